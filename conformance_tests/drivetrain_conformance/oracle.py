"""What the engine under test is compared with: the model's logits, computed in a way that bypasses the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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


@runtime_checkable
class RoundingOracle(Oracle, Protocol):
    """One that also knows how far rounding moves its logits, which is far where a router picks among experts."""

    def rounded_logits(self, token_ids: Sequence[int], unit: float) -> Iterator[Logits]:
        """Yield the logits again and again, each time with every weight off by about ``unit`` of its value."""
        ...


@runtime_checkable
class ImagesOracle(Oracle, Protocol):
    """One that also sees images."""

    def logits_beside(self, token_ids: Sequence[int], images: Sequence[bytes]) -> Logits:
        """Return logits of token ids among which each image stands as often as the model takes it."""
        ...


class TransformersOracle:
    """A transformers forward pass in float32 on the CPU: no cache, no batch, no padding."""

    def __init__(self, model: Path) -> None:
        self._path = model

    @cached_property
    def _model(self) -> PreTrainedModel:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        sees = hasattr(AutoConfig.from_pretrained(self._path), "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        with no_progress_bars():
            model: PreTrainedModel = kind.from_pretrained(self._path, dtype=torch.float32)
        model.requires_grad_(False)
        model.eval()
        return model

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Run the model over the whole sequence."""
        return _logits(self._model, token_ids)

    def rounded_logits(self, token_ids: Sequence[int], unit: float) -> Iterator[Logits]:
        """Yield those of eight copies of the model."""
        import torch

        generator = torch.Generator().manual_seed(0)
        for _ in range(8):
            other = copy.deepcopy(self._model)
            for parameter in other.parameters():
                parameter.mul_(1 + unit * torch.randn(parameter.shape, generator=generator))
            yield _logits(other, token_ids)

    @cached_property
    def _image_processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._path)

    def logits_beside(self, token_ids: Sequence[int], images: Sequence[bytes]) -> Logits:
        """Run the model over the whole sequence and the images."""
        import torch
        from PIL import Image

        opened = [Image.open(BytesIO(image)).convert("RGB") for image in images]
        made = self._image_processor(images=opened, return_tensors="pt")
        ids = torch.tensor([list(token_ids)])
        places = (ids == self._model.config.image_token_id).int()
        with torch.no_grad():
            logits = self._model(input_ids=ids, mm_token_type_ids=places, use_cache=False, **made).logits[0]
        return np.asarray(logits.double().numpy())

    def hidden_states(self, token_ids: Sequence[int]) -> Logits:
        """Run the model without its head over the whole sequence."""
        import torch

        with torch.no_grad():
            states = self._model.base_model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)[0][0]
        return np.asarray(states.double().numpy())


def _logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Logits:
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return np.asarray(logits.double().numpy())


def log_softmax(logits: Logits) -> Logits:
    """Logprobs along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
