"""SGLang's routes for weights that a trainer broadcasts in its own torch.distributed group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Final

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.types.weights import CommunicatorSpec, TensorSpec
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http.answers import json_answer
from drivetrain_serving.http.bodies import read_json, unless_disconnected
from drivetrain_serving.http.error_statuses import described
from drivetrain_serving.sglang.errors import status_here
from drivetrain_weight_sync.trainer_groups.bucket import WHOLE, WeightBucket
from drivetrain_weight_sync.trainer_groups.messages import Join
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

_GROUP: Final = "weight_update_group"
"""SGLang's default for ``group_name``."""
_Route = Callable[["WeightGroupRoutes", Request], Awaitable[str]]


def _answered(route: _Route) -> Callable[[WeightGroupRoutes, Request], Awaitable[Response]]:
    """Answer with ``success`` and a message, as SGLang's weight routes do."""

    @wraps(route)
    async def call(self: WeightGroupRoutes, request: Request) -> Response:
        try:
            message = await route(self, request)
        except DrivetrainError as error:
            body = {"success": False, "message": str(error), "drivetrain": described(error)}
            return json_answer(body, status_here(error))
        return json_answer({"success": True, "message": message})

    return call


class WeightGroupRoutes:
    """Routes by which trainers form groups and announce buckets.

    Args:
        groups: The groups.
        config: Bounds of bodies and waits.
    """

    def __init__(self, groups: WeightGroups, config: ServerConfig) -> None:
        self._groups = groups
        self._config = config

    @_answered
    async def init_weights_update_group(self, request: Request) -> str:
        """Answer POST ``/init_weights_update_group``, once every rank has joined."""
        body = await read_json(request, self._config)
        join = _join(body, self._config.weight_group_timeout)
        await unless_disconnected(request.receive, self._groups.init(join))
        return f"The group {join.group_name!r} has formed."

    @_answered
    async def destroy_weights_update_group(self, request: Request) -> str:
        """Answer POST ``/destroy_weights_update_group``."""
        name = _name(await read_json(request, self._config))
        await self._groups.destroy(name)
        return f"The group {name!r} was left."

    @_answered
    async def update_weights_from_distributed(self, request: Request) -> str:
        """Answer POST ``/update_weights_from_distributed``, once the bucket has come."""
        body = await read_json(request, self._config)
        name = _name(body)
        try:
            bucket = WeightBucket(
                group_name=name,
                specs=_specs(body),
                chunk_bytes=_chunk_bytes(body),
                version=_version(body),
                abort_requests=body.get("abort_all_requests") is True,
                refusal=_refusal(body),
            )
        except InvalidRequest:
            # The trainer broadcasts something all the same: without the group, that fails instead of waiting.
            await self._groups.abandon(name)
            raise
        await unless_disconnected(request.receive, self._groups.receive(bucket))
        return f"{len(bucket.specs)} tensors were received."

    @_answered
    async def begin_weight_update(self, request: Request) -> str:
        """Answer POST ``/begin_weight_update``."""
        refusal = _refusal(await read_json(request, self._config))
        if refusal:
            raise InvalidRequest(refusal, field="selector")
        await self._groups.begin()
        return "The update is open."

    @_answered
    async def end_weight_update(self, request: Request) -> str:
        """Answer POST ``/end_weight_update``, once the engine serves the new weights."""
        del request
        await self._groups.end()
        return "The engine serves the new weights."


def _join(body: Mapping[str, object], timeout: float) -> Join:
    address = body.get("master_address")
    given = {
        "master_address": address.removeprefix("[").removesuffix("]") if isinstance(address, str) else address,
        **{name: body[name] for name in ("master_port", "rank_offset", "world_size") if name in body},
        "group_name": _name(body),
        "backend": body.get("backend") or "nccl",
    }
    try:
        spec = CommunicatorSpec.model_validate(given)
    except ValidationError as error:
        field, message = describe_validation_error(error, CommunicatorSpec)
        raise InvalidRequest(message, field=field) from None
    return Join(
        group_name=spec.group_name,
        rank=spec.rank_offset,
        world_size=spec.world_size,
        timeout=timeout,
        master_address=spec.master_address,
        master_port=spec.master_port,
        backend=spec.backend,
    )


def _name(body: Mapping[str, object]) -> str:
    name = body.get("group_name", _GROUP)
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"group_name={shown(name)}: expected a text that is not empty", field="group_name")
    return name


def _specs(body: Mapping[str, object]) -> tuple[TensorSpec, ...]:
    names, dtypes, shapes = (_list(body, field) for field in ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest(
            f"names, dtypes and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries; give one of each "
            "per tensor",
            field="names",
        )
    return tuple(_tensor(*one) for one in zip(names, dtypes, shapes, strict=True))


def _list(body: Mapping[str, object], field: str) -> list[object]:
    given = body.get(field)
    if not isinstance(given, list):
        raise InvalidRequest(f"{field}={shown(given)}: expected a list", field=field)
    return given


def _tensor(name: object, dtype: object, shape: object) -> TensorSpec:
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"names holds {shown(name)}; expected texts that are not empty", field="names")
    if not isinstance(dtype, str):
        raise InvalidRequest(f"dtypes holds {shown(dtype)}; expected names such as 'bfloat16'", field="dtypes")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequest(f"shapes holds {shown(shape)}; expected lists of sizes", field="shapes")
    return TensorSpec(name, dtype.removeprefix("torch."), tuple(shape))


def _chunk_bytes(body: Mapping[str, object]) -> int | None:
    given = body.get("load_format")
    if given not in (None, "flattened_bucket"):
        raise InvalidRequest(
            f"load_format={shown(given)}: expected null or 'flattened_bucket'; the group was left, because the server "
            "cannot tell what is broadcast",
            field="load_format",
        )
    return None if given is None else WHOLE


def _version(body: Mapping[str, object]) -> str | None:
    given = body.get("weight_version")
    return str(given) if isinstance(given, str | int) and not isinstance(given, bool) and given != "" else None


def _refusal(body: Mapping[str, object]) -> str:
    selector = body.get("selector", "all")
    if selector in (None, "all", "target"):
        return ""
    return f"selector={shown(selector)}: expected 'all' or 'target'; weights of draft models cannot be updated"
