"""Translate a transformers model's in-memory tensor names to the names in the engine's checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from drivetrain.types.config import EngineConfig
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name

_logger = logging.getLogger(__name__)


class InMemoryNames:
    """Translates names of state dicts and ``named_parameters``, which come without the model that knows its checkpoint.

    Transformers stacks experts, and names parts of vision models differently in memory than in the checkpoint. The
    class of the engine's model knows both.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model: nn.Module | None = None
        self._tried = False

    def stored(self, tensors: Mapping[str, torch.Tensor], manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        """Return views of ``tensors`` by the engine's names; return ``tensors`` unchanged if a name stays unknown."""
        known = manifest.aliases.keys() | {spec.name for spec in manifest.tensors}
        if tensors.keys() <= known:
            return tensors
        if not self._tried:
            self._tried, self._model = True, self._without_weights()
        if self._model is None:
            return tensors
        found = by_checkpoint_name(self._model, tensors)
        return found if found.keys() <= known else tensors

    def _without_weights(self) -> nn.Module | None:
        config = self._config
        try:
            from drivetrain_weight_sync.tensors.meta_model import without_weights

            return without_weights(
                config.model, config.revision, trust_remote_code=config.trust_remote_code, local_files_only=True
            )
        except (ImportError, OSError, ValueError) as error:
            _logger.info("the model class of %s could not be loaded for its tensor names: %s", config.model, error)
            return None
