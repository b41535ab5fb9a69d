"""What the engine under test is compared with: the model's logits, computed in a way that bypasses the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from drivetrain.progress_bars import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logits = NDArray[np.float64]


class Oracle(Protocol):
    """An independent source of a model's logits."""

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Return logits of shape (tokens, vocabulary); row i is the distribution of token i + 1."""
        ...


@runtime_checkable
class HiddenStatesOracle(Oracle, Protocol):
    """One that also knows what the language model's head is given."""

    def hidden_states(self, token_ids: Sequence[int]) -> Logits:
        """Return the last layer's states after the final norm, shape (tokens, hidden size)."""
        ...


class TransformersOracle:
    """A transformers forward pass in float32 on the CPU: no cache, no batch, no padding."""

    def __init__(self, model: Path) -> None:
        self._path = model

    @cached_property
    def _model(self) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        with no_progress_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32)
        model.requires_grad_(False)
        model.eval()
        return model

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Run the model over the whole sequence."""
        import torch

        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return np.asarray(logits.double().numpy())

    def hidden_states(self, token_ids: Sequence[int]) -> Logits:
        """Run the model without its head over the whole sequence."""
        import torch

        with torch.no_grad():
            states = self._model.base_model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)[0][0]
        return np.asarray(states.double().numpy())


def log_softmax(logits: Logits) -> Logits:
    """Logprobs along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
