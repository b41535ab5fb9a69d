# pyright: reportMissingImports=false
"""Calls of the backend to the engine core and its workers, served between two steps of the batch.

A call arrives through drivetrain's own socket, whose thread hands it to the engine core's loop. Calls to the scheduler
are served here; others are forwarded to every worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, cast

from drivetrain.backend.base import EngineStats
from drivetrain.errors import EngineBusy, EngineDied
from drivetrain.process.process_tree import end_with
from drivetrain.process.wire import Failure, Reply, encode
from drivetrain.process.worker_calls import WorkerCall, WorkerMethods
from drivetrain.process.worker_socket import WorkerSocket
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import ApplyUpdate, CommitUpdate, WeightMessage, WeightReply
from drivetrain_vllm.in_engine import SOCKET_VARIABLE, failed_requests
from drivetrain_vllm.in_engine.worker import OF_WORKERS
from drivetrain_weight_sync.receiver.cache_epochs import CacheEpochs
from drivetrain_weight_sync.receiver.request_arrivals import Arrivals

CALL: Final = "drivetrain"
"""Name of the workers' method."""
_CORE: Final = "_drivetrain_core"


class Core:
    """Calls that need the scheduler. Methods have the names and meanings of those on the ``Backend`` page."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.arrivals = Arrivals()
        self.cache_epochs = CacheEpochs()
        self.host: WorkerSocket | None = None
        """The host's socket, once calls are served from it."""
        self._asleep: frozenset[MemoryTag] = frozenset()
        self.is_frozen = False
        """True from vLLM's ``pause_scheduler`` until its ``resume_scheduler``."""

    def _of_workers(self, method: str, *arguments: object) -> object:
        return methods.result_of(method, forward(self._core, methods.call(method, arguments)))

    def stats(self) -> EngineStats:
        """Count requests and memory."""
        running, waiting = self._core.scheduler.get_request_counts()
        cache, weights = cast("tuple[int, int]", self._of_workers("occupied"))
        return EngineStats(running=running, waiting=waiting, kv_cache_bytes=cache, weight_bytes=weights)

    def tokens_so_far(self, request_ids: list[str]) -> dict[str, int]:
        """Return token counts of unfinished requests; finished ones are left out."""
        requests = [one for one in self._core.scheduler.requests.values() if not one.is_finished()]
        live = {_given(request.request_id): request.num_output_tokens for request in requests}
        return self.arrivals.tokens(request_ids, live)

    def reset_prefix_cache(self) -> None:
        """Free the cached prefixes if no request holds any; otherwise only those that do can match them any more."""
        scheduler = self._core.scheduler
        if scheduler.reset_prefix_cache() and scheduler.connector is None:
            return  # no prefix is left; a connector keeps its own, of offloaded blocks
        self.cache_epochs.renew()
        self._mark_waiting()

    def _mark_waiting(self) -> None:
        scheduler = self._core.scheduler
        running = {request.request_id for request in scheduler.running}
        for request in scheduler.requests.values():
            # A connector may be loading the cache of a request that waits.
            is_marked = self.cache_epochs.is_current(request.cache_salt)
            if not is_marked and request.request_id not in running and not request.num_computed_tokens:
                self._mark_again(request)

    def _renew_experts(self) -> None:
        """Let requests for their prompt's experts use no prefix of the weights before an update."""
        self.cache_epochs.renew_experts()
        self._mark_waiting()

    def arrived(self, request: Any) -> None:
        """Record the arrival of a request, which a reset may have overtaken."""
        self.arrivals.note(_given(request.request_id))
        if not self.cache_epochs.is_current(request.cache_salt):
            self._mark_again(request)

    def _mark_again(self, request: Any) -> None:
        """Let a request that holds no cache match no prefix from before the newest reset."""
        request.cache_salt = self.cache_epochs.marked_again(request.cache_salt)
        request.block_hashes.clear()
        if self._core.request_block_hasher is not None:
            request.block_hashes.extend(self._core.request_block_hasher(request))

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give memory back."""
        if self._core.scheduler.running or self._core.batch_queue:
            raise EngineBusy("requests hold cache: abort them, or pause_generation('retract') first")
        if MemoryTag.KV_CACHE in tags:
            self.reset_prefix_cache()
        self._of_workers("sleep", tags)
        self._asleep |= tags
        self.hold()

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory again."""
        self._of_workers("wake_up", tags)
        self._asleep -= tags
        self.hold()

    def hold(self) -> None:
        """Schedule nothing while requests are frozen or memory sleeps; no step is under way.

        Two threads fill the core's queue, one with requests and one with calls. A request whose caller left may arrive
        before a sleep or after it, and before its own abort.
        """
        from vllm.v1.core.sched.interface import PauseState

        held = self.is_frozen or bool(self._asleep)
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL if held else PauseState.UNPAUSED)

    def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update."""
        reply = cast("WeightReply", self._of_workers("receive_weights", message))
        if isinstance(message, CommitUpdate):
            self._renew_experts()
            self._core.reset_encoder_cache()
            self.set_weight_version(message.version)
        return reply

    def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        """Take all steps of an update."""
        reply = cast("WeightReply", self._of_workers("begin_weights", update))
        # Overlaps with copies on the GPU:
        self._renew_experts()
        if not update.keep_prefix_cache:
            self.reset_prefix_cache()
        self._core.reset_encoder_cache()
        committed = cast("WeightReply", self._of_workers("commit_weights", update))
        self.set_weight_version(update.version)
        return replace(reply, seconds=committed.seconds)

    def apply_weights_counting(self, update: ApplyUpdate, request_ids: list[str]) -> tuple[WeightReply, dict[str, int]]:
        """Take all steps of an update while requests are frozen, and count their tokens."""
        return self.apply_weights(update), self.tokens_so_far(request_ids)

    def set_weight_version(self, version: str) -> None:
        """Label the weights with a version."""
        failed_requests.trust(self._core.scheduler)
        # Releases without this method do not label tokens; the backend counts them instead.
        if hasattr(self._core, "set_weight_version"):
            self._core.set_weight_version(version)


def _given(request_id: str) -> str:
    """Return the backend's id of a request, without the suffix that vLLM adds, which has no dot."""
    given, dot, _ = request_id.rpartition(".")
    return given + dot


