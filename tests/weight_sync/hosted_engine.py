"""A receiver in a process of its own. Apart from the other receivers, which ranks import where no helpers are found."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

import torch
from tests.weight_sync.receiver_engines import HOST_CAPABILITIES, ReceiverEngine
from torch import nn

from drivetrain.errors import from_wire
from drivetrain.types.config import Isolation
from drivetrain.types.weights import CommunicatorSpec, WeightManifest, WeightMessage, WeightReply
from warm_python import start


class HostedEngine(ReceiverEngine):
    """A receiver in another process, whose model has the same shapes and starts with zeros."""

    isolation = Isolation.PROCESS
    capabilities = HOST_CAPABILITIES

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    async def __aenter__(self) -> Self:
        root = Path(__file__).parents[2]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), *sys.path]), OMP_NUM_THREADS="1")
        (stdin, self._to), (self._from, stdout) = _pipe(), _pipe()
        with stdin, stdout:
            program = ["-m", "tests.weight_sync.receiver_engines"]
            self.process = await asyncio.to_thread(start, program, {0: stdin, 1: stdout}, env=environment, cwd=root)
        await asyncio.to_thread(self._call, "model", self._model)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._to.close()
        await asyncio.to_thread(self.process.wait, 30)
        self._from.close()
        self.process.stdout.close()

    async def receive(self, message: WeightMessage) -> WeightReply:
        reply = await asyncio.to_thread(self._call, "handle", message)
        assert isinstance(reply, WeightReply)
        return reply

    async def weight_manifest(self) -> WeightManifest:
        manifest = await asyncio.to_thread(self._call, "manifest", None)
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        await asyncio.to_thread(self._call, "join", spec)

    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        await asyncio.to_thread(self._call, "leave", group_name)

    async def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the other process's model."""
        held: object = await asyncio.to_thread(self._call, "tensors", None)
        assert isinstance(held, dict)
        return held

    def _call(self, what: str, argument: object) -> object:
        pickle.dump((what, argument), self._to)
        self._to.flush()
        kind, value = pickle.load(self._from)
        if kind == "error":
            raise from_wire(*value)
        result: object = value
        return result


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Make a pipe; return its ends to read and to write."""
    read, write = os.pipe()
    return os.fdopen(read, "rb"), os.fdopen(write, "wb")
