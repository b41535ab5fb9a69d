"""Two ways for an adapter to reach an engine: as tensors through a transport, or as a folder."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import LoraSource, LoraTensors, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import make_plan
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.trainer.pushed_adapter import PushedAdapter
from drivetrain_weight_sync.trainer.source import Source
from drivetrain_weight_sync.trainer.staging import Staged, Stager, require_finite, stage
from drivetrain_weight_sync.trainer.strategy import Strategy
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.push_folder import PushFolder
from drivetrain_weight_sync.transports.threads import in_thread
from drivetrain_weight_sync.transports.updatable_engine import AdaptableEngine


@dataclass(frozen=True, slots=True)
class ReadyAdapter:
    """A staged adapter."""

    request: WeightUpdateRequest
    tensors: int
    nbytes: int


class AdapterWay(ABC):
    """Brings one adapter to one engine: :meth:`stage`, :meth:`update`, then :meth:`end`, push after push.

    Args:
        adapter: The adapter.
        engine: The engine.
        lora_name: Name by which requests select the adapter.
        mode: Pause mode for requests in flight that use it.
    """

    strategy: Strategy

    def __init__(self, adapter: PushedAdapter, engine: AdaptableEngine, lora_name: str, mode: PauseMode) -> None:
        self._adapter = adapter
        self._engine = engine
        self._lora_name = lora_name
        self._mode = mode

    @abstractmethod
    async def stage(self, version: str) -> ReadyAdapter:
        """Check the adapter and put it where the engine reads it."""

    @abstractmethod
    async def update(self, ready: ReadyAdapter) -> None:
        """Have the engine serve the staged adapter."""

    @abstractmethod
    async def end(self, *, failed: bool) -> None:
        """Free the state of a push."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything."""


class TensorWay(AdapterWay):
    """Sends tensors through a transport, with plan, digests and verification as for full weights.

    Args:
        adapter: As for :class:`AdapterWay`.
        engine: As for :class:`AdapterWay`.
        lora_name: As for :class:`AdapterWay`.
        mode: As for :class:`AdapterWay`.
        strategy: The strategy of ``sender``.
        sender: The transport.
        bucket_bytes: Most bytes per bucket.
    """

    def __init__(
        self,
        adapter: PushedAdapter,
        engine: AdaptableEngine,
        lora_name: str,
        mode: PauseMode,
        strategy: Strategy,
        sender: Sender,
        bucket_bytes: int,
    ) -> None:
        super().__init__(adapter, engine, lora_name, mode)
        self.strategy = strategy
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._stager = Stager()
        self._agreed: tuple[WeightManifest, WeightPlan] | None = None

    async def stage(self, version: str) -> ReadyAdapter:
        """Check, digest and stage the tensors; connect to the engine."""
        staged, sender = Staged(), self._sender

        def put() -> WeightUpdateRequest:
            tensors = self._adapter.tensors
            manifest, plan = self._planned(tensors)
            stage(Source(tensors), sender, manifest, plan, staged, self._stager, cast=False)
            return WeightUpdateRequest(
                version=version,
                source=sender.source(),
                plan=plan,
                digests=staged.digests,
                mode=self._mode,
                lora=LoraTensors(lora_name=self._lora_name, config=dict(self._adapter.config)),
            )

        request = await in_thread(put, staged.stop)
        await sender.connect(self._engine)
        return ReadyAdapter(request, len(staged.digests), staged.nbytes)

    def _planned(self, tensors: Mapping[str, torch.Tensor]) -> tuple[WeightManifest, WeightPlan]:
        """Return the plan for the tensors, the last one if it still fits."""
        manifest = WeightManifest(tuple(spec_of(name, tensor) for name, tensor in tensors.items()))
        if self._agreed is None or self._agreed[0] != manifest:
            self._agreed = manifest, make_plan(manifest.tensors, self._bucket_bytes)
        return self._agreed

    async def update(self, ready: ReadyAdapter) -> None:
        """Have the engine load the adapter, verify it, and serve it."""
        await self._sender.apply_adapter(self._engine, ready.request)
        self._sender.committed(ready.request.digests or {})

    async def end(self, *, failed: bool) -> None:
        """Drop references to the tensors. An arena is kept for the next push."""
        if failed:
            self._sender.forget()
        await in_thread(self._sender.release)

    async def close(self) -> None:
        """Leave the engine's group, and free the arena."""
        await self._sender.disconnect(self._engine)
        await in_thread(self._sender.close)


class FolderWay(AdapterWay):
    """Writes a peft folder. The last push's folder is kept until the next, for engines that read an adapter again.

    Args:
        adapter: As for :class:`AdapterWay`.
        engine: As for :class:`AdapterWay`.
        lora_name: As for :class:`AdapterWay`.
        mode: As for :class:`AdapterWay`.
        directory: Parent of the folders; None: the temporary folder.
    """

    strategy = Strategy.DISK

    def __init__(
        self,
        adapter: PushedAdapter,
        engine: AdaptableEngine,
        lora_name: str,
        mode: PauseMode,
        directory: Path | None,
    ) -> None:
        super().__init__(adapter, engine, lora_name, mode)
        self._directory = directory
        self._pushed: PushFolder | None = None
        self._staged: PushFolder | None = None

    async def stage(self, version: str) -> ReadyAdapter:
        """Write the folder."""
        self._staged = folder = await asyncio.to_thread(PushFolder, self._directory)
        tensors, nbytes = await asyncio.to_thread(self._write, folder)
        source = LoraSource(lora_name=self._lora_name, path=str(folder.path))
        return ReadyAdapter(WeightUpdateRequest(version=version, source=source, mode=self._mode), tensors, nbytes)

    def _write(self, folder: PushFolder) -> tuple[int, int]:
        """Write the adapter; return the number of tensors and their bytes."""
        state = self._adapter.tensors
        require_finite(non_finite(state), "tensors of the adapter")
        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in state.items()}
        with folder.writing():
            save_file(tensors, folder.path / "adapter_model.safetensors", metadata={"format": "pt"})
            (folder.path / "adapter_config.json").write_text(json.dumps(dict(self._adapter.config)), encoding="utf-8")
        return len(tensors), sum(tensor.nbytes for tensor in tensors.values())

    async def update(self, ready: ReadyAdapter) -> None:
        """Have the engine load the folder."""
        await self._engine.update_named_weights(ready.request)

    async def end(self, *, failed: bool) -> None:
        """Remove the folder that is served no more: the last one, or the staged one if the push failed."""
        staged, self._staged = self._staged, None
        surplus = staged
        if not failed:
            self._pushed, surplus = staged, self._pushed
        if surplus is not None:
            surplus.remove()

    async def close(self) -> None:
        """Remove the folder; the engine keeps the adapter."""
        pushed, self._pushed = self._pushed, None
        if pushed is not None:
            pushed.remove()