methods: Final = WorkerMethods(Core.tokens_so_far, Core.apply_weights_counting, *OF_WORKERS)


def _of(core: Any) -> Core:
    found: Core | None = core.__dict__.get(_CORE)
    if found is None:
        found = Core(core)
        setattr(core, _CORE, found)
    return found


def forward(core: Any, payload: bytes) -> bytes:
    """Call every worker; return the first answer, as all are equal.

    Raises:
        EngineDied: one of them is gone.
    """
    try:
        answers: list[bytes] = core.collective_rpc(CALL, args=(payload,))
    except Exception as error:
        if _lost_worker(core.model_executor):
            raise EngineDied("vLLM lost a worker's process") from error
        raise
    return answers[0]


def _lost_worker(executor: Any) -> bool:
    """Return whether a worker's process is gone: the other workers fail before vLLM notices."""
    workers = getattr(executor, "workers", None) or ()
    return getattr(executor, "is_failed", False) or any(not worker.proc.is_alive() for worker in workers)


class ArrivedCall(bytes):
    """A call's payload in the engine core's queue, told from vLLM's own messages by its type."""


def _serve(core: Any, host: WorkerSocket, payload: bytes) -> None:
    """Answer a call, now or once no step is under way. No error reaches the engine core."""

    def reply(answered: Future[bytes]) -> None:
        error = answered.exception()
        if isinstance(error, Exception):
            host.reply(encode(methods.not_taken(payload, error)))
        elif error is None:
            host.reply(answered.result())

    try:
        answer = _answer(core, payload)
    except Exception as error:
        answer = encode(methods.not_taken(payload, error))
    if isinstance(answer, bytes):
        host.reply(answer)
    else:
        answer.add_done_callback(reply)


