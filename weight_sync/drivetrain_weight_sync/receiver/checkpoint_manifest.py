"""Tensors and EOS ids of a checkpoint, read through transformers without loading weights."""

from __future__ import annotations

from transformers import GenerationConfig

from drivetrain.backend.toolkit.translation import eos_token_ids
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.receiver.weight_target import ModuleTarget
from drivetrain_weight_sync.tensors.meta_model import without_weights


def checkpoint_of(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> WeightManifest:
    """Return names, shapes and tied names of a model folder's tensors, in transformers' order."""
    return ModuleTarget(without_weights(model, revision, trust_remote_code=trust_remote_code)).manifest()


def eos_of_checkpoint(model: str, revision: str | None, *sources: object) -> tuple[int, ...]:
    """Return the EOS ids of the folder's generation configuration and of ``sources``."""
    try:
        generation: object = GenerationConfig.from_pretrained(model, revision=revision or "main")
    except OSError:
        generation = None
    return eos_token_ids(generation, *sources)
