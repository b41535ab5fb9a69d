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
from drivetrain_transformers.recurrent_states import concatenated, put_states, states_of
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
    """Experts of the last position, (sequences, layers, experts per token), if any sequence wants them."""


class Budget:
    """Selects the sequences of one prefill: padded tokens are bounded, and cached prefixes are equally long."""

    def __init__(self, most: int, prefix_of: Prefill, first: Sequence) -> None:
        self._most = most
        self._prefill = prefix_of
        self._unique: set[tuple[object, ...]] = set()
        self._longest = 0
        self._prefix = prefix_of.cached_length(first)

    def takes(self, sequence: Sequence) -> bool:
        """Add ``sequence`` if it fits, and return whether it did; equal token ids are computed once."""
        ids = sequence.prefill_ids
        key = (sequence.request.lora, *sequence.cache_ids)
        if self._unique:
            if self._prefill.runs_alone:
                return False
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
    """Runs the prompts of joining sequences, several in one forward pass, equal ones once.

    Args:
        model: The model.
        prefixes: Cached prefixes; None: none are kept.
        max_tokens: Most tokens of one forward pass, padding included; a single prompt may be longer.
        chunk: Most tokens of one forward pass of a single sequence, whose prefixes are cached in multiples of this
            number; no other sequence is run with it. None: prompts are run together and whole.
    """

    def __init__(
        self, model: LoadedModel, prefixes: PrefixCache | None, max_tokens: int, *, chunk: int | None = None
    ) -> None:
        self._model = model
        self._prefixes = prefixes
        self._max_tokens = max_tokens
        self._chunk = chunk
        self.runs_alone = chunk is not None
        """True if a sequence is run without others."""
        self.keeps_prompts = prefixes is not None and (model.is_recurrent or self.runs_alone)
        """True if each prompt's cache is stored in the prefix cache just before the prompt's last forward pass.

        The cache of the longer sequence cannot serve later: recurrent states cannot be cut back to the prompt, and in
        deterministic mode decoding steps round differently from a prompt's passes.
        """

    def budget(self, first: Sequence) -> Budget:
        """Return a budget for a forward pass that begins with ``first``."""
        return Budget(self._max_tokens, self, first)

    def cached_length(self, sequence: Sequence) -> int:
        """Return the number of cached tokens to use: 0 if all positions must be computed, for logprobs or experts."""
        params = sequence.request.params
        if self._prefixes is None or params.prompt_logprobs is not None or params.return_prompt_routed_experts:
            return 0
        if sequence.media is not None and self.keeps_prompts:
            return 0  # prompts with media are run in one pass, and none of their prefixes are kept
        length, _ = self._found(self._prefixes, sequence)
        if sequence.media is not None:
            length = sequence.media.without_a_part(length)
        return length if self._model.continues_from(length, len(sequence.prefill_ids)) else 0

    def _found(self, prefixes: PrefixCache, sequence: Sequence) -> tuple[int, RowCache | None]:
        token_ids = sequence.cache_ids[: sequence.prefilled]
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
        boundaries = [] if has_media else self._boundaries(unique, prefix)
        computed = self._model.prefill(
            [sequence.prefill_ids[prefix:] for sequence in unique],
            [sequence.request.lora for sequence in unique],
            past,
            prefix,
            all_positions=wants_all or (scored > 0 and not self._model.has_head_apart),
            before_head=scored if self._model.has_head_apart else 0,
            states=any(sequence.request.params.return_hidden_states for sequence in group),
            experts=any(wants_experts(sequence.request.params) for sequence in group),
            boundaries=boundaries,
            between=partial(self._between, unique, past, prefix + boundaries[-1]) if boundaries else None,
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

    def _boundaries(self, unique: list[Sequence], prefix: int) -> list[int]:
        """Return the numbers of ids after a prefix at which one forward pass ends and the next begins."""
        longest = max(len(sequence.prefill_ids) for sequence in unique) - prefix
        if self._chunk is not None:
            return list(range(self._chunk, longest, self._chunk))
        return [longest - 1] if self.keeps_prompts and longest > 1 else []

    def _between(self, unique: list[Sequence], past: Cache, last: int, columns: int) -> None:
        """Between two forward passes: before the last one, put the prompts into the prefix cache.

        Args:
            unique: The sequences.
            past: Their cache, with ``columns`` columns.
            last: Number of columns before the last pass.
            columns: Number of columns now.
        """
        if self.runs_alone:
            # Rounding may depend on the memory layout, so use the layout of a cached prefix.
            put_states(past.layers, concatenated([states_of(past)]))
        if columns != last or self._prefixes is None or not self.keeps_prompts:
            return
        longest = max(len(sequence.prefill_ids) for sequence in unique)
        for row, sequence in enumerate(unique):
            token_ids = sequence.prefill_ids[: columns - longest]
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
    first = logits.shape[0] - len(sequence.prefill_ids)
    logprobs = logits[first : first + len(prompt) - 1].float().log_softmax(-1)
    given = torch.tensor(prompt[1:], dtype=torch.long, device=logits.device)
    own = logprobs.gather(-1, given[:, None])
    sequence.prompt_logprobs = [None, *own[:, 0].tolist()]
    if count := params.prompt_logprobs:
        sequence.prompt_top_logprobs = [None, *(top_logprobs(row, count) for row in logprobs)]
    if params.return_prompt_ranks:
        sequence.prompt_ranks = [None, *(logprobs >= own).sum(-1).tolist()]
