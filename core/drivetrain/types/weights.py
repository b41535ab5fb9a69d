"""Descriptions of weight updates: tensors, their source, and the new version.

``drivetrain_weight_sync`` moves the data, on the trainer's and on the engine's side.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from drivetrain.checks.enum_fields import BY_NAME
from drivetrain.types.modes import PauseMode


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (``"float32"``, ``"bfloat16"``, …) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """All tensors that a complete update must contain, by checkpoint name."""

    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied weights: alias to the name in ``tensors``, such as ``{"lm_head.weight": "model.embed_tokens.weight"}``."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor's place in its bucket, in bytes. Offsets are aligned to 256 bytes."""

    spec: TensorSpec
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are transferred together. A layer is never split over two buckets."""

    tensors: tuple[PlacedTensor, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Tensors to be sent and their layout in buckets; agreed once, then identified by its hash."""

    buckets: tuple[Bucket, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors of the plan, in transfer order."""
        return tuple(placed.spec for bucket in self.buckets for placed in bucket.tensors)

    @property
    def hash(self) -> str:
        """SHA-256 over names, dtypes, shapes and bucket layout."""
        return hashlib.sha256(msgspec.msgpack.encode(self.buckets)).hexdigest()


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class InProcessSource(_Frozen):
    """Tensors in the engine's own process, registered there under ``key``."""

    kind: Literal["in_process"] = "in_process"
    key: str = Field(description="Key under which the sender registered them.")


class SharedMemorySource(_Frozen):
    """A shared-memory arena on the engine's host; bucket ``i`` begins at ``bucket_offsets[i]``."""

    kind: Literal["shared_memory"] = "shared_memory"
    path: str = Field(description="File that maps to the arena, such as /proc/PID/fd/N.")
    nbytes: int = Field(ge=0, description="Size of the arena in bytes.")
    bucket_offsets: tuple[int, ...] = Field(description="Byte offset of each of the plan's buckets in the arena.")


class DiskSource(_Frozen):
    """A checkpoint folder; its format is detected."""

    kind: Literal["disk"] = "disk"
    path: str = Field(description="The folder, readable by the engine's process.")


class CudaIpcSource(_Frozen):
    """GPU memory of another process, on GPUs that the engine can access."""

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    name: str = Field(
        description="Unique name of this set of segments and places; CUDA may reuse a handle, never this name."
    )
    gpus: tuple[str, ...] = Field(description="UUIDs of the GPUs that hold the segments.")
    segments: bytes = Field(
        description="For each memory segment, as allocated: its CUDA IPC handle (64 bytes), index of its GPU in "
        "``gpus``, and size in bytes, both little-endian int64."
    )
    places: bytes = Field(
        description="For each tensor of the plan, in order: index of its segment, and byte offset in it. "
        "Little-endian int64 [tensors, 2]."
    )


class BroadcastSource(_Frozen):
    """A torch.distributed group in which the trainer's rank 0 broadcasts each bucket."""

    kind: Literal["broadcast"] = "broadcast"
    group_name: str = Field(description="Name given to init_weight_update_communicator.")


class LoraSource(_Frozen):
    """A LoRA adapter in a peft folder."""

    kind: Literal["lora"] = "lora"
    lora_name: str = Field(description="Name of the adapter.")
    path: str = Field(description="Folder that holds the adapter.")


class LoraTensors(_Frozen):
    """Name and configuration of a LoRA adapter whose tensors the update's source brings, instead of all weights."""

    lora_name: str = Field(description="Name of the adapter.")
    config: dict[str, JsonValue] = Field(description="Fields of the adapter's ``adapter_config.json``.")


class ShardsSource(_Frozen):
    """Tensors in parts, in memory of several ranks of a trainer on the engine's host. The engine puts them together."""

    kind: Literal["shards"] = "shards"
    ranks: tuple[SharedMemorySource, ...] | tuple[CudaIpcSource, ...] = Field(
        min_length=1,
        description="Memory of each rank, of one kind; it holds the rank's parts, bucket by bucket of the plan.",
    )
    parts: tuple[bytes, ...] = Field(
        description="For each part of each rank, in the plan's order: index of its tensor in the plan, index of its "
        "first element in the flattened tensor, and number of elements. Little-endian int64 [parts, 3] per rank."
    )


class PluginSource(_Frozen):
    """Tensors delivered by a plugin's transport; see ``drivetrain_weight_sync.transports.Transport``."""

    kind: Literal["plugin"] = "plugin"
    transport: str = Field(
        min_length=1, description="Name under which the transport is registered on the engine's side."
    )
    data: dict[str, JsonValue] = Field(default_factory=dict, description="Data for the transport on the engine's side.")


WeightSource = (
    InProcessSource
    | SharedMemorySource
    | DiskSource
    | CudaIpcSource
    | BroadcastSource
    | LoraSource
    | ShardsSource
    | PluginSource
)


LORA_TRANSPORTS: Final = ("in_process", "shared_memory", "cuda_ipc", "broadcast")
"""Kinds of the sources that can bring an adapter's tensors."""


def transport_of(source: WeightSource) -> str:
    """Return how the tensors of a source travel: the kind of the source, or of its ranks' sources."""
    return source.ranks[0].kind if isinstance(source, ShardsSource) else source.kind


class WeightUpdateRequest(_Frozen):
    """One complete weight update: tensors, source, new version, and how requests in flight are handled."""

    version: str = Field(min_length=1, description="New weight version, published at commit.")
    source: WeightSource = Field(discriminator="kind", description="Source of the tensors.")
    plan: WeightPlan | None = Field(
        default=None,
        description="Tensors and their buckets; omitted for sources that describe themselves (disk, lora).",
    )
    digests: dict[str, int] | None = Field(
        default=None, description="Digest of each tensor, computed where it is stored; required with a plan."
    )
    mode: Annotated[PauseMode, BY_NAME] = Field(
        default=PauseMode.RETRACT, description="How requests in flight are handled while the weights change."
    )
    keep_prefix_cache: bool = Field(
        default=False, strict=True, description="Keep using prefix cache entries computed with older weights."
    )
    lora: LoraTensors | None = Field(
        default=None, description="The adapter that the tensors belong to; None: they are the model's own weights."
    )
    update_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex,
        min_length=1,
        max_length=64,
        description="Identifies this update among all: two engines whose weights come from updates of one id have the "
        "same weights. Drawn at random; make a new request for each update.",
    )

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter that is updated; None if the update brings all weights."""
        given = self.source if isinstance(self.source, LoraSource) else self.lora
        return None if given is None else given.lora_name

    @model_validator(mode="after")
    def _adapter_travels(self) -> WeightUpdateRequest:
        if self.lora is not None and (self.source.kind not in LORA_TRANSPORTS or self.keep_prefix_cache):
            raise ValueError(
                f"an adapter's tensors come from a source of kind {', '.join(LORA_TRANSPORTS)}, without "
                f"keep_prefix_cache; got kind {self.source.kind}. LoraSync makes such requests"
            )
        return self

    @model_validator(mode="after")
    def _plan_given(self) -> WeightUpdateRequest:
        if self.source.kind not in ("disk", "lora") and (self.plan is None or self.digests is None):
            raise ValueError(f"a {self.source.kind} source needs a plan and digests; use WeightSync to make them")
        if self.source.kind == "lora" and (self.plan, self.digests, self.keep_prefix_cache) != (None, None, False):
            raise ValueError("an adapter's folder is taken as it is: no plan, no digests, no keep_prefix_cache")
        return self


class CommunicatorSpec(_Frozen):
    """A torch.distributed group of a trainer and its engines, for weight updates."""

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=0, description="Rank of the engine's first worker.")
    world_size: int = Field(ge=2)
    group_name: str = Field(min_length=1)
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout: float = Field(
        default=60, gt=0, description="Timeout in seconds for forming the group, and for each broadcast."
    )


# Messages to the engine's side of a transfer, in this order. One update at a time.


@dataclass(frozen=True, slots=True)
class PrepareUpdate:
    """Open the source and check every tensor against the model. The model is not changed."""

    request: WeightUpdateRequest
    kept_plan: str | None = None
    """Hash of the plan, if the engine still keeps it: ``request`` then carries the empty plan ``WeightPlan(())``."""
    digests: bytes = b""
    """The digests, if the plan is omitted, in the plan's order: little-endian int64 [tensors]."""


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Begin to change the weights. Until the commit they are neither the old nor the new ones."""


@dataclass(frozen=True, slots=True)
class LoadBuckets:
    """Copy these buckets of the plan into the model."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyUpdate:
    """Compare the digest of each tensor in the model with the sender's."""


