"""Make a weight plan, and check it against the engine's manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from drivetrain.errors import InvalidConfig, WeightPlanMismatch
from drivetrain.types.weights import Bucket, PlacedTensor, TensorSpec, WeightManifest, WeightPlan
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.dtypes import dtype_of, nbytes_of, rounds

ALIGNMENT: Final = 256
"""Alignment in bytes of a tensor's offset in its bucket, and of a bucket's size."""
DEFAULT_BUCKET_BYTES: Final = 256 << 20

_STACKED: Final = re.compile(r"\.experts\.\w*[a-z]\w*$")
_LAYER: Final = re.compile(r"(?:.*?\.)?\d+\.")


def layer_of(name: str) -> str:
    """Return the name up to and including the layer's index, ``model.layers.3.``; the whole name if it has none."""
    found = _LAYER.match(name)
    return found.group() if found else name


def make_plan(
    specs: Iterable[TensorSpec],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    layer_of: Callable[[str], str] = layer_of,
) -> WeightPlan:
    """Place tensors in buckets of at most ``bucket_bytes``, whole layers together, in the order given.

    A layer larger than ``bucket_bytes`` gets a bucket of its own. Layers stay whole because engines fuse several
    checkpoint tensors of a layer into one parameter, and a fusion split over two buckets would come out wrong.
    ``layer_of`` returns the layer of a tensor by the tensor's name.

    Raises:
        InvalidConfig: ``bucket_bytes`` is not positive.
        WeightPlanMismatch: a name is given twice, or a dtype is unknown.
    """
    if bucket_bytes <= 0:
        raise InvalidConfig(f"bucket_bytes is {bucket_bytes}; give a positive number of bytes", field="bucket_bytes")
    layers: dict[str, dict[str, TensorSpec]] = {}
    for spec in specs:
        layer = layers.setdefault(layer_of(spec.name), {})
        if spec.name in layer:
            raise WeightPlanMismatch(f"{spec.name} is given twice; give each tensor once", extra=[spec.name])
        layer[spec.name] = spec
    buckets: list[list[TensorSpec]] = []
    room = 0
    for layer in layers.values():
        size = sum(_aligned(nbytes_of(spec)) for spec in layer.values())
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].extend(layer.values())
        room -= size
    return place(buckets)


def place(buckets: Iterable[Iterable[TensorSpec]]) -> WeightPlan:
    """Place the tensors of each bucket one after another."""
    return WeightPlan(tuple(_place(bucket) for bucket in buckets))


def bucket_offsets(plan: WeightPlan) -> tuple[int, ...]:
    """Return the byte offset of each bucket in an arena that holds the buckets one after another."""
    return tuple(accumulate((bucket.nbytes for bucket in plan.buckets), initial=0))[:-1]


def plan_nbytes(plan: WeightPlan) -> int:
    """Return the size of an arena that holds the whole plan, in bytes."""
    return sum(bucket.nbytes for bucket in plan.buckets)


def check_geometry(plan: WeightPlan) -> None:
    """Check that tensors are aligned, within their bucket, without overlap, and have their dtype's size.

    Raises:
        WeightPlanMismatch: a tensor fails one of these checks.
    """
    for index, bucket in enumerate(plan.buckets):
        end = 0
        for placed in bucket.tensors:
            name, expected = placed.spec.name, nbytes_of(placed.spec)
            if placed.nbytes != expected:
                problem = f"has {placed.nbytes} bytes in the plan, but {_describe(placed.spec)} takes {expected}"
            elif placed.offset % ALIGNMENT:
                problem = f"lies at byte {placed.offset} of bucket {index}, not a multiple of {ALIGNMENT}"
            elif placed.offset < end:
                problem = f"lies at byte {placed.offset} of bucket {index}, where the tensor before it ends at {end}"
            elif placed.offset + placed.nbytes > bucket.nbytes:
                problem = f"ends at byte {placed.offset + placed.nbytes} of bucket {index}, which has {bucket.nbytes}"
            else:
                end = placed.offset + placed.nbytes
                continue
            raise WeightPlanMismatch(f"{name} {problem}; make the plan with make_plan", mismatched=[name])


