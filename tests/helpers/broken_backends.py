"""A plugin of broken backends: each is the transformers backend with one fault."""

from __future__ import annotations

import dataclasses

from drivetrain import FinishReason, GenerateRequest, GenerateResult, PauseMode, hookimpl
from drivetrain.backend.base import Backend
from drivetrain_transformers.engine import TransformersBackend


class LosesAborted(TransformersBackend):
    """An aborted request loses its tokens."""

    name = "loses-aborted"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if result.finish_reason is FinishReason.ABORT:
            return dataclasses.replace(result, token_ids=[], weight_versions=[])
        return result


class NeverFreezes(TransformersBackend):
    """A pause does not freeze requests."""

    name = "never-freezes"

    async def freeze(self, mode: PauseMode) -> None:
        pass


class KeepsStaleCache(TransformersBackend):
    """Cache entries from older weights are reused."""

    name = "keeps-stale-cache"

    async def freeze(self, mode: PauseMode) -> None:
        await super().freeze(PauseMode.IN_PLACE)


BROKEN: list[type[Backend]] = [LosesAborted, NeverFreezes, KeepsStaleCache]


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    return BROKEN
