"""What an engine returns. Frozen dataclasses: they are made by the engine, in number, so nothing re-checks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from drivetrain.types.sampling import LogprobsMode


class FinishReason(Enum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token id (EOS included), stop string or stop regex matched; ``matched_stop`` says which."""
    LENGTH = "length"
    """``max_new_tokens`` or the context length was reached."""
    ABORT = "abort"
    """It was aborted; it holds what was generated until then."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a completion were sampled under ``version``."""

    version: str
    start: int
    end: int


TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one position, as (token id, logprob), most likely first."""


class _TextLater:
    """Base of what may have its ``text`` made when it is first asked for; equality, copies and pickles ask."""

    __slots__ = ("_make_text",)

    if not TYPE_CHECKING:  # or a misspelt attribute would have a type

        def __getattr__(self, name: str) -> Any:
            # Called when a slot is empty.
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
    """Which prompt of the call it belongs to."""
    sample_index: int
    """Which of the prompt's ``n`` samples it is."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it."""
    token_ids: list[int]
    """The ids that were sampled, in order."""
    text: str
    """Their decoding, without a stop token and, unless asked for, without the stop string or match. It is decoded when
    it is first read, unless stop strings were looked for in it."""
    finish_reason: FinishReason
    matched_stop: int | str | None = None
    """The stop token id, stop string or stop regex that ended it; None unless ``finish_reason`` is STOP."""
    logprobs: list[float] | None = None
    """One per token, in ``logprobs_mode``; None when not asked for."""
    logprobs_mode: LogprobsMode | None = None
    top_logprobs: list[TopLogprobs] | None = None
    """One list per token; None when not asked for."""
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token, raw; the first is None."""
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    """Which weight version made which tokens: spans in order, without gaps, over all of ``token_ids``."""
    cached_tokens: int = 0
    """Prompt tokens whose cache was found rather than computed."""
    hidden_states: list[list[float]] | None = None
    """The last layer's hidden state that each token was drawn from, after the final norm: what the language model's
    head was given. Shape (tokens, hidden size); None when not asked for."""
    routed_experts: list[list[list[int]]] | None = None
    """Experts of the forward pass that each token was drawn from, shape (tokens, MoE layers, experts per token); None
    when not asked for."""

    @property
    def weight_version(self) -> str | None:
        """The one version that made every token, or None when there are several (or no token)."""
        versions = {span.version for span in self.weight_versions}
        return versions.pop() if len(versions) == 1 else None


def make_text_later(completion: Completion, make: Callable[[], str]) -> Completion:
    """Let ``make`` say what a completion's text is when it is first read; returns the completion."""
    object.__setattr__(completion, "_make_text", make)
    object.__delattr__(completion, "text")
    return completion


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """What is new in one completion of a stream."""

    request_id: str
    prompt_index: int
    sample_index: int
    token_ids: list[int]
    text: str
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    completion: Completion | None = None
    """Only on a completion's last chunk: the whole of it, with its finish reason."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion ended, or None while it goes on."""
        return self.completion.finish_reason if self.completion else None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """All completions of one call, in the order of the prompts and, within one, of its samples."""

    completions: list[Completion] = field(default_factory=list)

    def by_prompt(self) -> list[list[Completion]]:
        """The completions grouped by prompt; see :func:`group_outputs_by_prompt`."""
        return group_outputs_by_prompt(self.completions)


def group_outputs_by_prompt(completions: Iterable[Completion]) -> list[list[Completion]]:
    """Group completions by their prompt, in the order of the prompts and of the samples within each."""
    groups: dict[int, list[Completion]] = {}
    for completion in sorted(completions, key=lambda c: (c.prompt_index, c.sample_index)):
        groups.setdefault(completion.prompt_index, []).append(completion)
    return [groups[index] for index in sorted(groups)]
