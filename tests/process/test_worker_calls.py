"""Encoding of calls to a worker inside an engine."""

from __future__ import annotations

import pytest

from drivetrain import InvalidRequest, MemoryTag, PauseMode
from drivetrain.errors import EngineInternalError, WireError
from drivetrain.process.wire import Call, Failure, encode
from drivetrain.process.worker_calls import CallNotTaken, FailedElsewhere, WorkerMethods
from drivetrain.types.weights import ApplyUpdate


class Worker:
    def __init__(self) -> None:
        self.slept: frozenset[MemoryTag] = frozenset()

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        self.slept = tags

    def tokens_so_far(self) -> dict[str, int]:
        return {"a": 3}

    def read_weight(self, name: str) -> None:
        raise InvalidRequest(f"no {name}", field="name")

    def unfreeze(self) -> None:
        raise FailedElsewhere

    def more_than_others(self) -> None: ...


methods = WorkerMethods(Worker.tokens_so_far)


def ask(worker: Worker, method: str, *arguments: object) -> object:
    payload = methods.call(method, arguments)
    assert methods.name_of(payload) == method
    return methods.result_of(method, methods.answer(worker, payload))


def test_a_method_of_the_page_is_called() -> None:
    worker = Worker()
    assert ask(worker, "sleep", frozenset({MemoryTag.WEIGHTS})) is None
    assert worker.slept == {MemoryTag.WEIGHTS}


def test_a_method_of_the_workers_own_is_called() -> None:
    assert ask(Worker(), "tokens_so_far") == {"a": 3}


def test_an_error_comes_back_as_itself() -> None:
    with pytest.raises(InvalidRequest, match="no lm_head") as caught:
        ask(Worker(), "read_weight", "lm_head")
    assert caught.value.field == "name"


def test_a_method_that_the_worker_does_not_have_is_an_error() -> None:
    with pytest.raises(EngineInternalError, match="embed"):
        ask(Worker(), "embed", [[1]], None)


def test_an_unknown_method_and_wrong_arguments_are_wire_errors() -> None:
    payload = WorkerMethods(Worker.more_than_others).call("more_than_others", ())
    with pytest.raises(WireError, match="the worker has no method 'more_than_others'"):
        methods.result_of("stats", methods.answer(Worker(), payload))
    payload = encode(Call(0, "read_weight", ()))
    with pytest.raises(WireError, match="read_weight takes 1 arguments, not 0"):
        methods.result_of("read_weight", methods.answer(Worker(), payload))


def test_the_first_rank_that_fails_is_what_all_answer() -> None:
    answer = methods.answer(Worker(), methods.call("read_weight", ("x",)), lambda own: ["", own])
    with pytest.raises(InvalidRequest, match="rank 1: no x"):
        methods.result_of("read_weight", answer)

    def gather(own: Failure | str) -> list[Failure | str]:
        assert own == "", "that another rank failed is no failure of this one"
        return [own, Failure(0, "InvalidRequest", "no y", {"field": "name"})]

    answer = methods.answer(Worker(), methods.call("unfreeze", ()), gather)
    with pytest.raises(InvalidRequest, match="rank 1: no y"):
        methods.result_of("unfreeze", answer)


def test_requests_are_frozen_for_an_update_as_it_says() -> None:
    update = ApplyUpdate("v1", 1, keep_prefix_cache=False, freeze=PauseMode.RETRACT)
    assert methods.read(methods.call("apply_weights", (update,))).freeze is PauseMode.RETRACT
    assert methods.read(methods.call("stats", ())).freeze is None


def test_a_call_that_was_not_taken_says_why() -> None:
    payload = methods.call("unfreeze", ())
    failed = methods.not_taken(payload, ConnectionResetError("the other rank is gone"))
    assert failed.error == CallNotTaken.__name__
    assert failed.message == "ConnectionResetError: the other rank is gone"
    with pytest.raises(InvalidRequest, match="no x"):
        methods.result_of("unfreeze", encode(methods.not_taken(payload, InvalidRequest("no x", field="name"))))
