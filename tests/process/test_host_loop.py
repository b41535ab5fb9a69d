"""The host loop, driven by hand-made messages."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from drivetrain import EngineConfig, Timeouts
from drivetrain.backend.base import GenerateRequest
from drivetrain.process.handshake import open_for, opened_config
from drivetrain.process.host_process import Ending, HostProcess
from drivetrain.process.rpc_methods import METHODS
from drivetrain.process.wire import (
    WIRE_VERSION,
    Call,
    Cancel,
    End,
    Failure,
    FrameReader,
    FromHost,
    Hello,
    Message,
    Open,
    Reply,
    Welcome,
    frame,
    from_host,
    read,
)


class Speaker:
    """A trainer that sends given messages."""

    def __init__(self) -> None:
        self.endings: queue.Queue[Ending] = queue.Queue()
        self.host = HostProcess(None, Timeouts(), self.endings.put)
        self.host.socket.settimeout(20)
        self._frames = FrameReader()
        self._got: list[FromHost] = []

    def send(self, *messages: Message) -> None:
        self.host.socket.sendall(b"".join(part for message in messages for part in frame(message)))

    def hear(self) -> FromHost:
        while not self._got:
            data = self.host.socket.recv(65536)
            assert data, "the host closed the socket"
            self._got += [read(from_host, payload) for payload in self._frames.feed(data)]
        return self._got.pop(0)


@pytest.fixture
def speaker(plugin: Path) -> Iterator[Speaker]:
    speaker = Speaker()
    yield speaker
    speaker.host.condemn("is not needed any more")
    speaker.host.join()
    speaker.host.socket.close()


@pytest.fixture
def opened(speaker: Speaker, config_for: Callable[[], EngineConfig]) -> Speaker:
    hello = speaker.hear()
    assert isinstance(hello, Hello)
    assert hello.pid == speaker.host.pid
    speaker.send(open_for(config_for(), "fake"))
    assert isinstance(speaker.hear(), Welcome)
    return speaker


def failure(message: FromHost, call_id: int) -> str:
    assert isinstance(message, Failure)
    assert (message.id, message.error) == (call_id, "WireError")
    return message.message


def test_another_wire_version_is_refused_by_the_host_too(
    speaker: Speaker, config_for: Callable[[], EngineConfig]
) -> None:
    assert isinstance(speaker.hear(), Hello)
    ours = open_for(config_for(), "fake")
    speaker.send(Open(99, "9.9", ours.backend, ours.config, ours.import_path))
    assert f"the trainer speaks wire version 99 (drivetrain 9.9), this side {WIRE_VERSION}" in failure(
        speaker.hear(), 0
    )
    assert speaker.endings.get(timeout=60).reason == "ended with exit code 1"


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0hello", b"".join(frame(Hello(1, "", "", 1)))]
)
def test_bytes_that_are_not_the_protocol_end_the_host_with_a_reason(speaker: Speaker, garbage: bytes) -> None:
    assert isinstance(speaker.hear(), Hello)
    speaker.host.socket.sendall(garbage)
    assert failure(speaker.hear(), 0)
    assert speaker.endings.get(timeout=60).reason == "ended with exit code 1"


def test_a_call_before_the_handshake_is_refused(speaker: Speaker) -> None:
    assert isinstance(speaker.hear(), Hello)
    speaker.send(Call(1, "weight_manifest", ()))
    assert "before Open" in failure(speaker.hear(), 1)


def test_wrong_calls_are_refused_one_by_one_and_the_host_serves_on(opened: Speaker) -> None:
    packed = msgspec.Raw(msgspec.msgpack.encode("text"))
    opened.send(
        Call(1, "no_such_method", ()),
        Call(2, "__init__", (packed,)),
        Call(3, "died", ()),
        Call(4, "abort", ()),
        Call(5, "abort", (packed,)),
        Call(6, "weight_manifest", ()),
    )
    assert "there is no method 'no_such_method'" in failure(opened.hear(), 1)
    assert "there is no method '__init__'" in failure(opened.hear(), 2)
    assert "there is no method 'died'" in failure(opened.hear(), 3)
    assert "abort takes 1 arguments, not 0" in failure(opened.hear(), 4)
    assert "cannot read the arguments of abort: Expected `array`, got `str`" in failure(opened.hear(), 5)
    reply = opened.hear()
    assert isinstance(reply, Reply)
    assert reply.id == 6


def test_a_cancelled_call_is_answered_once_it_is_over(opened: Speaker, ask: Callable[..., GenerateRequest]) -> None:
    arguments = METHODS["generate"].pack((ask("wait"),))
    opened.send(Call(1, "generate", arguments), Call(2, "weight_manifest", ()))
    first = opened.hear()
    assert isinstance(first, Reply)
    assert first.id == 2
    opened.send(Cancel(1), Cancel(2), Call(3, "weight_manifest", ()))  # the second one has ended
    assert {(type(message), message.id) for message in (opened.hear(), opened.hear())} == {(End, 1), (Reply, 3)}  # type: ignore[union-attr]


def test_a_second_open_is_refused(opened: Speaker, config_for: Callable[[], EngineConfig]) -> None:
    opened.send(open_for(config_for(), "fake"))
    assert "a second Open" in failure(opened.hear(), 0)


def test_a_host_whose_call_socket_closes_ends(opened: Speaker) -> None:
    opened.host.socket.close()
    assert opened.endings.get(timeout=60).reason == "ended with exit code 0"


def test_a_host_sees_which_fields_of_the_configuration_were_set(config_for: Callable[..., EngineConfig]) -> None:
    config = config_for("child", "/a/python", heartbeat=3.0)
    arrived = opened_config(open_for(config, "fake"))
    assert arrived.model_fields_set == {"backend", "model", "engine_kwargs", "timeouts"}
    assert arrived == config.model_copy(update={"python": None})
