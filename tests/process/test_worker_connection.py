"""The socket from a host to a process of its engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from drivetrain.errors import EngineDied, EngineStartError, WireError
from drivetrain.process.wire import Call, End, Item, Message, Reply, encode, from_trainer, read
from drivetrain.process.worker_calls import CallNotTaken, WorkerMethods
from drivetrain.process.worker_connection import WorkerConnection, WorkerListener
from drivetrain.process.worker_socket import WorkerSocket

pytestmark = pytest.mark.asyncio


Ends = tuple[WorkerConnection, WorkerSocket]


class Worker:
    def echo(self, text: str) -> str:
        return text[::-1]


methods = WorkerMethods(Worker.echo)
ECHO = methods["echo"]


@pytest.fixture
def listener() -> Iterator[WorkerListener]:
    made = WorkerListener()
    yield made
    made.close()


@pytest_asyncio.fixture
async def ends(listener: WorkerListener) -> AsyncIterator[Ends]:
    theirs = await asyncio.to_thread(WorkerSocket, listener.name)
    ours = await listener.accept(lambda: EngineDied("it is gone"))
    yield ours, theirs
    ours.close()
    theirs.close()


def flags_of(name: str) -> list[str]:
    """Return the flags of this machine's sockets that have that name."""
    return [line.split()[3] for line in Path("/proc/net/unix").read_text().splitlines() if name in line]


def serving(socket: WorkerSocket) -> threading.Thread:
    """A thread that answers calls until the host is gone."""

    def run() -> None:
        while socket.open:
            for payload in socket.receive(wait=True):
                socket.reply(methods.answer(Worker(), payload))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def test_many_calls_at_once_get_their_own_answers(ends: Ends) -> None:
    ours, theirs = ends
    thread = serving(theirs)
    texts = [chr(n) * n * 5000 + "end" for n in range(48, 108)]
    assert await asyncio.gather(*(ours.call(ECHO, (text,)) for text in texts)) == [text[::-1] for text in texts]
    ours.close()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive(), "the worker's end is told that the host is gone"


async def test_answers_may_come_in_another_order(ends: Ends) -> None:
    ours, theirs = ends
    calling = [asyncio.ensure_future(ours.call(ECHO, (text,))) for text in ("one", "two")]
    payloads: list[bytes] = []
    while len(payloads) < 2:
        payloads += await asyncio.to_thread(lambda: theirs.receive(wait=True))
    for payload in reversed(payloads):
        theirs.reply(methods.answer(Worker(), payload))
    assert await asyncio.gather(*calling) == ["eno", "owt"]


async def test_a_call_that_was_not_taken_says_why(ends: Ends) -> None:
    ours, theirs = ends
    calling = asyncio.ensure_future(ours.call(ECHO, ("one",)))
    (payload,) = await asyncio.to_thread(lambda: theirs.receive(wait=True))
    theirs.reply(encode(methods.not_taken(payload, ConnectionResetError("the other rank is gone"))))
    with pytest.raises(CallNotTaken, match="ConnectionResetError: the other rank is gone"):
        await calling


async def call_that_arrived(theirs: WorkerSocket) -> Call:
    (payload,) = await asyncio.to_thread(lambda: theirs.receive(wait=True))
    call = read(from_trainer, memoryview(payload))
    assert isinstance(call, Call)
    return call


@pytest.mark.parametrize("answer", [lambda n: Item(n, msgspec.Raw(b"\xa1x")), End], ids=["Item", "End"])
async def test_a_plain_call_that_is_answered_as_a_stream_fails_at_once(
    ends: Ends, answer: Callable[[int], Message]
) -> None:
    ours, theirs = ends
    calling = asyncio.ensure_future(ours.call(ECHO, ("one",)))
    theirs.reply(encode(answer((await call_that_arrived(theirs)).id)))
    with pytest.raises(WireError, match=r"answered echo with an (Item|End), not with a Reply"):
        await asyncio.wait_for(calling, 60)
    serving(theirs)
    assert await ours.call(ECHO, ("two",)) == "owt"


async def test_a_stream_that_is_answered_as_a_plain_call_fails_at_once(ends: Ends) -> None:
    ours, theirs = ends
    reading = asyncio.ensure_future(anext(ours.stream(ECHO, ("one",))))
    theirs.reply(encode(Reply((await call_that_arrived(theirs)).id, msgspec.Raw(b"\xa1x"))))
    with pytest.raises(WireError, match="answered the stream echo with a Reply, not with Items"):
        await asyncio.wait_for(reading, 60)


async def test_receive_returns_nothing_where_no_call_has_arrived(ends: Ends) -> None:
    _, theirs = ends
    assert theirs.receive(wait=False) == []
    assert theirs.open


async def test_a_cancelled_call_and_its_answer_are_dropped(ends: Ends) -> None:
    ours, theirs = ends
    given_up = asyncio.ensure_future(ours.call(ECHO, ("one",)))
    await asyncio.sleep(0)
    given_up.cancel()
    serving(theirs)
    assert await ours.call(ECHO, ("two",)) == "owt"


async def test_waiters_are_told_that_the_process_is_gone(ends: Ends) -> None:
    ours, theirs = ends
    calling = asyncio.ensure_future(ours.call(ECHO, ("one",)))
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(EngineDied, match="it is gone"):
        await asyncio.wait_for(calling, 60)
    with pytest.raises(EngineDied, match="it is gone"):
        await ours.call(ECHO, ("two",))


async def test_waiters_are_told_that_the_connection_was_closed(ends: Ends) -> None:
    ours, _ = ends
    calling = asyncio.ensure_future(ours.call(ECHO, ("one",)))
    await asyncio.sleep(0)
    ours.close()
    with pytest.raises(EngineDied):
        await asyncio.wait_for(calling, 60)


async def test_one_process_connects(listener: WorkerListener, ends: Ends) -> None:
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(WorkerSocket, listener.name)


async def test_a_process_that_does_not_connect_is_not_waited_for(listener: WorkerListener) -> None:
    with pytest.raises(EngineStartError, match=r"did not connect within 0\.1 s: drivetrain's plugin is not loaded"):
        await listener.accept(lambda: EngineDied("it is gone"), patience=0.1)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(WorkerSocket, listener.name)


async def test_nobody_listens_any_more_though_a_process_was_forked_meanwhile() -> None:
    listener = WorkerListener()
    forking = multiprocessing.get_context("fork")
    begun, over = forking.Event(), forking.Event()

    def wait() -> None:
        begun.set()
        over.wait(30)

    forked = forking.Process(target=wait)
    forked.start()
    try:
        assert await asyncio.to_thread(begun.wait, 30)
        theirs = await asyncio.to_thread(WorkerSocket, listener.name)
        ours = await listener.accept(lambda: EngineDied("it is gone"))
        with pytest.raises(ConnectionRefusedError):
            WorkerSocket(listener.name)
        assert "00010000" not in flags_of(listener.name), "a listening socket of that name is left"
        ours.close()
        theirs.close()
    finally:
        over.set()
        await asyncio.to_thread(forked.join)
