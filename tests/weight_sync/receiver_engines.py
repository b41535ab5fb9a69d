"""Engines that consist of a receiver and a model, to test weight sync without the rest of an engine.

The receiver, the transports and the model are real. The engine's state machine is absent.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
from torch import nn

from drivetrain.errors import DrivetrainError, to_wire
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation, Timeouts
from drivetrain.types.weights import (
    AbortUpdate,
    BeginUpdate,
    CommitUpdate,
    CommunicatorSpec,
    LoadBuckets,
    PrepareUpdate,
    ReleaseSources,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import ModuleTarget, Receiver, make_plan
from drivetrain_weight_sync.trainer.source import Source
from drivetrain_weight_sync.trainer.staging import Staged, Stager, stage
from drivetrain_weight_sync.transports.in_process import InProcessSender

HOST_CAPABILITIES = frozenset(
    {
        Capability.WEIGHTS_SHARED_MEMORY,
        Capability.WEIGHTS_BROADCAST,
        Capability.WEIGHTS_DISK,
        Capability.WEIGHTS_PLUGIN,
    }
)
CPU = torch.device("cpu")


class Update:
    def __init__(self, engine: ReceiverEngine, buckets: int) -> None:
        self._engine = engine
        self.buckets = buckets
        self.paused_seconds = 0.0

    async def load(self, indices: Sequence[int]) -> None:
        await self._engine.send(LoadBuckets(tuple(indices)))


class ReceiverEngine:
    """Drives a receiver through whole updates, as the engine does."""

    isolation: Isolation
    gpus: tuple[str, ...] = ()
    weight_update_ranks: tuple[str, ...] = ("rank 0",)
    capabilities: frozenset[Capability]
    config = EngineConfig(backend="receiver", model="none", timeouts=Timeouts(weight_update=20))

    def __init__(self) -> None:
        self.version = "initial"
        self.messages: list[str] = []
        self.requests: list[WeightUpdateRequest] = []
        self._prepared: tuple[WeightUpdateRequest, int] | None = None

    async def send(self, message: WeightMessage) -> WeightReply:
        self.messages.append(type(message).__name__)
        return await self.receive(message)

    async def receive(self, message: WeightMessage) -> WeightReply:
        raise NotImplementedError

    async def weight_manifest(self) -> WeightManifest:
        raise NotImplementedError

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        raise NotImplementedError

    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        raise NotImplementedError

    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        self._prepared = request, (await self.send(PrepareUpdate(request))).buckets

    async def release_weight_sources(self) -> None:
        await self.send(ReleaseSources())

    @asynccontextmanager
    async def weight_update(self, request: WeightUpdateRequest, *, at_once: bool = False) -> AsyncIterator[Update]:
        self.requests.append(request)
        if self._prepared is None or self._prepared[0] is not request:
            await self.prepare_weight_update(request)
        assert self._prepared is not None
        (_, buckets), self._prepared = self._prepared, None
        try:
            await self.send(BeginUpdate())
            update = Update(self, buckets)
            yield update
            if at_once:
                await self.send(LoadBuckets(tuple(range(buckets))))
            await self.send(VerifyUpdate())
            update.paused_seconds = (await self.send(CommitUpdate(request.version))).seconds
        except BaseException:
            await self.send(AbortUpdate())
            raise
        self.version = request.version


class InlineEngine(ReceiverEngine):
    """A receiver in this process."""

    isolation = Isolation.INLINE
    capabilities = HOST_CAPABILITIES | {Capability.WEIGHTS_IN_PROCESS}

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.receiver = Receiver(ModuleTarget(model))
        self._target = ModuleTarget(model)

    async def receive(self, message: WeightMessage) -> WeightReply:
        return await asyncio.to_thread(self.receiver.handle, message)

    async def weight_manifest(self) -> WeightManifest:
        return self._target.manifest()

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        await asyncio.to_thread(self.receiver.groups.join, spec, 1, CPU)

    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        self.receiver.groups.leave(group_name)


def serve() -> None:
    """Answer the calls of a ``HostedEngine`` on stdin until it is closed."""
    torch.set_num_threads(1)
    model = nn.Module()
    receiver = Receiver(ModuleTarget(model))
    while True:
        try:
            what, argument = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[str, object]
        try:
            match what:
                case "model":
                    model = argument
                    for tensor in model.state_dict().values():
                        tensor.zero_()
                    receiver = Receiver(ModuleTarget(model))
                    answer = ("ok", None)
                case "handle":
                    answer = ("ok", receiver.handle(argument))
                case "join":
                    receiver.groups.join(argument, 1, CPU)
                    answer = ("ok", None)
                case "leave":
                    receiver.groups.leave(argument)
                    answer = ("ok", None)
                case "manifest":
                    answer = ("ok", ModuleTarget(model).manifest())
                case _:
                    answer = ("ok", dict(model.state_dict()))
        except DrivetrainError as error:
            answer = ("error", to_wire(error))
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()


def push_in_process(
    receiver: Receiver, manifest: WeightManifest, weights: dict[str, torch.Tensor], *, spoil: str | None = None
) -> None:
    """Take weights through all steps of an update; ``spoil`` names a tensor that changes after it was digested."""
    plan, sender, staged = make_plan(manifest.tensors), InProcessSender(), Staged()
    stage(Source(weights), sender, manifest, plan, staged, Stager(), cast=False)
    request = WeightUpdateRequest(version="v1", source=sender.source(), plan=plan, digests=staged.digests)
    receiver.handle(PrepareUpdate(request))
    receiver.handle(BeginUpdate())
    if spoil is not None:
        weights[spoil].flatten()[0] += 1
    receiver.handle(LoadBuckets(tuple(range(len(plan.buckets)))))
    receiver.handle(VerifyUpdate())
    receiver.handle(CommitUpdate("v1"))
