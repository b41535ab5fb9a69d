"""Scheduler of the transformers backend: queue, running batch, and one step of it. No threads, no asyncio.

The bare loop of the backend is ``submit``, then ``step`` until ``idle``.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.backend.toolkit.translation import no_token_allowed, non_finite_logits, wants_experts
from drivetrain.errors import DrivetrainError, EngineOutOfMemory, UnsupportedCapability
from drivetrain.text.stops import StopMatcher
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import FinishReason
from drivetrain_sampling import NO_TOKEN, Drawn, Row, Sampler
from drivetrain_sampling.packed_masks import joined
from drivetrain_transformers.errors import as_engine_error
from drivetrain_transformers.kv_cache import RunningCache
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.prefill import Prefill
from drivetrain_transformers.prefix_cache import PrefixCache
from drivetrain_transformers.separate_caches import SeparateCaches
from drivetrain_transformers.sequences import Sequence, Sink

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from drivetrain_transformers.grammars import GrammarMask
    from drivetrain_transformers.row_media import RowMedia


class Scheduler:
    """Runs sequences from the queue to their end, one token per step for every running one.

    Args:
        model: The model.
        tokenizer: Decodes for stop strings and regexes.
        version: Label of the weights.
        max_rows: Most sequences that run at once.
        max_prefill_tokens: Most prompt tokens of one forward pass, padding included; a single prompt may be longer.
        prefix_cache_bytes: Memory for the prefixes of ended sequences; 0 keeps none.
        chunk: If given, results are deterministic: each forward pass computes one row, and prompts are computed in
            chunks of this length.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        *,
        version: str,
        max_rows: int,
        max_prefill_tokens: int,
        prefix_cache_bytes: int,
        chunk: int | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._row_limit = max_rows
        self._cache: RunningCache | SeparateCaches = (
            RunningCache(model.decode_graphs()) if chunk is None else SeparateCaches()
        )
        self.prefixes = PrefixCache(prefix_cache_bytes, whole=model.is_recurrent, block=chunk)
        self._prefill = Prefill(model, self.prefixes if prefix_cache_bytes else None, max_prefill_tokens, chunk=chunk)
        self._keeps_prefixes = prefix_cache_bytes > 0 and chunk is None
        """True if the caches of ended sequences are kept, generated tokens included."""
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._uncompiled: dict[str, Sequence] = {}
        """Sequences whose grammar is being compiled, by request id."""
        self._running: list[Sequence] = []
        self._mask: GrammarMask | None = None
        self._sampler: Sampler | None = None
        self._suspects: set[Sequence] = set()
        """Sequences of a step that failed. Each is admitted alone, to find the one that fails."""
        self._joining: list[Sequence] = []
        """Sequences that the current step admits."""
        self._touched = False
        """True once the current step may have changed the cache of running sequences."""
        self._arrivals = itertools.count()
        self._epoch = 0

    # State --------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if no sequence can run: none is in the batch or the queue."""
        return not self._running and not self._waiting

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, those whose grammar is being compiled included."""
        return len(self._waiting) + len(self._uncompiled)

    @property
    def kv_cache_bytes(self) -> int:
        """Memory held for keys and values, including prefixes of ended sequences."""
        return self._cache.nbytes + self.prefixes.nbytes

    # From outside, between steps ---------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerateRequest,
        sink: Sink,
        *,
        streamed: bool = False,
        grammar: CompiledGrammar | None = None,
        media: RowMedia | None = None,
    ) -> None:
        """Put a request into the queue; one that waits for its grammar only when :meth:`take_grammar` brings it."""
        if not self.model.choices and wants_experts(request.params):
            raise UnsupportedCapability(
                f"the layers of {self.model.info.architecture} do not show which experts they use; leave out "
                "return_routed_experts and return_prompt_routed_experts, or use another backend",
                capability=Capability.ROUTED_EXPERTS.value,
            )
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        params = request.params
        sequence = Sequence(
            request=request,
            row=Row(
                request.params,
                request.logprobs_mode,
                request.prompt_token_ids,
                request.stop_token_ids,
                seed,
                resumed=request.resumed_tokens,
            ),
            sink=sink,
            streamed=streamed,
            arrival=next(self._arrivals),
            matcher=StopMatcher(params, self._tokenizer) if StopMatcher.needed(params) else None,
            stop_ids=frozenset(request.stop_token_ids),
            prefilled=self._prefilled(request),
            media=media,
        )
        if request.params.structured_output is None:
            self._enqueue(sequence)
            return
        self._uncompiled[request.request_id] = sequence
        if grammar is not None:
            self.take_grammar(request.request_id, grammar)

    def _prefilled(self, request: GenerateRequest) -> int | None:
        """Return how many of the first ids prefill computes, also after a retraction; None if it computes all.

        With deterministic results, decoding computes generated ids again one at a time, as it did the first time.
        """
        if not self._prefill.runs_alone or request.max_new_tokens == 0:
            return None
        params, count = request.params, len(request.prompt_token_ids)
        wants_prompt = params.prompt_logprobs is not None or params.return_prompt_routed_experts
        return count if wants_prompt or request.resumed_tokens == count else count - request.resumed_tokens

    def take_grammar(self, request_id: str, grammar: CompiledGrammar | DrivetrainError) -> None:
        """Give a request its compiled grammar, or the error that it ends with; do nothing if it ended meanwhile."""
        from drivetrain_transformers.grammars import GrammarMask, GrammarState

        sequence = self._uncompiled.pop(request_id, None)
        if sequence is None:
            return
        if isinstance(grammar, DrivetrainError):
            sequence.sink(grammar)
            return
        try:
            sequence.grammar = GrammarState(grammar, sequence.row.drawn())
        except DrivetrainError as error:
            sequence.sink(error)
            return
        self._mask = self._mask or GrammarMask(self.model.device)
        self._enqueue(sequence)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End sequences with the tokens they have, whether running, waiting or frozen."""
        chosen = set(request_ids)
        for request_id in chosen & self._uncompiled.keys():
            self._deliver(self._uncompiled.pop(request_id), FinishReason.ABORT, None)
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row].request.request_id in chosen:
                self._end(row, FinishReason.ABORT, None, keep_prefix=False)
        kept = []
        for item in self._waiting:
            sequence = item[2]
            if sequence.request.request_id in chosen:
                self._deliver(sequence, FinishReason.ABORT, None)
            else:
                kept.append(item)
        heapq.heapify(kept)
        self._waiting = kept

    def retract(self) -> None:
        """Free the cache of every running sequence and put it back into the queue; later steps recompute the cache."""
        for sequence in self._running:
            self._enqueue(sequence)
        self._clear_rows(free=True)

    def weights_changed(self, version: str) -> None:
        """Label tokens sampled from here on with ``version``, and keep no cache of the old weights as a prefix."""
        self.relabel(version)
        self._epoch += 1
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs of steps: the weights that they read change, or their memory goes."""
        self._cache.drop_graphs()

    def relabel(self, version: str) -> None:
        """Label tokens sampled from here on with ``version``."""
        for sequence in itertools.chain(self._running, (item[2] for item in self._waiting)):
            sequence.mark_version(self.version)
        self.version = version

    def free_cache(self) -> None:
        """Free the memory of all keys and values; no sequence may be running."""
        assert not self._running, "sequences that run hold their cache"
        self._clear_rows(free=True)
        self.prefixes.clear()

    def fail_all(self, error: DrivetrainError) -> None:
        """End every sequence with an error."""
        for sequence in (*self._running, *(item[2] for item in self._waiting), *self._uncompiled.values()):
            sequence.sink(error)
        self._waiting = []
        self._uncompiled = {}
        self._clear_rows(free=True)

    # One step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit sequences with their first token if there is room; otherwise draw one token for each running one.

        Out of memory, every sequence goes back to the queue, and from then on half as many run at once; a sequence that
        does not fit even alone ends with an error. After any other error they also go back to the queue, and join one
        by one; a sequence that fails alone ends with the error. Generated tokens are never lost.
        """
        self._touched = False
        try:
            if self._has_room(0):
                self._admit()
            elif self._running:
                self._touched = True
                self._retract_rows_that_grow_long()
                if self._running:
                    self._decode_all()
        except Exception as error:
            self._recover(as_engine_error(error))
        self._joining = []
        if self.idle:
            self._row_limit = self._max_rows
            self._suspects.clear()

    def _has_room(self, joining: int) -> bool:
        """Return True if a sequence waits and there is a row for it, beside the running ones and ``joining`` others."""
        return bool(self._waiting) and len(self._running) + joining < self._row_limit

    def _admit(self) -> None:
        group: list[Sequence] = []
        self._joining = [self._waiting[0][2]]
        try:
            budget = self._prefill.budget(self._waiting[0][2])
            while self._has_room(len(group)) and budget.takes(self._waiting[0][2]):
                if group and not self._suspects.isdisjoint((group[0], self._waiting[0][2])):
                    break
                group.append(heapq.heappop(self._waiting)[2])
            self._joining = group
            prefilled = self._prefill.run(group)
        except BaseException:
            for sequence in group:
                self._enqueue(sequence)
            raise
        to_run = [index for index, sequence in enumerate(group) if sequence.request.max_new_tokens > 0]
        for sequence in group:
            sequence.epoch = self._epoch
            if sequence.request.max_new_tokens == 0:
                self._deliver(sequence, FinishReason.LENGTH, None)
        if not to_run:
            return
        joined = [group[index] for index in to_run]
        self._touched = True
        try:
            self._cache.admit(
                prefilled.cache, [prefilled.rows[i] for i in to_run], [len(sequence.prefill_ids) for sequence in joined]
            )
        except BaseException:
            for sequence in joined:
                self._enqueue(sequence)
            raise
        first = len(self._running)
        self._running.extend(joined)
        self._sampler = None
        self._suspects.difference_update(group)
        if joined[0].has_after(self._cache.lengths[first] - 1):
            return  # steps compute the sequence's other tokens again
        sampler = Sampler([sequence.row for sequence in joined], self.model.device)
        drawn = self._draw(sampler, prefilled.logits[to_run], joined)
        states, experts = (None if found is None else found[to_run] for found in (prefilled.states, prefilled.experts))
        self._take(drawn, states, experts, first)

    def _retract_rows_that_grow_long(self) -> None:
        """Retract rows whose next token changes their longrope factors: all their tokens are computed again."""
        short = self.model.short_length
        if short is None:
            return
        for row in range(len(self._running) - 1, -1, -1):
            if self._cache.lengths[row] == short:
                sequence = self._release(row)
                if sequence.prefilled is not None:
                    sequence.prefilled = short + 1
                self._enqueue(sequence)

    def _decode_all(self) -> None:
        """Compute one token of each running row: of all rows together, or of each alone."""
        if isinstance(self._cache, RunningCache):
            self._decode(self._running, self._cache, 0)
            return
        # From the last row on, as the last one takes the place of one that ends.
        for row in range(len(self._running) - 1, -1, -1):
            sequence = self._running[row]
            self._joining = [sequence]
            self._sampler = None
            self._decode([sequence], self._cache[row], row)

    def _decode(self, sequences: list[Sequence], cache: RunningCache, first: int) -> None:
        """Run one decode step for the rows from ``first`` on, and draw their next tokens.

        A row that runs alone after a retraction may only compute an id again that was drawn before: draw none then.
        """
        cache.open_column()
        computed = self.model.decode(
            [sequence.token_at(length) for sequence, length in zip(sequences, cache.lengths, strict=True)],
            [sequence.request.lora for sequence in sequences],
            cache,
            states=any(sequence.request.params.return_hidden_states for sequence in sequences),
            experts=any(sequence.request.params.return_routed_experts for sequence in sequences),
            media=[sequence.media for sequence in sequences] if self.model.placeholders else (),
        )
        cache.close_column()
        if sequences[0].has_after(cache.lengths[0] - 1):
            return
        if self._sampler is None:
            self._sampler = Sampler([sequence.row for sequence in sequences], self.model.device)
        experts = None if computed.experts is None else computed.experts[:, -1]
        self._take(self._draw(self._sampler, computed.logits, sequences), computed.states, experts, first)

    def _draw(self, sampler: Sampler, logits: torch.Tensor, sequences: list[Sequence]) -> Drawn:
        """Draw a token for each row of ``logits``, among those that its grammar allows."""
        if all(sequence.grammar is None for sequence in sequences):
            return sampler.draw(logits)
        assert self._mask is not None, "the first grammar brings it"
        return sampler.draw(self._mask.apply(logits, [sequence.grammar for sequence in sequences]), logits)

    def _take(self, drawn: Drawn, states: torch.Tensor | None, experts: torch.Tensor | None, first: int) -> None:
        """Give each row from ``first`` on its token, state and experts; end the sequences that end with the token."""
        states = None if states is None else states.float().cpu()
        experts = None if experts is None else experts.cpu()
        ended: list[tuple[int, FinishReason, int | None]] = []
        failed: list[tuple[int, int]] = []
        for offset, token_id in enumerate(drawn.token_ids):
            row = first + offset
            sequence = self._running[row]
            if token_id < 0:
                failed.append((row, token_id))
                continue
            if drawn.logprobs is not None and sequence.request.params.logprobs is not None:
                if sequence.logprobs is None:
                    sequence.logprobs = []
                sequence.logprobs.append(drawn.logprobs[offset])
            if offset in drawn.top_logprobs:
                if sequence.top_logprobs is None:
                    sequence.top_logprobs = []
                sequence.top_logprobs.append(drawn.top_logprobs[offset])
            if states is not None and sequence.request.params.return_hidden_states:
                sequence.hidden_states.append(states[offset].tolist())
            if experts is not None and sequence.request.params.return_routed_experts:
                sequence.experts.append(experts[offset])
            if offset in drawn.masks:
                sequence.masks.append(drawn.masks[offset])
            end = sequence.take(token_id)
            if end is not None:
                ended.append((row, *end))
            elif sequence.streamed:
                sequence.sink(_delta(sequence))
        if failed:
            self._end_failed(ended, failed)
            return
        if len(ended) == len(self._running) and not self._keeps_prefixes:
            finished = list(self._running)
            self._clear_rows(free=False)
            for row, reason, matched in ended:
                self._deliver(finished[row], reason, matched)
            return
        for row, reason, matched in reversed(ended):
            self._end(row, reason, matched, keep_prefix=True)

    # Ends --------------------------------------------------------------------------------------------------------

    def _end_failed(self, ended: list[tuple[int, FinishReason, int | None]], failed: list[tuple[int, int]]) -> None:
        """End rows from which no token could be drawn, each with its own error, and rows that ended normally."""
        ends = {row: (reason, matched) for row, reason, matched in ended}
        failures = dict(failed)
        for row in sorted(ends.keys() | failures.keys(), reverse=True):
            if row in ends:
                reason, matched = ends[row]
                self._end(row, reason, matched, keep_prefix=True)
                continue
            sequence = self._running[row]
            count = len(sequence.generated)
            if failures[row] == NO_TOKEN:
                error: DrivetrainError = no_token_allowed(sequence.request, count)
            else:
                error = non_finite_logits(sequence.request, count)
            self._fail(row, error)

    def _fail(self, row: int, error: DrivetrainError) -> None:
        """End one row with an error, and erase its cache, which may hold NaN."""
        self._cache.erase(row)
        self._release(row).sink(error)

    def _end(self, row: int, reason: FinishReason, matched: int | None, *, keep_prefix: bool) -> None:
        sequence = self._running[row]
        if keep_prefix:
            self._keep_prefix(row, sequence)
        self._release(row)
        self._deliver(sequence, reason, matched)

    def _release(self, row: int) -> Sequence:
        """Remove a sequence from the batch; the last row takes its place."""
        sequence = self._running[row]
        moved = self._cache.release(row)
        self._running[row] = self._running[moved]
        self._running.pop()
        self._sampler = None
        return sequence

    def _keep_prefix(self, row: int, sequence: Sequence) -> None:
        tokens = self._cache.lengths[row]
        length = tokens // self.prefixes.block * self.prefixes.block
        if not self._keeps_prefixes or length == 0 or sequence.epoch != self._epoch:
            return
        if sequence.media is not None and self.model.is_recurrent:
            return
        token_ids, made_by = sequence.cache_ids[:length], self.model.cache_identity(sequence.request.lora, tokens)
        if not self.prefixes.holds(token_ids, made_by):
            self.prefixes.insert(token_ids, self._cache.read(row, length), made_by)

    def _deliver(self, sequence: Sequence, reason: FinishReason, matched: int | None) -> None:
        if sequence.error is not None:
            sequence.sink(sequence.error)
            return
        try:
            result = sequence.result(reason, matched, self.version)
        except DrivetrainError as error:
            sequence.sink(error)
            return
        sequence.sink(_last_delta(sequence, result) if sequence.streamed else result)

    def _recover(self, error: DrivetrainError) -> None:
        if not isinstance(error, EngineOutOfMemory):
            self._isolate(error)
            return
        together = max(1, len(self._running))
        if together == 1 and self._row_limit == 1:
            error.batch_size = 1
            victims = self._running[:1] or [heapq.heappop(self._waiting)[2]]
            self._clear_rows(free=True)
            for sequence in victims:
                sequence.sink(error)
            return
        self.retract()
        self.prefixes.clear()
        self._row_limit = max(1, min(self._row_limit, together) // 2)
        self.model.release_unused_memory()

    def _isolate(self, error: DrivetrainError) -> None:
        """Narrow a failed step down to one sequence, and end only that one with the error."""
        involved = self._joining or list(self._running)
        if self._touched:
            self.retract()
        involved = [sequence for _, _, sequence in self._waiting if sequence in involved]
        if len(involved) > 1:
            self._suspects.update(involved)
            return
        self._waiting = [item for item in self._waiting if item[2] not in involved]
        heapq.heapify(self._waiting)
        for sequence in involved:
            sequence.sink(error)

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (-sequence.request.priority, sequence.arrival, sequence))

    def _clear_rows(self, *, free: bool) -> None:
        self._running = []
        self._sampler = None
        self._cache.clear(free=free)


def _delta(sequence: Sequence) -> TokenDelta:
    return TokenDelta(
        token_ids=[sequence.generated[-1]],
        logprobs=[sequence.logprobs[-1]] if sequence.logprobs else None,
        top_logprobs=[sequence.top_logprobs[-1]] if sequence.top_logprobs else None,
        released=sequence.released,
        sampling_mask=joined(sequence.masks[-1:]),
    )


def _last_delta(sequence: Sequence, result: GenerateResult) -> TokenDelta:
    if result.finish_reason is FinishReason.ABORT or not sequence.generated:
        return TokenDelta([], [] if result.logprobs is not None else None, None, result)
    last = _delta(sequence)
    return TokenDelta(last.token_ids, last.logprobs, last.top_logprobs, result, sampling_mask=last.sampling_mask)
