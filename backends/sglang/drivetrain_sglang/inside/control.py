# pyright: reportMissingImports=false
"""The scheduler's side of the backend: what the ``Backend`` page asks for, done between two steps of the batch.

A call is a method of the page, or of the worker's own, with its arguments, in the encoding of the wire protocol, sent
as one of SGLang's own collective RPCs. Nothing that goes wrong here may reach SGLang, which would end with its host.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from drivetrain.errors import DrivetrainError, EngineInternalError
from drivetrain.host.failures import exception, failure
from drivetrain.host.methods import METHODS, Method, method_of
from drivetrain.host.wire import Failure
from drivetrain_sglang.inside.model import checkpoint_of
from drivetrain_sglang.inside.worker import FailedElsewhere, Worker

CALL: Final = "drivetrain"
"""Name of the RPC."""

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_GRAMMARS: Final = "sglang.srt.constrained.grammar_manager.GrammarManager"
_LOADS: Final = "sglang.srt.managers.load_snapshot"
_WORKER: Final = "_drivetrain_worker"


class Question(msgspec.Struct, array_like=True, frozen=True):
    """A method and its arguments."""

    method: str
    arguments: tuple[msgspec.Raw, ...]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What it returned, or how it failed."""

    result: msgspec.Raw
    failure: Failure | None = None


_METHODS: Final[dict[str, Method]] = {**METHODS, "tokens_so_far": method_of(Worker.tokens_so_far)}
_questions: Final = msgspec.msgpack.Decoder(Question)
_answers: Final = msgspec.msgpack.Decoder(Answer)
_NOTHING: Final = msgspec.Raw(msgspec.msgpack.encode(None))


def ask(method: str, arguments: tuple[object, ...]) -> str:
    """Encode a call."""
    codecs = _METHODS[method].arguments
    encoded = tuple(argument.codec.encode(value) for argument, value in zip(codecs, arguments, strict=True))
    return base64.b64encode(msgspec.msgpack.encode(Question(method, encoded))).decode()


def result_of(method: str, answer: str) -> object:
    """Decode what a call returned.

    Raises:
        DrivetrainError: what it raised.
    """
    decoded = _answers.decode(base64.b64decode(answer))
    if decoded.failure is not None:
        raise exception(decoded.failure)
    return _METHODS[method].result.decode(decoded.result)


def _serve(worker: Worker, question: str) -> str:
    answer = Answer(_NOTHING)
    try:
        asked = _questions.decode(base64.b64decode(question))
        method = _METHODS[asked.method]
        arguments = [
            argument.codec.decode(data) for argument, data in zip(method.arguments, asked.arguments, strict=True)
        ]
        answer = Answer(method.result.encode(getattr(worker, asked.method)(*arguments)))
    except FailedElsewhere:
        pass  # the other rank's failure is what all answer
    except Exception as error:
        answer = Answer(_NOTHING, failure(0, error))
    return base64.b64encode(msgspec.msgpack.encode(_of_all_ranks(worker, answer))).decode()


def _of_all_ranks(worker: Worker, own: Answer) -> Answer:
    """The first failure of any rank, or rank 0's answer. Every rank has the same call at the same time."""
    group = worker.group
    if group is None:
        return own
    failures: list[Failure | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(failures, own.failure, group=group)
    for rank, failed in enumerate(failures):
        if failed is not None:
            return Answer(_NOTHING, msgspec.structs.replace(failed, message=f"rank {rank}: {failed.message}"))
    return own


def register() -> None:
    """Hook the scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SCHEDULER}.init_tokenizer", _only_our_stops, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.init_model_worker", _no_invented_bias, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.handle_rpc_request", _rpc, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.abort_request", _abort, HookType.AROUND)
    HookRegistry.register(f"{_GRAMMARS}.__init__", _make_grammars, HookType.AFTER)
    if importlib.util.find_spec(_LOADS) is not None:
        HookRegistry.register(f"{_LOADS}.create_load_snapshot_writer", _no_snapshots, HookType.REPLACE)


def _worker(scheduler: Any) -> Worker:
    worker: Worker | None = getattr(scheduler, _WORKER, None)
    if worker is None:
        worker = Worker(scheduler)
        setattr(scheduler, _WORKER, worker)
    return worker


def _rpc(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    if request.method != CALL:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import RpcReqOutput

    try:
        return RpcReqOutput(success=True, message=_serve(_worker(scheduler), request.parameters["question"]))
    except Exception as error:
        return RpcReqOutput(success=False, message=f"{type(error).__name__}: {error}")


def _abort(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    if request.abort_all or not _worker(scheduler).end(request.rid):
        return original(scheduler, request)
    return None


def _only_our_stops(_: None, scheduler: Any) -> None:
    # A request names every id that ends it, EOS included unless it goes on past EOS.
    scheduler.model_config.hf_eos_token_id = set()


def _no_invented_bias(_: None, scheduler: Any) -> None:
    """SGLang's reward models have a bias that checkpoints lack, and leave it as memory happened to be."""
    model = scheduler.tp_worker.model_runner.model
    bias = dict(model.named_parameters()).get("score.bias")
    if bias is not None:
        names = {spec.name for spec in checkpoint_of(scheduler.model_config).tensors}
        if "score.bias" not in names:
            bias.data.zero_()


def _no_snapshots(*_: object, **__: object) -> None:
    """SGLang's router reads them from a file in shared memory, which outlives the engine."""


def _make_grammars(_: None, manager: Any, scheduler: Any) -> None:
    """Without a tokenizer in its scheduler, which we leave out to be rid of the detokenizer, SGLang has no grammars."""
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
    manager.grammar_backend = create_grammar_backend(
        arguments, tokenizer, scheduler.model_config.vocab_size, _worker(scheduler).eos_token_ids
    )


def failed(message: str) -> DrivetrainError:
    """The error of an RPC that did not reach the worker."""
    return EngineInternalError(f"SGLang's scheduler could not take a call: {message}")
