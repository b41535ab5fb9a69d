"""Embeddings and rewards: forward passes without a KV cache, and one vector or score for each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from drivetrain.backend.toolkit.folder_pooling import PoolingMode, folder_pooling
from drivetrain.errors import EngineStartError
from drivetrain.types.config import EngineConfig, Task
from drivetrain_transformers.model import LoadedModel

_TOLERATED: Final = 0.05
"""Largest share by which rounding may change a vector in a padded batch."""


class Pooler:
    """Turns token sequences into unit vectors, or scores them with the model's head.

    Args:
        model: The model.
        config: The engine's configuration.
        max_tokens: Most tokens of one forward pass, padding included; a single sequence may be longer.

    Raises:
        EngineStartError: The model's folder asks for another pooling, the model has no score, or padding changes its
            vectors.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._alone = config.deterministic
        self._pooling = folder_pooling(config) or PoolingMode.LAST
        self._head = getattr(model.module, "score", None)
        if config.task is Task.REWARD and self._head is None:
            raise EngineStartError(
                f"{type(model.module).__name__} has no layer 'score' over its last token's state; the transformers "
                "backend scores with no other kind of reward model"
            )
        self._check_padding()

    def groups(self, sequences: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield the indices of sequences that share a forward pass, each index once; similar lengths go together."""
        group: list[int] = []
        for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index])):
            if group and (self._alone or (len(group) + 1) * len(sequences[index]) > self._max_tokens):
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    @torch.inference_mode()
    def vectors(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return a vector of length 1 for each sequence, in one forward pass."""
        vectors: list[list[float]] = torch.nn.functional.normalize(self._pooled(sequences), dim=-1).tolist()
        return vectors

    @torch.inference_mode()
    def scores(self, sequences: list[list[int]]) -> list[float]:
        """Return the head's first output at each sequence's last token, in one forward pass."""
        assert self._head is not None
        states, _ = self._model.states(sequences)
        scores: list[float] = self._head(states[:, -1])[:, 0].float().tolist()
        return scores

    def _pooled(self, sequences: list[list[int]]) -> torch.Tensor:
        states, mask = self._model.states(sequences)
        match self._pooling:
            case PoolingMode.LAST:
                return states[:, -1].float()
            case PoolingMode.FIRST:
                return states[torch.arange(len(sequences)), mask.shape[1] - mask.sum(1)].float()
            case PoolingMode.MEAN:
                weights = mask[:, :, None].float()
                return (states.float() * weights).sum(1) / weights.sum(1)

    @torch.inference_mode()
    def _check_padding(self) -> None:
        """Check that a short row beside a longer one has the vector that it has alone, without position ids."""
        rows = [[5, 7, 11], [13, 17, 19, 23, 29, 31, 37] * 4]
        padded, mask = self._model.states(rows, pad=1)
        for row, ids in enumerate(rows):
            alone = self._model.module.base_model(input_ids=torch.tensor([ids], device=padded.device))[0][0].float()
            beside = padded[row, mask.shape[1] - len(ids) :].float()
            if not (beside - alone).norm() <= _TOLERATED * alone.norm():
                raise EngineStartError(
                    f"{type(self._model.module).__name__} gives other vectors in a padded batch than alone, so the "
                    "transformers backend does not serve it for embeddings or rewards; use another backend"
                )
