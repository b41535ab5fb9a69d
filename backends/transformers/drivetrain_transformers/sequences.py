"""State of one sample in the transformers backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.errors import DrivetrainError
from drivetrain.text.stops import StopMatcher
from drivetrain.types.outputs import FinishReason, ReleasedText, TopLogprobs, VersionSpan
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.token_scores import TokenScores
from drivetrain_sampling import Row
from drivetrain_sampling.packed_masks import joined

if TYPE_CHECKING:
    from drivetrain_transformers.grammars import GrammarState
    from drivetrain_transformers.row_media import RowMedia

Sink = Callable[[GenerateResult | TokenDelta | DrivetrainError], None]
"""Receives a sequence's result or error, and its deltas if it is streamed. Called in the scheduler's thread."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with its generated tokens and the state of its cache."""

    request: GenerateRequest
    row: Row
    sink: Sink
    streamed: bool
    arrival: int
    matcher: StopMatcher | None
    stop_ids: frozenset[int]
    prefilled: int | None = None
    """Number of tokens that prefill computes, before the others follow one at a time; None: every token."""
    media: RowMedia | None = None
    """Images and videos of the prompt."""
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    masks: list[bytes] = field(default_factory=list)
    """Ids that each token was drawn from, as the sampler packs them, if they are asked for."""
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    prompt_ranks: list[int | None] | None = None
    scores: TokenScores | None = None
    hidden_states: list[list[float]] = field(default_factory=list)
    """State that each id was drawn from, if the request wants them."""
    experts: list[torch.Tensor] = field(default_factory=list)
    """Experts of each token, of shape (layers, experts per token), if they are asked for."""
    prompt_experts: RoutedExperts | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    grammar: GrammarState | None = None
    """State of ``structured_output``; None without it, and while it is compiled."""
    released: ReleasedText | None = None
    """Text and ids that the stream may show after the last token; None without stop strings and regexes."""
    error: DrivetrainError | None = None
    """Error with which it ends, in place of a result."""
    epoch: int = 0
    """Epoch of the weights that made its cache; a cache made under several epochs is never kept as a prefix."""

    @property
    def generated(self) -> list[int]:
        """Ids sampled so far."""
        return self.row.generated

    @property
    def token_ids(self) -> list[int]:
        """Ids of prompt and output."""
        return self.request.prompt_token_ids + self.row.generated

    @property
    def prefill_ids(self) -> list[int]:
        """Ids that prefill computes."""
        return self.token_ids[: self.prefilled]

    @property
    def cache_ids(self) -> list[int]:
        """Ids of prompt and output, with keys of media in place of their placeholders; equal ones have equal caches."""
        return self.token_ids if self.media is None else self.media.keys(self.token_ids)

    def token_at(self, place: int) -> int:
        """Return the id at a place in prompt and output."""
        after = place - len(self.request.prompt_token_ids)
        return self.request.prompt_token_ids[place] if after < 0 else self.row.generated[after]

    def has_after(self, place: int) -> bool:
        """Return whether prompt and output have an id after this place."""
        return place + 1 < len(self.request.prompt_token_ids) + len(self.row.generated)

    def take_prompt_experts(self, experts: torch.Tensor) -> None:
        """Keep the experts of the prompt's tokens, unless an earlier prefill gave them.

        Args:
            experts: Shape (padded tokens, layers, experts per token); the last is the sequence's last token.
        """
        if self.prompt_experts is None:
            first = len(experts) - len(self.token_ids)
            prompt = experts[first : first + len(self.request.prompt_token_ids)]
            self.prompt_experts = RoutedExperts.of(prompt.cpu().numpy())

    def mark_version(self, version: str) -> None:
        """Record that the tokens since the last mark were sampled under ``version``."""
        start = self.spans[-1].end if self.spans else 0
        end = len(self.row.generated)
        if end > start:
            if self.spans and self.spans[-1].version == version:
                self.spans[-1] = VersionSpan(version, self.spans[-1].start, end)
            else:
                self.spans.append(VersionSpan(version, start, end))

    def take(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Append a sampled id; return None to continue, or the finish reason and the matched stop id, if any."""
        generated = self.row.generated
        generated.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason.STOP, token_id
        try:
            if self.grammar is not None:
                self.grammar.take(token_id)
            if self.matcher is not None:
                if self.matcher.push(token_id) is not None:
                    return FinishReason.STOP, None
                if self.streamed:
                    self.released = self.matcher.release()
        except DrivetrainError as error:
            self.error = error
            return FinishReason.ABORT, None
        if self.grammar is not None and self.grammar.is_complete and self.row.steps >= self.row.params.min_new_tokens:
            return FinishReason.STOP, None
        if len(generated) >= self.request.max_new_tokens:
            return FinishReason.LENGTH, None
        return None

    def result(self, reason: FinishReason, matched: int | None, version: str) -> GenerateResult:
        """Return the complete result.

        Raises:
            InvalidRequest: A stop regex takes too long.
        """
        self.mark_version(version)
        if self.request.max_new_tokens == 0 and reason is not FinishReason.ABORT:
            self.spans = [VersionSpan(version, 0, 0)]
        params = self.request.params
        return GenerateResult(
            token_ids=self.row.generated,
            finish_reason=reason,
            weight_versions=self.spans,
            matched_stop=matched,
            logprobs=(self.logprobs or []) if params.logprobs is not None else None,
            top_logprobs=(self.top_logprobs or []) if params.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
            prompt_ranks=self.prompt_ranks,
            scores=self.scores,
            cached_tokens=self.cached_tokens,
            hidden_states=self.hidden_states if params.return_hidden_states else None,
            routed_experts=self._own_experts() if params.return_routed_experts else None,
            prompt_routed_experts=self.prompt_experts,
            matched_text=self.matcher.outcome() if self.matcher is not None else None,
            sampling_mask=joined(self.masks),
        )

    def _own_experts(self) -> RoutedExperts:
        return RoutedExperts.of(torch.stack(self.experts).numpy()) if self.experts else RoutedExperts()
