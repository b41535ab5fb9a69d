"""State that a receiver keeps from one weight update to the next."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain.errors import InvalidRequest, WeightBaseMismatch, WeightSyncError
from drivetrain.types.weights import WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import check_geometry, check_plan
from drivetrain_weight_sync.transports.base import hash_of


class HeldDigest(NamedTuple):
    """Digests of a tensor that the engine holds."""

    whole: int
    """Digest of the checkpoint tensor."""
    part: int | None
    """Digest of this worker's part; None if it holds the whole."""


@dataclass(frozen=True, slots=True)
class _CheckedPlan:
    plan: WeightPlan
    manifest: WeightManifest
    hash: str
    names: tuple[str, ...]


class KeptAcrossUpdates:
    """The plan that passed its checks, the digests of the engine's weights, and the copies that were proved."""

    def __init__(self) -> None:
        self.proved: frozenset[str] = frozenset()
        """Tensors that were once read back after a digested copy and matched. Their copies need no further read."""
        self.held: Mapping[str, HeldDigest] = {}
        """Digests of the last update's tensors; empty if there is none, or if a delta cannot change it."""
        self.plan_number = 0
        """Number of the last plan; it increases with each different plan."""
        self._checked: _CheckedPlan | None = None

    def check(self, plan: WeightPlan, manifest: WeightManifest) -> None:
        """Check a plan, unless it is the one that was checked last."""
        checked = self._checked
        if checked is None or (checked.plan, checked.manifest) != (plan, manifest):
            check_plan(plan.tensors, manifest)
            check_geometry(plan)
            names = tuple(spec.name for spec in plan.tensors)
            self._checked = _CheckedPlan(plan, manifest, plan.hash, names)
            self.plan_number += 1

    def with_plan(self, request: WeightUpdateRequest, kept: str, digests: bytes) -> WeightUpdateRequest:
        """Restore the plan and the digests' names, which the request left out because this worker keeps the plan.

        Raises:
            WeightSyncError: the plan whose hash is ``kept`` is not the one that was checked last.
            InvalidRequest: ``digests`` does not hold one digest per tensor.
        """
        checked = self._checked
        if checked is None or checked.hash != kept:
            raise WeightSyncError(
                "the update refers to a plan that this worker does not hold; nothing was changed. Push again"
            )
        names = checked.names
        if len(digests) != 8 * len(names):
            raise InvalidRequest(
                f"the update has {len(digests)} bytes of digests for {len(names)} tensors; each takes 8",
                field="digests",
            )
        by_name = dict(zip(names, struct.unpack(f"<{len(names)}q", digests), strict=True))
        return request.model_copy(update={"plan": checked.plan, "digests": by_name})

    def base(self, base: str | None) -> Mapping[str, HeldDigest]:
        """Return the digests of the weights that a delta changes; empty if the update brings every tensor whole.

        Raises:
            WeightBaseMismatch: the engine does not hold the delta's base.
        """
        if base is None:
            return {}
        held = {name: digest.whole for name, digest in self.held.items()}
        if not held or hash_of(held) != base:
            raise WeightBaseMismatch(
                "the delta's base is not the engine's last update"
                f"{'' if held else ' (there is none, or it failed)'}; nothing was changed. Send every tensor whole"
            )
        return self.held
