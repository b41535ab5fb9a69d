# pyright: reportMissingImports=false
"""Adapters that verl trains without merging them: base weights are pushed once, then the adapter at each update."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import torch

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag
from drivetrain_trainers.verl.plugin_names import ADAPTER
from drivetrain_weight_sync import AdapterTensors, LoraSync
from drivetrain_weight_sync.trainer.pushed_adapter import adapter_fields
from drivetrain_weight_sync.transports.threads import in_thread

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig

_logger: Final = logging.getLogger(__name__)


def adapter_rank(model: HFModelConfig) -> int:
    """Return the rank of the adapter that the engine serves; 0 if verl trains none, or merges it.

    Args:
        model: ``actor_rollout_ref.model``. Its fields are ``lora_rank`` for FSDP, and ``lora.rank`` for Megatron.
    """
    if model.lora.get("merge"):
        return 0
    return int(model.lora.get("rank") or model.lora_rank or 0)


def sleeping_memory(config: EngineConfig) -> list[MemoryTag]:
    """Return the memory that an engine frees while verl trains.

    verl sends base weights once. An engine with adapters that does not keep its weights during sleep frees its KV cache
    alone, as verl's own SGLang rollout does.
    """
    if config.enable_lora and not config.sleep_keeps_weights:
        return [MemoryTag.KV_CACHE]
    return [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]


def without_wrappers(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield base weights by the checkpoint's names, without the ``base_layer`` of peft that verl adds for vLLM."""
    for name, tensor in weights:
        yield name.replace(".base_layer.", "."), tensor


class AdapterPusher:
    """Pushes verl's adapter to one engine.

    Args:
        engine: The engine, with ``enable_lora``.
        name: The engine's name in the log.
        bucket_bytes: Most bytes of a bucket.
    """

    def __init__(self, engine: InferenceEngine, name: str, bucket_bytes: int) -> None:
        self._engine = engine
        self._name = name
        self._bucket_bytes = bucket_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._sync: LoraSync | None = None

    async def push(
        self, weights: Iterator[tuple[str, torch.Tensor]], step: int | None, config: Mapping[str, object]
    ) -> None:
        """Push; the version is the trainer's step, or unchanged if verl names none.

        Args:
            weights: The adapter's tensors by peft's names.
            step: The trainer's step.
            config: The fields of peft's ``LoraConfig``.

        Raises:
            InvalidRequest: The engine does not serve such an adapter.
            WeightSyncError: The push failed; the engine serves the old adapter.
        """
        self._tensors.clear()
        self._tensors |= await in_thread(lambda: dict(weights))
        if self._sync is None:
            from peft import LoraConfig

            usual: Mapping[str, object] = LoraConfig().to_dict()  # type: ignore[no-untyped-call]
            adapter = AdapterTensors(adapter_fields(config, usual), self._tensors)
            self._sync = LoraSync.connect(adapter, self._engine, ADAPTER, bucket_bytes=self._bucket_bytes)
        result = await self._sync.push(version=self._engine.get_weight_version() if step is None else str(step))
        _logger.info(
            "%s has version %s of the adapter: %d tensors, %d bytes by %s in %.0f ms",
            self._name,
            result.version,
            result.tensors,
            result.nbytes,
            result.strategy.value,
            1e3 * result.total_seconds,
        )
