"""Checks of the served weights on demand: checksums, comparisons, and other values that an update must replace."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import EngineBusy, InvalidRequest
from drivetrain.types.weights import TensorData, TensorSpec
from drivetrain_fleet import Health, InferenceEngineClient
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

if TYPE_CHECKING:
    import torch

_RESET_VERSION: Final = "reset"

Checksums = dict[str, str]
"""SHA-256 of each tensor's bytes, in hexadecimal digits, by checkpoint name."""


class WeightChecks:
    """Reads the weights of every served engine back, one tensor after another; requests go on meanwhile.

    Args:
        engine: A started engine, or a fleet, each of whose engines is checked unless it has failed.
        weight_groups: Pushes the values of a reset.
    """

    def __init__(self, engine: InferenceEngine, weight_groups: WeightGroups) -> None:
        self._engine = engine
        self._weight_groups = weight_groups
        self._snapshot: dict[str, Checksums] | None = None

    async def checksums(self, leave_out: Sequence[str] = ()) -> list[Checksums]:
        """Return the checksums of each engine, without tensors whose names contain a text of ``leave_out``.

        Raises:
            UnsupportedCapability: An engine cannot read its weights back.
            EngineStateError: Its weights are asleep.
            EngineBusy: The weights changed meanwhile.
        """
        return [*(await self._by_engine(leave_out)).values()]

    async def _by_engine(self, leave_out: Sequence[str] = ()) -> dict[str, Checksums]:
        """Return the checksums of each engine by its name in the fleet; a single engine's name is empty."""
        if not isinstance(self._engine, InferenceEngineClient):
            return {"": await _checksums(self._engine, leave_out)}
        engines = self._engine.engines
        serving = [member.name for member in self._engine.members if member.health is not Health.FAILED]
        return {name: await _checksums(engines[name], leave_out) for name in serving}

    async def take_snapshot(self) -> None:
        """Keep the checksums for :meth:`changed_since_snapshot`.

        Raises:
            DrivetrainError: as :meth:`checksums`.
        """
        self._snapshot = await self._by_engine()

    async def changed_since_snapshot(self, leave_out: Sequence[str] = ()) -> list[str]:
        """Return the names of tensors that differ from the snapshot on some engine; drop it if there are none.

        Raises:
            InvalidRequest: There is no snapshot, or the fleet has lost or gained an engine since.
            DrivetrainError: as :meth:`checksums`.
        """
        snapshot = self._snapshot
        if snapshot is None:
            raise InvalidRequest("there is no snapshot to compare with; take one first", field="action")
        now = await self._by_engine(leave_out)
        if now.keys() != snapshot.keys():
            raise InvalidRequest(
                f"the snapshot is of {', '.join(sorted(snapshot))}, and the fleet now has {', '.join(sorted(now))}; "
                "take another one",
                field="action",
            )
        changed = {tensor for name, after in now.items() for tensor in _changed(snapshot[name], after)}
        if not changed and self._snapshot is snapshot:  # another one may have been taken meanwhile
            self._snapshot = None
        return sorted(changed)

    async def reset(self, leave_out: Sequence[str] = ()) -> None:
        """Serve random values as version ``"reset"`` until an update replaces them.

        Tensors whose names contain a text of ``leave_out`` keep their values.

        Raises:
            InvalidRequest: An update is open.
            DrivetrainError: as :meth:`checksums` or ``WeightSync.push``.
        """
        tensors: dict[str, torch.Tensor] = {}
        for spec in (await self._engine.weight_manifest()).tensors:
            if _is_left_out(spec.name, leave_out):
                read = await self._engine.get_weights_by_name(spec.name)
                tensors[spec.name] = await asyncio.to_thread(_tensor, read)
            else:
                tensors[spec.name] = await asyncio.to_thread(random_values, spec)
        await self._weight_groups.replace(tensors, _RESET_VERSION)


async def _checksums(engine: InferenceEngine, leave_out: Sequence[str]) -> Checksums:
    version = engine.get_weight_version()
    found: Checksums = {}
    for spec in (await engine.weight_manifest()).tensors:
        if not _is_left_out(spec.name, leave_out):
            tensor = await engine.get_weights_by_name(spec.name)
            found[spec.name] = await asyncio.to_thread(lambda data: hashlib.sha256(data).hexdigest(), tensor.data)
    if engine.get_weight_version() != version:
        raise EngineBusy("the weights changed while they were read; ask again")
    return found


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [name for name, checksum in after.items() if before.get(name) != checksum]


def _is_left_out(name: str, leave_out: Sequence[str]) -> bool:
    return any(part in name for part in leave_out)


def overall(checksums: Mapping[str, str]) -> str:
    """Return one checksum of all tensors of an engine."""
    every = hashlib.sha256()
    for name in sorted(checksums):
        every.update(f"{name} {checksums[name]}\n".encode())
    return every.hexdigest()


def _tensor(read: TensorData) -> torch.Tensor:
    import torch

    data = torch.frombuffer(bytearray(read.data), dtype=torch.uint8)
    return data.view(getattr(torch, read.spec.dtype)).reshape(read.spec.shape)


def random_values(spec: TensorSpec) -> torch.Tensor:
    """Return random values: from 0 to 1, booleans, or of the whole range of an integer dtype."""
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.rand(spec.shape).to(dtype)
    if dtype is torch.bool:
        return torch.rand(spec.shape) > 0.5
    bounds = torch.iinfo(dtype)
    return torch.randint(bounds.min, bounds.max, spec.shape, dtype=dtype)