def check_plan(specs: Sequence[TensorSpec], manifest: WeightManifest) -> None:
    """Check that ``specs`` are exactly the tensors of ``manifest``; nothing is changed.

    A tied tensor may come under any one of its names.

    Raises:
        WeightPlanMismatch: naming every tensor that is missing, extra, or of another dtype or shape.
    """
    expected = {spec.name: spec for spec in manifest.tensors}
    seen: set[str] = set()
    extra: dict[str, str] = {}
    mismatched: dict[str, str] = {}
    dtypes: dict[tuple[str, str], list[str]] = {}
    """Names of tensors whose only fault is a floating dtype that would be rounded, by their dtype and the engine's."""
    for spec in specs:
        name = manifest.aliases.get(spec.name, spec.name)
        wanted = expected.get(name)
        if wanted is None:
            extra[spec.name] = f"{spec.name} ({_describe(spec)})"
        elif name in seen:
            tied = f", being tied to {name}" if spec.name != name else ""
            extra[spec.name] = f"{spec.name} (given a second time{tied})"
        elif spec.shape == wanted.shape and rounds(dtype_of(spec), dtype_of(wanted)):
            dtypes.setdefault((spec.dtype, wanted.dtype), []).append(spec.name)
        elif (spec.dtype, spec.shape) != (wanted.dtype, wanted.shape):
            mismatched[spec.name] = f"{spec.name} (got {_describe(spec)}, expected {_describe(wanted)})"
        seen.add(name)
    missing = {n: f"{n} (expected {_describe(spec)})" for n, spec in expected.items() if n not in seen}
    if not (missing or extra or mismatched or dtypes):
        return
    facts, renamed = _renamed(missing, extra)
    remedies = [
        "send every tensor of the engine's model" if missing.keys() - renamed else "",
        _remedy_of_extra(extra, renamed),
        "pass cast=True to WeightSync.connect, or load the engine with the trainer's dtype" if dtypes else "",
        "start the engine from the model that is trained" if mismatched else "",
    ]
    rounded = {
        f"{got} {wanted}": f"{len(names)} of {got}, which would round to the engine's {wanted} ({listed(names, 3)})"
        for (got, wanted), names in dtypes.items()
    }
    wrong = [name for names in dtypes.values() for name in names]
    raise WeightPlanMismatch(
        "the tensors do not match the engine's model; nothing was changed. "
        + "".join(facts)
        + "".join(
            _labelled(label, part)
            for label, part in (
                ("Missing", _others(missing, renamed)),
                ("Extra", _others(extra, renamed)),
                ("Wrong", mismatched),
                ("Wrong dtype", rounded),
            )
        )
        + "To fix it: "
        + "; ".join(remedy for remedy in remedies if remedy)
        + ".",
        missing=list(missing),
        extra=list(extra),
        mismatched=[*mismatched, *wrong],
    )


def _renamed(missing: Iterable[str], extra: Iterable[str]) -> tuple[list[str], set[str]]:
    """Find extra names that differ from missing ones only in a prefix.

    Returns:
        Sentences for the error message, and the names that they explain, extra and missing.
    """
    by_end: dict[str, list[str]] = {}
    for name in missing:
        for end in _ends(name):
            by_end.setdefault(end, []).append(name)
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name in extra:
        longest = next((end for end in _ends(name) if end in by_end), "")
        if len(by_end.get(longest, ())) == 1:
            (other,) = by_end[longest]
            begins = name.removesuffix(longest), other.removesuffix(longest)
            pairs.setdefault(begins, []).append((name, other))
    facts: list[str] = []
    told: set[str] = set()
    for (ours, engines), names in pairs.items():
        if len(names) > 1:
            told.update(*names)
            instead = f"where the engine's begin with {engines!r}" if engines else "which the engine's do not"
            verb = f"begin with {ours!r}, {instead}" if ours else f"lack {engines!r}, which the engine's begin with"
            facts.append(f"{len(names)} names {verb}, as {' and '.join(names[0])} do. ")
    return facts, told


def _others(described: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: text for name, text in described.items() if name not in names}


def _ends(name: str) -> list[str]:
    """Return the name and its suffixes after each dot that have at least two parts, longest first."""
    parts = name.split(".")
    return [".".join(parts[index:]) for index in range(max(len(parts) - 1, 1))]


def _remedy_of_extra(extra: Iterable[str], renamed: Collection[str]) -> str:
    if any(".lora_" in name for name in extra):
        return (
            "pass the peft model itself, rather than its state dict, to push the weights with its adapters merged, or "
            "push the adapter alone with LoraSync"
        )
    if any(_STACKED.search(name) for name in extra):
        return "pass the model itself, rather than its state dict, so that its stacked experts can be split"
    if renamed:
        return "name tensors as weight_manifest() does, or pass the module that the engine's model was made from"
    return "leave out tensors that the engine does not have" if extra else ""


def _place(specs: Iterable[TensorSpec]) -> Bucket:
    placed: list[PlacedTensor] = []
    offset = 0
    for spec in specs:
        nbytes = nbytes_of(spec)
        placed.append(PlacedTensor(spec, offset, nbytes))
        offset += _aligned(nbytes)
    return Bucket(tuple(placed), offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _labelled(label: str, tensors: dict[str, str]) -> str:
    return f"{label}: {listed(tensors.values())}. " if tensors else ""
