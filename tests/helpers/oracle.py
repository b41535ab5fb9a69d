"""Oracle: an independent transformers forward pass without cache, batch, or code of the backend under test."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain import Completion


@cache
def load(path: Path) -> PreTrainedModel:
    """Load a model, once per path."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.requires_grad_(False)
    model.eval()
    return model


def logits_of(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return the logits from which each output token was drawn, shape (output tokens, vocabulary)."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : len(prompt) + len(output) - 1].float()


def logprobs_of(model: PreTrainedModel, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Return the logprob of each output token at ``temperature``, shape (output tokens,)."""
    logits = logits_of(model, completion.prompt_token_ids, completion.token_ids) / temperature
    ids = torch.tensor(completion.token_ids)[:, None]
    return logits.log_softmax(-1).gather(-1, ids)[:, 0]
