"""SGLang's scheduler sees no request while memory sleeps, and ends one whose grammar is compiled without a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drivetrain.types.modes import MemoryTag
from drivetrain_sglang.in_engine import scheduler_calls
from drivetrain_sglang.in_engine.worker import Worker


def a_scheduler(waiting: list[object], compiling: list[object]) -> SimpleNamespace:
    grammars = SimpleNamespace(grammar_queue=compiling)
    return SimpleNamespace(waiting_queue=waiting, grammar_manager=grammars, _engine_paused=False)


@pytest.mark.parametrize("tag", MemoryTag)
def test_no_request_is_scheduled_while_memory_sleeps(tag: MemoryTag) -> None:
    """A request may arrive with the sleep or after it, and before its own abort."""
    waiting, compiling = [object()], [object()]
    scheduler = a_scheduler(waiting, compiling)

    def chosen(scheduler: SimpleNamespace, running_batch: object, *, last_batch: object) -> list[object]:
        return [running_batch, last_batch, *scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]

    worker = scheduler_calls.worker_of(scheduler)
    worker.asleep |= {tag}
    assert scheduler_calls.next_batch(chosen, scheduler, 1, last_batch=2) == [1, 2]
    assert scheduler.waiting_queue is waiting
    assert scheduler.grammar_manager.grammar_queue is compiling
    worker.asleep -= {tag}
    assert scheduler_calls.next_batch(chosen, scheduler, 1, last_batch=2) == [1, 2, *waiting, *compiling]


def test_an_abort_needs_no_step_while_a_grammar_is_compiled() -> None:
    """SGLang would compute a token for it, which takes until the engine is awake and not paused."""
    ending, other = SimpleNamespace(rid="a-1.", output_ids=[]), SimpleNamespace(rid="a-2.", output_ids=[])
    scheduler = a_scheduler([], [ending, other])
    assert not Worker(scheduler).end("a-1."), "SGLang removes it from the waiting queue"
    assert (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue) == ([ending], [other])
