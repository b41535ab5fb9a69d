"""Translate verl's sampling parameters to ours; each is honoured or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.sampling import SamplingParams

_SAME_NAME: Final = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "min_new_tokens",
        "stop_regex",
    }
)
_OTHER_NAME: Final[Mapping[str, str]] = {"min_tokens": "min_new_tokens"}
_BUDGETS: Final = ("max_tokens", "max_new_tokens")
_HANDLED: Final = frozenset({"top_k", "logprobs", "n", *_BUDGETS})
_WITHOUT_EFFECT: Final = frozenset({"detokenize"})
"""Parameters that change nothing: verl takes ids, and no text."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """verl's bounds on a response.

    Args:
        prompt: ``rollout.prompt_length``, in tokens.
        response: ``rollout.response_length``, in tokens.
        context: Tokens that the engine takes for prompt and response together.
    """

    prompt: int
    response: int
    context: int

    def budget(self, prompt_tokens: int, asked: int | None) -> int:
        """Return the most tokens to sample after a prompt, as verl's own rollouts bound them.

        Args:
            prompt_tokens: Tokens of the prompt, which may hold earlier turns.
            asked: The request's own limit; None: the rest of prompt and response together.

        Raises:
            InvalidRequest: The prompt fills the engine's context.
        """
        room = self.context - prompt_tokens
        if room < 1:
            raise InvalidRequest(
                f"prompt_ids has {prompt_tokens} tokens, and the engine's context is {self.context}; expected at least "
                "one token less: raise actor_rollout_ref.rollout.max_model_len or shorten the prompt",
                field="prompt_ids",
            )
        if asked is None:
            asked = min(self.response, self.prompt + self.response - prompt_tokens)
        return max(1, min(asked, room))


def sampling_params(
    given: Mapping[str, object], prompt_tokens: int, lengths: Lengths, defaults: Mapping[str, object]
) -> SamplingParams:
    """Return the parameters of one request.

    Args:
        given: The sampling parameters of verl's agent loop. A ``top_k`` of -1 is off; ``logprobs`` is a flag.
        prompt_tokens: Tokens of the prompt.
        lengths: Bounds on the response.
        defaults: Parameters of requests that do not name them.

    Raises:
        InvalidRequest: A parameter is unknown, or its value is out of range.
    """
    asked = {
        _OTHER_NAME.get(name, name): value
        for name, value in given.items()
        if value is not None and name not in _WITHOUT_EFFECT
    }
    if unknown := sorted(asked.keys() - _SAME_NAME - _HANDLED):
        raise InvalidRequest(
            f"sampling_params.{unknown[0]}={shown(asked[unknown[0]])}: the drivetrain rollout has no such parameter; "
            f"expected some of {', '.join(sorted(_SAME_NAME | _HANDLED))}",
            field=f"sampling_params.{unknown[0]}",
        )
    if asked.get("n", 1) != 1:
        raise InvalidRequest(
            f"sampling_params.n={shown(asked['n'])}: verl takes one response of a request; set rollout.n instead",
            field="sampling_params.n",
        )
    fields = {**defaults, **{name: value for name, value in asked.items() if name in _SAME_NAME}}
    if "top_k" in asked:
        fields["top_k"] = 0 if asked["top_k"] == -1 else asked["top_k"]
    fields["logprobs"] = _logprobs(asked.get("logprobs", False))
    fields["max_new_tokens"] = lengths.budget(prompt_tokens, _limit(asked))
    try:
        return SamplingParams.model_validate(fields)
    except ValidationError as error:
        field, message = describe_validation_error(error, SamplingParams)
        raise InvalidRequest(f"sampling_params: {message}", field=f"sampling_params.{field}") from None


def _limit(asked: Mapping[str, object]) -> int | None:
    given = [name for name in _BUDGETS if name in asked]
    if not given:
        return None
    value = asked[given[0]]
    if len(given) > 1 or not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(
            f"sampling_params.{given[0]}={shown(value)}: expected one whole number, as max_tokens or max_new_tokens",
            field=f"sampling_params.{given[0]}",
        )
    return value


def _logprobs(flag: object) -> int | None:
    """Translate verl's flag: its trainers use the sampled tokens' logprobs alone."""
    if isinstance(flag, bool):
        return 0 if flag else None
    raise InvalidRequest(
        f"sampling_params.logprobs={shown(flag)}: expected true or false; verl takes the sampled tokens' logprobs",
        field="sampling_params.logprobs",
    )
