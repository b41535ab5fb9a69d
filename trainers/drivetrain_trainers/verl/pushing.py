"""Push what verl hands over as weights: named tensors, which all ranks gather together, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Final

import ray
import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.capability import Capability
from drivetrain_trainers.verl.experts import restacked
from drivetrain_weight_sync import Strategy, WeightSync
from drivetrain_weight_sync.transports.cuda_ipc import can_map
from drivetrain_weight_sync.transports.threads import in_thread

Pairs = Iterator[tuple[str, torch.Tensor]]
Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]
"""Named tensors; reading one gathers it from all ranks."""

_logger: Final = logging.getLogger(__name__)


class Pusher:
    """Pushes to one engine or fleet from the rank that is attached to it.

    Args:
        engine: The engine or fleet.
        name: Its name in the log.
        bucket_bytes: Most bytes of a bucket.
    """

    def __init__(self, engine: InferenceEngine, name: str, bucket_bytes: int) -> None:
        self.engine = engine
        self._name = name
        self._weights: Pairs = iter(())
        self._known: frozenset[str] | None = None
        """Names of the engine's tensors, with their aliases, once it was asked."""
        cuda = torch.cuda.is_available()
        self._sync = WeightSync.connect(
            lambda: self._weights,
            engine,
            _strategy(engine),
            bucket_bytes=bucket_bytes,
            cast=True,  # the engine's dtype is verl's rollout.dtype
            group_backend="nccl" if cuda else "gloo",
            master_address=ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1",
        )

    async def push(self, weights: Pairs, step: int | None) -> None:
        """Push; the version is the trainer's step, or unchanged if verl names none."""
        if self._known is None:
            manifest = await self.engine.weight_manifest()
            self._known = frozenset({spec.name for spec in manifest.tensors} | manifest.aliases.keys())
        self._weights = restacked(weights, self._known)
        result = await self._sync.push(version=self.engine.get_weight_version() if step is None else str(step))
        _logger.info(
            "%s has version %s: %d tensors, %d bytes by %s in %.0f ms, paused for %.0f ms",
            self._name,
            result.version,
            result.tensors,
            result.nbytes,
            result.strategy.value,
            1e3 * result.total_seconds,
            1e3 * result.paused_seconds,
        )

    async def close(self) -> None:
        """Free the buffers and connections of pushes, and detach from the engine."""
        await self._sync.close()
        await self.engine.teardown()


def _strategy(engine: InferenceEngine) -> Strategy:
    """Return CUDA IPC if the engine can read this rank's GPU; ``AUTO`` cannot tell the GPU of a streamed source."""
    if Capability.WEIGHTS_CUDA_IPC in engine.capabilities and torch.cuda.is_available():
        if can_map(torch.device("cuda", torch.cuda.current_device()), engine.gpus):
            return Strategy.CUDA_IPC
    return Strategy.AUTO


async def push_and_gather(weights: Weights, push: Callable[[Pairs], Awaitable[None]] | None) -> None:
    """Push on the rank that has a ``push``; on the others take part in the gather.

    If the push fails, the remaining tensors are gathered all the same, because other ranks wait in that gather.
    """
    reading = _read(weights, asyncio.get_running_loop())
    try:
        if push is not None:
            await push(reading)
    finally:
        await in_thread(lambda: _drain(reading))


def _read(weights: Weights, loop: asyncio.AbstractEventLoop) -> Pairs:
    """Yield the tensors in any reading thread, on the GPU of the calling thread and without gradients, as verl does."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    return _reading(_from_loop(weights, loop) if isinstance(weights, AsyncIterator) else iter(weights), device)


def _reading(pairs: Pairs, device: int | None) -> Pairs:
    while True:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.no_grad():
            pair = next(pairs, None)
        if pair is None:
            return
        yield pair


def _from_loop(weights: AsyncIterator[tuple[str, torch.Tensor]], loop: asyncio.AbstractEventLoop) -> Pairs:
    async def following() -> tuple[str, torch.Tensor] | None:
        with torch.no_grad():  # each thread has a switch of its own
            return await anext(weights, None)

    while (pair := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
        yield pair


def _drain(weights: Pairs) -> None:
    for _ in weights:
        pass
