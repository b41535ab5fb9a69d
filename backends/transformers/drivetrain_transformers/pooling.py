"""Embeddings and rewards: forward passes without a KV cache, and one vector or score for each sequence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final

import torch
from transformers.utils.hub import cached_file

from drivetrain.errors import EngineStartError
from drivetrain.types.config import EngineConfig, Task
from drivetrain_transformers.model import LoadedModel

_TOLERATED: Final = 0.05
"""Largest share by which rounding may change a vector in a padded batch."""


class Pooling(Enum):
    """The way in which the states of a sequence's tokens become one vector; values are sentence-transformers' names."""

    LAST = "lasttoken"
    FIRST = "cls_token"
    MEAN = "mean_tokens"


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
        self._pooling = pooling_of(config) if config.task is Task.EMBED else Pooling.LAST
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
            case Pooling.LAST:
                return states[:, -1].float()
            case Pooling.FIRST:
                return states[torch.arange(len(sequences)), mask.shape[1] - mask.sum(1)].float()
            case Pooling.MEAN:
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


def pooling_of(config: EngineConfig) -> Pooling:
    """Return the pooling that the model's folder names in sentence-transformers' files; the last token's without them.

    Raises:
        EngineStartError: The folder names a pooling or a further layer that this backend does not apply.
    """
    modules = _read(config, "modules.json")
    if not isinstance(modules, list):
        return Pooling.LAST
    pooling = Pooling.LAST
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            named = _read(config, f"{module['path']}/config.json")
            assert isinstance(named, dict)
            chosen = [
                name.removeprefix("pooling_mode_") for name, value in named.items() if value is True and "mode" in name
            ]
            if len(chosen) != 1 or chosen[0] not in {known.value for known in Pooling}:
                raise EngineStartError(
                    f"the model's folder asks for the pooling {', '.join(chosen) or 'of no mode'}; the transformers "
                    f"backend has: {', '.join(known.value for known in Pooling)}"
                )
            pooling = Pooling(chosen[0])
        elif kind not in ("Transformer", "Normalize"):
            raise EngineStartError(
                f"the model's folder asks for a {kind} layer over its vectors, which the transformers backend does not "
                "apply; use another backend"
            )
    return pooling


def _read(config: EngineConfig, name: str) -> object:
    """Read a JSON file of the model's folder or hub id; None if it has none."""
    path = cached_file(
        config.model,
        name,
        revision=config.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        found: object = json.load(file)
    return found
