"""Which tensors travel together, and whether they are the engine's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from drivetrain.errors import InvalidConfig, WeightPlanMismatch
from drivetrain.weights import Bucket, PlacedTensor, TensorSpec, WeightManifest, WeightPlan
from drivetrain_weight_sync.dtypes import nbytes_of
from drivetrain_weight_sync.names import listed

ALIGNMENT: Final = 256
"""Bytes to which the offset of a tensor in its bucket, and the size of a bucket, are aligned."""
DEFAULT_BUCKET_BYTES: Final = 256 << 20

_LAYER: Final = re.compile(r"(?:.*?\.)?\d+\.")


def layer_of(name: str) -> str:
    """Return the name up to and including the layer's index, ``model.layers.3.``; the whole name if it has none."""
    found = _LAYER.match(name)
    return found.group() if found else name


def make_plan(specs: Iterable[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightPlan:
    """Place tensors in buckets of at most ``bucket_bytes``, whole layers together, in the order given.

    A layer larger than ``bucket_bytes`` has a bucket of its own. Engines fuse several checkpoint tensors of a
    layer into one parameter, and a fusion split over two buckets comes out wrong.

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
    return WeightPlan(tuple(_place(bucket) for bucket in buckets))


def bucket_offsets(plan: WeightPlan) -> tuple[int, ...]:
    """Return where each bucket begins, in bytes, when the buckets lie one after another in an arena."""
    return tuple(accumulate((bucket.nbytes for bucket in plan.buckets), initial=0))[:-1]


def plan_nbytes(plan: WeightPlan) -> int:
    """Return the size of an arena that holds the whole plan, in bytes."""
    return sum(bucket.nbytes for bucket in plan.buckets)


def check_geometry(plan: WeightPlan) -> None:
    """Check that each tensor lies whole and aligned in its bucket, apart from the others, with its dtype's size.

    Raises:
        WeightPlanMismatch: one does not.
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
    """Check that ``specs`` are exactly the tensors that ``manifest`` asks for; nothing is changed.

    A tied tensor may come under any one of its names.

    Raises:
        WeightPlanMismatch: naming every tensor that is missing, extra, or of another dtype or shape.
    """
    expected = {spec.name: spec for spec in manifest.tensors}
    seen: set[str] = set()
    extra: dict[str, str] = {}
    mismatched: dict[str, str] = {}
    for spec in specs:
        name = manifest.aliases.get(spec.name, spec.name)
        if name not in expected:
            extra[spec.name] = f"{spec.name} ({_describe(spec)})"
        elif name in seen:
            tied = f", being tied to {name}" if spec.name != name else ""
            extra[spec.name] = f"{spec.name} (comes a second time{tied})"
        elif (spec.dtype, spec.shape) != (expected[name].dtype, expected[name].shape):
            mismatched[spec.name] = f"{spec.name} (got {_describe(spec)}, expected {_describe(expected[name])})"
        seen.add(name)
    missing = {n: f"{n} (expected {_describe(spec)})" for n, spec in expected.items() if n not in seen}
    if not (missing or extra or mismatched):
        return
    wrong_dtype = any(
        spec.name in mismatched and spec.shape == expected[manifest.aliases.get(spec.name, spec.name)].shape
        for spec in specs
    )
    remedies = [
        "send every tensor that the engine holds" if missing else "",
        "leave out what it does not hold (merge adapters first)" if extra else "",
        "pass cast=True to convert floating dtypes, or load the engine with the trainer's dtype" if wrong_dtype else "",
        "give the engine the model that is trained" if mismatched and not wrong_dtype else "",
    ]
    raise WeightPlanMismatch(
        "the tensors are not those of the engine's model; nothing was changed. "
        + "".join(
            _labelled(label, part) for label, part in (("Missing", missing), ("Extra", extra), ("Wrong", mismatched))
        )
        + "To mend it: "
        + "; ".join(remedy for remedy in remedies if remedy)
        + ".",
        missing=list(missing),
        extra=list(extra),
        mismatched=list(mismatched),
    )


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
