"""Tests of server backends beyond the conformance suite: servers that die, freeze, need a key, or get many requests.

A backend's tests derive from :class:`ServerFaults` and run in the environment that holds the engine.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import psutil
import pytest

from drivetrain import EngineConfig, EngineDied, EngineState, InferenceEngine, InvalidConfig, create_engine
from drivetrain.errors import DrivetrainError
from drivetrain.testing import tiny_model
from drivetrain_conformance.harness.server_suite import Server

KEY = "a-key-that-nobody-may-see"
LONG = {"max_new_tokens": 900, "ignore_eos": True}
SOON = 5.0


class ServerFaults(ABC):
    backend: ClassVar[str]
    layers: ClassVar[int] = 2
    """Layers of the model; more if requests would otherwise end before the fault."""
    without_its_engine: ClassVar[float] = 30.0
    """Seconds in which a server must notice that its model's process is gone."""

    @abstractmethod
    def launch(self, config: EngineConfig, key: str | None) -> Server:
        """Launch a server; with a key it may stream in another mode than the suite's servers."""

    @abstractmethod
    def engine_of(self, server: Server) -> psutil.Process:
        """Return the server's process that holds the model."""

    @pytest.fixture
    def server(self) -> Iterator[Server]:
        made = self.launch(self._config(), None)
        yield made
        made.stop()

    @pytest.fixture(scope="class")
    @classmethod
    def with_key(cls) -> Iterator[Server]:
        made = cls().launch(cls()._config(), KEY)
        yield made
        made.stop()

    @property
    def model(self) -> str:
        return str(tiny_model("qwen2", num_hidden_layers=self.layers))

    def _config(self) -> EngineConfig:
        return EngineConfig.from_mapping({"backend": self.backend, "model": self.model})

    @asynccontextmanager
    async def connected(self, server: Server, **fields: object) -> AsyncGenerator[InferenceEngine, None]:
        async with create_engine(self.backend, model=self.model, endpoint=server.endpoint, **fields) as engine:
            yield engine

    # Death -------------------------------------------------------------------------------------------------------

    def test_a_killed_server_fails_everyone(self, server: Server) -> None:
        async def run() -> float:
            async with self.connected(server) as engine:
                return await everyone_hears(engine, lambda: server.signal(signal.SIGKILL), SOON)

        print(f"killed: {asyncio.run(run()):.2f} s")

    def test_a_server_whose_engine_is_killed_fails_everyone(self, server: Server) -> None:
        async def run() -> float:
            async with self.connected(server) as engine:
                return await everyone_hears(engine, self.engine_of(server).kill, self.without_its_engine)

        print(f"engine killed: {asyncio.run(run()):.2f} s")

    def test_a_frozen_server_fails_everyone(self, server: Server) -> None:
        async def run() -> float:
            async with self.connected(server, timeouts={"heartbeat": 2.0}) as engine:
                return await everyone_hears(engine, lambda: server.signal(signal.SIGSTOP), SOON)

        seconds = asyncio.run(run())
        server.signal(signal.SIGCONT)
        print(f"frozen: {seconds:.2f} s")

    # A key -------------------------------------------------------------------------------------------------------

    def test_a_wrong_key_is_refused_and_a_right_one_is_not_shown(
        self, with_key: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        for key in (None, "another"):
            with pytest.raises(InvalidConfig) as refused:
                create_engine(self.backend, model=self.model, endpoint=with_key.endpoint, endpoint_api_key=key)
            assert refused.value.field == "endpoint_api_key"

        async def run() -> None:
            async with self.connected(with_key, endpoint_api_key=KEY) as engine:
                assert len((await engine.generate("x", {"max_new_tokens": 2, "ignore_eos": True})).completions) == 1
                await engine.update_weight_version("labelled")
                assert KEY not in repr(engine.describe())
                assert KEY not in repr(engine.config)

        asyncio.run(run())
        assert KEY not in caplog.text

    def test_a_host_process_is_given_the_key(self, with_key: Server) -> None:
        async def run() -> None:
            async with self.connected(with_key, endpoint_api_key=KEY, isolation="process") as engine:
                assert (await engine.generate("x", {"max_new_tokens": 2})).completions

        asyncio.run(run())

    # Load --------------------------------------------------------------------------------------------------------

    def test_a_stream_of_what_is_new_is_the_completion(self, with_key: Server) -> None:
        async def run() -> None:
            params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 2, "stop_token_ids": [0]}
            async with self.connected(with_key, endpoint_api_key=KEY) as engine:
                whole = (await engine.generate("abc", params)).completions[0]
                chunks = [chunk async for chunk in engine.generate_stream("abc", params)]
            assert len(chunks) > 3
            assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
            assert [value for chunk in chunks for value in chunk.logprobs or ()] == pytest.approx(whole.logprobs)
            tops = [[token for token, _ in top] for chunk in chunks for top in chunk.top_logprobs or ()]
            assert tops == [[token for token, _ in top] for top in whole.top_logprobs or ()]

        asyncio.run(run())

    def test_a_thousand_requests_are_with_the_server_at_once(self, with_key: Server) -> None:
        async def run() -> int:
            most = 0
            async with self.connected(with_key, endpoint_api_key=KEY) as engine:
                prompts = [[1 + index % 200, 2, 3] for index in range(1024)]
                task = asyncio.create_task(engine.generate(prompts, {"max_new_tokens": 64, "ignore_eos": True}))
                while not task.done():
                    stats = await engine.stats()
                    most = max(most, stats.running + stats.waiting)
                    await asyncio.sleep(0.05)
                assert [len(one.token_ids) for one in (await task).completions] == [64] * 1024
            return most

        most = asyncio.run(run())
        print(f"most at once: {most}")
        assert most == 1024

    def test_a_trainer_that_stands_still_loses_no_server(self, with_key: Server) -> None:
        async def run() -> None:
            async with self.connected(with_key, endpoint_api_key=KEY, timeouts={"heartbeat": 1.0}) as engine:
                task = asyncio.create_task(engine.generate("x", {"max_new_tokens": 200, "ignore_eos": True}))
                await asyncio.sleep(0.3)
                for _ in range(3):
                    time.sleep(6.0)  # noqa: ASYNC251 - a training step
                    await asyncio.sleep(0.6)
                assert len((await task).completions[0].token_ids) == 200
                assert engine.state is EngineState.READY

        asyncio.run(run())


async def everyone_hears(engine: InferenceEngine, harm: Callable[[], None], within: float) -> float:
    """Harm a server while it generates and streams; return the seconds until all callers had their EngineDied."""

    async def streamed() -> None:
        async for _ in engine.generate_stream("stream", LONG):
            pass

    callers: list[asyncio.Task[object]] = [asyncio.create_task(engine.generate("call", LONG)) for _ in range(3)]
    callers.append(asyncio.create_task(streamed()))
    async with asyncio.timeout(30):
        while (await engine.stats()).running < 4:  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.02)
    begun = time.monotonic()
    harm()
    done, waiting = await asyncio.wait(callers, timeout=within)
    seconds = time.monotonic() - begun
    assert not waiting, f"{len(waiting)} callers still wait after {within} s"
    assert {type(task.exception()) for task in done} == {EngineDied}, [repr(task.exception()) for task in done]
    while engine.state is not EngineState.FAILED:
        assert time.monotonic() - begun < within, f"after {within} s the engine is {engine.state}"
        await asyncio.sleep(0.05)
    with pytest.raises(DrivetrainError):
        await engine.generate("no more", {"max_new_tokens": 1})
    return seconds