def _answer(core: Any, payload: bytes) -> bytes | Future[bytes]:
    if not hasattr(Core, methods.name_of(payload)):
        return forward(core, payload)
    call = methods.read(payload)
    if call.freeze is not None:
        return _answer_frozen(core, call, call.freeze)
    return encode(methods.serve(_of(core), call))


def _answer_frozen(core: Any, call: WorkerCall, mode: PauseMode) -> bytes | Future[bytes]:
    """Answer once no step is under way; then resume requests, unless the call failed."""

    def answer() -> bytes:
        answered: Reply | Failure = methods.serve(_of(core), call)
        if isinstance(answered, Reply):
            core.resume_scheduler()
        return encode(answered)

    pausing: Future[None] | None = core.pause_scheduler(mode="keep", clear_cache=mode is PauseMode.RETRACT)
    if pausing is None:
        return answer()
    answered: Future[bytes] = Future()

    def idle(_: Future[None]) -> None:
        try:
            answered.set_result(answer())
        except Exception as error:
            answered.set_exception(error)
        # The idle loop is about to wait for a message, though there is work again.
        _wake(core, None)

    pausing.add_done_callback(idle)
    return answered


def _wake(core: Any, request: ArrivedCall | None) -> None:
    from vllm.v1.engine import EngineCoreRequestType

    core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, request))


def _listen(core: Any, host: WorkerSocket, parent: int) -> None:
    while host.open:
        for payload in host.receive(wait=True):
            _wake(core, ArrivedCall(payload))
    end_with(parent)  # the engine core does not watch its parent


def register() -> None:
    """Serve calls from the host's socket in the engine core, and keep media in scheduler outputs."""
    from vllm.v1.core.sched import output
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    run: Callable[[Any], None] = EngineCoreProc.run_busy_loop
    handle: Callable[[Any, Any, Any], None] = EngineCoreProc._handle_client_request
    preprocess: Callable[[Any, Any], Any] = EngineCoreProc.preprocess_add_request
    pause: Callable[..., Any] = EngineCoreProc.pause_scheduler
    resume: Callable[[Any], None] = EngineCoreProc.resume_scheduler

    def run_busy_loop(core: Any) -> None:
        own = _of(core)  # made before the host sends requests, which another thread marks
        parent = os.getppid()  # read first: a host that ends later is noticed, and one that has ended does not answer
        own.host = host = WorkerSocket(os.environ[SOCKET_VARIABLE])
        threading.Thread(target=_listen, args=(core, host, parent), name="drivetrain-calls", daemon=True).start()
        run(core)

    def handle_client_request(core: Any, kind: Any, request: Any) -> None:
        if isinstance(request, ArrivedCall):
            host = _of(core).host
            assert host is not None, "the call arrived from there"
            _serve(core, host, request)
            return
        if kind == EngineCoreRequestType.ADD:
            _of(core).arrived(request[0])
        handle(core, kind, request)

    def preprocess_add_request(core: Any, request: Any) -> Any:
        request.cache_salt = _of(core).cache_epochs.marked(request.cache_salt)  # before the prompt's blocks are hashed
        return preprocess(core, request)

    def pause_scheduler(core: Any, *how: Any, **named: Any) -> Any:
        pausing = pause(core, *how, **named)
        _of(core).is_frozen = True
        return pausing

    def resume_scheduler(core: Any) -> None:
        resume(core)
        own = _of(core)
        own.is_frozen = False
        own.hold()

    EngineCoreProc.run_busy_loop = run_busy_loop
    EngineCoreProc.pause_scheduler = pause_scheduler
    EngineCoreProc.resume_scheduler = resume_scheduler
    EngineCoreProc._handle_client_request = handle_client_request
    EngineCoreProc.preprocess_add_request = preprocess_add_request
    # Newer releases omit an image's pixels if a cached prefix covers it, and crash when the request is retracted or
    # preempted and the image must be encoded again.
    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = lambda features, *_, **__: features
