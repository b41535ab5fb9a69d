"""The thread that steps the scheduler, and does everything else between two steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from drivetrain.backend import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.config import EngineConfig
from drivetrain.errors import DrivetrainError, EngineInternalError
from drivetrain.tokenizer import Tokenizer
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.scheduler import Scheduler
from drivetrain_transformers.sequences import Sink
from drivetrain_transformers.translate import DEFAULT_MAX_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, PREFIX_CACHE_BYTES

T = TypeVar("T")


class Runner:
    """Owns the model and the scheduler; only its thread touches them once it has started."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler) -> None:
        self.model = model
        self.scheduler = scheduler
        self._frozen = False
        self._stopping = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._submitted: list[tuple[GenerateRequest, Sink, bool]] = []
        self._thread = threading.Thread(target=self._run, name="drivetrain-transformers", daemon=True)

    @classmethod
    def load(cls, config: EngineConfig, report: Callable[[str], None]) -> Runner:
        """Load what ``config`` names and run one token through it."""
        model = LoadedModel.load(config, report)
        scheduler = Scheduler(
            model,
            Tokenizer.load(config),
            version=config.weight_version,
            max_rows=config.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
            max_prefill_tokens=config.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS,
            prefix_cache_bytes=PREFIX_CACHE_BYTES if config.enable_prefix_caching else 0,
        )
        return cls(model, scheduler)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was not finished ends with an error. Blocks until it has ended."""

        def stopping() -> None:
            self._stopping = True

        self._put(stopping)
        self._thread.join()

    # From the event loop -----------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, deliver: Sink, *, streamed: bool = False) -> None:
        """Hand a request to the scheduler; ``deliver`` is called in this event loop."""
        loop = asyncio.get_running_loop()

        def sink(item: GenerateResult | TokenDelta | DrivetrainError) -> None:
            self._outbox.setdefault(loop, []).append(partial(deliver, item))

        # All that one turn of the event loop submits is handed over at once: the batch then starts together, and the
        # thread is not woken, nor the interpreter's lock fought over, a thousand times.
        if not self._submitted:
            loop.call_soon(self._hand_over)
        self._submitted.append((request, sink, streamed))

    def abort(self, request_ids: list[str]) -> None:
        """End requests with what they have."""
        self._put(lambda: self.scheduler.abort(request_ids))

    def _put(self, command: Callable[[], None]) -> None:
        """Queue a command behind everything submitted before it."""
        self._hand_over()
        self._inbox.put(command)

    def _hand_over(self) -> None:
        submitted, self._submitted = self._submitted, []
        if not submitted:
            return

        def submit_all() -> None:
            for request, sink, streamed in submitted:
                self.scheduler.submit(request, sink, streamed=streamed)

        self._inbox.put(submit_all)

    async def freeze(self, *, retract: bool) -> None:
        """Stop stepping, and with ``retract`` let the running sequences' caches go."""

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
        """Run ``function`` in the thread, between two steps, and return what it returns."""
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
                self._outbox.setdefault(loop, []).append(partial(settle, None, error))
            else:
                self._outbox.setdefault(loop, []).append(lambda: settle(value, None))

        self._put(run)
        return await result

    # In the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            if self._frozen or self.scheduler.idle:
                self._inbox.get()()
            while not self._inbox.empty():
                self._inbox.get()()
            if not self._frozen and not self._stopping and not self.scheduler.idle:
                self.scheduler.step()
            self._flush()
        self.scheduler.fail_all(EngineInternalError("the engine was closed while this request was in flight"))
        self._flush()

    def _flush(self) -> None:
        """Hand what the last step produced to the event loops, one wake-up each."""
        for loop, deliveries in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver_all, deliveries)
            except RuntimeError:
                if not loop.is_closed():
                    raise
        self._outbox = {}


def _deliver_all(deliveries: list[Callable[[], None]]) -> None:
    for deliver in deliveries:
        deliver()
