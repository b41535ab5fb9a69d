"""The page that a trainer author reads: one engine, the same on every backend.

Validation, capability checks, the state machine, tokenising, stop semantics, n > 1, deadlines and weight versions
are here, once. What differs between engines is behind :class:`~drivetrain.backend.base.Backend`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

from drivetrain import openai
from drivetrain.backend.base import Backend, EngineStats, ModelInfo
from drivetrain.backend.toolkit.deadlines import Alarm, deadline
from drivetrain.backend.toolkit.stall_watch import ended
from drivetrain.backend.toolkit.translation import eos_token_ids, require_numbers
from drivetrain.checks.limits import SAMPLES_AT_ONCE
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.completions import completed
from drivetrain.engine.death_reports import report_death
from drivetrain.engine.request_builder import ParamsLike, RequestBuilder
from drivetrain.engine.requests_in_flight import LoadedLora, RequestsInFlight, run_each
from drivetrain.engine.samples import Sample, Samples
from drivetrain.engine.sessions import Session
from drivetrain.engine.states import EngineState, EngineStatus, WeightState
from drivetrain.engine.validation import absolute_path, check_prompt_length, check_seconds, check_url, require
from drivetrain.engine.weight_transfers import WeightTransferHandle
from drivetrain.engine.weight_updates import (
    SENT_MEANWHILE,
    SOURCE_CAPABILITY,
    KeptPlan,
    WeightTransaction,
    as_transfer_error,
    failure_reason,
)
from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineBusy,
    EngineError,
    EngineStartError,
    EngineStateError,
    InvalidRequest,
)
from drivetrain.openai import ChatCompletion, ChatCompletionChunk, TextCompletion, TextCompletionChunk
from drivetrain.servers.weight_version import remote_weight_version
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation, Task
from drivetrain.types.modes import MemoryTag, PauseMode, TurnMode
from drivetrain.types.outputs import Completion, CompletionChunk, GenerationOutput
from drivetrain.types.prompts import PromptLike
from drivetrain.types.weights import (
    AbortUpdate,
    CommunicatorSpec,
    DiskSource,
    LoraSource,
    ReleaseSources,
    TensorData,
    WeightManifest,
    WeightReport,
    WeightUpdateRequest,
)

logger = logging.getLogger("drivetrain.engine")
_T = TypeVar("_T")

_PAUSE_CAPABILITY = {
    PauseMode.ABORT: Capability.PAUSE_ABORT,
    PauseMode.WAIT: Capability.PAUSE_WAIT,
    PauseMode.IN_PLACE: Capability.PAUSE_IN_PLACE,
    PauseMode.RETRACT: Capability.PAUSE_RETRACT,
}
_SLEEP_CAPABILITY = {
    MemoryTag.WEIGHTS: Capability.SLEEP_WEIGHTS,
    MemoryTag.KV_CACHE: Capability.SLEEP_KV_CACHE,
    MemoryTag.CUDA_GRAPH: Capability.SLEEP_CUDA_GRAPH,
}


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine is, in one value."""

    backend: str
    isolation: str
    state: str
    weight_version: str
    versions: dict[str, str]
    capabilities: tuple[str, ...]
    model: ModelInfo | None
    config: dict[str, object]


@dataclass(frozen=True, slots=True)
class WeightIntegrity:
    """What ``check_weight_sync_integrity`` found."""

    expected_version: str
    actual_version: str
    report: WeightReport

    @property
    def ok(self) -> bool:
        """The version is the expected one, and no tensor holds a NaN or an infinity."""
        return self.expected_version == self.actual_version and self.report.ok


