"""Compare a checkpoint's files with the model that they are for, and with what an engine holds after loading them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from drivetrain.errors import EngineStartError, WeightSyncError
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.receiver.weight_target import WeightTarget
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tracing.quantised_parts import held_by
from drivetrain_weight_sync.tracing.traced_target import TracedTarget
from drivetrain_weight_sync.transports.checkpoint_files import require_readable

_ROWS: Final = 2
"""Rows compared at each end of a tensor: packing, transposing or padding would show in these few."""


def require_complete(folder: Path, model: WeightManifest) -> None:
    """Refuse safetensors files that lack tensors of the model, or hold them in another shape.

    Some loaders leave a parameter as it was allocated if no file holds it, and the engine would serve that. A folder
    that also holds tensors of other names is not judged: an engine may read these in place of the model's.

    Args:
        folder: The checkpoint.
        model: Names and shapes of the model's tensors.

    Raises:
        EngineStartError: Tensors are missing or have another shape, or a file cannot be read.
    """
    stored: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            require_readable(file)
            with safe_open(file, framework="pt") as opened:
                stored |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
        except (OSError, SafetensorError) as error:
            raise EngineStartError(f"the checkpoint file {str(file)!r} cannot be read: {error}") from error
    shapes = {spec.name: tuple(spec.shape) for spec in model.tensors}
    held = {model.aliases.get(name, name): shape for name, shape in stored.items()}
    if not held or not held.keys() <= shapes.keys():
        return
    refuse_incomplete(
        str(folder),
        [name for name in shapes if name not in held],
        [(name, shape, shapes[name]) for name, shape in held.items() if shape != shapes[name]],
    )


def refuse_incomplete(
    model: str, missing: Collection[str], mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]
) -> None:
    """Raise :class:`EngineStartError` if a checkpoint lacks tensors, or holds some in another shape.

    Args:
        model: Folder or hub id.
        missing: Names of the tensors that it lacks.
        mismatched: Name, stored shape and the model's shape of the others.
    """
    shapes = [f"{name} {tuple(stored)}, not {tuple(wanted)}" for name, stored, wanted in mismatched]
    if missing or shapes:
        problems = [f"lacks {listed(missing)}"] * bool(missing) + [f"has {listed(shapes)}"] * bool(shapes)
        raise EngineStartError(
            f"the checkpoint of {model!r} {' and '.join(problems)}; give a folder that holds every weight of the model "
            "that its config.json describes"
        )


def require_as_stored(target: WeightTarget, folder: Path) -> None:
    """Compare both ends of every tensor with the safetensors files from which the engine was started.

    An engine may pack weights after loading. Then the loader's copies lead to memory that the engine no longer computes
    with. Called before the first update.

    Raises:
        WeightSyncError: tensors differ from the files at the destinations of their copies.
    """
    known = {*(spec.name for spec in target.manifest().tensors), *target.manifest().aliases}
    moved: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in known & set(stored.keys()) - target.converted:
                held = target.read(name)
                rows = stored.get_slice(name)
                if list(held.shape) != rows.get_shape() or held.ndim == 0:
                    whole = stored.get_tensor(name)
                    part = target.part_of(name, whole)
                    pairs = [(held, whole if part is None else part)]
                else:
                    pairs = [(held[:_ROWS], rows[:_ROWS]), (held[-_ROWS:], rows[-_ROWS:])]
                if not all(_same(one, other) for one, other in pairs):
                    moved.append(name)
    if moved:
        raise WeightSyncError(
            f"the engine packs or transposes {listed(sorted(moved))} for its kernels after loading, which weight sync "
            "does not support yet; configure the engine to keep weights as in the checkpoint"
        )


def require_converted_alike(target: TracedTarget, folder: Path) -> None:
    """Reload one part of each kind that the engine converts, and check that the same values result.

    Raises:
        WeightSyncError: the values differ; the engine's own were restored.
    """
    kinds: dict[object, nn.Module] = {}
    for part in target.converted_parts:
        kinds.setdefault((type(part), *((held.dtype, held.ndim) for held in held_by(part))), part)
    for part in kinds.values():
        names = target.converted_parts[part]
        stored = _stored(folder, names)
        if stored.keys() != set(names) or any(tensor.itemsize == 1 for tensor in stored.values()):
            continue  # the values from which a quantised checkpoint was made are unknown
        before = [held.clone() for held in held_by(part)]
        target.load(stored.items())
        target.finish()
        if not all(map(_alike, held_by(part), before)):
            for held, kept in zip(held_by(part), before, strict=True):
                held.data.copy_(kept)
            raise WeightSyncError(
                f"the engine converts {listed(sorted(names))} differently when it loads them again, which weight sync "
                "does not support; configure the engine to keep weights as in the checkpoint"
            )


def _stored(folder: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            found |= {name: stored.get_tensor(name) for name in set(names) & set(stored.keys())}
    return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _same(held: torch.Tensor, stored: torch.Tensor) -> bool:
    if held.shape != stored.shape:
        return False
    return torch.allclose(held.cpu(), stored.to(held.dtype), rtol=0, atol=0, equal_nan=True)
