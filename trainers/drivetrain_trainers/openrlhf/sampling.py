"""Translate OpenRLHF's requests, which carry vLLM's sampling parameters, and the answers that its executors read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.outputs import Completion, VersionSpan

_SAME: Final[tuple[str, ...]] = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logprobs",
)
_OTHER: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_WITHOUT_EFFECT: Final = frozenset({"output_kind", "output_text_buffer_length"})
"""They decide how vLLM streams; an executor waits for the whole answer."""
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's logprob, as vLLM returns it."""

    logprob: float
    rank: int | None = None
    """1 is the most likely token; None if the token is not among those that were asked for."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A completion, with the names of vLLM's."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    stop_reason: int | str | None
    """The stop token id or stop string that matched."""
    logprobs: list[dict[int, Logprob]] | None
    """For each token the sampled id and the most likely ones; None when not asked for."""
    weight_versions: tuple[VersionSpan, ...]
    """Weight version of each token. vLLM has no such field."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to a request, with the names of vLLM's."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


def sampling_params(given: object) -> dict[str, object]:
    """Translate a ``vllm.SamplingParams`` into fields of drivetrain's; vLLM need not be installed here.

    Raises:
        InvalidRequest: A field that drivetrain does not translate has another value than its default.
    """
    fields = dict(_fields(given))
    translated: dict[str, object] = {name: fields.pop(name) for name in _SAME if name in fields}
    translated |= {ours: fields.pop(theirs) for theirs, ours in _OTHER.items() if theirs in fields}
    translated["top_k"] = max(0, _integer("top_k", fields.pop("top_k", 0)))  # vLLM: -1 and 0 are off
    for several in ("stop", "stop_token_ids"):
        translated[several] = translated.get(several) or ()
    translated["logit_bias"] = fields.pop("logit_bias", None) or {}
    _require_defaults(given, fields)
    return translated


def _fields(given: object) -> Iterator[tuple[str, object]]:
    """Yield the public fields of a msgspec structure, as vLLM's is, or of any other object."""
    names = getattr(given, "__struct_fields__", None)
    if names is None:
        names = vars(given) if hasattr(given, "__dict__") else ()
    if not names:
        raise InvalidRequest(f"sampling_params={shown(given)}: expected vLLM's SamplingParams", field="sampling_params")
    for name in names:
        if not name.startswith("_"):
            yield name, getattr(given, name)


def _require_defaults(given: object, fields: Mapping[str, object]) -> None:
    """Raise for a field that would be dropped."""
    try:
        defaults: object = type(given)()
    except TypeError:  # its fields have no defaults
        defaults = None
    for name, value in fields.items():
        default = getattr(defaults, name, _MISSING)
        dropped = value if default is _MISSING else value != default
        if dropped and name not in _WITHOUT_EFFECT:
            raise InvalidRequest(
                f"sampling_params.{name}={shown(value)}: drivetrain does not translate this field of vLLM's; leave it "
                "out",
                field=f"sampling_params.{name}",
            )


def _integer(name: str, value: object) -> int:
    if type(value) is not int:
        raise InvalidRequest(f"sampling_params.{name}={shown(value)}: expected an integer", field=name)
    return value


def request_output(completions: list[Completion]) -> RequestOutput:
    """Return the completions of one prompt as vLLM's answer."""
    return RequestOutput(list(completions[0].prompt_token_ids), [_output(one) for one in completions])


def _output(completion: Completion) -> CompletionOutput:
    return CompletionOutput(
        index=completion.sample_index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason.value,
        stop_reason=completion.matched_stop,
        logprobs=_logprobs(completion),
        weight_versions=completion.weight_versions,
    )


def _logprobs(completion: Completion) -> list[dict[int, Logprob]] | None:
    if completion.logprobs is None:
        return None
    tops = completion.top_logprobs or [[] for _ in completion.token_ids]
    found: list[dict[int, Logprob]] = []
    for token, logprob, top in zip(completion.token_ids, completion.logprobs, tops, strict=True):
        ranked = {other: Logprob(its, rank) for rank, (other, its) in enumerate(top, 1)}
        sampled = ranked.get(token)
        found.append({token: Logprob(logprob, sampled.rank if sampled else None), **_without(ranked, token)})
    return found


def _without(ranked: Mapping[int, Logprob], token: int) -> dict[int, Logprob]:
    return {other: its for other, its in ranked.items() if other != token}
