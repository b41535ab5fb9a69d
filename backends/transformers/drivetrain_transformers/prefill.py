"""Prefill: compute the cache of sequences that join the batch, and the logits after their last token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicCache

from drivetrain_sampling import top_logprobs
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.prefix_cache import PrefixCache
from drivetrain_transformers.sequences import Sequence


@dataclass(slots=True)
class Prefilled:
    """A left-padded cache, the cache row of each sequence, and logits of shape (sequences, vocabulary)."""

    cache: Cache
    rows: list[int]
    logits: torch.Tensor
    states: torch.Tensor | None
    """Shape (sequences, hidden size), if any sequence wants hidden states."""


class Budget:
    """Selects the sequences of one forward pass: padded tokens are bounded, and cached prefixes are equally long."""

    def __init__(self, most: int, prefix_of: Prefill, first: Sequence) -> None:
        self._most = most
        self._prefill = prefix_of
        self._unique: set[tuple[object, ...]] = set()
        self._longest = 0
        self._prefix = prefix_of.cached_length(first)

    def takes(self, sequence: Sequence) -> bool:
        """Add ``sequence`` if it fits, and return whether it did; equal token ids are computed once."""
        ids = sequence.token_ids
        key = (sequence.request.lora, *ids)
        if self._unique:
            if self._prefill.cached_length(sequence) != self._prefix:
                return False
            if key in self._unique:
                return True
            # Padding between a cached prefix and the rest would leave a gap in the row.
            if self._prefix and len(ids) - self._prefix != self._longest:
                return False
        longest = max(self._longest, len(ids) - self._prefix)
        if self._unique and longest * (len(self._unique) + 1) > self._most:
            return False
        self._unique.add(key)
        self._longest = longest
        return True


class Prefill:
    """Runs the prompts of joining sequences, several in one forward pass, equal ones once."""

    def __init__(self, model: LoadedModel, prefixes: PrefixCache | None, max_tokens: int) -> None:
        self._model = model
        self._prefixes = prefixes
        self._max_tokens = max_tokens

    def budget(self, first: Sequence) -> Budget:
        """Return a budget for a forward pass that begins with ``first``."""
        return Budget(self._max_tokens, self, first)

    def cached_length(self, sequence: Sequence) -> int:
        """Return the number of cached tokens to use: 0 with prompt logprobs, which need every position computed."""
        if self._prefixes is None or sequence.request.params.prompt_logprobs is not None:
            return 0
        return self._found(self._prefixes, sequence)[0]

    def _found(self, prefixes: PrefixCache, sequence: Sequence) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        token_ids = sequence.token_ids
        return prefixes.find(token_ids, self._model.cache_identity(sequence.request.lora, len(token_ids)))

    def run(self, group: list[Sequence]) -> Prefilled:
        """Compute the cache of ``group``, whose cached prefixes are equally long."""
        order: dict[tuple[object, ...], int] = {}
        unique: list[Sequence] = []
        rows: list[int] = []
        for sequence in group:
            row = order.setdefault((sequence.request.lora, *sequence.token_ids), len(order))
            rows.append(row)
            if row == len(unique):
                unique.append(sequence)
        prefix = self.cached_length(group[0])
        past = self._past(unique, prefix)
        wants_all = any(
            sequence.request.params.prompt_logprobs is not None and sequence.prompt_logprobs is None
            for sequence in group
        )
        computed = self._model.prefill(
            [sequence.token_ids[prefix:] for sequence in unique],
            [sequence.request.lora for sequence in unique],
            past,
            prefix,
            all_positions=wants_all,
            states=any(sequence.request.params.return_hidden_states for sequence in group),
        )
        logits, states = computed.logits, computed.states
        for sequence, row in zip(group, rows, strict=True):
            if not sequence.generated:
                sequence.cached_tokens = prefix
            if sequence.request.params.prompt_logprobs is not None and sequence.prompt_logprobs is None:
                _score_prompt(sequence, logits[row])
        index = torch.tensor(rows, device=logits.device)
        own_states = None if states is None else states.index_select(0, index)
        return Prefilled(past, rows, logits[:, -1].index_select(0, index), own_states)

    def _past(self, unique: list[Sequence], prefix: int) -> DynamicCache:
        past = DynamicCache()
        if prefix:
            assert self._prefixes is not None
            found = [self._found(self._prefixes, sequence)[1] for sequence in unique]
            for layer in range(len(found[0])):
                keys = torch.cat([layers[layer][0][:, :, :prefix] for layers in found])
                values = torch.cat([layers[layer][1][:, :, :prefix] for layers in found])
                past.update(keys, values, layer)
        return past


def _score_prompt(sequence: Sequence, logits: torch.Tensor) -> None:
    """Set logprobs and ranks of the prompt's tokens, the first being None.

    Args:
        sequence: A sequence whose params ask for them.
        logits: Shape (padded tokens, vocabulary).
    """
    prompt, params = sequence.request.prompt_token_ids, sequence.request.params
    first = logits.shape[0] - len(sequence.token_ids)
    logprobs = logits[first : first + len(prompt) - 1].float().log_softmax(-1)
    given = torch.tensor(prompt[1:], dtype=torch.long, device=logits.device)
    own = logprobs.gather(-1, given[:, None])
    sequence.prompt_logprobs = [None, *own[:, 0].tolist()]
    if count := params.prompt_logprobs:
        sequence.prompt_top_logprobs = [None, *(top_logprobs(row, count) for row in logprobs)]
    if params.return_prompt_ranks:
        sequence.prompt_ranks = [None, *(logprobs >= own).sum(-1).tolist()]
