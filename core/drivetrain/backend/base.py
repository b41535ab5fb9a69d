"""The plugin author's page: the primitives of one running engine.

A backend translates; it decides nothing. :class:`~drivetrain.engine.engine.InferenceEngine` does validation, capability
checks, the state machine, tokenising, stop semantics, n > 1, deadlines and versions once for every backend. It calls a
primitive only if its capability is claimed and the engine's state allows it.

Every coroutine here may also be called over the wire (see ``drivetrain.process``). So arguments and results are exactly
of the annotated types, and errors are classes of ``drivetrain.errors``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from drivetrain.errors import EngineError, EngineInternalError, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, MatchedText, ReleasedText, TopLogprobs, VersionSpan
from drivetrain.types.prompts import MediaInput
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain.types.token_scores import Scoring, TokenScores
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
    WeightUpdateRequest,
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a started engine's model."""

    vocab_size: int
    """Token ids range from 0 to ``vocab_size - 1``."""
    context_length: int
    """Maximum number of tokens, prompt and output together."""
    eos_token_ids: tuple[int, ...]
    """Ids that end generation unless ``ignore_eos`` is set."""
    dtype: str
    """Type of the weights, such as ``"bfloat16"``."""
    architecture: str
    parameters: int
    """Number of parameters."""
    device: str
    weight_version: str | None = None
    """Version label that a running server already gives its weights; None: ``EngineConfig.weight_version``."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that hold the weights, by rank, such as ``"GPU-e6f9517c-…"``; empty: no GPU, or unknown."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of an engine's requests and memory."""

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
    """One sample to generate. The request is complete and validated; backends add no defaults."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    """The user's sampling parameters. Use this class's fields instead of their ``n``, ``seed`` and
    ``max_new_tokens``."""
    max_new_tokens: int
    """Maximum number of tokens to generate; fits the context length together with the prompt."""
    stop_token_ids: tuple[int, ...]
    """Every id that ends generation: the request's own and, unless ``ignore_eos``, the model's EOS ids."""
    logprobs_mode: LogprobsMode
    seed: int | None = None
    """Seed of the random stream; None: the engine's choice."""
    lora: str | None = None
    priority: int = 0
    """Requests with a higher priority start sooner."""
    media: tuple[MediaInput, ...] = ()
    """Media of the prompt, with their bytes; placeholders stand in the prompt as :meth:`Backend.read_media` said."""
    weight_version: str | None = None
    """Weight version that all tokens must come from; None: any. ``InferenceEngine`` sees to it, not the backend."""
    resumed_tokens: int = 0
    """Number of tokens at the end of ``prompt_token_ids`` that were sampled for this request before its engine was
    lost. They count as generated for ``seed``, penalties, ``min_new_tokens`` and temperature schedules, but not for
    ``max_new_tokens``, and are not part of the result. Never set unless :attr:`Backend.counts_resumed_tokens`."""
    scoring: Scoring | None = None
    """Logprobs wanted at positions of the prompt, beside the tokens that are generated and beside
    ``params.prompt_logprobs``. Never set unless the engine claims ``Capability.SCORE_AT``."""


