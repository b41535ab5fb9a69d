# ruff: noqa: ASYNC220, ASYNC251 - it blocks the event loop on purpose
"""A backend that makes trouble in a host process; conftest.py installs it where the host finds it.

``engine_kwargs["trouble"]``, and the request id or LoRA name of a call, choose the trouble.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable

import drivetrain
import drivetrain.types.weights
from drivetrain import (
    Backend,
    Capability,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    StopKind,
    TensorData,
    TensorSpec,
    TokenDelta,
    VersionSpan,
)
from drivetrain.backend.base import EngineStats
from drivetrain.errors import (
    EngineDied,
    EngineError,
    EngineStartError,
    InvalidConfig,
    InvalidRequest,
    WeightPlanMismatch,
)
from drivetrain.types.weights import WeightManifest, WeightMessage, WeightReply

print("fakeplug is imported")

HOLDS_A_SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print("held", flush=True)
time.sleep(600)
"""


class OddError(Exception):
    pass


class PluginsOwnError(InvalidRequest):
    pass


class FakeBackend(Backend):
    name = "fake"
    engine_distribution = "pluggy"
    config_names = {"seed": "random_seed"}  # noqa: RUF012 - as plugins write it
    native_stops = frozenset({StopKind.STRING})
    counts_resumed_tokens = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.trouble = str(config.engine_kwargs.get("trouble", ""))
        self.child: subprocess.Popen[bytes] | None = None
        self.child_pid = 0
        self.aborted: list[str] = []
        self.cancelled: list[str] = []
        self.dying = asyncio.Event()
        if self.trouble == "refuse":
            raise InvalidConfig("engine_kwargs.trouble='refuse': refused as asked", field="engine_kwargs.trouble")

    @classmethod
    def preload(cls) -> None:
        print("fakeplug is preloaded")
        trouble = os.environ.get("FAKE_PRELOAD")
        if trouble == "odd":
            raise OddError("nothing to import")
        if trouble == "thread":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        if config.engine_kwargs.get("trouble") == "slow probe":
            time.sleep(600)
        return frozenset({Capability.STREAMING, Capability.SEED} if config.seed is None else {Capability.STREAMING})

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        if config.engine_kwargs.get("trouble") == "invalid":
            raise InvalidConfig("engine_kwargs.trouble='invalid': refused as asked", field="engine_kwargs.trouble")

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        print(f"starting with marker {os.environ.get('FAKE_MARKER', '')}".rstrip())
        report("reading the model")
        await asyncio.to_thread(report, "from a thread")
        if self.trouble == "odd start":
            print("the last words of the engine")
            raise OddError("no such luck")
        if self.trouble == "start error":
            print("the last words of the engine")
            raise EngineStartError("the model is broken")
        if self.trouble == "exit on start":
            print("the last words of the engine", file=sys.stderr)
            os._exit(7)
        if self.trouble == "long traceback on start":
            try:
                raise OddError("no such layer")
            except OddError:
                traceback.print_exc()
            print(*(f"warning {number}" for number in range(200)), sep="\n")
            os._exit(7)
        if self.trouble == "own group":
            import torch.distributed

            with socket.create_server(("127.0.0.1", 0)) as listening:
                port = listening.getsockname()[1]
            torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        if self.trouble == "block start":
            time.sleep(600)
        if self.trouble == "long start":
            ctypes.PyDLL(None).sleep(2)  # unlike time.sleep, this holds the interpreter's lock
        if self.trouble == "forked child" and (child := os.fork()):
            self.child_pid = child
        elif self.trouble == "forked child":
            while True:
                time.sleep(60)
        elif self.trouble == "titled child":
            self.child = subprocess.Popen(["engine::rank_1"], executable=sys.executable, stdin=subprocess.PIPE)
            self.child_pid = self.child.pid
        elif self.trouble == "semaphore child":
            self._start_semaphore_child()
        elif self.trouble.endswith("child"):
            self.child = subprocess.Popen(["sleep", "600"], start_new_session=self.trouble == "detached child")
            self.child_pid = self.child.pid
        return ModelInfo(256, 4096, (0,), "float32", "Fake", 0, "cpu")

    def _start_semaphore_child(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", HOLDS_A_SEMAPHORE], stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        self.child.stdout.readline()
        self.child_pid = self.child.pid

    async def close(self) -> None:
        if self.trouble == "hang on close":
            await asyncio.sleep(600)
        if self.trouble == "fail on close":
            raise OddError("cannot close")
        if self.child is not None and self.trouble != "forgotten child":
            self.child.kill()
            self.child.wait()

    def child_processes(self) -> list[int] | None:
        return [] if self.trouble == "unneeded child" else None

    async def died(self) -> EngineError:
        await self.dying.wait()
        return EngineError("its scheduler is gone")

    async def stats(self) -> EngineStats:
        """Return values that the tests want to see from outside, in the fields of an engine's stats."""
        if self.trouble == "no step":
            await asyncio.sleep(600)
        return EngineStats(len(self.aborted), len(self.cancelled), self.child_pid, os.getpid())

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.request_id.startswith("wait"):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.cancelled.append(request.request_id)
                raise
        if request.request_id == "semaphore child":
            self._start_semaphore_child()
        if request.request_id == "block":
            time.sleep(600)
        if request.request_id == "hold":
            ctypes.PyDLL(None).sleep(600)
        if request.request_id == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if request.request_id == "odd":
            raise OddError("an engine's own exception")
        if request.request_id == "cancel itself":
            raise asyncio.CancelledError
        if request.request_id == "die":
            self.dying.set()
            await asyncio.sleep(600)
        if request.request_id == "engine died":
            threading.Timer(0.05, print, ["the last words of the engine"], {"flush": True}).start()
            raise EngineDied("the engine's process ended")
        if request.request_id == "exit":
            raise SystemExit(3)
        if request.request_id == "wrong type":
            return "not a result"  # type: ignore[return-value]
        if request.request_id == "unsendable":
            return object()  # type: ignore[return-value]
        ids = request.prompt_token_ids
        return GenerateResult(
            ids, FinishReason.LENGTH, [VersionSpan("initial", 0, len(ids))], logprobs=[-1.5] * len(ids)
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        try:
            for token in request.prompt_token_ids:
                yield TokenDelta([token], logprobs=[-0.5])
            if request.request_id == "odd":
                raise OddError("in the middle of a stream")
            if request.request_id.startswith("wait"):
                await asyncio.sleep(600)
            yield TokenDelta([], result=await self.generate(request))
        finally:
            if request.request_id.startswith("wait"):
                self.cancelled.append(request.request_id)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def weight_manifest(self) -> WeightManifest:
        return WeightManifest((TensorSpec("a.weight", "float32", (2, 3)),), {"b.weight": "a.weight"})

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, drivetrain.types.weights.LoadBuckets):
            return WeightReply(len(message.indices), 4)
        raise WeightPlanMismatch(f"a {type(message).__name__}", missing=["a", "b"], extra=["c"])

    async def read_weight(self, name: str) -> TensorData:
        size = int(name)
        return TensorData(TensorSpec(name, "uint8", (size,)), bytes(range(256)) * (size // 256))

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        if lora_name == "own error":
            raise PluginsOwnError("a class that only the plugin knows", field="lora_name")
        raise OddError(f"{lora_name} {lora_path} {pinned}")

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return [[float(dimensions or 0), *map(float, prompt)] for prompt in prompts]


@drivetrain.hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    return [FakeBackend]
