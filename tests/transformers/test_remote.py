"""``create_engine("remote")`` and ``drivetrain host``: an engine of another process, by its address and key."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import drivetrain.attached.parts
from drivetrain import (
    ConnectionLost,
    EngineConfig,
    EngineDied,
    EngineStateError,
    InvalidConfig,
    SamplingParams,
    TextPrompt,
    WireError,
    attach,
    create_engine,
)
from drivetrain.attached.connection import OwnerConnection
from drivetrain.text.tokenizer_files import load_tokenizer, read_tokenizer_files
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import WeightSync
from engines import OpenEngine, owner_of, tensors_for, until
from remote_hosts import KEY, host, printed, wired

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=0)
LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
BOUND = 60.0


# The page ------------------------------------------------------------------------------------------------------------


async def test_a_remote_engine_is_the_same_page(open_engine: OpenEngine, model: Path, tmp_path: Path) -> None:
    async with open_engine(isolation="process") as engine:
        handle = await engine.handle("127.0.0.1:0", key=KEY)
        file = tmp_path / "engine.yaml"
        file.write_text(f"backend: remote\nendpoint: {handle.address}\nkey: {KEY}\n")
        expected = await engine.generate("hello", GREEDY)
        remote = await asyncio.to_thread(create_engine, str(file), model=str(model), dtype="float32")
        assert remote.capabilities == engine.capabilities - {"weights_in_process"}
        with pytest.raises(EngineStateError, match=r"not started|created"):
            await remote.generate("hello", GREEDY)
        async with remote:
            found = await remote.generate("hello", GREEDY)
            assert found.completions[0].token_ids == expected.completions[0].token_ids
            assert found.completions[0].logprobs == expected.completions[0].logprobs
            async with WeightSync.connect(await tensors_for(remote), remote) as sync:
                await sync.push(version="pushed")
            assert remote.get_weight_version() == engine.get_weight_version() == "pushed"
        assert engine.state.value == "ready", "teardown detaches"


async def test_the_key_may_be_in_the_environment(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine() as engine:
        handle = await engine.handle(key=KEY)
        monkeypatch.setenv("DRIVETRAIN_KEY", KEY)
        async with await asyncio.to_thread(create_engine, "remote", endpoint=handle.address) as remote:
            assert remote.state.value == "ready"


async def test_deadlines_are_each_sides_own(open_engine: OpenEngine) -> None:
    async with open_engine(timeouts={"heartbeat": 20, "generate": 500}) as engine:
        handle = await engine.handle(key=KEY)
        fields = {"endpoint": handle.address, "key": KEY, "timeouts": {"generate": 0.05, "heartbeat": 5}}
        async with await asyncio.to_thread(create_engine, "remote", **fields) as remote:
            assert remote.config.timeouts.generate == 0.05
            assert remote.config.timeouts.heartbeat == 20, "both ends keep one pulse"


@pytest.mark.parametrize(
    ("fields", "error", "field", "words"),
    [
        ({"endpoint": None}, InvalidConfig, "endpoint", "tcp://host:port"),
        (
            {"endpoint": "http://127.0.0.1:80"},
            InvalidConfig,
            "endpoint",
            "expected unix:/path, tcp://host:port or tls://host:port",
        ),
        ({"endpoint": 5}, InvalidConfig, "endpoint", "expected unix:/path"),
        ({"key": None}, InvalidConfig, "key", "DRIVETRAIN_KEY"),
        ({"key": 7}, InvalidConfig, "key", "a string"),
        ({"key": "another key of the same kind"}, WireError, None, "key is wrong"),
        ({"endpoint": "unix:/nowhere/at/all"}, EngineStateError, None, "no engine listens"),
        ({"endpoint": "tcp://127.0.0.1:1"}, EngineStateError, None, "no engine listens"),
        ({"dtype": "bfloat16"}, InvalidConfig, "dtype", "was started with"),
        ({"max_num_seqs": 3}, InvalidConfig, "max_num_seqs", "was started with None"),
        ({"model": "/another/model"}, InvalidConfig, "model", "was started with"),
        ({"isolation": "process"}, InvalidConfig, "isolation", "runs already"),
        ({"python": "/usr/bin/python3"}, InvalidConfig, "python", "runs already"),
        ({"nonsense": 1}, InvalidConfig, "nonsense", "no such field"),
    ],
)
async def test_a_wrong_field_is_refused(
    open_engine: OpenEngine, fields: Mapping[str, object], error: type[Exception], field: str | None, words: str
) -> None:
    async with open_engine() as engine:
        handle = await engine.handle(key=KEY)
        with pytest.raises(error, match=words) as caught:
            await asyncio.to_thread(create_engine, "remote", **{"endpoint": handle.address, "key": KEY, **fields})
        assert getattr(caught.value, "field", None) == field
        assert KEY not in str(caught.value)


# The tokenizer -------------------------------------------------------------------------------------------------------


async def test_the_owner_lends_its_tokenizer(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine() as engine:
        handle = await engine.handle()
        monkeypatch.setattr(drivetrain.attached.parts, "is_here", lambda config: False)
        other = await attach(handle)
        try:
            text = TextPrompt(text="Grüße, 你好")
            assert other.tokenizer.encode(text) == engine.tokenizer.encode(text)
            chat = [{"role": "user", "content": "hello"}]
            mine = (await other.chat_completion({"messages": chat, "max_tokens": 4, "temperature": 0}))["choices"]
            owners = (await engine.chat_completion({"messages": chat, "max_tokens": 4, "temperature": 0}))["choices"]
            assert mine == owners
        finally:
            await other.teardown()


def test_only_files_of_the_tokenizer_are_lent(model: Path) -> None:
    config = EngineConfig(backend="transformers", model=str(model))
    files = read_tokenizer_files(config)
    assert "tokenizer.json" in files
    assert not [name for name in files if name.endswith((".safetensors", ".py", ".index.json"))]
    with pytest.raises(InvalidConfig, match="sent a file"):
        load_tokenizer(config, {"../tokenizer.json": b"{}"})
    with pytest.raises(InvalidConfig, match="sent a file"):
        load_tokenizer(config, {"code.py": b""})


# A connection that breaks --------------------------------------------------------------------------------------------


async def test_a_broken_connection_is_made_again(open_engine: OpenEngine) -> None:
    async with open_engine() as engine, wired(engine) as (wire, handle):
        remote = await attach(handle)
        try:
            generating = asyncio.create_task(remote.generate([1, 2], LONG))
            await until(lambda: bool(engine.parts.in_flight.running))
            await remote.pause_generation("in_place")
            wire.cut()
            async with within(seconds=BOUND):
                with pytest.raises(ConnectionLost, match="may have taken effect"):
                    await generating
                assert (await remote.stats()).running >= 0
                # The owner undoes what the broken connection held.
                await until(lambda: not engine.parts.in_flight.running and not remote.is_paused)
                assert remote.state.value == "ready"
                assert (await remote.generate([1, 2], GREEDY)).completions[0].token_ids
        finally:
            await remote.teardown()


async def test_reads_are_repeated_when_the_connection_breaks(open_engine: OpenEngine) -> None:
    async with open_engine() as engine, wired(engine) as (wire, handle):
        remote = await attach(handle)
        try:
            asked = [asyncio.create_task(remote.stats()) for _ in range(20)]
            await asyncio.sleep(0)  # sent, and not answered yet
            wire.cut()
            async with within(seconds=BOUND):
                assert len(await asyncio.gather(*asked)) == 20
        finally:
            await remote.teardown()


async def test_what_was_prepared_before_a_break_is_sent_again(open_engine: OpenEngine) -> None:
    async with open_engine() as engine, wired(engine) as (wire, handle):
        remote = await attach(handle)
        try:
            tensors = await tensors_for(remote)
            async with WeightSync.connect(tensors, remote) as sync:
                transfer = await sync.start_weight_transfer(version="pushed")
                await transfer.wait()
                wire.cut()
                async with within(seconds=BOUND):
                    await remote.stats()
                    await transfer.finish()
            assert remote.get_weight_version() == "pushed"
        finally:
            await remote.teardown()


async def test_no_connection_means_that_the_owner_is_gone(open_engine: OpenEngine) -> None:
    async with open_engine(timeouts={"heartbeat": 2}) as engine, wired(engine) as (wire, handle):
        remote = await attach(handle)
        try:
            generating = asyncio.create_task(remote.generate([1, 2], LONG))
            await until(lambda: bool(engine.parts.in_flight.running))
            wire.cut_for_good = True
            wire.cut()
            async with within(seconds=BOUND):
                with pytest.raises(EngineDied):
                    await generating
            assert remote.state.value == "failed"
        finally:
            await remote.teardown()


async def test_a_handshake_that_is_dropped_is_tried_again(open_engine: OpenEngine) -> None:
    async with open_engine() as engine, wired(engine) as (wire, handle):
        remote = await attach(handle)
        owner = owner_of(remote)
        try:
            wire.drop_handshakes = 2
            wire.cut()
            async with within(seconds=BOUND):
                await remote.stats()
                assert (await remote.generate([1, 2], GREEDY)).completions[0].token_ids
            assert wire.dropped == 2
            assert owner.connections == 2, "attempts that failed are no connections"
        finally:
            await remote.teardown()


async def test_handshakes_that_are_always_dropped_mean_that_the_owner_is_gone(open_engine: OpenEngine) -> None:
    async with open_engine(timeouts={"heartbeat": 2}) as engine, wired(engine) as (wire, handle):
        remote = await attach(handle)
        try:
            generating = asyncio.create_task(remote.generate([1, 2], LONG))
            await until(lambda: bool(engine.parts.in_flight.running))
            wire.drop_handshakes = sys.maxsize
            begun = asyncio.get_running_loop().time()
            wire.cut()
            async with within(seconds=BOUND):
                with pytest.raises(EngineDied, match="call socket"):
                    await generating
            assert 1 < asyncio.get_running_loop().time() - begun < 10
            assert wire.dropped > 2
            assert remote.state.value == "failed"
        finally:
            await remote.teardown()


async def test_another_engine_at_the_address_is_not_taken_for_the_first(open_engine: OpenEngine) -> None:
    async with open_engine() as first, open_engine() as second, wired(first) as (wire, handle):
        remote = await attach(handle)
        try:
            wire.target = (await second.handle("127.0.0.1:0", key=KEY)).tcp[1]
            wire.cut()
            async with within(seconds=BOUND):
                with pytest.raises(EngineDied, match="another engine"):
                    await remote.stats()
        finally:
            await remote.teardown()


async def test_a_connection_that_nobody_waits_for_leaves_no_error_to_the_log() -> None:
    said: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
    connection = OwnerConnection(KEY, lambda state: None, lambda reason: None)
    connection.fail(lambda: ConnectionLost("the connect was cancelled meanwhile"))
    del connection
    gc.collect()
    await asyncio.sleep(0)
    assert not said


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_host_serves_until_it_is_told_to_end(model: Path, isolation: str) -> None:
    async with host("--model", str(model), "--listen", "127.0.0.1:0", "--isolation", isolation) as process:
        endpoint, key = await printed(process, "endpoint"), await printed(process, "key")
        async with await asyncio.to_thread(create_engine, "remote", endpoint=endpoint, key=key) as engine:
            assert (await engine.generate([1, 2], GREEDY)).completions[0].token_ids
        async with await asyncio.to_thread(create_engine, "remote", endpoint=endpoint, key=key) as engine:
            process.send_signal(signal.SIGTERM)
            async with within(seconds=BOUND):
                assert await process.wait() == 0
                await until(lambda: engine.state.value == "failed")


async def test_a_host_prints_no_key_that_it_was_given(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    for arguments, key in (((), KEY), (("--key-file", str(file)), None)):
        async with host("--model", str(model), *arguments, key=key) as process:
            endpoint = await printed(process, "endpoint")
            assert endpoint.startswith("unix:/")
            async with await asyncio.to_thread(create_engine, "remote", endpoint=endpoint, key=KEY):
                pass
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            assert process.returncode == 0
            assert KEY not in (out + err).decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--listen", "nowhere"), "HOST:PORT"),
        (("--listen", "127.0.0.1:0", "--set", "dtype=int3"), "dtype"),
        (("--key-file", "/no/such/file"), "--key-file"),
        (("--announce", "node3"), "needs listen"),
    ],
)
async def test_a_host_that_cannot_start_says_why(model: Path, arguments: tuple[str, ...], words: str) -> None:
    async with host("--model", str(model), *arguments) as process:
        out, err = await process.communicate()
        assert process.returncode == 1
        assert words in err.decode()
        assert not out


@pytest.mark.slow
async def test_a_host_ends_with_its_engine(model: Path) -> None:
    async with host("--model", str(model), "--isolation", "process", key=KEY) as process:
        endpoint = await printed(process, "endpoint")
        engine = await asyncio.to_thread(create_engine, "remote", endpoint=endpoint, key=KEY)
        async with engine:
            assert engine.host_pid is not None
            os.kill(engine.host_pid, signal.SIGKILL)
            _, err = await process.communicate()
            assert process.returncode == 1
            assert "EngineDied" in err.decode()
