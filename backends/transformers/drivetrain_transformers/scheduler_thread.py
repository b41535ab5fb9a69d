"""The thread that steps the scheduler, and runs commands between two steps."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.checks.limits import SAMPLES_AT_ONCE
from drivetrain.errors import DrivetrainError, EngineDied, EngineInternalError
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import EngineConfig, Task
from drivetrain_transformers.deterministic import chunk_of
from drivetrain_transformers.errors import as_engine_error
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.pooling import Pooler
from drivetrain_transformers.scheduler import Scheduler
from drivetrain_transformers.sequences import Sink
from drivetrain_transformers.translate import (
    DEFAULT_MAX_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    PREFIX_CACHE_BYTES,
    has_grammars,
)

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from drivetrain_transformers.grammars import Grammar, Grammars
    from drivetrain_transformers.row_media import RowMedia

T = TypeVar("T")

logger: Final = logging.getLogger("drivetrain.transformers")


@dataclass(frozen=True, slots=True)
class _Command:
    """Work for the thread between two steps."""

    run: Callable[[], None]
    give_up: Callable[[DrivetrainError], object] = lambda error: None
    """Passes the error to the waiting caller if the thread has ended."""


class SchedulerThread:
    """Owns the model and the scheduler, which no other thread may touch once this one has started."""

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        *,
        grammars: Grammars | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self.pooler = pooler
        """Embeds or scores; None if the engine generates."""
        self._grammars = grammars
        self._compiling: set[asyncio.Task[None]] = set()
        self._frozen = False
        self._stopping = False
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._closing = threading.Lock()
        """Held to queue a command and to end the thread, so that every queued command is run or given up."""
        self._over: DrivetrainError | None = None
        """Reason for the thread's end; None while it runs."""
        self._death_watchers: list[Callable[[DrivetrainError], None]] = []
        self._undelivered: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._deliveries: dict[asyncio.AbstractEventLoop, Deliveries] = {}
        self._submitted: list[tuple[GenerateRequest, Sink, bool, CompiledGrammar | None, RowMedia | None]] = []
        self._thread = threading.Thread(target=self._run, name="drivetrain-transformers", daemon=True)

    @classmethod
    def load(cls, config: EngineConfig, report: Callable[[str], None]) -> SchedulerThread:
        """Load the model that ``config`` names, and create a scheduler for it."""
        model = LoadedModel.load(config, report)
        tokenizer = Tokenizer.load(config)
        scheduler = Scheduler(
            model,
            tokenizer,
            version=config.weight_version,
            max_rows=config.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
            max_prefill_tokens=config.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS,
            prefix_cache_bytes=PREFIX_CACHE_BYTES if config.enable_prefix_caching else 0,
            chunk=chunk_of(model, config),
        )
        grammars = None
        if has_grammars():
            from drivetrain_transformers.grammars import Grammars

            grammars = Grammars(tokenizer, model.info.vocab_size, model.info.eos_token_ids)
        pooler = None
        if config.task is not Task.GENERATE:
            pooler = Pooler(model, config, config.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS)
        return cls(model, scheduler, grammars=grammars, pooler=pooler)

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """End the thread; unfinished requests end with an error. Return whether it ended within ``seconds``."""

        def stopping() -> None:
            self._stopping = True

        self._put(_Command(stopping))
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # From the event loop -----------------------------------------------------------------------------------------

    def submit(
        self, request: GenerateRequest, deliver: Sink, *, streamed: bool = False, media: RowMedia | None = None
    ) -> None:
        """Hand a request to the scheduler; ``deliver`` is called in this event loop."""
        loop = asyncio.get_running_loop()

        def sink(item: GenerateResult | TokenDelta | DrivetrainError) -> None:
            self._undelivered.setdefault(loop, []).append(partial(deliver, item))

        # Requests submitted in one turn of the event loop are handed over together: the batch then starts together, and
        # a thousand requests do not wake the thread or contend for the GIL a thousand times.
        if not self._submitted:
            loop.call_soon(self._hand_over)
        grammar = request.params.structured_output
        compiled = self._grammars.kept(grammar) if self._grammars is not None and grammar is not None else None
        self._submitted.append((request, sink, streamed, compiled, media))
        if grammar is not None and compiled is None:
            task = loop.create_task(self._compile(request.request_id, grammar))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)

    async def _compile(self, request_id: str, grammar: Grammar) -> None:
        """Compile a request's grammar, while the scheduler keeps the request out of its queue."""
        outcome: CompiledGrammar | DrivetrainError
        try:
            if self._grammars is None:
                raise EngineInternalError("xgrammar is not installed, and structured output was not refused")
            outcome = await self._grammars.compiled(grammar)
        except Exception as error:
            outcome = as_engine_error(error)
        self._hand_over()  # the scheduler must have the request first
        self._put(_Command(lambda: self.scheduler.take_grammar(request_id, outcome)))

    async def stop_compiling(self) -> None:
        """Compile no more grammars; requests that wait for one are ended by :meth:`stop`."""
        for task in self._compiling:
            task.cancel()
        if self._grammars is not None:
            await self._grammars.close()

    def abort(self, request_ids: list[str]) -> None:
        """End requests with the tokens they have."""
        self._hand_over()
        self._put(_Command(lambda: self.scheduler.abort(request_ids)))

    async def died(self) -> EngineDied:
        """Wait for the thread to fail, and return the error; never returns otherwise."""
        result: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        loop = result.get_loop()

        def settle(error: EngineDied) -> None:
            if not result.done():
                result.set_result(error)

        def tell(error: DrivetrainError) -> None:
            if isinstance(error, EngineDied):
                self._undelivered.setdefault(loop, []).append(partial(settle, error))

        self._put(_Command(lambda: self._death_watchers.append(tell), tell))
        return await result

    def _put(self, command: _Command) -> None:
        with self._closing:
            if self._over is None:
                self._commands.put(command)
            else:  # the thread no longer delivers anything
                command.give_up(self._over)
                self._flush()

    def _hand_over(self) -> None:
        submitted, self._submitted = self._submitted, []
        if not submitted:
            return

        def submit_all() -> None:
            for request, sink, streamed, grammar, media in submitted:
                try:
                    self.scheduler.submit(request, sink, streamed=streamed, grammar=grammar, media=media)
                except Exception as error:
                    sink(as_engine_error(error))

        def give_up(error: DrivetrainError) -> None:
            for _, sink, *_ in submitted:
                sink(error)

        self._put(_Command(submit_all, give_up))

    async def freeze(self, *, retract: bool) -> None:
        """Stop stepping; with ``retract``, also free the caches of running sequences."""

        def freezing() -> None:
            self._frozen = True
            if retract:
                self.scheduler.retract()
                self.model.release_unused_memory()

        await self.call(freezing)

    async def unfreeze(self) -> None:
        """Step again."""

        def unfreezing() -> None:
            self._frozen = False

        await self.call(unfreezing)

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the thread, between two steps, and return its result.

        Raises:
            EngineOutOfMemory: It ran out of memory. Other exceptions are mapped too: see :func:`as_engine_error`.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def run() -> None:
            try:
                value = function()
            except Exception as error:
                self._undelivered.setdefault(loop, []).append(partial(settle, None, as_engine_error(error)))
            else:
                self._undelivered.setdefault(loop, []).append(lambda: settle(value, None))

        def give_up(error: DrivetrainError) -> None:
            self._undelivered.setdefault(loop, []).append(partial(settle, None, error))

        self._hand_over()  # keeps the order of earlier submissions
        self._put(_Command(run, give_up))
        return await result

    # In the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        over: DrivetrainError = EngineInternalError("the engine was closed meanwhile")
        try:
            self._serve()
        except BaseException as error:
            logger.exception("the thread of the transformers engine failed")
            over = EngineDied(f"the thread of the transformers engine failed: {type(error).__name__}: {error}")
            over.__cause__ = error
        with self._closing:
            self._over = over
            while not self._commands.empty():
                self._commands.get().give_up(over)
            for tell in self._death_watchers:
                tell(over)
            self.scheduler.fail_all(over)
            self._flush()

    def _serve(self) -> None:
        while not self._stopping:
            if self._frozen or self.scheduler.idle:
                self._commands.get().run()
            while not self._commands.empty():
                self._commands.get().run()
            if not self._frozen and not self._stopping and not self.scheduler.idle:
                self.scheduler.step()
            self._flush()

    def _flush(self) -> None:
        """Deliver the results of the last step to the event loops, with one wake-up each."""
        for loop, deliveries in self._undelivered.items():
            try:
                loop.call_soon_threadsafe(self._deliveries.setdefault(loop, Deliveries(loop)).add, deliveries)
            except RuntimeError:
                if not loop.is_closed():
                    raise
        self._undelivered = {}


class Deliveries:
    """Calls the sinks of one event loop in order, a bounded number per turn of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left: deque[Callable[[], None]] = deque()

    def add(self, deliveries: list[Callable[[], None]]) -> None:
        """Queue deliveries after all earlier ones. Called in the event loop."""
        is_idle = not self._left
        self._left.extend(deliveries)
        if is_idle:
            self._call_some()

    def _call_some(self) -> None:
        try:
            for _ in range(min(len(self._left), SAMPLES_AT_ONCE)):
                self._left.popleft()()
        finally:
            if self._left:
                self._loop.call_soon(self._call_some)
