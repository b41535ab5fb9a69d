"""Sockets end with the process that owns them, though processes were forked from it meanwhile."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from drivetrain.process.sockets_in_forks import keep_from_forks
from engines import HANGING

_FORKING = multiprocessing.get_context("fork")


@contextmanager
def forked() -> Iterator[int]:
    """Fork a process, as engines do that start workers; yield its id once it runs."""
    begun, over = _FORKING.Event(), _FORKING.Event()

    def wait() -> None:
        begun.set()
        over.wait(HANGING)

    process = _FORKING.Process(target=wait)
    process.start()
    try:
        assert begun.wait(HANGING)
        assert process.pid is not None
        yield process.pid
    finally:
        over.set()
        process.join()


def test_a_port_is_left_with_its_socket() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    keep_from_forks(listening)
    with forked():
        listening.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        socket.create_server(address).close()


def test_a_descriptor_is_not_given_to_another_file_of_the_forked_process() -> None:
    """The copied socket closes its number when it is released."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keep_from_forks(ours)
        with forked() as process:
            assert os.readlink(f"/proc/{process}/fd/{ours.fileno()}") == os.devnull
            assert os.readlink(f"/proc/{process}/fd/{theirs.fileno()}").startswith("socket:")


async def test_servers_and_connections_go_on_and_end() -> None:
    made: list[asyncio.Transport] = []

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            keep_from_forks(transport)
            made.append(transport)

        def data_received(self, data: bytes) -> None:
            made[0].write(data)

    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    keep_from_forks(server)
    address = server.sockets[0].getsockname()
    async with asyncio.timeout(HANGING):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            with forked():
                writer.write(b"two")
                assert await reader.readexactly(3) == b"two"
        with forked():
            made[0].close()
            assert await reader.read() == b""
            server.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*address)
    writer.close()


def test_what_has_ended_is_no_matter() -> None:
    """An error in the forked process would only be printed, and leave it copies: their order is not ours to choose."""
    keep_from_forks(socket.socket())
    with ExitStack() as stack:
        live = []
        for _ in range(10):
            closed = stack.enter_context(socket.socket())
            live.append(stack.enter_context(socket.socket()))
            keep_from_forks(closed)
            keep_from_forks(live[-1])
            closed.close()
        with forked() as process:
            assert {os.readlink(f"/proc/{process}/fd/{one.fileno()}") for one in live} == {os.devnull}
