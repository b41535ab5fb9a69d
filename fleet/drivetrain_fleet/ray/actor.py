"""The actors: one owns an engine, the others keep GPUs of further bundles for it."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError, EngineStartError, from_wire, to_wire
from drivetrain.types.config import EngineConfig
from drivetrain.types.handle import EngineHandle
from drivetrain_fleet.ray.calls import call


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of drivetrain as an actor returns it: an exception would come wrapped into one of Ray's."""

    kind: str
    message: str
    fields: dict[str, object]

    @classmethod
    def of(cls, error: DrivetrainError) -> Refusal:
        """Describe an error."""
        return cls(*to_wire(error))

    def error(self) -> DrivetrainError:
        """Rebuild the error."""
        return from_wire(self.kind, self.message, self.fields)


class EngineActor:
    """Owns one engine, which starts when the first handle is asked for.

    If the engine dies, the actor's process ends, so that Ray makes the actor anew from the constructor's arguments.

    Args:
        config: The engine's configuration.
        keepers: Actors that keep the engine's GPUs, in the order of ``CUDA_VISIBLE_DEVICES``. If there are none, the
            GPUs are this actor's own.
    """

    def __init__(self, config: EngineConfig, keepers: list[ActorHandle[object]]) -> None:
        self._config = config
        self._keepers = keepers
        self._starting = asyncio.Lock()
        self._engine: InferenceEngine | None = None
        self._handles: dict[bool, EngineHandle] = {}
        self._ending: asyncio.Task[None] | None = None

    async def handle(self, node: str) -> EngineHandle | Refusal:
        """Return a handle for the processes of a node: a Unix socket for this node's, a TCP address for others.

        Args:
            node: Ray's id of the node.
        """
        try:
            async with self._starting:
                engine = await self._started()
                here = node == ray.get_runtime_context().get_node_id()
                if here not in self._handles:
                    self._handles[here] = await (engine.handle() if here else _handle_for_others(engine))
                return self._handles[here]
        except DrivetrainError as error:
            return Refusal.of(error)

    async def _started(self) -> InferenceEngine:
        if self._engine is None:
            await self._require_gpus()
            engine = create_engine(self._config)
            await engine.start()
            # As a host process does: otherwise each full garbage collection scans the objects that the start made.
            gc.collect()
            gc.freeze()
            self._engine = engine
            self._ending = asyncio.create_task(_end_with(engine))
        return self._engine

    async def _require_gpus(self) -> None:
        """Raise if the bundles have other GPUs than those that this actor was made with."""
        if not self._keepers:
            return
        kept: list[str] = []
        for keeper in self._keepers:
            gpus = await call(keeper, "gpus")
            assert isinstance(gpus, list)
            kept += gpus
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if kept != seen.split(","):
            raise EngineStartError(
                f"the engine's bundles have the GPUs {','.join(kept)} now, and its actor was made for {seen}: Ray has "
                "placed the bundles anew; start the engines again"
            )

    async def placement(self) -> tuple[str, int, str | None]:
        """Return the node's id, the process's id and what CUDA may see."""
        return ray.get_runtime_context().get_node_id(), os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")

    async def close(self) -> None:
        """Close the engine; the actor can then be killed."""
        async with self._starting:
            if self._ending is not None:
                self._ending.cancel()
            if self._engine is not None:
                await self._engine.teardown()


async def _handle_for_others(engine: InferenceEngine) -> EngineHandle:
    address = ray.util.get_node_ip_address()
    return await engine.handle(f"[{address}]:0" if ":" in address else f"{address}:0", announce=address)


async def _end_with(engine: InferenceEngine) -> None:
    """End this process once the engine has failed."""
    failed = asyncio.Event()

    def look() -> None:
        if engine.state is EngineState.FAILED:
            failed.set()

    engine.parts.controller.subscribe(look)
    look()
    await failed.wait()
    try:
        async with asyncio.timeout(engine.config.timeouts.close):
            await engine.teardown()  # tells holders why it failed
    finally:
        os._exit(1)  # an actor that leaves by itself in any other way is not made anew


class GpuKeeper:
    """Keeps the GPUs of one bundle for an engine whose actor is in another bundle."""

    async def gpus(self) -> list[str]:
        """Return Ray's ids of the GPUs."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]
