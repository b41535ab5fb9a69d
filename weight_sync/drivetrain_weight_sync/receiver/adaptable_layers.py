"""Find the layers that an engine's adapters can change, under each name that an adapter may give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.types.config import EngineConfig
from drivetrain_weight_sync.tensors.meta_model import without_weights
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of weights by name."""


def shapes_in_language_model(config: EngineConfig) -> Sequence[Shapes]:
    """Return the shapes of a vision model's weights that adapters can change: those of its language model.

    VLLM ignores what an adapter holds for the other layers.

    Returns:
        The shapes by checkpoint name, as adapters of older releases name them; then by their names in memory, as
        trainers with today's transformers do.
    """
    model: Any = without_weights(config.model, config.revision, trust_remote_code=config.trust_remote_code)
    parameters = dict(model.named_parameters())
    language = [part for part in (model.get_decoder(), model.get_output_embeddings()) if isinstance(part, nn.Module)]
    within = {id(parameter) for part in language for parameter in part.parameters()}
    adapted = {name for name, parameter in parameters.items() if id(parameter) in within}
    in_memory = {_storage(parameter): name for name, parameter in parameters.items()}
    stored = by_checkpoint_name(model, parameters)
    return (
        {name: tuple(one.shape) for name, one in stored.items() if in_memory[_storage(one)] in adapted},
        {name: tuple(parameters[name].shape) for name in parameters if name in adapted},
    )


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage
