"""Encoding of calls to a worker inside an engine."""

from __future__ import annotations

import pytest

from drivetrain import InvalidRequest, MemoryTag, PauseMode
from drivetrain.errors import EngineInternalError
from drivetrain.process.wire import Failure
from drivetrain.process.worker_calls import CallNotTaken, Calls, FailedElsewhere


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


calls = Calls(Worker.tokens_so_far)


def ask(worker: Worker, method: str, *arguments: object) -> object:
    question = calls.ask(method, arguments)
    assert calls.method_of(question) == method
    return calls.result_of(method, calls.serve(worker, question))


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


def test_what_is_no_method_is_an_error() -> None:
    with pytest.raises(EngineInternalError, match="embed"):
        ask(Worker(), "embed", [[1]], None)


def test_the_first_rank_that_fails_is_what_all_answer() -> None:
    answer = calls.serve(Worker(), calls.ask("read_weight", ("x",)), lambda own: [None, own])
    with pytest.raises(InvalidRequest, match="rank 1: no x"):
        calls.result_of("read_weight", answer)

    def gather(own: Failure | None) -> list[Failure | None]:
        assert own is None, "that another rank failed is no failure of this one"
        return [own, Failure(0, "InvalidRequest", "no y", {"field": "name"})]

    answer = calls.serve(Worker(), calls.ask("unfreeze", ()), gather)
    with pytest.raises(InvalidRequest, match="rank 1: no y"):
        calls.result_of("unfreeze", answer)


def test_requests_are_frozen_before_a_call_as_it_says() -> None:
    question = calls.ask("stats", (), PauseMode.RETRACT)
    assert calls.freeze_of(question) is PauseMode.RETRACT
    assert calls.freeze_of(calls.ask("stats", ())) is None


def test_a_call_that_was_not_taken_says_why() -> None:
    answer = calls.not_taken(ConnectionResetError("the other rank is gone"))
    assert not calls.succeeded(answer)
    with pytest.raises(CallNotTaken, match="ConnectionResetError: the other rank is gone"):
        calls.result_of("unfreeze", answer)
    with pytest.raises(InvalidRequest, match="no x"):
        calls.result_of("unfreeze", calls.not_taken(InvalidRequest("no x", field="name")))
