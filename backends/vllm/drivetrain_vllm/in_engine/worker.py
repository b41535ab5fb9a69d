# pyright: reportMissingImports=false
"""Primitives of the ``Backend`` page for vLLM's worker, which holds the model and the cache."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from drivetrain.errors import EngineStartError, EngineStateError
from drivetrain.process.worker_calls import WorkerMethods
from drivetrain.types.modes import MemoryTag
from drivetrain.types.weights import WeightManifest
from drivetrain_vllm.in_engine.adapters import load_held
from drivetrain_vllm.in_engine.gpu_sleep import DeviceMemory
from drivetrain_vllm.in_engine.quantised_layers import quantised_layers
from drivetrain_vllm.in_engine.weight_layouts import without_lora
from drivetrain_vllm.translate import KEEPS_WEIGHTS
from drivetrain_weight_sync.receiver.checkpoint_manifest import checkpoint_of
from drivetrain_weight_sync.receiver.cpu_sleep import HostMemory
from drivetrain_weight_sync.receiver.rank_weights import RankWeights
from drivetrain_weight_sync.tracing.derived_tensors import AfterLoading
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts


class Worker(RankWeights):
    """A vLLM worker. Methods have the names and meanings of those on the ``Backend`` page."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._profile: tuple[torch.profiler.profile, Path] | None = None

    @property
    def _runner(self) -> Any:
        return self._worker.model_runner

    @property
    def model(self) -> torch.nn.Module:
        """VLLM's model."""
        model: torch.nn.Module = self._runner.get_model()
        return model

    @property
    def checkpoint(self) -> WeightManifest:
        """Manifest of the model's checkpoint tensors, as a trainer has them."""
        from vllm.config import set_current_vllm_config

        config = self._worker.model_config
        # vLLM patches the class of a model that it runs through transformers; the patched class needs this
        # configuration.
        with set_current_vllm_config(self._worker.vllm_config):
            return checkpoint_of(config.model, config.revision, trust_remote_code=config.trust_remote_code)

    @property
    def folder(self) -> Path | None:
        """Folder from which vLLM read the weights; None if it made dummy weights or downloaded the model."""
        folder = Path(self._worker.model_config.model)
        return folder if folder.is_dir() and self._worker.load_config.load_format != "dummy" else None

    @property
    def group(self) -> Any:
        """The ranks of vLLM's world."""
        from vllm.distributed.parallel_state import get_world_group

        world = get_world_group()
        return world.cpu_group if world.world_size > 1 else None

    @property
    def rank(self) -> int:
        """Index of this worker's rank in the group."""
        return int(self._worker.rank)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load tensors as vLLM loads a checkpoint."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config), without_lora(self.model):
            return super().load_weights(weights)

    def load_held_adapters(self) -> None:
        """Have vLLM's manager of adapters look among the held ones first."""
        load_held(self._runner.lora_manager, self.adapters)

    def converted(self) -> QuantisedParts:
        """Return the layers that vLLM quantised, or packed for its kernels."""
        return quantised_layers(self.model, self._worker.vllm_config, self.load_weights)

    def after_loading(self) -> Iterable[AfterLoading]:
        """Return the steps to run after loading: splitting MLA's projection, and steps that some models add."""
        dtype = self._worker.model_config.dtype
        for name, module in self.model.named_modules():
            compute: Any = getattr(module, "process_weights_after_loading", None)
            # Attention only: other layers with this method are handled as quantised layers.
            if compute is not None and hasattr(module, "impl"):
                yield AfterLoading(name, module, partial(compute, dtype))
        of_model: Any = getattr(self.model, "process_weights_after_loading", None)
        if of_model is not None:
            yield AfterLoading("the model", self.model, of_model)

    def expert_layers(self) -> list[int]:
        """Return the indices of the layers whose experts vLLM records for each token.

        Raises:
            EngineStartError: vLLM cannot record the experts of every layer that has them, or no layer has experts.
        """
        layers: set[int] = set()
        for name, module in self.model.named_modules():
            match _notes_experts(module):
                case True:
                    layers.add(cast("int", module.layer_id))
                case False:
                    raise EngineStartError(
                        f"the kernel of {name} routes tokens itself, and vLLM does not record its experts"
                    )
        if not layers:
            raise EngineStartError("vLLM records experts for no layer of this model")
        return sorted(layers)

    # Profile -----------------------------------------------------------------------------------------------------

    def start_profile(self, directory: str) -> None:
        """Start recording."""
        self._profile = torch.profiler.profile(), Path(directory)
        self._profile[0].start()

    def stop_profile(self) -> str:
        """Write the trace file, and return its path."""
        if self._profile is None:
            raise EngineStateError("no profile is being recorded; call start_profile first", state="ready")
        (profile, directory), self._profile = self._profile, None
        profile.stop()
        path = directory / f"{uuid.uuid4().hex[:12]}.rank-{self.rank}.trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        return str(path)

    # Memory ------------------------------------------------------------------------------------------------------

    def occupied(self) -> tuple[int, int]:
        """Return bytes of the cache and of the weights, on all ranks."""
        storages = [tensor.untyped_storage() for tensor in self.model.parameters()]
        weights = {storage._cdata: storage.nbytes() for storage in storages}
        own = (
            0 if MemoryTag.KV_CACHE in self.asleep else sum(storage.nbytes() for storage in self.cache()),
            0 if MemoryTag.WEIGHTS in self.asleep else sum(weights.values()),
        )
        of_ranks = self.of_ranks(lambda: own)
        return sum(cache for cache, _ in of_ranks), sum(held for _, held in of_ranks)

    def cache(self) -> list[torch.UntypedStorage]:
        """Return the storages of the attention layers' KV cache."""
        storages = (tensor.untyped_storage() for tensor in _tensors(self._runner.kv_caches))
        return list({storage._cdata: storage for storage in storages}.values())

    @cached_property
    def _memory(self) -> HostMemory | DeviceMemory:
        """Memory that sleeps by tag. First accessed while the weights are awake."""
        storages = {MemoryTag.WEIGHTS: self.target.storages, MemoryTag.KV_CACHE: self.cache()}
        if next(self.model.parameters()).device.type != "cpu":
            keeps_weights = bool(self._worker.vllm_config.additional_config.get(KEEPS_WEIGHTS))
            return DeviceMemory(storages, keeps_weights=keeps_weights)
        return HostMemory(storages)

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give memory back."""
        if MemoryTag.WEIGHTS in tags:
            self.receiver.forget_held()  # creates the receiver if needed, since tracing the loader needs the weights
            self.writer.stop()
        self.put_to_sleep(self._memory, tags)

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory again."""
        self.awaken(self._memory, tags)


