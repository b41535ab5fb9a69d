"""Rewrite adapters so that every engine computes them alike: one rank, one scale, no fused layer adapted in part."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from drivetrain.errors import EngineInternalError, InvalidRequest, WeightSyncError
from drivetrain_weight_sync.receiver.lora_adapters import (
    AdapterChecks,
    GivenAdapter,
    LoraAdapter,
    LoraModule,
    adapter_in,
    named_alike,
)
from drivetrain_weight_sync.transports.push_folder import PushFolder


class PlainAdapters:
    """Folders of adapters for an engine that supports plain LoRA only.

    A folder is the trainer's own, or a rewritten one that is kept until :meth:`remove`: engines read an adapter again.

    Args:
        largest_rank: Largest rank that the engine was configured for.
        adapted_with: For each layer that the engine fuses, the layers that must be adapted with it.
        writes: False if the engine cannot read our folders; adapters that need rewriting are then refused.
    """

    def __init__(
        self,
        largest_rank: int,
        adapted_with: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        writes: bool = True,
    ) -> None:
        self.largest_rank = largest_rank
        self.adapted_with = adapted_with
        self._writes = writes
        self._written: dict[str, PushFolder] = {}

    def folder_for(self, lora_name: str, path: str, *namings: Mapping[str, tuple[int, ...]]) -> str:
        """Check the adapter at ``path``, and return the folder from which the engine is to load it.

        Args:
            lora_name: Name of the adapter.
            path: The folder.
            namings: Shapes of the weights that adapters can change, once for each way to name them.

        Raises:
            InvalidRequest: the folder holds no adapter that the engine can serve.
            EngineInternalError: the folder for the engine cannot be written; the one written before is kept.
        """
        adapter, zeros = _checked(adapter_in(path), self.largest_rank, self.adapted_with, namings, AdapterChecks())
        if not zeros and not adapter.unusual:
            return path
        if not self._writes:
            why = ", ".join(adapter.unusual) or f"no tensors for {next(iter(zeros))}"
            raise InvalidRequest(
                f"lora_path={path!r} has {why} in its adapter, which this engine does not apply; save it with one "
                "rank and alpha for all modules, and with all layers that the engine fuses",
                field="lora_path",
            )
        folder = _written(adapter, zeros)
        self.remove(lora_name)
        self._written[lora_name] = folder
        return str(folder.path)

    def remove(self, lora_name: str) -> None:
        """Remove an adapter's rewritten folder, if there is one; the engine must have unloaded it."""
        written = self._written.pop(lora_name, None)
        if written is not None:
            written.remove()

    def close(self) -> None:
        """Remove all rewritten folders; the engine must be closed."""
        for name in list(self._written):
            self.remove(name)


def plain_tensors(
    given: GivenAdapter,
    largest_rank: int,
    adapted_with: Mapping[str, Sequence[str]],
    namings: Sequence[Mapping[str, tuple[int, ...]]],
    checks: AdapterChecks,
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Check an adapter, and return the configuration and tensors from which the engine is to load it.

    The returned tensors may share memory with the given ones. Other arguments are those of :class:`PlainAdapters` and
    its ``folder_for``.

    Raises:
        InvalidRequest: the engine cannot serve it.
    """
    adapter, zeros = _checked(given, largest_rank, adapted_with, namings, checks)
    if not zeros and not adapter.unusual:
        return dict(given.config), dict(given.tensors)
    return _rewritten(adapter, zeros)


def _checked(
    given: GivenAdapter,
    largest_rank: int,
    adapted_with: Mapping[str, Sequence[str]],
    namings: Sequence[Mapping[str, tuple[int, ...]]],
    checks: AdapterChecks,
) -> tuple[LoraAdapter, dict[str, tuple[int, ...]]]:
    """Return the adapter, and the layers that it leaves out and the engine needs."""
    shapes = named_alike(given.tensors, namings)
    adapter = checks.check(given, largest_rank, shapes)
    return adapter, _unadapted(adapter, shapes, adapted_with)


def _unadapted(
    adapter: LoraAdapter, shapes: Mapping[str, tuple[int, ...]], adapted_with: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int, ...]]:
    """Return the layers that the adapter leaves out and the engine needs, with the shapes of their weights.

    Args:
        adapter: The adapter.
        shapes: Shapes of the model's weights, by checkpoint name.
        adapted_with: For each layer, by the last part of its name, the layers that must be adapted with it.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in adapter.modules:
        parent, _, own = name.rpartition(".")
        for other in adapted_with.get(own, ()):
            module = f"{parent}.{other}"
            if module not in adapter.modules and f"{module}.weight" in shapes:
                found[module] = shapes[f"{module}.weight"]
    return found


def _written(adapter: LoraAdapter, zeros: Mapping[str, tuple[int, ...]]) -> PushFolder:
    try:
        folder = PushFolder(None)
        try:
            with folder.writing():
                write_plain(adapter, folder.path, zeros)
        except BaseException:
            folder.remove()
            raise
    except WeightSyncError as error:
        raise EngineInternalError(
            f"the adapter has to be rewritten for the engine, and there is no room for it: {error.__cause__}; make "
            f"room in {tempfile.gettempdir()}, or name another folder by TMPDIR"
        ) from error
    return folder


def write_plain(adapter: LoraAdapter, folder: Path, zeros: Mapping[str, tuple[int, ...]]) -> None:
    """Write an equivalent adapter without fields that an engine may ignore.

    Args:
        adapter: The adapter, without biases.
        folder: The folder to write into.
        zeros: Shapes of the weights of further layers, whose adapter is zero.
    """
    config, tensors = _rewritten(adapter, zeros)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _rewritten(
    adapter: LoraAdapter, zeros: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Return configuration and tensors of an equivalent adapter.

    Smaller ranks are padded with zeros. Scales that differ from the adapter's own are multiplied into B.
    """
    tensors: dict[str, torch.Tensor] = {}
    some = next(iter(adapter.modules.values())).a
    for name, module in {**adapter.modules, **_nothing(zeros, adapter, some)}.items():
        missing = adapter.rank - module.rank
        a = torch.nn.functional.pad(module.a, (0, 0, 0, missing))
        b = torch.nn.functional.pad(module.b, (0, missing))
        if module.scale != adapter.scale:
            b = (b.double() * (module.scale / adapter.scale)).to(b.dtype)
        first, second = ("embedding_A", "embedding_B") if module.is_embedding else ("A.weight", "B.weight")
        tensors[f"base_model.model.{name}.lora_{first}"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_{second}"] = b.contiguous()
    config: dict[str, object] = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank,
        "target_modules": [*adapter.modules, *zeros],
        "bias": "none",
        "inference_mode": True,
    }
    return config, tensors


def _nothing(shapes: Mapping[str, tuple[int, ...]], adapter: LoraAdapter, like: torch.Tensor) -> dict[str, LoraModule]:
    return {
        name: LoraModule(
            like.new_zeros(adapter.rank, inputs),
            like.new_zeros(outputs, adapter.rank),
            None,
            adapter.scale,
            is_embedding=False,
        )
        for name, (outputs, inputs) in shapes.items()
    }
