"""What a checkpoint holds, as a trainer has it: learned from transformers without reading a weight."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from drivetrain.weights import WeightManifest
from drivetrain_weight_sync.target import ModuleTarget


def checkpoint_of(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> WeightManifest:
    """Names, shapes and ties of the tensors of a model folder, in the order of transformers' own."""
    config = transformers.AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    kind: Any = AutoModelForCausalLM
    if any("SequenceClassification" in name for name in config.architectures or ()):
        kind = AutoModelForSequenceClassification
    elif hasattr(config, "vision_config"):
        kind = AutoModelForImageTextToText
    with torch.device("meta"):
        made = kind.from_config(config, trust_remote_code=trust_remote_code)
    made.tie_weights()
    return ModuleTarget(made).manifest()


def eos_token_ids(model: str, *configs: Any) -> tuple[int, ...]:
    """The EOS ids of the folder's generation configuration, or else of the first configuration that has some."""
    try:
        generation: Any = GenerationConfig.from_pretrained(model)
    except OSError:
        generation = None
    for source in (generation, *configs):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (int(value),)
    return ()
