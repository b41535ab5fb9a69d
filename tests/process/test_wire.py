"""Frames and messages of the wire protocol."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import StopKind, WireError
from drivetrain.process.wire import (
    HANDSHAKE_LIMIT,
    MESSAGES,
    Attach,
    Attached,
    Call,
    Cancel,
    End,
    Failure,
    Fatal,
    FrameReader,
    FromHost,
    FromTrainer,
    FromWatch,
    Heartbeat,
    Hello,
    Item,
    Message,
    Open,
    Progress,
    Reply,
    State,
    Welcome,
    frame,
    from_host,
    from_trainer,
    from_watch,
    read,
)

PACKED = msgspec.Raw(msgspec.msgpack.encode({"a": [1, 2.5, None]}))
EXAMPLES: tuple[Message, ...] = (
    Hello(1, "0.1", "3.11.7", 42, b"nonce"),
    Open(1, "0.1", "fake", PACKED, ("/a", "/b")),
    Welcome("fake", "pluggy", "1.6", frozenset({StopKind.STRING}), True),
    Attach(1, "0.1", b"nonce", b"proof", 0, "process 42 of a host"),
    Attached(b"proof", 3, PACKED, PACKED),
    State(PACKED),
    Call(1, "generate", (PACKED, PACKED)),
    Reply(1, PACKED),
    Failure(2, "InvalidRequest", "no", {"field": "top_p", "missing": ["a"]}),
    Item(3, PACKED),
    End(3),
    Cancel(4),
    Progress("loading"),
    Heartbeat(0.25),
    Fatal("lost a process"),
)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == set(MESSAGES)
    assert set(MESSAGES) == set((FromHost | FromTrainer | FromWatch).__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent_and_from_its_own_side_only(message: Message) -> None:
    (payload,) = FrameReader().feed(b"".join(frame(message)))
    accepted: list[object] = []
    decoders: list[msgspec.msgpack.Decoder[Any]] = [from_host, from_trainer, from_watch]
    for decoder in decoders:
        try:
            accepted.append(read(decoder, payload))
        except WireError:
            continue
    assert accepted == [message]


@given(st.lists(st.text(max_size=40), max_size=12), st.lists(st.integers(1, 30), min_size=1))
def test_frames_come_out_whole_however_the_bytes_are_cut(texts: list[str], cuts: list[int]) -> None:
    sent = [Progress(text) for text in texts]
    stream = b"".join(part for message in sent for part in frame(message))
    reader = FrameReader()
    got: list[object] = []
    position, turn = 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        got += [read(from_host, payload) for payload in reader.feed(stream[position : position + size])]
        position, turn = position + size, turn + 1
    assert got == sent


def test_a_message_larger_than_a_read_is_put_together() -> None:
    stream = b"".join(frame(Progress("x" * 1_000_000)))
    reader = FrameReader()
    parts = [stream[start : start + 4096] for start in range(0, len(stream), 4096)]
    assert [len(reader.feed(part)) for part in parts] == [0] * (len(parts) - 1) + [1]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0", (HANDSHAKE_LIMIT + 1).to_bytes(4, "little"), b"\xff" * 8],
)
def test_bytes_that_are_no_frames_are_refused(garbage: bytes) -> None:
    with pytest.raises(WireError, match="not drivetrain's wire protocol"):
        FrameReader().feed(garbage)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"{}",
        msgspec.msgpack.encode(["unknown", 1]),
        msgspec.msgpack.encode(["reply", "one", 2]),
        msgspec.msgpack.encode(["reply"]),
        msgspec.msgpack.encode({"type": "reply"}),
        msgspec.msgpack.encode(["progress", "text"])[:-1],
        msgspec.msgpack.encode(["progress", "text"]) + b"more",
        b"\x92\xa8progress\xa2\xff\xfe",
        b"\x91" * 100_000,
    ],
)
def test_payloads_that_are_no_messages_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="not a message of wire version"):
        read(from_host, memoryview(payload))


@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_decode_or_be_refused(data: bytes) -> None:
    try:
        for payload in FrameReader().feed(data):
            read(from_trainer, payload)
    except WireError:
        pass


def test_a_hello_of_a_later_version_with_more_fields_is_still_understood() -> None:
    payload = msgspec.msgpack.encode(["hello", 99, "9.9", "3.14", 7, b"", {"new": True}])
    assert read(from_host, memoryview(payload)) == Hello(99, "9.9", "3.14", 7)
