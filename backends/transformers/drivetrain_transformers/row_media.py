"""Images and videos of one row: their places among its tokens, and the inputs of the model's forward pass for them.

The vision model runs within the forward pass that computes the places, and no image's features are kept. So new weights
of the vision model apply to every image that is computed after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class PlacedMedium:
    """One image or video of a row."""

    key: int
    """Number that stands for its content in prefix-cache keys: negative, and unique to the file."""
    token_id: int
    """Placeholder token id."""
    start: int
    """Index of its first placeholder in the row."""
    count: int
    """Number of placeholders."""
    inputs: Mapping[str, torch.Tensor]
    """Inputs of the forward pass by name. Those of several media are concatenated along their first dimension."""

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class RowMedia:
    """All images and videos of one row."""

    media: tuple[PlacedMedium, ...]
    """In the order of the row."""
    positions: torch.Tensor | None = None
    """Temporal, row and column position of each prompt token, shape (3, prompt tokens); None: as without media."""
    offset: int = 0
    """Difference between the position and the index of tokens after the prompt."""

    def keys(self, token_ids: list[int]) -> list[int]:
        """Return the row's token ids with each medium's key in place of its placeholders, for the prefix cache."""
        keys = list(token_ids)
        for medium in self.media:
            keys[medium.start : medium.end] = [medium.key] * medium.count
        return keys

    def without_a_part(self, length: int) -> int:
        """Return the greatest length up to ``length`` at which the row's beginning holds each medium whole or not."""
        return next((medium.start for medium in self.media if medium.start < length < medium.end), length)

    def positions_of(self, begin: int, end: int) -> torch.Tensor:
        """Return the positions of the tokens from ``begin`` to ``end``, of shape (3, tokens)."""
        assert self.positions is not None
        after = torch.arange(self.positions.shape[1], end) + self.offset
        return torch.cat([self.positions, after.expand(3, -1)], dim=1)[:, begin:end]


@dataclass(frozen=True, slots=True)
class Padded:
    """Left-padded rows after ``prefix`` cached tokens of each, on the CPU."""

    tokens: torch.Tensor
    """Shape (rows, padded tokens)."""
    positions: torch.Tensor
    """Shape (rows, padded tokens), or (3, rows, padded tokens) for models with positions in an image."""
    lengths: Sequence[int]
    """Tokens of each row after its prefix."""
    prefix: int

    def beginning(self, row: int) -> int:
        """Return the column at which the row's first token is or, if it is cached, would be."""
        return self.tokens.shape[1] - self.lengths[row] - self.prefix


class MediaPass:
    """A forward pass over rows of which some have images or videos.

    Args:
        module: The model.
        placeholders: Its placeholder token ids.
        rows: Media of each row.
        padded: The rows.
    """

    def __init__(
        self, module: PreTrainedModel, placeholders: Sequence[int], rows: Sequence[RowMedia | None], padded: Padded
    ) -> None:
        self._module = module
        self._rows = rows
        self._padded = padded
        self._strays = self._find_strays(placeholders)
        ordinary = next(token for token in range(len(placeholders) + 1) if token not in placeholders)
        self.tokens = padded.tokens.masked_fill(self._strays, ordinary)
        """Token ids to give the forward pass within :meth:`running`."""

    @property
    def positions(self) -> torch.Tensor:
        """Positions to give the forward pass."""
        plain, prefix = self._padded.positions, self._padded.prefix
        if all(row is None or row.positions is None for row in self._rows):
            return plain
        whole = plain.expand(3, -1, -1).clone()
        for index, (row, length) in enumerate(zip(self._rows, self._padded.lengths, strict=True)):
            if row is not None and row.positions is not None:
                whole[:, index, whole.shape[2] - length :] = row.positions_of(prefix, prefix + length)
        return whole

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return further inputs of the forward pass: media that no row's prefix holds, in the order of the rows."""
        parts: dict[str, list[torch.Tensor]] = {}
        for row in self._rows:
            for medium in self._computed(row):
                for name, tensor in medium.inputs.items():
                    parts.setdefault(name, []).append(tensor)
        joined = {name: torch.cat(_equally_large(tensors)).to(self._module.device) for name, tensors in parts.items()}
        return {name: one.to(self._module.dtype) if one.is_floating_point() else one for name, one in joined.items()}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the context, embed placeholder ids that stand for no medium as ordinary tokens, in one forward pass.

        A model may sample its placeholder token, and a prompt without media may hold it.
        """
        if not bool(self._strays.any()):
            yield
            return
        device = self._module.device
        tokens, strays = self._padded.tokens.to(device), self._strays.to(device)[..., None]

        def restore(layer: nn.Module, _: object, embedded: torch.Tensor) -> torch.Tensor:
            hook.remove()
            return torch.where(strays, layer(tokens), embedded)

        hook = self._module.get_input_embeddings().register_forward_hook(restore)
        try:
            yield
        finally:
            hook.remove()

    def _computed(self, row: RowMedia | None) -> Iterator[PlacedMedium]:
        """Yield the row's media after its prefix."""
        for medium in row.media if row is not None else ():
            if medium.start >= self._padded.prefix:
                yield medium

    def _find_strays(self, placeholders: Sequence[int]) -> torch.Tensor:
        strays = torch.isin(self._padded.tokens, torch.tensor(placeholders))
        for index, row in enumerate(self._rows):
            begin = self._padded.beginning(index)
            for medium in self._computed(row):
                strays[index, begin + medium.start : begin + medium.end] = False
        return strays


def _equally_large(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pad tensors with zeros to one shape but for the first dimension: some models cut images into several parts."""
    shapes = {tensor.shape[1:] for tensor in tensors}
    if len(shapes) == 1:
        return tensors
    most = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return [
        nn.functional.pad(
            tensor,
            [
                edge
                for size, own in zip(reversed(most), reversed(tensor.shape[1:]), strict=True)
                for edge in (0, size - own)
            ],
        )
        for tensor in tensors
    ]
