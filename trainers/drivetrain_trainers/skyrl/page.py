"""The attributes that the groups of calls share."""

from __future__ import annotations

from drivetrain.engine.engine import InferenceEngine
from drivetrain_trainers.skyrl.transfer import WeightTransfers


class Page:
    """Attributes that ``SkyRLInferenceEngine`` sets."""

    engine: InferenceEngine
    """The engine behind this page."""
    transfers: WeightTransfers
    """Receives the weights of SkyRL's requests."""
