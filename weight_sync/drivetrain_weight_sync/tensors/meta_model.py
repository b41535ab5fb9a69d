"""Instantiate a model's class without its weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)


def without_weights(
    model: str, revision: str | None = None, *, trust_remote_code: bool = False, local_files_only: bool = False
) -> nn.Module:
    """Return a folder's model on the meta device, in the class that trainers load."""
    config = transformers.AutoConfig.from_pretrained(
        model, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local_files_only
    )
    kind: Any = AutoModelForCausalLM
    if any("SequenceClassification" in name for name in config.architectures or ()):
        kind = AutoModelForSequenceClassification
    elif hasattr(config, "vision_config"):
        kind = AutoModelForImageTextToText
    elif hasattr(config, "audio_config"):
        kind = transformers.AutoModelForMultimodalLM  # older releases, as trainers may have, lack it
    with torch.device("meta"):
        made: nn.Module = kind.from_config(config, trust_remote_code=trust_remote_code)
    made.tie_weights()  # type: ignore[operator]
    return made
