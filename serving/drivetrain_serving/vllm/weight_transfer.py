"""vLLM's routes for weights that a trainer broadcasts through NCCL."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError, InvalidRequest, InvalidWeights, UnsupportedCapability, WeightPlanMismatch
from drivetrain.types.weights import TensorSpec
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import flag_of, read_fields, unless_disconnected, version_of
from drivetrain_serving.http_layer.route_docs import Fields, documented
from drivetrain_serving.vllm.answer_types import Said
from drivetrain_serving.vllm.errors import error_answer
from drivetrain_serving.vllm.sent_adapters import SentAdapters
from drivetrain_weight_sync.trainer_groups.bucket import WeightBucket
from drivetrain_weight_sync.trainer_groups.process_messages import JoinNccl
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

GROUP: Final = "weight transfer engine"
"""Name of the one group that these routes form."""
_CHUNK_BYTES: Final = 1 << 30
_ID_BYTES: Final = 128
_INIT_FIELDS: Final = frozenset(
    {
        "master_address",
        "master_port",
        "nccl_unique_id_b64",
        "rank_offset",
        "world_size",
        "packed",
        "packed_buffer_size_bytes",
        "packed_num_buffers",
    }
)
_OTHER_TRANSFERS: Final[Mapping[str, str]] = {
    "base_model_path": "deltas of a checkpoint (SkyRL's weight_sync_backend: delta)",
    "local_checkpoint_dir": "deltas of a checkpoint (SkyRL's weight_sync_backend: delta)",
    "replica_rank": "pulls by RDMA (weight_sync_backend: sharded_rdt)",
    "trainer_actor_names": "pulls by RDMA (weight_sync_backend: sharded_rdt)",
}
"""Fields of ``init_info`` that only another transfer than NCCL's sends → its name."""
_HANDLES: Final = ("ipc_handles", "ipc_handles_pickled")
_Route = Callable[["WeightTransferRoutes", Request], Awaitable[str]]


class InitFields(Fields):
    """A request to ``/init_weight_transfer_engine``."""

    init_info: object = Field(
        default=None,
        description="The communicator: where the trainer listens or the id of NCCL, the server's rank and all ranks.",
        json_schema_extra={
            "type": "object",
            "properties": {
                "master_address": {"type": ["string", "null"]},
                "master_port": {"type": "integer", "minimum": 0},
                "nccl_unique_id_b64": {"type": ["string", "null"]},
                "rank_offset": {"type": "integer", "minimum": 0},
                "world_size": {"type": "integer", "minimum": 0},
                "packed": {"type": "boolean"},
                "packed_buffer_size_bytes": {"type": "integer", "minimum": 0},
                "packed_num_buffers": {"type": "integer", "minimum": 0},
            },
            "additionalProperties": False,
        },
    )


class UpdateInfo(Fields):
    """Tensors that a trainer broadcasts."""

    update_info: object = Field(
        default=None,
        description="Tensors in the order of their broadcasts.",
        json_schema_extra={
            "type": ["object", "null"],
            "properties": {
                "names": {"type": "array", "items": {"type": "string"}},
                "dtype_names": {"type": "array", "items": {"type": "string"}},
                "shapes": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
                "packed": {"type": "boolean"},
                "packed_buffer_size_bytes": {"type": "integer", "minimum": 0},
            },
        },
    )


class FinishFields(Fields):
    """A request to ``/finish_weight_update``."""

    weight_version: object = Field(
        default=None,
        description="Version of the new weights.",
        json_schema_extra={"type": ["string", "integer", "null"]},
    )


class EmptyFields(Fields):
    """A request whose fields are ignored."""


def can_transfer(engine: InferenceEngine) -> bool:
    """Return whether weights can come by NCCL, which needs a GPU of the engine's."""
    return bool(engine.gpus)


def refusal_answer(error: DrivetrainError) -> Response:
    """Answer an error of an update; weights that are refused are 400, since a trainer would send a 500 again."""
    if isinstance(error, WeightPlanMismatch | InvalidWeights):
        error = InvalidRequest(str(error))
    return error_answer(error)


def _answered(route: _Route) -> Callable[[WeightTransferRoutes, Request], Awaitable[Response]]:
    """Answer with a message, or with the refusal."""

    @wraps(route)
    async def call(self: WeightTransferRoutes, request: Request) -> Response:
        try:
            return json_answer(Said(message=await route(self, request)))
        except DrivetrainError as error:
            return refusal_answer(error)

    return call


