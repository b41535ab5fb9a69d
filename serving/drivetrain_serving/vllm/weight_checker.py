"""vLLM's route that checks the weights of the served engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeGuard

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import read_fields
from drivetrain_serving.http_layer.route_docs import Fields, documented
from drivetrain_serving.vllm import answer_types as types
from drivetrain_serving.weight_checks import Checksums, WeightChecks

_ACTIONS: Final = ("checksum", "reset", "compare")


class WeightCheckerFields(Fields):
    """A request to ``/weight_checker``."""

    action: object = Field(
        default=None,
        description="Answers with checksums, serves random weights, or compares with the baseline.",
        json_schema_extra={"enum": [*_ACTIONS]},
    )
    baseline: object = Field(
        default=None,
        description="An earlier answer's checksums.",
        json_schema_extra={"type": ["object", "null"], "additionalProperties": {"type": "string"}},
    )


class WeightCheckerRoute:
    """The route ``/weight_checker``."""

    def __init__(self, checks: WeightChecks, config: ServerConfig) -> None:
        self._checks = checks
        self._config = config

    @documented(body=WeightCheckerFields, answer=types.WeightChecksums | types.WeightsReset | types.WeightsCompared)
    async def weight_checker(self, request: Request) -> Response:
        """Answer POST ``/weight_checker``. After a reset the engine serves random weights until an update."""
        asked = await read_fields(request, self._config, WeightCheckerFields)
        action, baseline = asked.action, asked.baseline
        if action not in _ACTIONS:
            raise HTTPException(400, f"action={shown(action)}: expected {', '.join(_ACTIONS)}")
        if baseline is None and action == "compare":
            raise HTTPException(400, "baseline is missing: 'compare' needs an object of checksums by name")
        if baseline is not None and not _are_checksums(baseline):
            raise HTTPException(400, f"baseline={shown(baseline)}: expected an object of checksums by name")
        if action == "reset":
            await self._checks.reset()
            return json_answer(types.WeightsReset(status="reset"))
        checksums = _by_rank(await self._checks.checksums())
        if baseline is None or action == "checksum":
            return json_answer(types.WeightChecksums(checksums=checksums))
        either = checksums.keys() | baseline.keys()
        mismatches = sorted(name for name in either if checksums.get(name) != baseline.get(name))
        return json_answer(types.WeightsCompared(match=not mismatches, mismatches=mismatches))


def _are_checksums(value: object) -> TypeGuard[Checksums]:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _by_rank(engines: Sequence[Checksums]) -> Checksums:
    """Name tensors as vLLM does, where each engine is a data-parallel rank."""
    return {
        f"dp{place}:pp0:pcp0:tp0:{name}": checksum
        for place, checksums in enumerate(engines)
        for name, checksum in checksums.items()
    }