@dataclass(frozen=True, slots=True)
class ReadMedium:
    """Placeholder tokens of one image, video or sound in the prompt."""

    token_id: int
    """Placeholder token id."""
    count: int
    """Number of consecutive placeholder tokens."""
    data: bytes | None = None
    """The file's bytes if they were fetched, so that generation does not depend on a URL or path that may change."""
    follows: int | None = None
    """Token id that must directly precede the placeholders; None: any."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One whole sample as the engine drew it; ``InferenceEngine`` cuts it at stop strings and decodes it."""

    token_ids: list[int]
    finish_reason: FinishReason
    weight_versions: list[VersionSpan]
    """The weights that each token was sampled with. For a prompt that is only scored: one empty span of the version
    that scored it. An empty list: unknown, so ``InferenceEngine`` has it scored again if the weights changed meanwhile.
    Other samples without a token have an empty list: they were aborted before their first one.
    """
    matched_stop: int | None = None
    """The stop token id that ended the sample. (Stop strings and regexes are matched by ``InferenceEngine``.)"""
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    prompt_ranks: list[int | None] | None = None
    cached_tokens: int = 0
    hidden_states: list[list[float]] | None = None
    routed_experts: RoutedExperts | None = None
    prompt_routed_experts: RoutedExperts | None = None
    matched_text: MatchedText | None = None
    """The text, if the backend already matched every id with ``drivetrain.text.stops.StopMatcher``; None lets
    ``InferenceEngine`` match the ids."""
    sampling_mask: SamplingMask | None = None
    """Ids that each token was drawn from. May be None if there are no tokens."""
    scores: TokenScores | None = None
    """Logprobs that the request's ``scoring`` asks for. May be None if the request has no ``scoring``, was aborted
    before its prompt was read, or has a prompt of one token."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens that one step added. The last delta of a stream carries the whole result, also after an abort."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    result: GenerateResult | None = None
    released: ReleasedText | None = None
    """Text and ids that may be shown, if the backend matches every id with ``drivetrain.text.stops.StopMatcher``.
    If it is None, ``InferenceEngine`` matches the ids."""
    sampling_mask: SamplingMask | None = None
    """Ids that each of ``token_ids`` was drawn from."""


class StopKind(Enum):
    """A stop condition on text that some engines can apply themselves."""

    STRING = "string"
    REGEX = "regex"


class Backend(ABC):
    """One engine: made from a configuration, started once, closed once.

    Thread: ``start`` and every other coroutine run on one event loop. Inline, it is the caller's; in a host process, it
    belongs to the host's main thread. Calls may overlap, and none may block the loop: run long work in another thread.
    Pausing, sleeping, loading adapters and applying an update never overlap each other.

    State: each primitive names the engine states in which it is called. "Open" is any state between ``start`` and
    ``close`` except FAILED: READY, PAUSED, ASLEEP, UPDATING and DIRTY.

    A backend sets ``name``, ``engine_distribution``, ``native_stops`` and ``counts_resumed_tokens`` in its class. A
    stand-in for an engine elsewhere, such as the backend in another process, sets them in each instance.
    """

    name: str
    """Name by which users select this backend."""
    engine_distribution: str
    """Distribution that contains the engine, such as ``"sglang"``; its installed version is the engine's version."""
    config_names: ClassVar[Mapping[str, str]] = {}
    """:class:`EngineConfig` field → the engine's name for it. Fields that are set but not in this table are refused."""
    native_stops: frozenset[StopKind] = frozenset()
    """Text stops at which this engine ends generation itself, at the match or soon after. For other stops
    ``InferenceEngine`` streams the tokens, matches and aborts. In both cases it cuts ids and text exactly."""
    counts_resumed_tokens: bool = False
    """True if ``GenerateRequest.resumed_tokens`` is honoured: the next token is drawn as if the request had never been
    interrupted. A fleet then resumes requests with a seed, penalties or a temperature schedule at this engine."""
    default_isolation: ClassVar[Isolation] = Isolation.PROCESS
    seen_working: ClassVar[tuple[str, str] | None] = None
    """Oldest and newest engine release that the backend was tested with, such as ``("0.5.17", "0.5.23")``. For other
    releases ``create_engine`` warns and continues."""
    oldest_version: ClassVar[str | None] = None
    """Oldest engine release with which the backend works; ``create_engine`` refuses older ones."""
    endangers_its_process: ClassVar[bool] = False
    """True if an engine failure can end the process it runs in; isolation ``inline`` is then refused."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    # Before launch -----------------------------------------------------------------------------------------------

    @classmethod
    def preload(cls) -> None:
        """Import the modules that ``start`` needs, without starting a thread or touching a device.

        Called in the main thread of a fork server, before any event loop runs: hosts are forked from that process.
        """
        return None

    @classmethod
    @abstractmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Return what the installed engine can do on this machine with this configuration; start nothing.

        Called before launch: in the thread that calls ``create_engine``, or in a probe process of ``config.python``.
        """

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        """Refuse values of ``config`` with which ``start`` could only fail; start nothing. The default refuses none.

        Called before launch, after unclaimed capabilities and fields without an equivalent were refused, where
        :meth:`capabilities` is called.

        Raises:
            InvalidConfig: A value is wrong; ``field`` names it.
        """
        return None

    # Lifecycle ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Load the model and get ready to generate. Call ``report`` with a few words at each stage.

        In a host process ``report`` may be called from any thread; inline, only from the event loop's.

        State: STARTING, once.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and leave no process, thread, port or file behind. Called once, also after a failed start.

        State: CLOSED, FAILED or STARTING. Requests in flight were aborted first, unless the engine had failed.
        """

    @property
    def pid(self) -> int | None:
        """Process id of the host process; None if the engine runs in this process."""
        return None

    async def died(self) -> EngineError:
        """Wait until the engine ends by itself and return the reason. Not called over the wire.

        State: runs from the end of ``start`` until ``close``, which cancels it.
        """
        never: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        return await never

    def child_processes(self) -> list[int] | None:
        """Return the child processes that the engine cannot live without; None: every child that is alive.

        Called once in a host process, on the event loop, when ``start`` has returned.
        """
        return None

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Return the current counts and memory sizes.

        State: open. Also polled to detect a stalled engine: answer between two steps, not from a cache.
        """

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. An aborted request returns its tokens so far, with ``FinishReason.ABORT``.

        Cancelling the call aborts the request. The default reads :meth:`stream` to its end; override it if the engine
        is faster when it returns a sample at once.

        State: called in READY; requests in flight stay through PAUSED and UPDATING, frozen or draining as the pause
        mode says.
        """
        result: GenerateResult | None = None
        async with aclosing(self.stream(request)) as deltas:
            async for delta in deltas:
                result = delta.result
        if result is None:
            raise EngineInternalError(
                f"request {request.request_id}: the stream of the {self.name} backend ended without a result"
            )
        return result

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample and yield each step's tokens. Closing the generator early aborts the request.

        A backend that cannot stream overrides :meth:`generate` instead.

        State: as for :meth:`generate`.
        """
        raise self._unsupported(Capability.STREAMING)

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        """Fetch and measure a prompt's images, videos and sounds, before the prompt is generated from.

        :func:`drivetrain.media.inputs.read_bytes` fetches within the limits of ``config.media``. The backend itself
        checks pixel counts and video limits before it decodes.

        State: READY, PAUSED or UPDATING: a request is held by a pause only after this call.

        Raises:
            InvalidRequest: A medium cannot be fetched, is of another type than declared, or is too large.
            DeadlineExceeded: One medium took longer than ``config.timeouts.media``.
        """
        raise self._unsupported(Capability.IMAGES)

    async def abort(self, request_ids: list[str]) -> None:
        """Ask for an early end of these requests and return at once. Ignore ids that are not running.

        State: open; requests may be running, waiting or frozen.
        """
        raise self._unsupported(Capability.ABORT)

    # Pause and memory --------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        """Freeze all requests, ``IN_PLACE`` (cache kept) or ``RETRACT`` (cache released); idempotent.

        ``RETRACT`` after ``IN_PLACE`` releases the caches. The modes ``ABORT`` and ``WAIT`` need no primitive.

        State: PAUSED or UPDATING, also ASLEEP or DIRTY. No new request arrives until :meth:`unfreeze`.
        """
        raise self._unsupported(Capability.PAUSE_IN_PLACE)

    async def unfreeze(self) -> None:
        """Let frozen requests continue; idempotent.

        State: PAUSED, ASLEEP or UPDATING, just before the engine becomes READY.
        """
        raise self._unsupported(Capability.PAUSE_IN_PLACE)

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Free the memory of ``tags``. No request is running; frozen ones hold no cache.

        Tags whose last sleep or wake-up failed or timed out may be asleep already; the others are awake.
        State: READY, PAUSED, ASLEEP (other tags) or DIRTY. No new request arrives meanwhile.
        """
        raise self._unsupported(Capability.SLEEP_WEIGHTS)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate the memory of ``tags`` again. Unless kept, the weights are undefined until the next update.

        State: ASLEEP; only with tags that are asleep.
        """
        raise self._unsupported(Capability.SLEEP_WEIGHTS)

    async def reset_prefix_cache(self) -> None:
        """Discard every cached prefix. Requests that are frozen in place keep their own cache.

        State: open, also with requests running; in UPDATING after verification and before the commit.
        """
        raise self._unsupported(Capability.PREFIX_CACHE)

    async def clear_hicache_storage(self) -> None:
        """Clear the storage tier of a hierarchical cache.

        State: open.
        """
        raise self._unsupported(Capability.HICACHE_STORAGE)

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        """Return the name, dtype and shape of every tensor that a complete update must contain.

        State: open, also while the weights are asleep.
        """
        raise self._unsupported("weight updates")

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Perform one step of a weight update; see the messages in ``drivetrain.types.weights``.

        With ``WEIGHT_STAGING``, generation goes on during a ``PrepareUpdate`` of any size, and a checkpoint's files are
        not needed after it.

        State: depends on the message. PrepareUpdate comes in READY, PAUSED, DIRTY, or ASLEEP with the weights awake;
        requests may be running. BeginUpdate to CommitUpdate come in UPDATING; requests have ended or are frozen.
        AbortUpdate follows a failed step, also in DIRTY. ReleaseSources comes in any open state.

        Raises:
            WeightPlanMismatch: PrepareUpdate brings other tensors than the model's.
            WeightTransferFailed: A step after BeginUpdate failed.
            WeightVerifyFailed: VerifyUpdate found different digests.
        """
        raise self._unsupported("weight updates")

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        """Apply a prepared update whose buckets are all available, in one call, and reset the prefix cache.

        Override it if the engine can take all steps at once; the default makes the calls one after another. If a step
        fails, requests that were frozen for the update stay frozen.

        State: UPDATING.

        Raises:
            WeightTransferFailed, WeightVerifyFailed: As in :meth:`receive_weights`.
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
        """Check every tensor in place for NaN, infinity and zeros only.

        State: open; raise ``EngineStateError`` while the weights are asleep.
        """
        raise self._unsupported(Capability.READ_WEIGHTS)

    async def set_weight_version(self, version: str) -> None:
        """Relabel the weights. Tokens sampled from now on carry the new label.

        State: READY, PAUSED, or ASLEEP, with committed weights; UPDATING when an adapter was updated.
        """
        raise self._unsupported(Capability.VERSION_SPANS)

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a torch.distributed group for weight updates. Generation goes on until the trainer has joined.

        State: open.
        """
        raise self._unsupported(Capability.WEIGHTS_BROADCAST)

    async def destroy_communicator(self, group_name: str) -> None:
        """Leave the torch.distributed group.

        State: open.
        """
        raise self._unsupported(Capability.WEIGHTS_BROADCAST)

    async def read_weight(self, name: str) -> TensorData:
        """Return one tensor by its checkpoint name.

        State: open; raise ``EngineStateError`` while the weights are asleep.
        """
        raise self._unsupported(Capability.READ_WEIGHTS)

    async def save_sharded(self, path: str) -> None:
        """Save the model with its current weights to a folder, an absolute path, while requests go on.

        The folder does not exist yet or is empty, and appears only when complete. Cancelling the call leaves nothing.

        State: READY or PAUSED; also ASLEEP while the weights are awake. No update or sleep of the weights runs
        meanwhile.

        Raises:
            InvalidRequest: The folder cannot be created; nothing was written.
        """
        raise self._unsupported(Capability.SAVE_SHARDED)

    async def save_remote(self, url: str) -> None:
        """Save the model like :meth:`save_sharded`, to an fsspec URL under which nothing exists yet.

        State: as for :meth:`save_sharded`.

        Raises:
            InvalidRequest: The protocol is unknown, or the URL is not writable; nothing was written.
        """
        raise self._unsupported(Capability.SAVE_REMOTE)

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder.

        Honour every field of ``adapter_config.json`` and every tensor, or raise ``InvalidRequest`` before loading
        anything: ``drivetrain_weight_sync.receiver.lora_adapters.read_adapter`` does so.

        State: open; with committed weights if it replaces an adapter. Requests may be running.
        """
        raise self._unsupported(Capability.LORA)

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        """Load an adapter whose tensors ``update.source`` brings, and whose configuration is ``update.lora.config``.

        Make the checks of :meth:`load_lora_adapter`, and compare the tensors with ``update.digests``:
        ``receiving`` and ``check_adapter`` of ``drivetrain_weight_sync.receiver`` do so. Every worker loads the
        adapter, or none keeps it. The source's memory is not read after this returns. ``lora_name`` is the backend's
        own name for the adapter, ``update.lora.lora_name`` the trainer's.

        State: open, with committed weights. Requests may be running.

        Raises:
            WeightVerifyFailed: Tensors differ from those that were sent.
        """
        raise self._unsupported(Capability.WEIGHTS_LORA_TENSORS)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter. No request that uses it is running.

        State: open.
        """
        raise self._unsupported(Capability.LORA)

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one embedding per prompt, shortened to ``dimensions`` and scaled to length 1 if they are given.

        If the model's folder names no pooling, the embedding is the last token's state of the last layer, after the
        final norm.

        State: called in READY or PAUSED: a pause does not hold these calls. A call may still run when an update begins;
        ``InferenceEngine`` then drops its answer or error, and calls again after the update.
        """
        raise self._unsupported(Capability.EMBED)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return a reward model's score of each token sequence: its output at the last token, which may have any id.

        State: as for :meth:`embed`.
        """
        raise self._unsupported(Capability.REWARD_SCORE)

    # Profile -----------------------------------------------------------------------------------------------------

    async def start_profile(self, directory: str) -> None:
        """Start recording a profile.

        State: open.
        """
        raise self._unsupported(Capability.PROFILE)

    async def stop_profile(self) -> str:
        """Stop recording and return the path of the trace file.

        State: open.
        """
        raise self._unsupported(Capability.PROFILE)

    # ---------------------------------------------------------------------------------------------------------------

    def _unsupported(self, capability: Capability | str) -> UnsupportedCapability:
        name = capability.value if isinstance(capability, Capability) else capability
        return UnsupportedCapability(f"the {self.name} backend does not support {name}", capability=name)
