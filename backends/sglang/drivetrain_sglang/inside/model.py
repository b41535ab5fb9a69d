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
from drivetrain_weight_sync import ModuleTarget


def checkpoint_of(model_config: Any) -> WeightManifest:
    """Names, shapes and ties of the tensors of SGLang's model, in the order of transformers' own."""
    config = transformers.AutoConfig.from_pretrained(
        model_config.model_path,
        revision=getattr(model_config, "revision", None),
        trust_remote_code=getattr(model_config, "trust_remote_code", False),
    )
    kind: Any = AutoModelForCausalLM
    if any("SequenceClassification" in name for name in config.architectures or ()):
        kind = AutoModelForSequenceClassification
    elif hasattr(config, "vision_config"):
        kind = AutoModelForImageTextToText
    with torch.device("meta"):
        model = kind.from_config(config)
    model.tie_weights()
    return ModuleTarget(model).manifest()


def eos_token_ids(model_config: Any) -> tuple[int, ...]:
    """The EOS ids of the generation configuration, or of the model's."""
    try:
        generation: Any = GenerationConfig.from_pretrained(model_config.model_path)
    except OSError:
        generation = None
    for source in (generation, model_config.hf_text_config, model_config.hf_config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (int(value),)
    return ()
