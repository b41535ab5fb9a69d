"""The weights that a fleet serves, and which engines are known to have the same ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import WeightState


@dataclass(frozen=True, slots=True)
class FleetWeights:
    """Weights by their version and origin: the update that brought them, the folder that holds them, or both."""

    version: str
    source: str | None
    """The folder or hub id that holds them; None: unknown, or they were pushed from memory."""
    update_id: str = ""
    """Id of the update that brought them; empty: unknown, or an engine loaded them when it started."""

    def known_as(self, other: FleetWeights) -> bool:
        """Return True if both are known to be the same weights under the same version.

        One version may name different weights: a trainer that starts again may count its steps from one again.
        """
        same_update = self.update_id != "" and self.update_id == other.update_id
        same_source = self.source is not None and self.source == other.source
        return self.version == other.version and (same_update or same_source)

    @property
    def origin(self) -> str:
        """Their origin, for messages."""
        return self.source or (f"the update {self.update_id[:8]}" if self.update_id else "unknown origin")


def weights_of(engine: InferenceEngine) -> FleetWeights:
    """Return the weights of an engine. Their origin is unknown if they are not committed."""
    version, update_id = engine.get_weight_version(), engine.parts.weights.update_id
    if engine.status.weights is not WeightState.CLEAN:
        return FleetWeights(version, None)
    if update_id:
        return FleetWeights(version, None, update_id)
    config = engine.config
    if engine.model_info.weight_version not in (None, config.weight_version):
        return FleetWeights(version, None)  # a server that was updated before this engine's page was made
    model = os.path.realpath(config.model) if os.path.exists(config.model) else config.model
    return FleetWeights(version, f"{model}@{config.revision}" if config.revision else model)


def most_common(weights: Sequence[FleetWeights]) -> int:
    """Return the index of the weights that most of these are known as; of equally common ones, the first."""
    counts = [max(1, sum(one.known_as(other) for other in weights)) for one in weights]
    return counts.index(max(counts))
