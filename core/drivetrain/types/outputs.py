"""Outputs of an engine. Frozen dataclasses, not pydantic models: the engine makes many, already valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling import LogprobsMode
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain.types.token_scores import TokenScores


class FinishReason(Enum):
    """The reason why a completion ended."""

    STOP = "stop"
    """A stop token id (EOS included), stop string or stop regex matched; ``matched_stop`` says which."""
    LENGTH = "length"
    """``max_new_tokens`` or the context length was reached."""
    ABORT = "abort"
    """The request was aborted; the completion holds the tokens generated until then."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Range of a completion's tokens, ``start`` (inclusive) to ``end`` (exclusive), sampled under ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MatchedText:
    """A sample's text, cut at the first match of its stop strings and regexes if there is one."""

    text: str
    """The remaining text."""
    token_count: int
    """Number of sampled ids that remain, without a stop token."""
    matched: str | None = None
    """The stop string, or the stop regex's pattern; None if nothing matched."""


@dataclass(frozen=True, slots=True)
class ReleasedText:
    """Text and ids of a stream that no later match of a stop string or regex can take away."""

    text: str
    """The text since the previous chunk."""
    token_count: int
    """Number of ids that are released, from the sample's first on."""


TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one position, as (token id, logprob), most likely first."""


class _TextLater:
    """Base of outputs whose ``text`` may be decoded on first access, which includes comparing, copying and pickling."""

    __slots__ = ("_make_text",)

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept misspelt attributes

        def __getattr__(self, name: str) -> Any:
            # Python calls this only if the slot is empty.
            if name != "text":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            text = object.__getattribute__(self, "_make_text")()
            object.__setattr__(self, "text", text)
            return text


@dataclass(frozen=True, slots=True)
class Completion(_TextLater):
    """One completion of one prompt."""

    request_id: str
    """The engine's id of this sample, as ``abort`` takes it."""
    prompt_index: int
    """Index of its prompt in the call."""
    sample_index: int
    """Index of this sample among the prompt's ``n``."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it."""
    token_ids: list[int]
    """The sampled ids, in order."""
    text: str
    """Decoded ``token_ids``, without a stop token and, unless asked for, without the stop string or match. Decoded on
    first access, unless stop strings had to be matched in it."""
    finish_reason: FinishReason
    matched_stop: int | str | None = None
    """The stop token id, stop string or stop regex that matched; None unless ``finish_reason`` is STOP."""
    logprobs: list[float] | None = None
    """One per token, in ``logprobs_mode``; None when not asked for."""
    logprobs_mode: LogprobsMode | None = None
    top_logprobs: list[TopLogprobs] | None = None
    """One list per token; None when not asked for."""
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token, raw; the first is None. None when not asked for, or aborted before the prompt was read."""
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    prompt_ranks: list[int | None] | None = None
    """Rank of each prompt token by raw logprob: the number of tokens that are at least as likely, itself included, so 1
    for the most likely. Tokens of equal logprob may have each other's ranks. The first is None. None when not asked
    for, or aborted before the prompt was read."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """Weight version of each token, as spans in order and without gaps over all of ``token_ids``. With
    ``max_new_tokens=0``, and from ``compute_logprobs``, one span without tokens: the version that scored the prompt."""
    cached_tokens: int = 0
    """Number of prompt tokens that were served from the prefix cache."""
    hidden_states: list[list[float]] | None = None
    """Hidden state from which each token was sampled: last layer, after the final norm, the input of the LM head. Shape
    (tokens, hidden size); None when not asked for."""
    routed_experts: RoutedExperts | None = None
    """Experts chosen in the forward pass that sampled each token; None when not asked for. The first token's are those
    of the prompt's last token."""
    prompt_routed_experts: RoutedExperts | None = None
    """Experts of each prompt token, cached ones included, chosen when the first token was drawn: a retraction does not
    change them. None when not asked for, or aborted before the prompt was read."""
    sampling_mask: SamplingMask | None = None
    """Ids that each token was drawn from, one position per token; None when not asked for."""
    scores: TokenScores | None = None
    """Logprobs that ``compute_logprobs`` was asked for with ``at``, ``temperature`` or ``last_n``. None when not asked
    for, or aborted before the prompt was read."""

    @property
    def weight_version(self) -> str | None:
        """The weight version of all tokens, or of the scores if no token was asked for; None if there are several."""
        versions = {span.version for span in self.weight_versions}
        return versions.pop() if len(versions) == 1 else None


def make_text_later(completion: Completion, make: Callable[[], str]) -> Completion:
    """Make ``completion`` decode its text by calling ``make`` on first access; returns the completion."""
    object.__setattr__(completion, "_make_text", make)
    object.__delattr__(completion, "text")
    return completion


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """New tokens and text of one completion of a stream."""

    request_id: str
    prompt_index: int
    sample_index: int
    token_ids: list[int]
    text: str
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    completion: Completion | None = None
    """The whole completion with its finish reason, on its last chunk only."""
    sampling_mask: SamplingMask | None = None
    """Ids that each of ``token_ids`` was drawn from; None when not asked for."""
    prompt_token_ids: Sequence[int] = ()
    """The prompt, with the placeholder tokens of its images, videos and sounds."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the completion ended; None while it goes on."""
        return self.completion.finish_reason if self.completion else None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """All completions of one call, ordered by prompt, then by sample."""

    completions: list[Completion] = field(default_factory=list)

    def by_prompt(self) -> list[list[Completion]]:
        """Return the completions grouped by prompt; see :func:`group_outputs_by_prompt`."""
        return group_outputs_by_prompt(self.completions)


def group_outputs_by_prompt(completions: Iterable[Completion]) -> list[list[Completion]]:
    """Group completions by prompt, in prompt order; each group is in sample order."""
    groups: dict[int, list[Completion]] = {}
    for completion in sorted(completions, key=lambda c: (c.prompt_index, c.sample_index)):
        groups.setdefault(completion.prompt_index, []).append(completion)
    return [groups[index] for index in sorted(groups)]
