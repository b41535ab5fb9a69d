"""Prefill: compute the cache of sequences that join the batch, and the logits after their last token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from drivetrain.backend.toolkit.translation import wants_experts
from drivetrain_sampling import top_logprobs
from drivetrain_transformers.kv_cache import RowCache, row_cache
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.prefix_cache import PrefixCache
from drivetrain_transformers.recurrent_states import concatenated, put_states
from drivetrain_transformers.scoring import positions_of, score
from drivetrain_transformers.sequences import Sequence


@dataclass(slots=True)
class Prefilled:
    """A left-padded cache, the cache row of each sequence, and logits of shape (sequences, vocabulary)."""

    cache: Cache
    rows: list[int]
    logits: torch.Tensor
    states: torch.Tensor | None
    """Shape (sequences, hidden size), if any sequence wants hidden states."""
    experts: torch.Tensor | None
    """Those of the last position, (sequences, layers, experts per token), if any sequence wants experts."""


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
        key = (sequence.request.lora, *sequence.cache_ids)
        if self._unique:
            if self._prefill.cached_length(sequence) != self._prefix:
                return False
            if key in self._unique:
                return True
            # Padding between a cached prefix and the rest would leave a gap in the row.
            if self._prefix and len(ids) - self._prefix != self._longest:
                return False
            # A prompt is kept without its last token.
            if self._prefill.keeps_prompts and (len(ids) == 1) != (self._longest == 1):
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
        self.keeps_prompts = prefixes is not None and model.is_recurrent
        """True if the cache of each prompt is kept, because states of a longer sequence cannot be cut back to it."""

    def budget(self, first: Sequence) -> Budget:
        """Return a budget for a forward pass that begins with ``first``."""
        return Budget(self._max_tokens, self, first)

    def cached_length(self, sequence: Sequence) -> int:
        """Return the number of cached tokens to use: 0 if all positions must be computed, for logprobs or experts."""
        params = sequence.request.params
        if self._prefixes is None or params.prompt_logprobs is not None or params.return_prompt_routed_experts:
            return 0
        if sequence.media is not None and self._model.is_recurrent:
            return 0  # such a prefix cannot be cut back to the beginning of an image
        length, _ = self._found(self._prefixes, sequence)
        if sequence.media is not None:
            length = sequence.media.without_a_part(length)
        return length if self._model.continues_from(length, len(sequence.token_ids)) else 0

    def _found(self, prefixes: PrefixCache, sequence: Sequence) -> tuple[int, RowCache | None]:
        token_ids = sequence.cache_ids
        made_by = self._model.cache_identity(sequence.request.lora, len(token_ids))
        scored = positions_of(sequence)
        # The positions to score are computed, so that none of them may come from the cache.
        return prefixes.find(token_ids[: len(token_ids) - scored + 1] if scored else token_ids, made_by)

    def run(self, group: list[Sequence]) -> Prefilled:
        """Compute the cache of ``group``, whose cached prefixes are equally long."""
        order: dict[tuple[object, ...], int] = {}
        unique: list[Sequence] = []
        rows: list[int] = []
        for sequence in group:
            row = order.setdefault((sequence.request.lora, *sequence.cache_ids), len(order))
            rows.append(row)
            if row == len(unique):
                unique.append(sequence)
        prefix = self.cached_length(group[0])
        past = self._past(unique, prefix)
        wants_all = any(
            sequence.request.params.prompt_logprobs is not None and sequence.prompt_logprobs is None
            for sequence in group
        )
        has_media = any(sequence.media is not None for sequence in unique)
        scored = max(map(positions_of, group))
        keeps = self.keeps_prompts and len(unique[0].token_ids) > prefix + 1 and not has_media
        computed = self._model.prefill(
            [sequence.token_ids[prefix:] for sequence in unique],
            [sequence.request.lora for sequence in unique],
            past,
            prefix,
            all_positions=wants_all or (scored > 0 and not self._model.has_head_apart),
            before_head=scored if self._model.has_head_apart else 0,
            states=any(sequence.request.params.return_hidden_states for sequence in group),
            experts=any(wants_experts(sequence.request.params) for sequence in group),
            before_last=partial(self._keep_prompts, unique, past) if keeps else None,
            media=[sequence.media for sequence in unique] if has_media else (),
        )
        if scored:
            score(self._model, group, rows, computed)
        logits, states = computed.logits, computed.states
        for sequence, row in zip(group, rows, strict=True):
            if not sequence.generated:
                sequence.cached_tokens = prefix
            if sequence.request.params.prompt_logprobs is not None and sequence.prompt_logprobs is None:
                _score_prompt(sequence, logits[row])
            if computed.experts is not None and sequence.request.params.return_prompt_routed_experts:
                sequence.take_prompt_experts(computed.experts[row])
        index = torch.tensor(rows, device=logits.device)
        own_states = None if states is None else states.index_select(0, index)
        last = None if computed.experts is None else computed.experts[:, -1].index_select(0, index)
        return Prefilled(past, rows, logits[:, -1].index_select(0, index), own_states, last)

    def _keep_prompts(self, unique: list[Sequence], past: Cache) -> None:
        """Keep the cache of each sequence without its last token, which a prompt that comes again computes."""
        assert self._prefixes is not None
        for row, sequence in enumerate(unique):
            token_ids = sequence.token_ids[:-1]
            made_by = self._model.cache_identity(sequence.request.lora, len(token_ids))
            if not self._prefixes.holds(token_ids, made_by):
                self._prefixes.insert(token_ids, row_cache(past, row, len(token_ids)), made_by)

    def _past(self, unique: list[Sequence], prefix: int) -> DynamicCache:
        past = self._model.empty_cache()
        if prefix:
            assert self._prefixes is not None
            found = [row for sequence in unique if (row := self._found(self._prefixes, sequence)[1]) is not None]
            attention = [number for number, layer in enumerate(past.layers) if isinstance(layer, CacheLayerMixin)]
            for pair, layer in enumerate(attention or range(len(found[0].pairs))):
                keys = torch.cat([row.pairs[pair][0][:, :, :prefix] for row in found])
                values = torch.cat([row.pairs[pair][1][:, :, :prefix] for row in found])
                past.update(keys, values, layer)
            put_states(past.layers, concatenated([row.states for row in found]))
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
