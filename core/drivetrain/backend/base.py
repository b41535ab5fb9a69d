"""The page that a plugin author reads: the primitives of one running engine.

A backend translates; it decides nothing. Validation, capability checks, the state machine, tokenising, stop
semantics, n > 1, deadlines and versions are :class:`~drivetrain.engine.engine.InferenceEngine`'s, once for every
backend. A primitive is called only if its capability was claimed, and only in a state that allows it.

Every coroutine here may also be called over the wire (see ``drivetrain.process``): its arguments and result are
exactly what its annotations say, and errors are members of the tree in ``drivetrain.errors``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from drivetrain.errors import EngineError, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, TopLogprobs, VersionSpan
from drivetrain.types.prompts import MediaInput
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.weights import (
    ApplyUpdate,
    BeginUpdate,
    CommitUpdate,
    CommunicatorSpec,
    TensorData,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a started engine says of its model."""

    vocab_size: int
    """Token ids run from 0 to ``vocab_size - 1``."""
    context_length: int
    """Most tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...]
    """Ids that end generation unless ``ignore_eos``."""
    dtype: str
    """Type of the weights, such as ``"bfloat16"``."""
    architecture: str
    parameters: int
    """Number of parameters."""
    device: str
    weight_version: str | None = None
    """Label that the weights had already; None: ``EngineConfig.weight_version``."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that hold the weights, such as ``"GPU-e6f9517c-…"``, by rank; empty: none, or nobody knows."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A momentary look at an engine."""

    running: int
    """Requests in the batch, frozen ones included."""
    waiting: int
    """Requests admitted but not yet in the batch."""
    kv_cache_bytes: int
    """Memory held for KV cache, in use or not."""
    weight_bytes: int
    """Memory held for weights."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sample to generate, complete and validated: a backend looks nothing up and fills nothing in."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    """As the user gave them, but that ``n``, ``seed`` and ``max_new_tokens`` are superseded by the fields here."""
    max_new_tokens: int
    """Prompt and this together fit the context length."""
    stop_token_ids: tuple[int, ...]
    """Every id that ends generation: the request's own and, unless ``ignore_eos``, the model's EOS ids."""
    logprobs_mode: LogprobsMode
    seed: int | None = None
    """Fixes the random stream; None: the engine's own choice."""
    lora: str | None = None
    priority: int = 0
    """Higher is sooner."""
    media: tuple[MediaInput, ...] = ()
    """Each with its bytes, and in the prompt as often as :meth:`Backend.read_media` said."""