OF_WORKERS = (
    Worker.gpus,
    Worker.expert_layers,
    Worker.occupied,
    Worker.prepare_weights,
    Worker.prepared_weights,
    Worker.begin_weights,
    Worker.commit_weights,
    Worker.stage_adapter,
    Worker.drop_adapter,
)
"""Methods of a worker that are not on the ``Backend`` page."""
methods = WorkerMethods(*OF_WORKERS)


class Extension:
    """Mix-in that vLLM adds to its worker's class."""

    _drivetrain_worker: Worker

    def drivetrain(self, payload: bytes) -> bytes:
        """Answer a call; every rank receives the same call at the same time."""
        worker = self.__dict__.get("_drivetrain_worker")
        if worker is None:
            worker = self._drivetrain_worker = Worker(self)
        return methods.answer(worker, payload, None if worker.group is None else worker.gather)


def _notes_experts(module: Any) -> bool | None:
    """Return whether vLLM records the experts to which a module routes tokens; None if it routes none."""
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    if not hasattr(module, "layer_id"):
        return None
    if getattr(module, "is_monolithic", False):
        # Newer releases support recording in such kernels, or refuse to start.
        return hasattr(routed_experts_capturer, "bind_routed_experts_capturer")
    parts = (module, getattr(module, "router", None))
    return any(getattr(part, "capture_fn", None) is not None for part in parts) or None


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for item in held:
            yield from _tensors(item)
