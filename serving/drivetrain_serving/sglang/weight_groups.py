"""SGLang's routes for weights that a trainer broadcasts in its own torch.distributed group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Final

from pydantic import Field, JsonValue, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.types.weights import CommunicatorSpec, TensorSpec
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import (
    flag_of,
    list_of,
    read_fields,
    text_of,
    unless_disconnected,
    version_of,
)
from drivetrain_serving.http_layer.route_docs import OF_ENGINES, Fields, documented
from drivetrain_serving.sglang.answer_types import WeightsChanged
from drivetrain_serving.sglang.errors import FailureBody, failure_answer
from drivetrain_weight_sync.trainer_groups.bucket import WHOLE, WeightBucket
from drivetrain_weight_sync.trainer_groups.process_messages import Join
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
            return failure_answer(error)
        return json_answer(WeightsChanged(success=True, message=message))

    return call


_NAME: Final[dict[str, JsonValue]] = {"type": "string", "minLength": 1}
_TEXTS: Final[dict[str, JsonValue]] = {"type": "array", "items": {"type": "string"}}


class GroupFields(Fields):
    """A request to ``/destroy_weights_update_group``."""

    group_name: object = Field(default=_GROUP, description="Names the group.", json_schema_extra=_NAME)


class JoinFields(GroupFields):
    """A request to ``/init_weights_update_group``."""

    master_address: object = Field(
        default=None, description="Where the trainer's rank 0 listens.", json_schema_extra=_NAME
    )
    master_port: object = Field(
        default=None,
        description="Its port.",
        json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string"}]},
    )
    rank_offset: object = Field(
        default=None, description="The server's rank.", json_schema_extra={"type": "integer", "minimum": 1}
    )
    world_size: object = Field(
        default=None, description="Number of all ranks.", json_schema_extra={"type": "integer", "minimum": 2}
    )
    backend: object = Field(
        default=None, description="nccl if not given.", json_schema_extra={"enum": ["nccl", "gloo", None]}
    )


class SelectorFields(Fields):
    """A request to ``/begin_weight_update``."""

    selector: object = Field(
        default="all", description="The model whose weights come.", json_schema_extra={"enum": ["all", "target", None]}
    )


class BucketFields(GroupFields, SelectorFields):
    """A request to ``/update_weights_from_distributed``."""

    names: object = Field(default=None, description="Tensors, in the order of broadcasts.", json_schema_extra=_TEXTS)
    dtypes: object = Field(
        default=None, description="Their dtypes, such as bfloat16 or torch.bfloat16.", json_schema_extra=_TEXTS
    )
    shapes: object = Field(
        default=None,
        description="Their shapes.",
        json_schema_extra={"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    )
    load_format: object = Field(
        default=None,
        description="null: a broadcast for each tensor; flattened_bucket: one of all bytes.",
        json_schema_extra={"enum": ["flattened_bucket", None]},
    )
    weight_version: object = Field(
        default=None,
        description="Version of the weights that the update makes.",
        json_schema_extra={"type": ["string", "integer", "null"]},
    )
    abort_all_requests: object = Field(
        default=None,
        description="Ends the requests in flight before the update is applied.",
        json_schema_extra={"type": ["boolean", "null"]},
    )


class WeightGroupRoutes:
    """Routes by which trainers form groups and announce buckets.

    Args:
        groups: The groups.
        config: Bounds of bodies and waits.
    """

    def __init__(self, groups: WeightGroups, config: ServerConfig) -> None:
        self._groups = groups
        self._config = config

    @documented(body=JoinFields, answer=WeightsChanged, errors=(FailureBody,))
    @_answered
    async def init_weights_update_group(self, request: Request) -> str:
        """Answer POST ``/init_weights_update_group``, once every rank has joined."""
        asked = await read_fields(request, self._config, JoinFields)
        with self._groups.releasing(asked.master_address, asked.master_port, asked.world_size):
            join = _join(asked, self._config.weight_group_timeout)
            await unless_disconnected(request.receive, self._groups.init(join))
        return f"The group {join.group_name!r} has formed."

    @documented(body=GroupFields, answer=WeightsChanged, errors=(FailureBody,))
    @_answered
    async def destroy_weights_update_group(self, request: Request) -> str:
        """Answer POST ``/destroy_weights_update_group``."""
        name = text_of((await read_fields(request, self._config, GroupFields)).group_name, "group_name")
        await self._groups.destroy(name)
        return f"The group {name!r} was left."

    @documented(body=BucketFields, answer=WeightsChanged, errors=(FailureBody,))
    @_answered
    async def update_weights_from_distributed(self, request: Request) -> str:
        """Answer POST ``/update_weights_from_distributed``, once the bucket has come."""
        asked = await read_fields(request, self._config, BucketFields)
        name = text_of(asked.group_name, "group_name")
        try:
            bucket = WeightBucket(
                group_name=name,
                specs=_specs(asked),
                chunk_bytes=_chunk_bytes(asked.load_format),
                version=version_of(asked.weight_version),
                abort_requests=flag_of(asked.abort_all_requests, "abort_all_requests"),
                refusal=_refusal(asked),
            )
        except InvalidRequest:
            # The trainer broadcasts something all the same: without the group, that fails instead of waiting.
            await self._groups.abandon(name)
            raise
        await unless_disconnected(request.receive, self._groups.receive(bucket))
        return f"{len(bucket.specs)} tensors were received."

    @documented(body=SelectorFields, answer=WeightsChanged, errors=(FailureBody,))
    @_answered
    async def begin_weight_update(self, request: Request) -> str:
        """Answer POST ``/begin_weight_update``."""
        refusal = _refusal(await read_fields(request, self._config, SelectorFields))
        if refusal:
            raise InvalidRequest(refusal, field="selector")
        await self._groups.begin()
        return "The update is open."

    @documented(statuses=(400, *OF_ENGINES), answer=WeightsChanged, errors=(FailureBody,))
    @_answered
    async def end_weight_update(self, request: Request) -> str:
        """Answer POST ``/end_weight_update``, once the engine serves the new weights."""
        del request
        await self._groups.end()
        return "The engine serves the new weights."


def _join(asked: JoinFields, timeout: float) -> Join:
    address = asked.master_address
    given = {
        "master_address": address.removeprefix("[").removesuffix("]") if isinstance(address, str) else address,
        **asked.model_dump(include={"master_port", "rank_offset", "world_size"}, exclude_unset=True),
        "group_name": text_of(asked.group_name, "group_name"),
        "backend": asked.backend or "nccl",
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


def _specs(asked: BucketFields) -> tuple[TensorSpec, ...]:
    names, dtypes = list_of(asked.names, "names"), list_of(asked.dtypes, "dtypes")
    shapes = list_of(asked.shapes, "shapes")
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest(
            f"names, dtypes and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries; give one of each "
            "per tensor",
            field="names",
        )
    return tuple(_tensor(*one) for one in zip(names, dtypes, shapes, strict=True))


def _tensor(name: object, dtype: object, shape: object) -> TensorSpec:
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"names holds {shown(name)}; expected texts that are not empty", field="names")
    if not isinstance(dtype, str):
        raise InvalidRequest(f"dtypes holds {shown(dtype)}; expected names such as 'bfloat16'", field="dtypes")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequest(f"shapes holds {shown(shape)}; expected lists of sizes", field="shapes")
    return TensorSpec(name, dtype.removeprefix("torch."), tuple(shape))


def _chunk_bytes(given: object) -> int | None:
    if given not in (None, "flattened_bucket"):
        raise InvalidRequest(
            f"load_format={shown(given)}: expected null or 'flattened_bucket'; the group was left, because the server "
            "cannot tell what is broadcast",
            field="load_format",
        )
    return None if given is None else WHOLE


def _refusal(asked: SelectorFields) -> str:
    selector = asked.selector
    if selector in (None, "all", "target"):
        return ""
    return f"selector={shown(selector)}: expected 'all' or 'target'; weights of draft models cannot be updated"