@dataclass(frozen=True, slots=True)
class ReadMedium:
    """An image, video or sound beside a prompt, as the model takes it."""

    token_id: int
    """What stands in a prompt where it is."""
    count: int
    """How often, one after another."""
    data: bytes | None = None
    """Its bytes, if they had to be looked for: what is generated then depends on nothing that may change."""
    follows: int | None = None
    """The token id that must stand right before it, if the model wants one."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """All of one sample, as the engine sampled it; :class:`InferenceEngine` cuts it at stop strings and decodes it."""

    token_ids: list[int]
    finish_reason: FinishReason
    weight_versions: list[VersionSpan]
    matched_stop: int | None = None
    """The stop token id that ended it. (Stop strings and regexes are matched by the engine page.)"""
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    cached_tokens: int = 0
    hidden_states: list[list[float]] | None = None
    routed_experts: list[list[list[int]]] | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to a sample. A stream ends with a delta that carries the whole result, aborted or not."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    result: GenerateResult | None = None


class StopKind(Enum):
    """A stop condition on text, which an engine may be able to act on by itself."""

    STRING = "string"
    REGEX = "regex"


class Backend(ABC):
    """One engine. Made from a configuration, started once, closed once."""

    name: ClassVar[str]
    """The string that picks this backend."""
    engine_distribution: ClassVar[str]
    """Distribution whose installed version is the engine's, such as ``"sglang"``."""
    config_names: ClassVar[Mapping[str, str]] = {}
    """:class:`EngineConfig` field → the engine's own name for it. Set fields outside this table are refused."""
    native_stops: ClassVar[frozenset[StopKind]] = frozenset()
    """Stop conditions on text at which this engine ends by itself, at the match or soon after it. For the others
    the engine page streams the tokens, matches them and aborts. Either way it cuts ids and text."""
    default_isolation: ClassVar[Isolation] = Isolation.PROCESS
    seen_working: ClassVar[tuple[str, str] | None] = None
    """Oldest and newest release of the engine that the backend was tested with, such as ``("0.5.17", "0.5.23")``. Of
    others ``create_engine`` warns, and uses them."""
    oldest_version: ClassVar[str | None] = None
    """Oldest release of the engine that the backend can run with; ``create_engine`` refuses older ones."""
    endangers_its_process: ClassVar[bool] = False
    """Whether the engine can end the process that it is in; then isolation ``inline`` is refused."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    # Before launch -----------------------------------------------------------------------------------------------

    @classmethod
    def preload(cls) -> None:
        """Import what ``start`` will, starting no thread and touching no device: hosts may be forked from here."""
        return None

    @classmethod
    @abstractmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """What the installed engine can do on this machine with this configuration. Starts nothing."""

    # Lifecycle ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Load the model and make ready to generate. Call ``report`` with a few words at each stage."""

    @abstractmethod
    async def close(self) -> None:
        """Stop, and leave no process, thread, port or file behind. Called once, also after a failed start."""

    @property
    def pid(self) -> int | None:
        """Process id of the host process; None when the engine runs in this one."""
        return None

    async def died(self) -> EngineError:
        """Return, when the engine ends by itself, why; never return otherwise. Not called over the wire."""
        never: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        return await never

    def child_processes(self) -> list[int] | None:
        """Process ids whose end is this engine's end; None: every child that was alive when ``start`` returned."""
        return None

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Look at the engine as it is now."""

    # Generation --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. An aborted request returns what it has, with ``FinishReason.ABORT``.

        Cancelling the call aborts the request.
        """

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample, yielding each step. Closing the generator early aborts the request."""
        raise self._unsupported(Capability.STREAMING)

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        """Look at what lies beside a prompt, before anything is generated from it.

        :func:`drivetrain.media.inputs.read_bytes` fetches within ``config.media``; the bounds of pixels and of videos
        are the backend's to check, before it decodes.

        Raises:
            InvalidRequest: one of them cannot be had, is not what it is said to be, or is too large.
            DeadlineExceeded: one took longer than ``config.timeouts.media``.
        """
        raise self._unsupported(Capability.IMAGES)

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests early; ids that are not running are passed over. Returns at once."""
        raise self._unsupported(Capability.ABORT)

    # Pause and memory --------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        """Freeze all requests, ``IN_PLACE`` (cache kept) or ``RETRACT`` (cache released); idempotent.

        ``RETRACT`` after ``IN_PLACE`` releases the caches. The other two modes need no primitive.
        """
        raise self._unsupported(Capability.PAUSE_IN_PLACE)

    async def unfreeze(self) -> None:
        """Let frozen requests go on; idempotent."""
        raise self._unsupported(Capability.PAUSE_IN_PLACE)

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give back the memory of ``tags``. No request runs; frozen ones hold no cache."""
        raise self._unsupported(Capability.SLEEP_WEIGHTS)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take the memory of ``tags`` again. Weights hold no defined values until an update, unless kept."""
        raise self._unsupported(Capability.SLEEP_WEIGHTS)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Requests frozen in place keep their own cache."""
        raise self._unsupported(Capability.PREFIX_CACHE)

    async def clear_hicache_storage(self) -> None:
        """Forget the storage tier of a hierarchical cache."""
        raise self._unsupported(Capability.HICACHE_STORAGE)

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        """Name every tensor that a complete update must bring."""
        raise self._unsupported("weight updates")

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of a weight update; see the messages in ``drivetrain.types.weights``.

        An engine with ``WEIGHT_STAGING`` generates while it takes a ``PrepareUpdate``, however large the source is, and
        needs a checkpoint's files no more afterwards.

        Raises:
            WeightPlanMismatch: on PrepareUpdate, when the tensors are not the model's.
            WeightTransferFailed: a step failed after BeginUpdate.
            WeightVerifyFailed: on VerifyUpdate, when digests differ.
        """
        raise self._unsupported("weight updates")

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        """Take all steps of an update that was prepared and whose buckets lie ready, and reset the prefix cache.

        The same as the calls one after another, which is what happens unless an engine can take them as one. If one
        of them fails, requests that were frozen for it stay so.

        Raises:
            WeightTransferFailed, WeightVerifyFailed: as for the messages.
        """
        if update.freeze is not None:
            await self.freeze(update.freeze)
        await self.receive_weights(BeginUpdate())
        reply = await self.receive_weights(update.load)
        await self.receive_weights(VerifyUpdate())
        if not update.keep_prefix_cache:
            await self.reset_prefix_cache()
        committed = await self.receive_weights(CommitUpdate(update.version))
        if update.freeze is not None:
            await self.unfreeze()
        return replace(reply, seconds=committed.seconds)

    async def validate_weights(self) -> WeightReport:
        """Look at every tensor, where it lies, for NaN, infinity and zeros only."""
        raise self._unsupported(Capability.READ_WEIGHTS)

    async def set_weight_version(self, version: str) -> None:
        """Label the weights; tokens sampled from here on carry the label."""
        raise self._unsupported(Capability.VERSION_SPANS)

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a torch.distributed group for weight updates."""
        raise self._unsupported(Capability.WEIGHTS_BROADCAST)

    async def destroy_communicator(self, group_name: str) -> None:
        """Leave that group."""
        raise self._unsupported(Capability.WEIGHTS_BROADCAST)

    async def read_weight(self, name: str) -> TensorData:
        """Return one tensor by its checkpoint name."""
        raise self._unsupported(Capability.READ_WEIGHTS)

    async def save_sharded(self, path: str) -> None:
        """Save the model with the weights that it has now to a folder, an absolute path; requests run on meanwhile.

        The folder is not there yet, or is empty, and appears when it is complete. Nothing changes the weights
        meanwhile. Cancelling the call leaves nothing.

        Raises:
            InvalidRequest: no new folder can be made there; nothing was done.
        """
        raise self._unsupported(Capability.SAVE_SHARDED)

    async def save_remote(self, url: str) -> None:
        """Do the same to an fsspec URL, under which there is nothing yet.

        Raises:
            InvalidRequest: there is no such protocol, or nothing can be written there; nothing was done.
        """
        raise self._unsupported(Capability.SAVE_REMOTE)

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder.

        Every field of its ``adapter_config.json`` and every tensor is honoured, or refused with ``InvalidRequest``
        before anything is loaded: ``drivetrain_weight_sync.receiver.lora_adapters.read_adapter`` does so.
        """
        raise self._unsupported(Capability.LORA)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        raise self._unsupported(Capability.LORA)

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one vector per prompt, shortened to ``dimensions`` if given.

        A model whose folder names no pooling is pooled to its last token: the last layer's state after the final norm.
        """
        raise self._unsupported(Capability.EMBED)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return a reward model's score per token sequence."""
        raise self._unsupported(Capability.REWARD_SCORE)

    # Profile -----------------------------------------------------------------------------------------------------

    async def start_profile(self, directory: str) -> None:
        """Begin to record a profile."""
        raise self._unsupported(Capability.PROFILE)

    async def stop_profile(self) -> str:
        """End the recording and return the path of the trace file."""
        raise self._unsupported(Capability.PROFILE)

    # ---------------------------------------------------------------------------------------------------------------

    def _unsupported(self, capability: Capability | str) -> UnsupportedCapability:
        name = capability.value if isinstance(capability, Capability) else capability
        return UnsupportedCapability(f"the {self.name} backend does not support {name}", capability=name)


ReportProgress = Callable[[str], None]

__all__ = [
    "Backend",
    "EngineStats",
    "GenerateRequest",
    "GenerateResult",
    "ModelInfo",
    "ReadMedium",
    "ReportProgress",
    "StopKind",
    "TokenDelta",
]
