"""Results reach the event loop in order, a few in each of its turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from drivetrain.checks.limits import SAMPLES_AT_ONCE
from drivetrain_transformers.scheduler_thread import Deliveries


async def test_deliveries_keep_their_order_and_leave_turns_to_others() -> None:
    turn = 0
    got: list[int] = []
    turns: Counter[int] = Counter()

    def take(number: int) -> None:
        got.append(number)
        turns[turn] += 1

    deliveries = Deliveries(asyncio.get_running_loop())
    deliveries.add([partial(take, number) for number in range(5 * SAMPLES_AT_ONCE)])
    deliveries.add([partial(take, number) for number in range(5 * SAMPLES_AT_ONCE, 6 * SAMPLES_AT_ONCE)])
    while len(got) < 6 * SAMPLES_AT_ONCE:
        turn += 1
        await asyncio.sleep(0)
    assert got == list(range(6 * SAMPLES_AT_ONCE))
    assert max(turns.values()) <= SAMPLES_AT_ONCE


async def test_a_delivery_that_fails_keeps_no_other_back() -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    got: list[int] = []

    def fail() -> None:
        raise KeyError("x")

    deliveries = Deliveries(loop)
    loop.call_soon(partial(deliveries.add, [fail, partial(got.append, 1)]))
    for _ in range(3):
        await asyncio.sleep(0)
    assert got == [1]
    assert [type(failure) for failure in failures] == [KeyError]
