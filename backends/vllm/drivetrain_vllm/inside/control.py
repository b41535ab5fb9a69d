# pyright: reportMissingImports=false
"""The engine core's side of the backend: what the ``Backend`` page asks for, done between two steps of the batch.

A call comes as one of vLLM's own utility calls. What is a scheduler's to do is done here; the rest is every worker's.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Final, cast

from drivetrain.backend import EngineStats
from drivetrain.errors import EngineBusy, EngineDied
from drivetrain.host.calls import Calls
from drivetrain.memory import MemoryTag, PauseMode
from drivetrain.weights import ApplyUpdate, CommitUpdate, WeightMessage, WeightReply
from drivetrain_vllm.errors import LOST_WORKER
from drivetrain_vllm.inside.worker import OF_WORKERS

CALL: Final = "drivetrain"
"""Name of the utility method, and of the workers'."""


class Core:
    """The scheduler. Methods are named as on the ``Backend`` page and mean the same."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def _of_workers(self, method: str, *arguments: object) -> object:
        return calls.result_of(method, forward(self._core, calls.ask(method, arguments)))

    def stats(self) -> EngineStats:
        """Count requests and memory."""
        running, waiting = self._core.scheduler.get_request_counts()
        cache, weights = cast("tuple[int, int]", self._of_workers("occupied"))
        return EngineStats(running=running, waiting=waiting, kv_cache_bytes=cache, weight_bytes=weights)

    def tokens_so_far(self) -> dict[str, int]:
        """How many tokens each request has that is not over, by the id that the backend gave it."""
        requests = [one for one in self._core.scheduler.requests.values() if not one.is_finished()]
        # vLLM has added to it: characters without a dot.
        return {_given(request.request_id): request.num_output_tokens for request in requests}

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request holds; the backend never asks for the others again."""
        self._core.scheduler.reset_prefix_cache()

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give memory back."""
        if self._core.scheduler.running or self._core.batch_queue:
            raise EngineBusy("requests hold cache: abort them, or pause_generation('retract') first")
        if MemoryTag.KV_CACHE in tags:
            self.reset_prefix_cache()
        self._of_workers("sleep", tags)

    def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update."""
        reply = cast("WeightReply", self._of_workers("receive_weights", message))
        if isinstance(message, CommitUpdate):
            self._core.reset_encoder_cache()
            self.set_weight_version(message.version)
        return reply

    def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        """Take all steps of an update."""
        reply = cast("WeightReply", self._of_workers("begin_weights", update))
        # While a GPU copies:
        if not update.keep_prefix_cache:
            self.reset_prefix_cache()
        self._core.reset_encoder_cache()
        self._of_workers("commit_weights", update)
        self.set_weight_version(update.version)
        return reply

    def apply_weights_counting(self, update: ApplyUpdate) -> tuple[WeightReply, dict[str, int]]:
        """Take all steps of an update while requests are frozen, and count their tokens."""
        return self.apply_weights(update), self.tokens_so_far()

    def set_weight_version(self, version: str) -> None:
        """Label the weights."""
        # Releases that do not have it give tokens no labels: there the backend counts them.
        if hasattr(self._core, "set_weight_version"):
            self._core.set_weight_version(version)


def _given(request_id: str) -> str:
    given, dot, _ = request_id.rpartition(".")
    return given + dot


calls: Final = Calls(Core.tokens_so_far, Core.apply_weights_counting, *OF_WORKERS)


def forward(core: Any, question: str) -> str:
    """Ask every worker; all answer the same.

    Raises:
        EngineDied: one of them is gone.
    """
    try:
        answers: list[str] = core.collective_rpc(CALL, args=(question,))
    except Exception as error:
        if _lost_worker(core.model_executor):
            raise EngineDied(LOST_WORKER) from error
        raise
    return answers[0]


def _lost_worker(executor: Any) -> bool:
    """Whether a worker's process is gone: the others fail sooner than vLLM finds out."""
    workers = getattr(executor, "workers", None) or ()
    return getattr(executor, "is_failed", False) or any(not worker.proc.is_alive() for worker in workers)


def _answer(core: Any, question: str, freeze: str | None = None) -> str | Future[str]:
    if freeze is not None:
        return _answer_frozen(core, question, freeze)
    if hasattr(Core, calls.method_of(question)):
        return calls.serve(Core(core), question)
    return forward(core, question)


def _answer_frozen(core: Any, question: str, mode: str) -> str | Future[str]:
    """Answer once no step is under way; requests go on after it, unless it failed."""

    def answer() -> str:
        said = calls.serve(Core(core), question)
        if calls.succeeded(said):
            core.resume_scheduler()
        return said

    pausing: Future[None] | None = core.pause_scheduler(mode="keep", clear_cache=mode == PauseMode.RETRACT.value)
    if pausing is None:
        return answer()
    said: Future[str] = Future()

    def idle(_: Future[None]) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        try:
            said.set_result(answer())
        except Exception as error:
            said.set_exception(error)
        # The loop that found itself idle waits for a message next, and there is work again.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    pausing.add_done_callback(idle)
    return said


def register() -> None:
    """Give the engine core a utility method, and its workers what they need of images."""
    from vllm.v1.core.sched import output
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, CALL, _answer)
    # Newer releases do not send workers the pixels of an image that a cached prefix covers, and end when the request is
    # retracted, or preempted, and the image must be seen again.
    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = lambda features, *_, **__: features
