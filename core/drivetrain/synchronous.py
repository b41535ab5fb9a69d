"""An engine for callers without an event loop: each call blocks until it is done."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import ExitStack, aclosing
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, TypeVarTuple, Unpack

from drivetrain.attached.engine import attach
from drivetrain.backend.base import ModelInfo
from drivetrain.create import create_engine
from drivetrain.engine.api.description import EngineDescription
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineDied, EngineError, EngineStateError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.handle import EngineHandle

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Ts = TypeVarTuple("_Ts")


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that starts no thread while the interpreter ends, which then has none to give."""

    interpreter_ends = False

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _R], *args: *_Ts
    ) -> asyncio.Future[_R]:
        """Run a call in a thread, or at once in the loop's own."""
        if not self.interpreter_ends:
            return super().run_in_executor(executor, func, *args)
        done: asyncio.Future[_R] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Wait for the threads of calls, unless the interpreter has waited for them."""
        if not self.interpreter_ends:
            await super().shutdown_default_executor(*args)


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        running = threading.Event()
        self.engine: InferenceEngine | None = None
        """The engine that is called in it."""
        self._closed = False
        self._process = os.getpid()
        self._turn = threading.Lock()
        """Held while work is handed over, or the loop is told to close: no work comes after that."""
        self._thread = threading.Thread(target=self._run, args=(running,), name="drivetrain-sync-engine", daemon=True)
        self._thread.start()
        running.wait()

    def _run(self, running: threading.Event) -> None:
        self._loop = _Loop()
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed(running))

    async def _until_closed(self, running: threading.Event) -> None:
        self._closing = asyncio.Event()
        running.set()
        await self._closing.wait()

    @property
    def is_in_this_process(self) -> bool:
        """False in a process forked from the loop's, which lacks its thread."""
        return os.getpid() == self._process

    def start_no_threads(self) -> None:
        """Call this when the interpreter ends."""
        self._loop.interpreter_ends = True

    def require_other_thread(self) -> None:
        """Raise if the caller would wait forever: in the loop's own thread, or in a process that lacks the thread."""
        if not self.is_in_this_process:
            raise EngineStateError(
                f"process {os.getpid()} was forked from the engine's, {self._process}, and lacks its thread; attach to "
                "engine.handle() here, or make an engine of its own"
            )
        if threading.current_thread() is self._thread:
            raise EngineStateError("a blocking call in the engine's own thread would wait for itself; await there")

    def submit(self, work: Coroutine[Any, Any, _R]) -> Future[_R]:
        """Start work in the loop."""
        try:
            self.require_other_thread()
        except EngineStateError:
            work.close()
            raise
        with self._turn:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise self._was_closed("the engine was closed; make a new one")

    def run(self, work: Coroutine[Any, Any, _R]) -> _R:
        """Wait for work in the loop; if the caller is interrupted, cancel it."""
        future = self.submit(work)
        try:
            return self.result(future)
        finally:
            future.cancel()  # no effect on work that has ended

    def result(self, future: Future[_R]) -> _R:
        """Wait for submitted work."""
        try:
            return future.result()
        except CancelledError:
            raise self._was_closed("the engine was closed during the call") from None

    def _was_closed(self, what: str) -> EngineError:
        status = None if self.engine is None else self.engine.status
        if status is not None and status.died:
            return EngineDied(f"{what}; it died before that ({status.why})")
        return EngineStateError(what)

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Idempotent."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()


