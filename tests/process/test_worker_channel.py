"""The socket from a host to a process of its engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from drivetrain.errors import EngineDied, EngineStartError
from drivetrain.process.worker_channel import AnswerChannel, Asked, Channel, ChannelListener

pytestmark = pytest.mark.asyncio


@pytest.fixture
def listener() -> Iterator[ChannelListener]:
    made = ChannelListener()
    yield made
    made.close()


@pytest_asyncio.fixture
async def ends(listener: ChannelListener) -> AsyncIterator[tuple[Channel, AnswerChannel]]:
    theirs = await asyncio.to_thread(AnswerChannel, listener.name)
    ours = await listener.accept(lambda: EngineDied("it is gone"))
    yield ours, theirs
    ours.close()
    theirs.close()


def flags_of(name: str) -> list[str]:
    """Of the sockets of this machine that have that name."""
    return [line.split()[3] for line in Path("/proc/net/unix").read_text().splitlines() if name in line]


def answering(channel: AnswerChannel, answer: Callable[[Asked], bytes]) -> threading.Thread:
    def run() -> None:
        while channel.open:
            for asked in channel.receive(wait=True):
                channel.answer(asked, answer(asked))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def test_many_questions_at_once_have_each_its_answer(ends: tuple[Channel, AnswerChannel]) -> None:
    ours, theirs = ends
    thread = answering(theirs, lambda asked: asked.question[::-1])
    questions = [bytes([n]) * n * 5000 + b"end" for n in range(1, 60)]
    assert await asyncio.gather(*map(ours.ask, questions)) == [question[::-1] for question in questions]
    ours.close()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive(), "who answers is told that the host is gone"


async def test_answers_may_come_in_another_order(ends: tuple[Channel, AnswerChannel]) -> None:
    ours, theirs = ends
    asking = [asyncio.ensure_future(ours.ask(question)) for question in (b"one", b"two")]
    await asyncio.sleep(0)
    asked: list[Asked] = []
    while len(asked) < 2:
        asked += await asyncio.to_thread(lambda: theirs.receive(wait=True))
    for one in reversed(asked):
        theirs.answer(one, b"answer to " + one.question)
    assert await asyncio.gather(*asking) == [b"answer to one", b"answer to two"]


async def test_nothing_came_yet(ends: tuple[Channel, AnswerChannel]) -> None:
    _, theirs = ends
    assert theirs.receive(wait=False) == []
    assert theirs.open


async def test_an_answer_that_nobody_waits_for_is_dropped(ends: tuple[Channel, AnswerChannel]) -> None:
    ours, theirs = ends
    given_up = asyncio.ensure_future(ours.ask(b"one"))
    await asyncio.sleep(0)
    given_up.cancel()
    answering(theirs, lambda asked: b"answer to " + asked.question)
    assert await ours.ask(b"two") == b"answer to two"


async def test_who_waits_is_told_that_the_process_is_gone(ends: tuple[Channel, AnswerChannel]) -> None:
    ours, theirs = ends
    asking = asyncio.ensure_future(ours.ask(b"one"))
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(EngineDied, match="it is gone"):
        await asyncio.wait_for(asking, 5)
    with pytest.raises(EngineDied, match="it is gone"):
        await ours.ask(b"two")


async def test_who_waits_is_told_that_the_channel_was_closed(ends: tuple[Channel, AnswerChannel]) -> None:
    ours, _ = ends
    asking = asyncio.ensure_future(ours.ask(b"one"))
    await asyncio.sleep(0)
    ours.close()
    with pytest.raises(EngineDied):
        await asyncio.wait_for(asking, 5)


async def test_one_process_connects(listener: ChannelListener, ends: tuple[Channel, AnswerChannel]) -> None:
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(AnswerChannel, listener.name)


async def test_a_process_that_does_not_connect_is_not_waited_for(listener: ChannelListener) -> None:
    with pytest.raises(EngineStartError, match=r"did not connect within 0\.1 s: drivetrain's plugin is not loaded"):
        await listener.accept(lambda: EngineDied("it is gone"), patience=0.1)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(AnswerChannel, listener.name)


async def test_nobody_listens_any_more_though_a_process_was_forked_meanwhile() -> None:
    listener = ChannelListener()
    forking = multiprocessing.get_context("fork")
    begun, over = forking.Event(), forking.Event()

    def wait() -> None:
        begun.set()
        over.wait(30)

    forked = forking.Process(target=wait)
    forked.start()
    try:
        assert await asyncio.to_thread(begun.wait, 30)
        theirs = await asyncio.to_thread(AnswerChannel, listener.name)
        ours = await listener.accept(lambda: EngineDied("it is gone"))
        with pytest.raises(ConnectionRefusedError):
            AnswerChannel(listener.name)
        assert "00010000" not in flags_of(listener.name), "a listening socket of that name is left"
        ours.close()
        theirs.close()
    finally:
        over.set()
        await asyncio.to_thread(forked.join)