class WeightTransferRoutes:
    """Routes of vLLM's NCCL weight transfer engine.

    Args:
        engine: The served engine.
        groups: The groups of trainers.
        adapters: Takes updates that bring an adapter.
        config: Bounds of bodies and waits.
    """

    def __init__(
        self, engine: InferenceEngine, groups: WeightGroups, adapters: SentAdapters, config: ServerConfig
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._adapters = adapters
        self._config = config
        self._chunk_bytes: int | None = None

    @documented(body=InitFields, answer=Said)
    @_answered
    async def init(self, request: Request) -> str:
        """Answer POST ``/init_weight_transfer_engine``, once every rank has joined."""
        info = (await read_fields(request, self._config, InitFields)).init_info
        known = info if isinstance(info, dict) else {}
        with self._groups.releasing(*(known.get(name) for name in ("master_address", "master_port", "world_size"))):
            self._require_gpu()
            if not isinstance(info, dict):
                raise InvalidRequest(f"init_info={shown(info)}: expected an object", field="init_info")
            join, chunk_bytes = join_of(info, self._config.weight_group_timeout), _chunk_bytes(info, "init_info")
            self._adapters.forget()
            await unless_disconnected(request.receive, self._groups.init(join))
        self._chunk_bytes = chunk_bytes
        return "Weight transfer initialized"

    @documented(body=EmptyFields, answer=Said)
    @_answered
    async def shutdown(self, request: Request) -> str:
        """Answer POST ``/shutdown_weight_transfer_engine``."""
        await read_fields(request, self._config, EmptyFields)
        self._require_gpu()
        self._adapters.forget()
        await self._groups.destroy(GROUP)
        return "Weight transfer engine shut down"

    @documented(body=EmptyFields, answer=Said)
    @_answered
    async def start(self, request: Request) -> str:
        """Answer POST ``/start_weight_update``."""
        await read_fields(request, self._config, EmptyFields)
        await self.begin()
        return "Weight update started"

    async def begin(self) -> None:
        """Open an update, of the adapter that is expected or of all weights.

        Raises:
            UnsupportedCapability: The engine has no GPU.
            InvalidRequest: An update is open.
        """
        self._require_gpu()
        if self._adapters.expected:
            self._adapters.begin()
        else:
            await self._groups.begin()

    def expect_adapter(self, target: object) -> None:
        """Let the next update bring an adapter.

        Raises:
            UnsupportedCapability: The engine has no GPU.
            InvalidRequest: An update is open.
            DrivetrainError: as ``SentAdapters.expect``.
        """
        self._require_gpu()
        if self._groups.is_open:
            raise InvalidRequest("an update is open; end it first")
        self._adapters.expect(target)

    async def receive(self, request: Request, asked: UpdateInfo) -> str:
        """Receive the tensors of ``/update_weights`` with ``update_info``, and return the message of the answer.

        Raises:
            UnsupportedCapability: The engine has no GPU.
            InvalidRequest: No update was started, or the tensors cannot be taken.
            DrivetrainError: as ``WeightGroups.receive``.
        """
        self._require_gpu()
        adapters = self._adapters
        try:
            bucket = self._bucket(asked.update_info)
            (adapters if adapters.expected else self._groups).require_open()
        except (InvalidRequest, UnsupportedCapability):
            # The trainer goes on with its broadcast. Without the group, the broadcast fails instead of waiting.
            adapters.forget()
            await self._groups.abandon(GROUP)
            raise
        if adapters.expected:
            await self._receive_adapter(request, bucket)
            return "Adapter received"
        try:
            await unless_disconnected(request.receive, self._groups.receive(bucket))
        except WeightPlanMismatch as error:
            raise InvalidRequest(str(error), field="update_info") from error
        return "Weights updated"

    async def _receive_adapter(self, request: Request, bucket: WeightBucket) -> None:
        try:
            tensors = await unless_disconnected(request.receive, self._groups.collect(bucket))
        except BaseException:
            self._adapters.forget()  # the group is lost, and with it the rest of the update
            raise
        self._adapters.take(bucket, tensors)

    def drop_open_update(self) -> None:
        """Forget tensors that have come, when a folder brought all weights."""
        self._groups.drop_open_update()

    @documented(body=FinishFields, answer=Said)
    @_answered
    async def finish(self, request: Request) -> str:
        """Answer POST ``/finish_weight_update``, once the engine serves the new weights."""
        await self.commit(version_of((await read_fields(request, self._config, FinishFields)).weight_version))
        return "Weight update finished"

    async def commit(self, version: str | None = None) -> None:
        """Load the open update into the engine as ``version``, or as the next number; keep an adapter for its load.

        Raises:
            UnsupportedCapability: The engine has no GPU.
            DrivetrainError: as ``WeightGroups.end`` and ``SentAdapters.end``.
        """
        self._require_gpu()
        if self._adapters.expected:
            self._adapters.end(version)
        else:
            await self._groups.end(version)

    def _require_gpu(self) -> None:
        if not can_transfer(self._engine):
            raise UnsupportedCapability(
                "weight transfer is by NCCL, and this engine has no GPU; send a folder (POST /update_weights "
                "{weight_dir}), or broadcast through gloo (POST /init_weights_update_group)"
            )

    def _bucket(self, given: object) -> WeightBucket:
        info = given[0] if isinstance(given, list) and len(given) == 1 else given
        if not isinstance(info, dict):
            raise InvalidRequest(f"update_info={shown(given)}: expected an object", field="update_info")
        if any(info.get(name) is not None for name in _HANDLES):
            raise UnsupportedCapability(
                "update_info brings pickled handles of GPU memory, and this server unpickles nothing; let the trainer "
                "broadcast (SkyRL's colocate_all: false)"
            )
        names, dtypes, shapes = (info.get(field) for field in ("names", "dtype_names", "shapes"))
        if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
            raise InvalidRequest("names, dtype_names and shapes: expected lists", field="update_info")
        if not len(names) == len(dtypes) == len(shapes):
            raise InvalidRequest(
                f"names, dtype_names and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries; give one "
                "of each per tensor",
                field="update_info",
            )
        packed = info.get("packed")
        chunk_bytes = self._chunk_bytes if packed is None else _chunk_bytes(info, "update_info")
        specs = tuple(_spec(*one) for one in zip(names, dtypes, shapes, strict=True))
        return WeightBucket(group_name=GROUP, specs=specs, chunk_bytes=chunk_bytes)


def join_of(info: Mapping[str, object], timeout: float) -> JoinNccl:
    """Return the communicator that ``init_info`` names.

    Raises:
        UnsupportedCapability: It is that of another transfer.
        InvalidRequest: A field is unknown, missing or wrong.
    """
    others = {other for name, other in _OTHER_TRANSFERS.items() if name in info}
    if info.keys() == {"packed"}:
        others.add("handles of GPU memory (SkyRL's colocate_all: true)")
    if others:
        raise UnsupportedCapability(
            f"init_info is that of {', '.join(sorted(others))}, and this server takes weights by NCCL, by gloo or from "
            "a folder; set weight_sync_backend: nccl and colocate_all: false"
        )
    unknown = info.keys() - _INIT_FIELDS
    if unknown:
        raise InvalidRequest(f"init_info holds {', '.join(sorted(unknown))}, which is unknown", field="init_info")
    rank, world_size = _integer(info, "rank_offset"), _integer(info, "world_size")
    encoded, address = info.get("nccl_unique_id_b64"), info.get("master_address")
    if encoded:
        if address is not None:
            raise InvalidRequest("give nccl_unique_id_b64, or master_address and master_port", field="init_info")
        return JoinNccl(
            group_name=GROUP, rank=rank, world_size=world_size, timeout=timeout, unique_id=_identity(encoded)
        )
    if not isinstance(address, str) or not address:
        raise InvalidRequest(f"master_address={shown(address)}: expected an address", field="init_info.master_address")
    port = _integer(info, "master_port")
    return JoinNccl(
        group_name=GROUP,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        master_address=address.removeprefix("[").removesuffix("]"),
        master_port=port,
    )


def _identity(encoded: object) -> bytes:
    try:
        decoded = base64.b64decode(str(encoded), validate=True)
    except binascii.Error:
        decoded = b""
    if len(decoded) != _ID_BYTES:
        raise InvalidRequest(
            f"nccl_unique_id_b64: expected {_ID_BYTES} bytes in standard base64", field="init_info.nccl_unique_id_b64"
        )
    return decoded


def _chunk_bytes(info: Mapping[str, object], where: str) -> int | None:
    packed = flag_of(info.get("packed"), f"{where}.packed")
    return _integer(info, "packed_buffer_size_bytes", where, _CHUNK_BYTES) if packed else None


def _integer(info: Mapping[str, object], name: str, where: str = "init_info", default: int | None = None) -> int:
    value = info.get(name, default)
    if type(value) is not int or value < 0:
        raise InvalidRequest(f"{name}={shown(value)}: expected a number that is not negative", field=f"{where}.{name}")
    return value


def _spec(name: object, dtype: object, shape: object) -> TensorSpec:
    if not isinstance(name, str) or not isinstance(dtype, str):
        raise InvalidRequest(
            f"update_info holds {shown(name)} of {shown(dtype)}; expected texts", field="update_info.names"
        )
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequest(f"shapes holds {shown(shape)}; expected lists of sizes", field="update_info.shapes")
    return TensorSpec(name, dtype.removeprefix("torch."), tuple(shape))