def _blocking(
    call: Callable[Concatenate[InferenceEngine, _P], Coroutine[Any, Any, _R]],
) -> Callable[Concatenate[SyncEngine, _P], _R]:
    """Return a blocking form of a call of ``InferenceEngine``."""

    @functools.wraps(call)
    def blocking(page: SyncEngine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # By its name: fleets and attached engines have calls of their own.
        own: Callable[_P, Coroutine[Any, Any, _R]] = getattr(page.engine, call.__name__)
        return page.run(own(*args, **kwargs))

    return blocking


def _iterating(
    call: Callable[Concatenate[InferenceEngine, _P], AsyncGenerator[_R, None]],
) -> Callable[Concatenate[SyncEngine, _P], Iterator[_R]]:
    """Return a stream of the engine as an iterator."""

    @functools.wraps(call)
    def iterating(page: SyncEngine, /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_R]:
        own: Callable[_P, AsyncGenerator[_R, None]] = getattr(page.engine, call.__name__)
        return page.iterate(own(*args, **kwargs))

    return iterating


class SyncEngine:
    """An engine whose calls block. Made by :func:`sync_engine`; used as ``with engine:``.

    Its calls are those of :class:`InferenceEngine`, with the same arguments, results and errors. They run in an event
    loop of its own, in a thread of its own, so any number of threads may call at once. If a call is interrupted, as by
    Ctrl-C, or a stream is left, its requests are aborted. An inline engine or a fleet that is still open when the
    interpreter ends is closed then, and an attached engine is detached.
    """

    def __init__(self, engine: InferenceEngine, loop: _LoopThread) -> None:
        self.engine = engine
        """The page whose calls are awaited, for :meth:`run` and for ``WeightSync.connect``."""
        self._loop = loop
        loop.engine = engine
        self._ending = threading.Lock()
        self._ended = False
        _open[self] = None

    def run(self, work: Coroutine[Any, Any, _R]) -> _R:
        """Run a coroutine in the engine's event loop, such as ``sync.push(version=…)``; return its result.

        Raises:
            EngineDied: The engine was closed after it had died.
            EngineStateError: The engine was closed, or the caller is a callback in the engine's own thread, or in a
                process forked from its own.
        """
        return self._loop.run(work)

    def teardown(self) -> None:
        """Stop the engine and its thread; idempotent. Requests in flight come back aborted.

        Raises:
            EngineStateError: The caller is a callback in the engine's own thread, or in a process forked from its own.
        """
        self._loop.require_other_thread()
        with self._ending:
            if not self._ended:
                self._ended = True
                try:
                    self.run(self.engine.teardown())
                finally:
                    self._loop.close()
                    _open.pop(self, None)

    def end_with_interpreter(self) -> None:
        """Stop an inline engine or a fleet, or detach, as the interpreter ends.

        The interpreter would abort if a step of an inline engine were under way. A host process ends by its socket.
        """
        if type(self.engine) is not InferenceEngine or self.engine.isolation is Isolation.INLINE:
            self._loop.start_no_threads()
            self.teardown()

    def __enter__(self) -> Self:
        """Start the engine, unless it is attached and therefore started."""
        if self.engine.state is EngineState.CREATED:
            try:
                self.start()
            except BaseException:
                self.teardown()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the engine; nothing is there to stop in a process forked from its own."""
        if self._loop.is_in_this_process:
            self.teardown()

    def iterate(self, stream: AsyncGenerator[_R, None]) -> Iterator[_R]:
        """Read an asynchronous generator in the engine's event loop; leaving the iteration closes it.

        Raises:
            EngineDied: The engine was closed after it had died.
            EngineStateError: The engine was closed, or the caller is a callback in the engine's own thread, or in a
                process forked from its own.
        """
        pieces: queue.SimpleQueue[tuple[_R] | None] = queue.SimpleQueue()

        async def take() -> None:
            try:
                async with aclosing(stream):
                    async for piece in stream:
                        pieces.put((piece,))
            finally:
                pieces.put(None)

        taking = self._loop.submit(take())
        try:
            while (piece := pieces.get()) is not None:
                yield piece[0]
            self._loop.result(taking)
        finally:
            taking.cancel()

    # Facts -------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        return self.engine.config

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Every capability that the engine claims."""
        return self.engine.capabilities

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        return self.engine.state

    @property
    def model_info(self) -> ModelInfo:
        """The model, once the engine is started."""
        return self.engine.model_info

    @property
    def is_paused(self) -> bool:
        """True while requests wait for :meth:`continue_generation`."""
        return self.engine.is_paused

    def supports(self, capability: Capability) -> bool:
        """Return True if the engine claims ``capability``."""
        return self.engine.supports(capability)

    def get_weight_version(self) -> str:
        """Return the version of the weights that are served."""
        return self.engine.get_weight_version()

    def describe(self) -> EngineDescription:
        """Return a description of the engine, in plain values."""
        return self.engine.describe()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        return self.engine.decode(token_ids, skip_special_tokens=skip_special_tokens)

    # Calls -------------------------------------------------------------------------------------------------------

    start = _blocking(InferenceEngine.start)
    stats = _blocking(InferenceEngine.stats)
    handle = _blocking(InferenceEngine.handle)

    encode = _blocking(InferenceEngine.encode)
    encode_single = _blocking(InferenceEngine.encode_single)
    generate = _blocking(InferenceEngine.generate)
    generate_stream = _iterating(InferenceEngine.generate_stream)
    generate_with_session = _blocking(InferenceEngine.generate_with_session)
    open_session = _blocking(InferenceEngine.open_session)
    close_session = _blocking(InferenceEngine.close_session)
    completion = _blocking(InferenceEngine.completion)
    completion_stream = _iterating(InferenceEngine.completion_stream)
    chat_completion = _blocking(InferenceEngine.chat_completion)
    chat_completion_stream = _iterating(InferenceEngine.chat_completion_stream)
    compute_logprobs = _blocking(InferenceEngine.compute_logprobs)
    compute_similarity = _blocking(InferenceEngine.compute_similarity)
    score = _blocking(InferenceEngine.score)

    abort = _blocking(InferenceEngine.abort)
    abort_generation = _blocking(InferenceEngine.abort_generation)
    pause_generation = _blocking(InferenceEngine.pause_generation)
    continue_generation = _blocking(InferenceEngine.continue_generation)
    sleep = _blocking(InferenceEngine.sleep)
    sleep_all = _blocking(InferenceEngine.sleep_all)
    sleep_weights_only = _blocking(InferenceEngine.sleep_weights_only)
    wake_up = _blocking(InferenceEngine.wake_up)
    wake_up_all = _blocking(InferenceEngine.wake_up_all)
    wake_up_weights_only = _blocking(InferenceEngine.wake_up_weights_only)
    reset_prefix_cache = _blocking(InferenceEngine.reset_prefix_cache)
    clear_hicache_storage = _blocking(InferenceEngine.clear_hicache_storage)
    start_profile = _blocking(InferenceEngine.start_profile)
    stop_profile = _blocking(InferenceEngine.stop_profile)

    load_lora_adapter = _blocking(InferenceEngine.load_lora_adapter)
    unload_lora_adapter = _blocking(InferenceEngine.unload_lora_adapter)

    load_weights_from_disk = _blocking(InferenceEngine.load_weights_from_disk)
    update_named_weights = _blocking(InferenceEngine.update_named_weights)
    update_weight_version = _blocking(InferenceEngine.update_weight_version)
    check_weight_sync_integrity = _blocking(InferenceEngine.check_weight_sync_integrity)
    validate_weights = _blocking(InferenceEngine.validate_weights)
    get_weights_by_name = _blocking(InferenceEngine.get_weights_by_name)
    weight_manifest = _blocking(InferenceEngine.weight_manifest)
    save_sharded_model = _blocking(InferenceEngine.save_sharded_model)
    save_remote_model = _blocking(InferenceEngine.save_remote_model)


_open: dict[SyncEngine, None] = {}
"""Engines that were not torn down, oldest first; a dictionary for its order."""
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    with ExitStack() as closing:  # the newest first: it may be attached to an older one
        for engine in list(_open):  # a copy, because other threads may make and close engines
            closing.callback(engine.end_with_interpreter)


def sync_engine(
    engine: str | os.PathLike[str] | Mapping[str, object] | EngineConfig | InferenceEngine | EngineHandle,
    **fields: object,
) -> SyncEngine:
    """Make an engine whose calls block, for trainers without an event loop. Starts only the thread of its event loop.

    Args:
        engine: As for :func:`create_engine`; or an engine or fleet that was not started; or a handle, whose engine is
            attached to.
        fields: Fields of :class:`EngineConfig`, as for :func:`create_engine`.

    Raises:
        InvalidRequest: ``fields`` are given beside an engine or a handle.
        EngineStateError: The engine was started in another event loop.
        DrivetrainError: The errors of :func:`create_engine`, or those of :func:`attach` for a handle.
    """
    made = isinstance(engine, InferenceEngine | EngineHandle)
    if made and fields:
        field = next(iter(fields))
        raise InvalidRequest(f"{field}: the engine has its configuration already; leave {field} out", field=field)
    if isinstance(engine, EngineHandle):
        loop = _LoopThread()
        try:
            return SyncEngine(loop.run(attach(engine)), loop)
        except BaseException:
            loop.close()
            raise
    page = engine if isinstance(engine, InferenceEngine) else create_engine(engine, **fields)
    if page.state is not EngineState.CREATED:
        raise EngineStateError(f"the engine is {page.state.value} in another event loop; pass one that was not started")
    return SyncEngine(page, _LoopThread())