@dataclass(frozen=True, slots=True)
class CommitUpdate:
    """Publish ``version``; tokens sampled from here on carry it."""

    version: str


@dataclass(frozen=True, slots=True)
class AbortUpdate:
    """Discard the update; the sender sends nothing more for it."""


@dataclass(frozen=True, slots=True)
class ReleaseSources:
    """Unmap senders' shared memory, which the engine keeps between updates, and discard a pending update."""


WeightMessage = PrepareUpdate | BeginUpdate | LoadBuckets | VerifyUpdate | CommitUpdate | AbortUpdate | ReleaseSources


@dataclass(frozen=True, slots=True)
class ApplyUpdate:
    """All steps from BeginUpdate to CommitUpdate in one call, for a prepared update with every bucket available."""

    version: str
    buckets: int
    keep_prefix_cache: bool
    freeze: PauseMode | None = None
    """Freeze requests in this way until the end of the update; None: there are none, or they are frozen."""

    @property
    def load(self) -> LoadBuckets:
        """The message that loads every bucket."""
        return LoadBuckets(tuple(range(self.buckets)))


@dataclass(frozen=True, slots=True)
class WeightReply:
    """Result of one step of an update."""

    buckets: int = 0
    """After PrepareUpdate: number of buckets to load. A fleet's engines say so only after BeginUpdate."""
    nbytes: int = 0
    """Bytes copied by this step."""
    keeps_plan: bool = False
    """After PrepareUpdate: the engine keeps this plan, so it need not be sent again until another plan is sent."""
    seconds: float = 0.0
    """After CommitUpdate or ApplyUpdate: seconds since BeginUpdate, measured by the receiver. Generation stood still
    meanwhile."""


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor by value: little-endian, row-major bytes, as ``torch.frombuffer`` reads them."""

    spec: TensorSpec
    data: bytes


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Result of ``validate_weights``: names of tensors with NaN, with infinity, and of zeros only."""

    checked: int
    nan: tuple[str, ...] = ()
    infinite: tuple[str, ...] = ()
    all_zero: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no tensor holds NaN or infinity. Tensors of zeros only do not count: a bias may be all zero."""
        return not (self.nan or self.infinite)
