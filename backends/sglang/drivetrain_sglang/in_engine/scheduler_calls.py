# pyright: reportMissingImports=false
"""Calls of the backend to the worker, run in SGLang's scheduler between two steps of the batch.

A call reaches the first rank through drivetrain's socket. It is then distributed as one of SGLang's own collective
RPCs, which every rank receives at the same step.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

from drivetrain.backend.toolkit.translation import eos_token_ids
from drivetrain.process.wire import Failure, Reply, encode
from drivetrain.process.worker_calls import WorkerMethods
from drivetrain.process.worker_socket import WorkerSocket
from drivetrain_sglang.in_engine import SOCKET_VARIABLE
from drivetrain_sglang.in_engine.failed_requests import end_failed
from drivetrain_sglang.in_engine.worker import Worker

CALL: Final = "drivetrain"
"""Name of the RPC."""

methods: Final = WorkerMethods(
    Worker.gpus,
    Worker.expert_layers,
    Worker.pooling,
    Worker.tokens_so_far,
    Worker.apply_weights_counting,
    Worker.prepare_weights,
    Worker.prepared_weights,
    Worker.stage_adapter,
    Worker.drop_adapter,
)

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_GRAMMARS: Final = "sglang.srt.constrained.grammar_manager.GrammarManager"
_LOADS: Final = "sglang.srt.managers.load_snapshot"
_RECEIVER: Final = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_WORKER: Final = "_drivetrain_worker"


def register() -> None:
    """Hook the scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SCHEDULER}.init_tokenizer", _only_our_stops, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.init_model_worker", _no_invented_bias, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.init_idle_sleeper", _listen, HookType.AFTER)
    HookRegistry.register(f"{_RECEIVER}._pull_raw_reqs", _receive, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.handle_rpc_request", _rpc, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.handle_generate_request", _arrives, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", next_batch, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.abort_request", _abort, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", _process, HookType.AROUND)
    HookRegistry.register(f"{_GRAMMARS}.__init__", _make_grammars, HookType.AFTER)
    if importlib.util.find_spec(_LOADS) is not None:
        HookRegistry.register(f"{_LOADS}.create_load_snapshot_writer", _no_snapshots, HookType.REPLACE)


def worker_of(scheduler: Any) -> Worker:
    """Return the scheduler's worker, made at the first call."""
    worker: Worker | None = getattr(scheduler, _WORKER, None)
    if worker is None:
        worker = Worker(scheduler)
        setattr(scheduler, _WORKER, worker)
    return worker


class _Process:
    """State of a scheduler's process."""

    host: WorkerSocket | None = None
    """Connection to the host, on the first rank only."""


def _listen(_: None, scheduler: Any) -> None:
    if scheduler.ipc_channels.recv_from_rpc is None:  # another rank
        return
    _Process.host = host = WorkerSocket(os.environ[SOCKET_VARIABLE])
    if scheduler.idle_sleeper is not None:
        import zmq

        scheduler.idle_sleeper.poller.register(host, zmq.POLLIN)


def _receive(requests: list[Any] | None, _: Any) -> list[Any] | None:
    """Append calls to the requests that arrived, as if they came through SGLang's own socket."""
    host = _Process.host
    if host is None or requests is None:
        return requests
    from sglang.srt.managers.io_struct import RpcReqInput

    for payload in host.receive(wait=False):
        requests.append(RpcReqInput(method=CALL, parameters={"payload": payload}))
    return requests


def _rpc(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    if request.method != CALL:
        return original(scheduler, request)
    answer = _answer(scheduler, request.parameters["payload"])
    if _Process.host is not None:
        _Process.host.reply(encode(answer))
    return None


def _answer(scheduler: Any, payload: bytes) -> Reply | Failure:
    try:
        worker = worker_of(scheduler)
        gather = None if worker.group is None else worker.gather
        call = methods.read(payload)
        if call.freeze is not None:
            worker.freeze(call.freeze)
        answer = methods.serve(worker, call, gather)
        if call.freeze is not None and isinstance(answer, Reply):
            worker.unfreeze()
    except Exception as error:
        return methods.not_taken(payload, error)
    return answer


def _arrives(original: Callable[..., Any], scheduler: Any, request: Any, **newer: Any) -> Any:
    worker = worker_of(scheduler)
    worker.arrivals.note(request.rid)
    request.extra_key = worker.cache_epochs.marked(request.extra_key)
    return original(scheduler, request, **newer)


def next_batch(original: Callable[..., Any], scheduler: Any, *batches: Any, **newer: Any) -> Any:
    """Choose the next batch; none while memory sleeps.

    Calls and requests come through different channels. A request whose caller left may arrive together with a sleep or
    after it, and before its own abort.
    """
    worker = worker_of(scheduler)
    with worker.without_waiting() if worker.asleep else nullcontext():
        return original(scheduler, *batches, **newer)


def _abort(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    if request.abort_all or not worker_of(scheduler).end(request.rid):
        return original(scheduler, request)
    return None


def _process(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *more: Any, **newer: Any) -> Any:
    failed = end_failed(batch, result)
    if failed:
        worker_of(scheduler).erase(failed)
    return original(scheduler, batch, result, *more, **newer)


def _only_our_stops(_: None, scheduler: Any) -> None:
    # A request names every id that ends it, including EOS unless it ignores EOS.
    scheduler.model_config.hf_eos_token_id = set()


def _no_invented_bias(_: None, scheduler: Any) -> None:
    """Zero the bias of SGLang's reward models if the checkpoint lacks it: SGLang leaves it uninitialised."""
    model = scheduler.tp_worker.model_runner.model
    bias = dict(model.named_parameters()).get("score.bias")
    if bias is not None:
        if "score.bias" not in {spec.name for spec in worker_of(scheduler).checkpoint.tensors}:
            bias.data.zero_()


def _no_snapshots(*_: object, **__: object) -> None:
    """Do nothing: the snapshots, for SGLang's router, are in a shared-memory file that would outlive the engine."""


def _make_grammars(_: None, manager: Any, scheduler: Any) -> None:
    """Create the grammar backend, which SGLang omits without a tokenizer; there is none so that no detokenizer runs."""
    if manager.grammar_backend is not None or not scheduler.is_generation:
        return
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    arguments = scheduler.server_args
    tokenizer = get_tokenizer(
        arguments.tokenizer_path or arguments.model_path,
        trust_remote_code=arguments.trust_remote_code,
        revision=arguments.revision,
    )
    # Ids that may follow the end of a grammar.
    ends = worker_of(scheduler).eos_token_ids | {*eos_token_ids(tokenizer)}
    manager.grammar_backend = create_grammar_backend(arguments, tokenizer, scheduler.model_config.vocab_size, ends)
