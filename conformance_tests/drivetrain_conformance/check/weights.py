"""Push the reference's weights to the engine, and compare the engine's tensors with them."""

from __future__ import annotations

from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain_conformance.assets.weight_sources import raw_bytes
from drivetrain_conformance.check.reference import Reference
from drivetrain_weight_sync import WeightSync, WeightSyncResult
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.source import Source, by_name

_READ_AT_MOST: Final = 4 << 30
"""Bytes of weights above which the engine's tensors are not read back one by one."""


async def push(engine: InferenceEngine, reference: Reference, version: str) -> WeightSyncResult:
    """Push the reference's module, as a trainer does; floating-point tensors are rounded to the engine's dtype.

    Raises:
        UnsupportedCapability: the engine takes no weights.
        WeightSyncError: the push failed.
    """
    async with WeightSync.connect(reference.module, engine, cast=True) as sync:
        return await sync.push(version=version)


async def differing_tensors(engine: InferenceEngine, reference: Reference) -> list[str] | None:
    """Return the names of the engine's tensors that are not the reference's; None if they cannot be read back."""
    if not engine.supports(Capability.READ_WEIGHTS):
        return None
    try:
        manifest = await engine.weight_manifest()
    except UnsupportedCapability:  # the engine takes no weights, and has no list of them
        return None
    named = by_name(Source(reference.module, InMemoryNames(engine.config)).pairs(manifest))
    if sum(tensor.nbytes for tensor in named.values()) > _READ_AT_MOST:
        return None
    found: list[str] = []
    for spec in manifest.tensors:
        own = named.get(spec.name)
        if own is not None:
            read = await engine.get_weights_by_name(spec.name)
            if read.data != raw_bytes(own.to(dtype_of(spec))):
                found.append(spec.name)
    return found
