"""The processes that have weights: a sender, for another process's engine, and a trainer with its own engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import tempfile
import time
import traceback
import zlib
from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from tests.faults.line import Line, LineLost

from drivetrain import EngineConfig, EngineState, InferenceEngine, create_engine
from drivetrain.errors import DrivetrainError, EngineDied, from_wire, to_wire
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain.types.weights import CommunicatorSpec, WeightManifest, WeightUpdateRequest
from drivetrain_conformance.assets.weight_sources import raw_bytes
from drivetrain_weight_sync import UpdatableEngine, WeightSync

BUCKET_BYTES = 300_000
"""Splits the model of these tests into four buckets."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a sender's process."""

    model: Path
    transport: str
    temporary: Path
    """Temporary folder of the process."""
    own: dict[str, Any] | None = None
    """Configuration of its own engine; None: the engine is at the other end of the line."""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a push, as its caller saw it."""

    version: str
    seconds: float
    error: tuple[str, str, dict[str, object]] | None = None
    """The error that it raised, as described by :func:`to_wire`."""
    bare: str = ""
    """Traceback of an error that is not drivetrain's."""
    state: str = ""
    """State of the trainer's own engine."""
    served: str = ""
    """Version that the trainer's own engine claims."""
    wrong: Sequence[str] = field(default=())
    """Tensors of the trainer's own engine that differ from the claimed version."""


def weights_of(model: Path, version: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a version; ``initial`` is the model on disk."""
    tensors = load_file(model / "model.safetensors")
    if version == "initial":
        return tensors
    random = torch.Generator().manual_seed(zlib.crc32(version.encode()))
    return {name: t + 0.05 * torch.randn(t.shape, generator=random).to(t.dtype) for name, t in tensors.items()}


async def differing(engine: InferenceEngine, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the tensors that the engine does not hold bit for bit."""
    manifest = await engine.weight_manifest()
    held = {spec.name: (await engine.get_weights_by_name(spec.name)).data for spec in manifest.tensors}
    return [name for name in held if held[name] != raw_bytes(expected[name])]


def main(end: socket.socket, job: Job) -> None:
    """Push a version each time that one is requested, until the end is."""
    torch.set_num_threads(1)
    os.environ["TMPDIR"], tempfile.tempdir = str(job.temporary), None
    asyncio.run(_work(end, job))


async def _work(end: socket.socket, job: Job) -> None:
    line = await Line.over(end)
    if job.own is None:
        engine = await FarEngine.reached_by(line)
        await _pushes(line, job, engine, None)
        return
    async with create_engine(job.own) as own:
        await _pushes(line, job, own, own)


async def _pushes(line: Line, job: Job, engine: UpdatableEngine, own: InferenceEngine | None) -> None:
    tensors: dict[str, torch.Tensor] = {}
    report: Report | None = None
    async with WeightSync.connect(tensors, engine, job.transport, bucket_bytes=BUCKET_BYTES) as sync:
        while True:
            await line.say(("next", 0, (report, own and own.host_pid)))
            try:
                version = await _asked(line)
            except LineLost:
                return
            if version is None:
                return
            tensors.update(weights_of(job.model, version))
            begun = time.monotonic()
            error, bare = None, ""
            try:
                await sync.push(version=version)
            except DrivetrainError as raised:
                error = to_wire(raised)
            except Exception:
                bare = traceback.format_exc()
            report = Report(version, time.monotonic() - begun, error, bare)
            if own is not None:
                report = await _with_claims(report, job, own)
            (Path(os.environ["DRIVETRAIN_FAULTS"]) / f"report-{os.getpid()}").write_bytes(pickle.dumps(report))


async def _asked(line: Line) -> str | None:
    while True:
        _, kind, value = cast("tuple[int, str, str | None]", await line.hear())
        if kind == "push":
            return value


async def _with_claims(report: Report, job: Job, own: InferenceEngine) -> Report:
    """Add the engine's claims to a report, and the tensors that contradict them."""
    if report.error is not None and report.error[0] == EngineDied.__name__:
        while own.state is not EngineState.FAILED:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    served, state = own.get_weight_version(), own.state
    wrong = await differing(own, weights_of(job.model, served)) if state is EngineState.READY else []
    return Report(
        report.version, report.seconds, report.error, report.bare, own.status.describe(), served, tuple(wrong)
    )


class FarEngine:
    """The engine at the other end of a line, as far as weight sync needs it."""

    def __init__(self, line: Line, isolation: Isolation, capabilities: Set[Capability], config: EngineConfig) -> None:
        self._line = line
        self._numbers = itertools.count(1)
        self.isolation, self.capabilities, self.config = isolation, capabilities, config
        self.gpus: tuple[str, ...] = ()
        self.weight_update_ranks = ("rank 0",)

    @classmethod
    async def reached_by(cls, line: Line) -> FarEngine:
        """Ask the owner about the engine."""
        await line.say(("hello", 0, None))
        _, _, (isolation, capabilities, config) = cast("tuple[int, str, Any]", await line.hear())
        return cls(line, isolation, capabilities, config)

    async def weight_manifest(self) -> WeightManifest:
        return cast(WeightManifest, await self.call("manifest", None))

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        await self.call("join", spec)

    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        await self.call("leave", group_name)

    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        await self.call("prepare", request)

    async def release_weight_sources(self) -> None:
        await self.call("release", None)

    @asynccontextmanager
    async def weight_update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AsyncGenerator[FarUpdate, None]:
        update = FarUpdate(self, cast(int, await self.call("update", (request, at_once))))
        try:
            yield update
        except BaseException as error:
            if not update.ended:
                await self._line.say(("break", 0, repr(error)))
            raise
        await self.call("finish", None)

    async def call(self, name: str, argument: object) -> object:
        number = next(self._numbers)
        await self._line.say((name, number, argument))
        while True:
            try:
                answered, kind, value = cast("tuple[int, str, Any]", await self._line.hear())
            except LineLost as lost:
                raise EngineDied(f"the engine's owner hung up during {name!r}") from lost
            if answered != number:
                continue  # the answer to a cancelled call
            if kind == "error":
                raise from_wire(*value)
            return cast(object, value)


class FarUpdate:
    """An update of the far engine."""

    def __init__(self, engine: FarEngine, buckets: int) -> None:
        self._engine = engine
        self.buckets = buckets
        self.paused_seconds = 0.0
        """Known only to the owner."""
        self.ended = False

    async def load(self, indices: Sequence[int]) -> None:
        try:
            await self._engine.call("load", list(indices))
        except DrivetrainError:
            self.ended = True
            raise