class InferenceEngine:
    """One inference engine. Made by :func:`~drivetrain.create.create_engine`; used as ``async with engine:``.

    It belongs to the event loop that it was started in. Any number of tasks of that loop may use it at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        *,
        capabilities: frozenset[Capability],
        isolation: Isolation,
        versions: dict[str, str],
    ) -> None:
        self.config = config
        self.capabilities = capabilities
        """What this engine can do; known before it starts."""
        self.isolation = isolation
        """Where it runs."""
        self.versions = versions
        """Versions of drivetrain, Python and the engine."""
        self._backend = backend
        self._status = EngineStatus()
        self._version = config.weight_version
        self._backend_closed = False
        self._frozen = False
        """Whether the backend was told to freeze requests, and not yet to let them go on."""
        self._prepared: WeightTransaction | None = None
        self._plans = KeptPlan()
        """The update that the receiver checked last, if it was asked to ahead of time."""
        self._holds = 0
        self._loras: dict[str, LoadedLora] = {}
        self._stray_loras: set[str] = set()
        """Adapters that the backend may have loaded after their loading was given up."""
        self._sessions: dict[str, Session] = {}
        self._groups: set[str] = set()
        """In which a trainer broadcasts, by name."""
        self._control = asyncio.Lock()
        self._weights = asyncio.Lock()
        self._model: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._builder: RequestBuilder | None = None
        self._in_flight_: RequestsInFlight | None = None
        self._death_watch: asyncio.Task[None] | None = None
        report_death(backend, self._failed)

    # Lifecycle ---------------------------------------------------------------------------------------------------

    @checked
    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Load the model and make ready. ``progress`` is called with a few words at each stage.

        Raises:
            EngineStartError: it did not start; the message carries the last log lines.
            DeadlineExceeded: it took longer than ``timeouts.start``.
        """
        self._status = self._status.start()

        def report(stage: str) -> None:
            logger.info("%s: %s", self.config.backend, stage)
            if progress is not None:
                progress(stage)

        try:
            # A host process keeps the deadline itself, and says why with its last log lines: let it be the first.
            grace = 0.0 if self.isolation is Isolation.INLINE else self.config.timeouts.close
            async with deadline(self.config.timeouts.start + grace, f"the {self.config.backend} engine to start"):
                report("loading the tokenizer")
                self._tokenizer = await asyncio.to_thread(Tokenizer.load, self.config)
                self._model = _with_ends_of(self._tokenizer, await self._backend.start(report))
        except BaseException as error:
            self._status = self._status.fail(f"it did not start: {error}")
            await self._close_backend()
            if isinstance(error, Exception) and not isinstance(error, DrivetrainError):
                what = f"the {self.config.backend} engine did not start: {type(error).__name__}: {error}"
                raise EngineStartError(what) from error
            raise
        if self._model.weight_version is not None:
            self._version = self._model.weight_version
        self._builder = RequestBuilder(self.config, self.capabilities, self._model, self._tokenizer)
        self._in_flight_ = RequestsInFlight(
            self._backend, self._tokenizer, lambda: self._is_held, self._loras, self._failed
        )
        self._status = self._status.started()
        self._death_watch = asyncio.create_task(self._watch_for_death())

    async def teardown(self) -> None:
        """Stop the engine and leave nothing behind; idempotent. Requests in flight come back aborted."""
        if self._status.state in (EngineState.CLOSED, EngineState.CREATED):
            self._status = self._status.close()
            return
        if self._status.state is not EngineState.FAILED and self._in_flight_ is not None:
            try:
                async with deadline(self.config.timeouts.close, "requests in flight to end"):
                    await self._in_flight.abort(None)
                    await self._in_flight.drained()
            except DrivetrainError as error:
                logger.warning("requests in flight did not end before teardown: %s", error)
        self._status = self._status.close()
        if self._death_watch is not None:
            self._death_watch.cancel()
            await asyncio.gather(self._death_watch, return_exceptions=True)
        if self._in_flight_ is not None:
            self._in_flight.changed()
        await self._close_backend()

    async def _close_backend(self) -> None:
        if self._backend_closed:
            return
        self._backend_closed = True
        async with deadline(self.config.timeouts.close * 2, f"the {self.config.backend} engine to close"):
            await self._backend.close()

    async def _watch_for_death(self) -> None:
        # A host process watches for stalls itself.
        inline = self.isolation is Isolation.INLINE
        error = await (ended(self._backend, lambda: self._in_flight.running) if inline else self._backend.died())
        logger.error("the %s engine died: %s", self.config.backend, error)
        self._failed(error)
        if inline:
            self._in_flight.fail(error)

    def _failed(self, error: EngineError) -> None:
        self._status = self._status.fail(str(error))
        if self._in_flight_ is not None:
            self._in_flight_.changed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.teardown()

    # What it is --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The state it is in."""
        return self._status.state

    @property
    def status(self) -> EngineStatus:
        """The state in full: paused how, which memory asleep, whether the weights may be served."""
        return self._status

    @property
    def model_info(self) -> ModelInfo:
        """Vocabulary, context length, EOS ids and type of the model that was started."""
        if self._model is None:
            raise self._not_started("model_info")
        return self._model

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that hold the weights, by rank; empty until started, on a CPU, or if nobody knows."""
        return () if self._model is None else self._model.gpus

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            raise self._not_started("tokenizer")
        return self._tokenizer

    @property
    def tp_size(self) -> int:
        """Tensor parallel size."""
        return self.config.tensor_parallel_size

    @property
    def pp_size(self) -> int:
        """Pipeline parallel size."""
        return self.config.pipeline_parallel_size

    @property
    def dp_size(self) -> int:
        """Data parallel size."""
        return self.config.data_parallel_size

    @property
    def ep_size(self) -> int:
        """Expert parallel size."""
        return self.config.expert_parallel_size

    @property
    def host_pid(self) -> int | None:
        """Process id of the host process; None when the engine runs in this one."""
        return self._backend.pid

    @checked
    def supports(self, capability: Capability | str) -> bool:
        """Whether ``capability`` is claimed; its name, such as ``"lora"``, will do."""
        return capability in self.capabilities

    def describe(self) -> EngineDescription:
        """Everything there is to know without asking the engine."""
        return EngineDescription(
            backend=self.config.backend,
            isolation=self.isolation.value,
            state=self._status.describe(),
            weight_version=self._version,
            versions=dict(self.versions),
            capabilities=tuple(capability.value for capability in Capability if capability in self.capabilities),
            model=self._model,
            config=self.config.described(),
        )

    async def stats(self) -> EngineStats:
        """Requests running and waiting, memory held."""
        self._status.require_open("stats()")
        async with self._bounded("the engine's statistics"):
            return await self._backend.stats()

    # Generation --------------------------------------------------------------------------------------------------

    @checked
    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        lora: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> GenerationOutput:
        """Generate ``n`` completions of each prompt.

        Args:
            prompts: One prompt or a sequence of them: text, token ids, chat messages, or a prompt object.
            sampling_params: One for all prompts, or one for each; a mapping of its fields will do.
            request_ids: One id per prompt, to abort it by; made up if not given.
            lora: Name of a loaded LoRA adapter.
            priority: Higher is sooner.
            timeout: Seconds until DeadlineExceeded; ``timeouts.generate`` if not given.

        Returns:
            The completions, prompt by prompt, sample by sample.

        Raises:
            InvalidRequest: before any work, naming the field, the value and the remedy.
            UnsupportedCapability: before any work, naming the capability.
            EngineStateError: the engine's state cannot serve requests.
            EngineDied: the engine's process ended.
            DeadlineExceeded: it took too long; the requests were aborted.
        """
        return await self._generate(prompts, sampling_params, request_ids, lora, priority, timeout)

    async def _generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None,
        request_ids: Sequence[str] | None,
        lora: str | None,
        priority: int,
        timeout: float | None,
        whole: Callable[[list[int]], list[int]] | None = None,
    ) -> GenerationOutput:
        seconds = check_seconds(timeout, self.config.timeouts.generate)
        samples = self._build(
            "generate()",
            prompts,
            sampling_params,
            request_ids=request_ids,
            lora=lora,
            priority=priority,
        )
        async with deadline(seconds, f"{sum(one.count for one in samples)} completions"):
            with self._in_flight.under_way(samples):
                await self._read(samples, whole)
                tasks: list[asyncio.Task[Completion]] = []
                try:
                    await run_each(samples, self._complete, tasks)
                except BaseException:
                    await _cancelled(tasks)
                    raise
                return GenerationOutput([task.result() for task in tasks])

    async def _complete(self, sample: Sample) -> Completion:
        return await completed(sample, await self._in_flight.run(sample), self.tokenizer)

    @checked
    async def generate_stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        lora: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Generate as :meth:`generate` does, yielding chunks of all samples as they come.

        The chunks of a sample put together are exactly its completion, which its last chunk carries. Closing
        the generator early aborts what is still being generated.
        """
        require(self.capabilities, Capability.STREAMING, "generate_stream()", self.config.backend)
        seconds = check_seconds(timeout, self.config.timeouts.generate)
        samples = self._build(
            "generate_stream()", prompts, sampling_params, request_ids=request_ids, lora=lora, priority=priority
        )
        ends = time.monotonic() + seconds
        queue: asyncio.Queue[CompletionChunk | BaseException] = asyncio.Queue()
        overdue: list[DeadlineExceeded] = []

        async def pump(sample: Sample) -> None:
            try:
                async with aclosing(self._in_flight.stream(sample)) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait(chunk)
            except Exception as error:
                queue.put_nowait(error)

        total = sum(one.count for one in samples)
        tasks: list[asyncio.Task[None]] = []

        def ring() -> None:
            # Samples that have ended lie in the queue, and are handed out whenever somebody reads them.
            if late := total - sum(task.done() for task in tasks):
                overdue.append(
                    DeadlineExceeded(f"waited {seconds:g} s for {late} streamed completions; they did not come")
                )
                queue.put_nowait(overdue[0])

        with self._in_flight.under_way(samples):
            async with deadline(seconds, "the prompts to be read"):
                await self._read(samples)
            alarm = Alarm(max(0.0, ends - time.monotonic()), ring)
            starting = asyncio.create_task(run_each(samples, pump, tasks))
            try:
                open_samples = total
                while open_samples:
                    item = overdue[0] if overdue else await queue.get()
                    if isinstance(item, BaseException):
                        raise item
                    open_samples -= item.completion is not None
                    yield item
            finally:
                alarm.cancel()
                await _cancelled([starting])
                await _cancelled(tasks)

    @checked
    async def generate_with_session(
        self,
        session_id: str,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        parent_request_id: str | None = None,
        turn: TurnMode = TurnMode.CONTINUE,
        request_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> GenerationOutput:
        """Generate one turn of a session, going on from, branching from or replacing an earlier turn.

        Args:
            session_id: As ``open_session`` returned it.
            prompts: What is new in this turn. The model sees the turn that it builds on, that turn's answer, and then
                this; so does ``prompt_token_ids`` of the completion.
            sampling_params: As in :meth:`generate`.
            parent_request_id: Request id of the completion that the turn builds on; None: it begins afresh.
            turn: How it relates to that one.
            request_ids: As in :meth:`generate`; later turns name this one by the completion's id.
            timeout: As in :meth:`generate`.
        """
        require(self.capabilities, Capability.SESSIONS, "generate_with_session()", self.config.backend)
        session = self._session(session_id)

        def whole(token_ids: list[int]) -> list[int]:
            return session.prompt(token_ids, parent_request_id, turn)

        output = await self._generate(prompts, sampling_params, request_ids, None, 0, timeout, whole)
        for completion in output.completions:
            session.add(completion, parent_request_id, turn)
        return output

    @checked
    async def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], *, top_k: int = 0, timeout: float | None = None
    ) -> GenerationOutput:
        """Score given token ids without sampling any: each completion holds ``prompt_logprobs`` of its sequence."""
        require(self.capabilities, Capability.SCORE_TOKENS, "compute_logprobs()", self.config.backend)
        params: ParamsLike = {"max_new_tokens": 0, "prompt_logprobs": top_k}
        return await self.generate(sequences, params, timeout=timeout)

    @checked
    async def chat_completion(self, payload: Mapping[str, object], *, timeout: float | None = None) -> ChatCompletion:
        """Answer a chat completion request of the OpenAI API, with token ids and weight versions as extra fields.

        Args:
            payload: The request, as it comes out of JSON; ``docs/how-to/openai-payloads.md`` lists its fields.
            timeout: As in :meth:`generate`, whose errors these are too; they name the request's fields.
        """
        return await openai.chat_completion(self, payload, timeout)

    @checked
    def chat_completion_stream(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Answer as :meth:`chat_completion` does, in chunks."""
        return openai.chat_completion_stream(self, payload, timeout)

    @checked
    async def completion(self, payload: Mapping[str, object], *, timeout: float | None = None) -> TextCompletion:
        """Answer a completion request of the OpenAI API; see :meth:`chat_completion`."""
        return await openai.completion(self, payload, timeout)

    @checked
    def completion_stream(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> AsyncGenerator[TextCompletionChunk, None]:
        """Answer as :meth:`completion` does, in chunks."""
        return openai.completion_stream(self, payload, timeout)

    @checked
    async def abort(self, request_id: str) -> None:
        """End one request; its completions come back marked aborted, with what was generated so far."""
        self._status.require_open("abort()")
        require(self.capabilities, Capability.ABORT, "abort()", self.config.backend)
        async with self._bounded("the abort to reach the engine"):
            await self._in_flight.abort(request_id)

    async def abort_generation(self) -> None:
        """End every request, those that wait included; the engine goes on serving new ones."""
        self._status.require_open("abort_generation()")
        require(self.capabilities, Capability.ABORT, "abort_generation()", self.config.backend)
        async with self._bounded("the abort to reach the engine"):
            await self._in_flight.abort(None)

    @checked
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        return self.tokenizer(token_ids, skip_special_tokens=skip_special_tokens)

    # Sessions ----------------------------------------------------------------------------------------------------

    @checked
    async def open_session(self, capacity: int, *, session_id: str | None = None) -> str:
        """Open a session whose turns have up to ``capacity`` tokens, with all that they build on; return its id."""
        self._require("open_session()", Capability.SESSIONS)
        session_id = session_id or uuid.uuid4().hex
        if session_id in self._sessions:
            raise InvalidRequest(f"session_id={shown(session_id)} is open already; close it first", field="session_id")
        self._sessions[session_id] = Session(session_id, capacity)
        return session_id

    @checked
    async def close_session(self, session_id: str) -> None:
        """Close a session; turns that name it afterwards are refused."""
        self._require("close_session()", Capability.SESSIONS)
        self._session(session_id)
        del self._sessions[session_id]

    # Pause -------------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Requests that arrive wait, because of ``pause_generation`` or of a weight update that has not ended well."""
        return self._status.paused is not None or self._status.weights is not WeightState.CLEAN

    @checked
    async def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT, *, timeout: float | None = None) -> None:
        """Pause; see :class:`PauseMode` for what becomes of requests in flight. Idempotent.

        Raises:
            InvalidRequest: the mode is unknown; nothing changed.
            UnsupportedCapability: this engine cannot pause so; nothing changed.
            DeadlineExceeded: requests in flight did not end in time; the engine is not paused.
        """
        mode = PauseMode(mode)
        seconds = check_seconds(timeout, self.config.timeouts.control)
        self._require("pause_generation()", _PAUSE_CAPABILITY[mode])
        self._status.pause(mode)
        async with (
            self._controlling("pause_generation()"),
            deadline(seconds, f"generation to pause ({mode.value})"),
        ):
            before = self._status
            self._refuse_waiting_for_frozen(mode)
            self._set(before.pause(mode))
            try:
                await self._quiesce(mode)
            except BaseException:
                self._set(before)
                raise

    async def continue_generation(self) -> None:
        """Let frozen and waiting requests go on. Idempotent."""
        self._status.require_open("continue_generation()")
        async with self._controlling("continue_generation()"):
            after = self._status.resume()
            await self._unfreeze_if_free(after)
            self._set(after)

    async def _quiesce(self, mode: PauseMode) -> None:
        """Deal with requests in flight; the gate is shut."""
        match mode:
            case PauseMode.ABORT:
                await self._in_flight.abort_running()
                await self._in_flight.drained()
            case PauseMode.WAIT:
                await self._in_flight.drained()
            case PauseMode.IN_PLACE | PauseMode.RETRACT:
                self._frozen = True
                await self._backend.freeze(mode)

    def _refuse_waiting_for_frozen(self, mode: PauseMode) -> None:
        # Whatever holds requests at the gate (a pause, a sleep, a failed update) has frozen those that are in flight.
        if mode is PauseMode.WAIT and self._status.holds_requests and self._in_flight.running:
            raise EngineStateError(
                f"mode='wait' would wait for ever: {self._in_flight.running} requests in flight are frozen, for the "
                f"engine is {self._status.describe()}; use 'retract', 'in_place' or 'abort', or let them go on first",
                state=self._status.state.value,
            )

    async def _unfreeze_if_free(self, after: EngineStatus) -> None:
        """Let frozen requests go on if nothing holds them in ``after``."""
        if self._frozen and not after.holds_requests:
            async with self._bounded("frozen requests to go on"):
                await self._backend.unfreeze()
            self._frozen = False

    # Sleep and cache ---------------------------------------------------------------------------------------------

    @checked
    async def sleep(
        self,
        tags: Iterable[MemoryTag | str] | None = None,
        *,
        timeout: float | None = None,
        abort_first: bool = False,
        drain_timeout: float = 0.0,
    ) -> None:
        """Give memory back. What becomes of requests in flight is said by the arguments and by nothing else.

        Args:
            tags: Which memory; all that this engine can give back if not given.
            timeout: Seconds for giving it back.
            abort_first: Abort requests in flight. Requests frozen by ``pause_generation("retract")`` hold no cache
                and need not be aborted.
            drain_timeout: Seconds to let requests in flight end by themselves.

        Raises:
            EngineBusy: requests are in flight, and the arguments leave them so; nothing changed.
        """
        chosen = self._sleep_tags(tags, "sleep()")
        seconds = check_seconds(timeout, self.config.timeouts.control)
        keeps = self.config.sleep_keeps_weights
        self._status.sleep(chosen, keeps_weights=keeps)
        owning = self._owning_weights("sleep()") if MemoryTag.WEIGHTS in chosen else nullcontext()
        async with owning, self._controlling("sleep()"), self._shut_gate():
            await self._clear_for_sleep(abort_first, drain_timeout)
            after = self._status.sleep(chosen, keeps_weights=keeps)
            new = chosen - self._status.asleep
            if new:
                async with deadline(seconds, "the engine to fall asleep"):
                    await self._backend.sleep(new)
            self._set(after)

    async def _clear_for_sleep(self, abort_first: bool, drain_timeout: float) -> None:
        if not self._in_flight.running or self._status.paused is PauseMode.RETRACT:
            return
        if abort_first:
            require(self.capabilities, Capability.ABORT, "sleep(abort_first=True)", self.config.backend)
            async with self._bounded("aborted requests to end before sleep"):
                await self._in_flight.abort_running()
                await self._in_flight.drained()
            return
        try:
            async with deadline(drain_timeout, "requests in flight to end before sleep"):
                await self._in_flight.drained()
        except DeadlineExceeded:
            raise EngineBusy(
                f"sleep() is refused: {self._in_flight.running} requests are in flight after "
                f"drain_timeout={drain_timeout:g} s; abort them (abort_first=True), "
                "give them longer, or pause_generation('retract') first"
            ) from None

    @checked
    async def wake_up(self, tags: Iterable[MemoryTag | str] | None = None, *, timeout: float | None = None) -> None:
        """Take memory again. Weights that were not kept must be updated before the engine serves."""
        chosen = self._sleep_tags(tags, "wake_up()")
        seconds = check_seconds(timeout, self.config.timeouts.control)
        self._status.wake(chosen)
        async with self._controlling("wake_up()"):
            after = self._status.wake(chosen)
            waking = chosen & self._status.asleep
            if waking:
                async with deadline(seconds, "the engine to wake up"):
                    await self._backend.wake_up(waking)
            await self._unfreeze_if_free(after)
            self._set(after)

    async def sleep_weights_only(self) -> None:
        """Give back the weights' memory."""
        await self.sleep([MemoryTag.WEIGHTS])

    async def wake_up_weights_only(self) -> None:
        """Take the weights' memory again."""
        await self.wake_up([MemoryTag.WEIGHTS])

    async def sleep_all(self) -> None:
        """Give back all memory that this engine can give back."""
        await self.sleep()

    async def wake_up_all(self) -> None:
        """Take all of it again."""
        await self.wake_up()

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._require("reset_prefix_cache()", Capability.PREFIX_CACHE)
        async with self._bounded("the prefix cache to be reset"):
            await self._backend.reset_prefix_cache()

    async def clear_hicache_storage(self) -> None:
        """Forget the storage tier of a hierarchical cache."""
        self._require("clear_hicache_storage()", Capability.HICACHE_STORAGE)
        async with self._bounded("the cache storage to be cleared"):
            await self._backend.clear_hicache_storage()

    # Weights -----------------------------------------------------------------------------------------------------

    async def weight_manifest(self) -> WeightManifest:
        """Every tensor that a complete update must bring."""
        self._status.require_open("weight_manifest()")
        if self.capabilities.isdisjoint(SOURCE_CAPABILITY.values()):
            require(self.capabilities, Capability.WEIGHTS_DISK, "weight_manifest()", self.config.backend)
        async with self._bounded("the engine's weight manifest"):
            return await self._backend.weight_manifest()

    @asynccontextmanager
    @checked
    async def weight_update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[WeightTransaction, None]:
        """Run one weight update; ``load`` every bucket within.

        Entering checks the request against the model (a refusal changes nothing), deals with requests in flight
        as ``request.mode`` says, and begins. Leaving verifies every tensor, resets the prefix cache, publishes the
        version, and lets requests go on unless the engine was paused before. Leaving by an exception, or failing to
        verify, leaves the engine dirty: it serves nothing until a complete update is committed.

        Args:
            request: What, from where, as which version.
            at_once: Load nothing within: leaving does it, together with all that comes before and after it, in one
                call to the engine, and only for that call are requests frozen. Every bucket must lie ready.

        Raises:
            WeightPlanMismatch: tensors missing, extra or of another shape or dtype; nothing changed.
            WeightTransferFailed: it broke on the way; the engine is dirty.
            WeightVerifyFailed: what arrived is not what was sent; the engine is dirty.
        """
        self._require_update_of_all(request.source.kind)
        async with self._owning_weights("a weight update"), self._controlling("a weight update"):
            self._status.require_updatable()
            self._check_in_flight(request.mode)
            prepared, self._prepared = self._prepared, None
            transaction = prepared if prepared and prepared.request is request else await self._prepare(request)
            before = self._status
            self._set(before.begin_update())
            try:
                freeze = await self._quiesce_for_update(request.mode, later=at_once and not before.holds_requests)
            except BaseException:
                await self._abort_update()
                self._set(before)
                await self._unfreeze_if_free(before)
                raise
            try:
                if not at_once:
                    await transaction.begin()
                yield transaction
                await (transaction.apply(freeze) if at_once else transaction.finish())
            except BaseException as error:
                self._set(self._status.dirty(failure_reason(request.version, error)))
                await self._abort_update(freeze)
                if isinstance(error, Exception) and not isinstance(error, DrivetrainError):
                    raise as_transfer_error(request.version, error) from error
                raise
            self._version = request.version
            after = self._status.commit_update()
            self._frozen = self._frozen and freeze is None
            await self._unfreeze_if_free(after)
            self._set(after)

    def _check_in_flight(self, mode: PauseMode) -> None:
        """Raise if there are requests in flight that cannot be dealt with as ``mode`` says."""
        if self._in_flight.running:
            self._require_in_flight(mode)
            self._refuse_waiting_for_frozen(mode)

    def _require_in_flight(self, mode: PauseMode) -> None:
        require(self.capabilities, Capability.WEIGHT_UPDATE_IN_FLIGHT, "a weight update in flight", self.config.backend)
        require(self.capabilities, _PAUSE_CAPABILITY[mode], f"mode={mode.value!r}", self.config.backend)

    async def _quiesce_for_update(self, mode: PauseMode, *, later: bool = False) -> PauseMode | None:
        """Deal with requests in flight; return how to freeze them if only that is left to do, ``later``."""
        if not self._in_flight.running:
            return None
        self._require_in_flight(mode)  # they may have arrived while the update was prepared
        if later and mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            self._frozen = True
            return mode
        async with deadline(self.config.timeouts.weight_update, f"requests in flight to be dealt with ({mode.value})"):
            await self._quiesce(mode)
        return None

    @checked
    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        """Open the source of an update and check it against the model, while the engine serves on.

        :meth:`weight_update` does so itself, unless this was called before it with the same object. Changes nothing.

        Raises:
            WeightPlanMismatch: tensors missing, extra or of another shape or dtype.
        """
        self._require_update_of_all(request.source.kind)
        async with self._owning_weights("a weight update"):
            self._status.require_updatable()
            self._prepared = None
            self._prepared = await self._prepare(request)

    async def release_weight_sources(self) -> None:
        """Let go of memory that trainers share with the engine, which stays mapped from one update to the next."""
        self._status.require_open("release_weight_sources()")
        async with self._owning_weights("release_weight_sources()"), self._controlling("release_weight_sources()"):
            self._prepared = None
            async with self._bounded("the receiver to let go of shared memory"):
                await self._backend.receive_weights(ReleaseSources())

    def _require_update_of_all(self, kind: str) -> None:
        """Raise unless an update of all weights may begin."""
        if kind == "lora":
            raise InvalidRequest("an adapter is updated as a whole; use update_named_weights()", field="source.kind")
        self._require_update_from(kind)

    def _require_update_from(self, kind: str) -> None:
        what = f"a weight update from {kind}"
        self._status.require_open(what)
        require(self.capabilities, SOURCE_CAPABILITY[kind], what, self.config.backend)
        self._status.require_updatable()

    async def _prepare(self, request: WeightUpdateRequest) -> WeightTransaction:
        keep = request.keep_prefix_cache or Capability.PREFIX_CACHE not in self.capabilities
        transaction = WeightTransaction(self._backend, request, self.config.timeouts.weight_update, keep, self._plans)
        try:
            await transaction.prepare()
        except BaseException:
            await self._abort_update()  # it may still be at it
            raise
        return transaction

    async def _abort_update(self, freeze: PauseMode | None = None) -> None:
        """Withdraw an update that failed; ``freeze`` says how requests were to be frozen for it, or were."""
        try:
            async with self._bounded("the receiver to forget the update"):
                if freeze is not None:
                    await self._backend.freeze(freeze)
                await self._backend.receive_weights(AbortUpdate())
        except Exception as error:  # what made the update fail is what the caller is told
            logger.warning("the failed update could not be withdrawn from the engine: %s", error)

    @checked
    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        """Run a whole weight update whose tensors lie ready: every bucket, verified and committed.

        A source of kind ``lora`` updates one adapter, or loads it if there is none of its name; other weights stay,
        and if it fails, so does the old adapter.

        Raises:
            DrivetrainError: as :meth:`weight_update` does.
            EngineBusy: requests in flight use the adapter, and ``request.mode`` would have them go on.
        """
        if isinstance(request.source, LoraSource):
            await self._update_lora(request, request.source)
            return
        at_once = request.source.kind not in SENT_MEANWHILE
        async with self.weight_update(request, at_once=at_once) as transaction:
            for index in range(0 if at_once else transaction.buckets):
                await transaction.load([index])

    @checked
    async def start_weight_transfer(self, request: WeightUpdateRequest) -> WeightTransferHandle[None]:
        """Begin to stage an update in the background, while generation goes on; only its ``finish`` pauses.

        A checkpoint's files are read and checked meanwhile, and may be removed once it is staged. What a plugin's
        transport brings, and tensors in memory that is shared with a trainer, must stay as they are until it is
        finished; the ``start_weight_transfer`` of a ``WeightSync`` copies tensors first.

        Raises:
            WeightPlanMismatch, InvalidRequest: by the handle, as :meth:`prepare_weight_update` does.
        """
        self._require("start_weight_transfer()", Capability.WEIGHT_STAGING)
        self._require_update_of_all(request.source.kind)

        async def let_go() -> None:
            if self._prepared is not None and self._prepared.request is request:
                self._prepared = None
                await self._abort_update()

        return WeightTransferHandle(
            request.version,
            self.prepare_weight_update(request),
            lambda _: self.update_named_weights(request),
            let_go,
        )

    @checked
    async def load_weights_from_disk(
        self, path: str | os.PathLike[str], version: str, *, mode: PauseMode | str = PauseMode.RETRACT
    ) -> None:
        """Update the weights from a checkpoint folder, readable by the engine; its format is found by looking."""
        source = DiskSource(path=os.fspath(path))
        request = WeightUpdateRequest(version=version, source=source, mode=PauseMode(mode))
        await self.update_named_weights(request)

    def get_weight_version(self) -> str:
        """The version of the weights that are served, as last committed."""
        return self._version

    @checked
    async def update_weight_version(self, version: str) -> None:
        """Give the weights another label, without changing them."""
        self._require("update_weight_version()", Capability.VERSION_SPANS)
        async with self._controlling("update_weight_version()"):
            if self._status.weights is not WeightState.CLEAN:
                raise EngineStateError(
                    f"update_weight_version() is refused: the engine is {self._status.describe()}; push a complete "
                    "weight update, which carries its version",
                    state=self._status.state.value,
                )
            async with self._bounded("the weight version to be set"):
                await self._backend.set_weight_version(version)
            self._version = version

    @staticmethod
    @checked
    async def get_remote_weight_version(endpoint: str, *, timeout: float = 5.0) -> str:
        """Ask the server at ``endpoint`` (``http://host:port``) which weight version it serves."""
        return await remote_weight_version(endpoint, timeout)

    @checked
    async def get_weights_by_name(self, name: str) -> TensorData:
        """Return one tensor by its checkpoint name."""
        self._require("get_weights_by_name()", Capability.READ_WEIGHTS)
        async with self._bounded(f"the tensor {name!r}"):
            return await self._backend.read_weight(name)

    async def validate_weights(self) -> WeightReport:
        """Look at every tensor for NaN, infinity and zeros only."""
        self._require("validate_weights()", Capability.READ_WEIGHTS)
        async with deadline(self.config.timeouts.weight_update, "the weights to be validated"):
            return await self._backend.validate_weights()

    @checked
    async def check_weight_sync_integrity(self, expected_version: str) -> WeightIntegrity:
        """Compare the served version with ``expected_version`` and look at every tensor."""
        return WeightIntegrity(expected_version, self._version, await self.validate_weights())

    @checked
    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a torch.distributed group in which the trainer will broadcast weights.

        Raises:
            InvalidRequest: the engine is in a group of that name, or is joining one.
            DeadlineExceeded: it did not form within ``timeouts.weight_update``.
        """
        self._require("init_weight_update_communicator()", Capability.WEIGHTS_BROADCAST)
        if spec.group_name in self._groups:
            raise InvalidRequest(
                f"the engine is in a group {spec.group_name!r} already; leave it first", field="group_name"
            )
        timeout = min(spec.timeout, self.config.timeouts.weight_update)
        self._groups.add(spec.group_name)
        try:
            async with deadline(self.config.timeouts.weight_update, f"the group {spec.group_name!r} to form"):
                await self._backend.init_communicator(spec.model_copy(update={"timeout": timeout}))
        except BaseException:
            self._groups.discard(spec.group_name)
            raise

    @checked
    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        """Leave that group.

        Raises:
            InvalidRequest: the engine is in none of that name.
        """
        self._require("destroy_weight_update_communicator()", Capability.WEIGHTS_BROADCAST)
        self._groups.discard(group_name)
        async with self._bounded(f"the group {group_name!r} to dissolve"):
            await self._backend.destroy_communicator(group_name)

    @checked
    async def save_sharded_model(self, path: str | os.PathLike[str], *, timeout: float | None = None) -> None:
        """Save the model with its current weights to a folder that any engine can load; requests run on meanwhile.

        The folder appears when it is complete. A weight update, or sleep of the weights, waits until then.

        Args:
            path: A folder that is not there yet, or is empty, where the engine runs; relative to this process's
                working directory.
            timeout: Seconds until DeadlineExceeded, which leaves nothing; ``timeouts.weight_update`` if not given.

        Raises:
            InvalidRequest: no new folder can be made there; nothing was done.
            EngineStateError: the weights are asleep, dirty or being updated.
        """
        self._require("save_sharded_model()", Capability.SAVE_SHARDED)
        await self._save("save_sharded_model()", absolute_path(path), timeout, self._backend.save_sharded)

    @checked
    async def save_remote_model(self, url: str, *, timeout: float | None = None) -> None:
        """Save the model as :meth:`save_sharded_model` does to an fsspec URL under which there is nothing yet.

        Raises:
            InvalidRequest: there is no such protocol, or nothing can be written there; nothing was done.
            EngineStateError: the weights are asleep, dirty or being updated.
        """
        self._require("save_remote_model()", Capability.SAVE_REMOTE)
        await self._save("save_remote_model()", check_url(url), timeout, self._backend.save_remote)

    async def _save(
        self, action: str, place: str, timeout: float | None, save: Callable[[str], Awaitable[None]]
    ) -> None:
        seconds = check_seconds(timeout, self.config.timeouts.weight_update)
        self._status.require_weights(action)
        async with deadline(seconds, f"the model to be saved to {place!r}"), self._owning_weights(action):
            self._status.require_weights(action)
            await save(place)

    # LoRA --------------------------------------------------------------------------------------------------------

    @checked
    async def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, pinned: bool = False
    ) -> None:
        """Load an adapter from a peft folder; ``pinned`` keeps it from being evicted.

        Raises:
            InvalidRequest: the name is taken, ``max_loras`` or ``max_lora_rank`` is exceeded, or the folder holds no
                adapter of this model.
        """
        self._require("load_lora_adapter()", Capability.LORA)
        async with self._controlling("load_lora_adapter()"), self._bounded(f"the LoRA adapter {lora_name!r} to load"):
            if lora_name in self._loras:
                raise InvalidRequest(
                    f"lora_name={shown(lora_name)} is loaded already; unload it first", field="lora_name"
                )
            self._require_room_for_lora()
            self._loras[lora_name] = await self._load_lora(lora_name, os.fspath(lora_path), pinned)

    @checked
    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter; requests that use it afterwards are refused.

        Raises:
            InvalidRequest: it is not loaded.
            EngineBusy: requests that use it are under way.
        """
        self._require("unload_lora_adapter()", Capability.LORA)
        self._require_lora(lora_name, "lora_name")
        async with self._controlling("unload_lora_adapter()"), self._bounded(f"the adapter {lora_name!r} to unload"):
            self._require_lora(lora_name, "lora_name")  # another call may have unloaded it meanwhile
            users = self._in_flight.using_lora(lora_name)
            if users:
                raise EngineBusy(
                    f"LoRA adapter {lora_name!r} is used by {users} requests under way; let them end or abort them"
                )
            loaded = self._loras.pop(lora_name)  # no request may take it from here on
            try:
                await self._backend.unload_lora_adapter(loaded.backend_name)
            except BaseException:
                self._loras[lora_name] = loaded
                raise

    def _require_room_for_lora(self) -> None:
        if self.config.max_loras is not None and len(self._loras) >= self.config.max_loras:
            raise InvalidRequest(
                f"{len(self._loras)} LoRA adapters are loaded and max_loras={self.config.max_loras}; unload one, "
                "or raise max_loras",
                field="lora_name",
            )

    async def _load_lora(self, lora_name: str, lora_path: str, pinned: bool) -> LoadedLora:
        for stray in list(self._stray_loras):
            with suppress(DrivetrainError):  # the backend does not have it after all
                await self._backend.unload_lora_adapter(stray)
            self._stray_loras.discard(stray)
        taken = {loaded.backend_name for loaded in self._loras.values()}
        names = itertools.chain([lora_name], (f"{lora_name}-{number}" for number in itertools.count(2)))
        backend_name = next(name for name in names if name not in taken)
        try:
            await self._backend.load_lora_adapter(backend_name, lora_path, pinned)
        except InvalidRequest:
            raise
        except BaseException:
            self._stray_loras.add(backend_name)
            raise
        return LoadedLora(backend_name, pinned)

    async def _update_lora(self, request: WeightUpdateRequest, source: LoraSource) -> None:
        """Load the new adapter beside the old one, let it take its name, unload the old one."""
        name, what = source.lora_name, f"an update of the adapter {source.lora_name!r}"
        self._require_update_from(source.kind)
        async with self._owning_weights(what), self._controlling(what):
            self._status.require_weights(what)
            old = self._loras.get(name)
            if old is None:
                self._require_room_for_lora()
            self._refuse_users_of_lora(name, request.mode)
            self._refuse_waiting_for_frozen(request.mode)
            async with self._bounded(f"the LoRA adapter {name!r} to load"):
                new = await self._load_lora(name, source.path, old is not None and old.pinned)
            before = self._status
            surplus: LoadedLora | None = new
            self._set(before.begin_update())
            try:
                self._refuse_users_of_lora(name, request.mode)  # they may have arrived meanwhile
                if self._in_flight.running_with_lora(name):
                    await self._quiesce_for_update(request.mode)
                async with self._bounded("the weight version to be set"):
                    await self._backend.set_weight_version(request.version)
                self._loras[name], self._version, surplus = new, request.version, old
            finally:
                self._set(before)
                if surplus is not None:
                    async with self._bounded(f"what is not {name!r} any more, or did not become it, to unload"):
                        await self._backend.unload_lora_adapter(surplus.backend_name)

    def _refuse_users_of_lora(self, name: str, mode: PauseMode) -> None:
        """Raise if requests are in flight with the adapter that could not go on with another."""
        users = self._in_flight.running_with_lora(name)
        if users and mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            raise EngineBusy(
                f"LoRA adapter {name!r} is used by {users} requests in flight, which cannot go on with another one "
                f"(mode={mode.value!r}); let them end first, or say mode='wait' or mode='abort'"
            )

    # Models that do not generate ---------------------------------------------------------------------------------

    @checked
    async def encode(
        self, prompts: PromptLike | Sequence[PromptLike], *, dimensions: int | None = None
    ) -> list[list[float]]:
        """Return one embedding per prompt; ``dimensions`` shortens it, for models trained for that.

        If the model's folder names no pooling, an embedding points where the last layer's state of the last token does.
        """
        self._require("encode()", Capability.EMBED)
        builder = self._builder_for(Task.EMBED, "encode()")
        async with deadline(self.config.timeouts.generate, "the embeddings"):
            token_ids = await builder.prompt_token_ids(prompts)
            vectors = await self._backend.embed(token_ids, dimensions)
        require_numbers((sum(vector) for vector in vectors), "an embedding")
        return vectors

    @checked
    async def encode_single(self, prompt: PromptLike, *, dimensions: int | None = None) -> list[float]:
        """Return the embedding of one prompt."""
        (vector,) = await self.encode([prompt], dimensions=dimensions)
        return vector

    @checked
    async def compute_similarity(self, first: PromptLike, second: PromptLike) -> float:
        """Return the cosine of the angle between two prompts' embeddings."""
        a, b = await self.encode([first, second])
        return _dot(a, b) / math.sqrt(_dot(a, a) * _dot(b, b))

    @checked
    async def score(self, input_ids: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return a reward model's score of each output after its input."""
        self._require("score()", Capability.REWARD_SCORE)
        if len(input_ids) != len(output_ids):
            raise InvalidRequest(
                f"{len(input_ids)} inputs and {len(output_ids)} outputs; expected as many", field="output_ids"
            )
        builder = self._builder_for(Task.REWARD, "score()")
        pairs = list(zip(input_ids, output_ids, strict=True))
        for index, (one, other) in enumerate(pairs):
            check_prompt_length(len(one) + len(other), f"input_ids[{index}]", self.model_info.context_length)
        async with deadline(self.config.timeouts.generate, f"{len(pairs)} scores"):
            sequences = await builder.prompt_token_ids([[*one, *other] for one, other in pairs])
            scores = await self._backend.reward_score(sequences)
        require_numbers(scores, "a score")
        return scores

    # Profile -----------------------------------------------------------------------------------------------------

    @checked
    async def start_profile(self, directory: str | os.PathLike[str]) -> None:
        """Begin to record a profile into ``directory``."""
        self._require("start_profile()", Capability.PROFILE)
        async with self._bounded("the profile to start"):
            await self._backend.start_profile(os.fspath(directory))

    async def stop_profile(self) -> str:
        """End the recording; return the trace file's path."""
        self._require("stop_profile()", Capability.PROFILE)
        async with self._bounded("the profile to be written"):
            return await self._backend.stop_profile()

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _in_flight(self) -> RequestsInFlight:
        if self._in_flight_ is None:
            raise self._not_started("this")
        return self._in_flight_

    @property
    def _is_held(self) -> bool:
        self._status.require_open("a waiting request")
        return self._holds > 0 or self._status.holds_requests

    def _build(
        self,
        action: str,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None,
        *,
        request_ids: Sequence[str] | None = None,
        lora: str | None = None,
        priority: int = 0,
    ) -> list[Samples]:
        builder = self._builder_for(Task.GENERATE, action)
        if lora is not None and Capability.LORA in self.capabilities:
            self._require_lora(lora, "lora")
        return builder.build(prompts, sampling_params, request_ids=request_ids, lora=lora, priority=priority)

    async def _read(self, prompts: Sequence[Samples], whole: Callable[[list[int]], list[int]] | None = None) -> None:
        """Give the prompts the ids that the model sees; the backend looks at what lies beside them."""
        builder = self._builder_for(Task.GENERATE, "generate()")
        await builder.read(prompts, whole)
        with_media = [samples for samples in prompts if samples.request.media]
        if not with_media:
            return
        read = await _all(self._backend.read_media(samples.request.media) for samples in with_media)
        for samples, media in zip(with_media, read, strict=True):
            builder.place(samples, media)

    def _require_lora(self, name: str, field: str) -> None:
        if name not in self._loras:
            loaded = ", ".join(sorted(self._loras)) or "none"
            raise InvalidRequest(f"{field}={shown(name)} is not loaded; loaded: {loaded}", field=field)

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise InvalidRequest(
                f"session_id={shown(session_id)} is not open; open_session() gives one", field="session_id"
            )
        return self._sessions[session_id]

    def _builder_for(self, task: Task, action: str) -> RequestBuilder:
        self._status.require_admission(action)
        if self._builder is None:
            raise self._not_started(action)
        if self.config.task is not task:
            raise InvalidRequest(
                f"{action} needs an engine with task={task.value!r}; this one was created with "
                f"task={self.config.task.value!r}",
                field="task",
            )
        return self._builder

    def _require(self, action: str, capability: Capability) -> None:
        self._status.require_open(action)
        require(self.capabilities, capability, action, self.config.backend)

    def _set(self, status: EngineStatus) -> None:
        """Move to the next status; one that arrives after death or teardown changes nothing."""
        if self._status.state in (EngineState.FAILED, EngineState.CLOSED):
            return
        self._status = status
        self._in_flight.changed()

    @asynccontextmanager
    async def _controlling(self, action: str) -> AsyncGenerator[None, None]:
        """One change of state at a time."""
        async with deadline(self.config.timeouts.control, f"another change of state to end before {action}"):
            await self._control.acquire()
        try:
            yield
        finally:
            self._control.release()

    @asynccontextmanager
    async def _owning_weights(self, action: str) -> AsyncGenerator[None, None]:
        """One that changes the weights, or saves them, at a time; other changes of state go on during a save.

        Entered before :meth:`_controlling`, never within.
        """
        seconds = self.config.timeouts.weight_update
        async with deadline(seconds, f"a weight update or a save to end before {action}"):
            await self._weights.acquire()
        try:
            yield
        finally:
            self._weights.release()

    @asynccontextmanager
    async def _shut_gate(self) -> AsyncGenerator[None, None]:
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._in_flight.changed()

    def _bounded(self, waited_for: str) -> AbstractAsyncContextManager[None]:
        return deadline(self.config.timeouts.control, waited_for)

    def _sleep_tags(self, tags: Iterable[MemoryTag | str] | None, action: str) -> frozenset[MemoryTag]:
        self._status.require_open(action)
        able = frozenset(tag for tag, capability in _SLEEP_CAPABILITY.items() if capability in self.capabilities)
        if tags is None:
            if not able:
                require(self.capabilities, Capability.SLEEP_KV_CACHE, action, self.config.backend)
            return able
        chosen = frozenset(MemoryTag(tag) for tag in tags)
        if not chosen:
            raise InvalidRequest(f"{action}: tags is empty; name some, or give None for all", field="tags")
        for tag in chosen:
            require(self.capabilities, _SLEEP_CAPABILITY[tag], f"{action} of {tag.value}", self.config.backend)
        return chosen

    def _not_started(self, action: str) -> EngineStateError:
        return EngineStateError(
            f"{action} is not known before the engine is started: 'await engine.start()' or 'async with engine:'",
            state=self._status.state.value,
        )


def _with_ends_of(tokenizer: Tokenizer, model: ModelInfo) -> ModelInfo:
    """The model with the tokenizer's EOS id beside its own: some chat models' end is named there alone."""
    named = (*model.eos_token_ids, *eos_token_ids(tokenizer.inner))
    ends = tuple(token_id for token_id in dict.fromkeys(named) if 0 <= token_id < model.vocab_size)
    return replace(model, eos_token_ids=ends)


async def _all(coroutines: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Await all of them; when one fails, cancel the others before the error goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await _cancelled(tasks)
        raise


async def _cancelled(tasks: Sequence[asyncio.Task[_T]]) -> None:
    """Cancel tasks and wait until they have ended, some at each turn of the event loop."""
    left = [task for task in tasks if not task.done()]
    try:
        while left:
            some, left = left[:SAMPLES_AT_ONCE], left[SAMPLES_AT_ONCE:]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    except BaseException:
        for task in left:
            task.cancel()
        raise


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
