"""Translate TRL's generation settings to sampling parameters; refuse what has no equivalent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.validation import check_sampling_params
from drivetrain.errors import InvalidRequest
from drivetrain.types.sampling import LogprobsMode, SamplingParams

_OTHER_NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
}
"""Names of vLLM and transformers that differ from ours in nothing else."""
_TRL_DECIDES: Final = frozenset({"n", "num_return_sequences", "logprobs"})
_NOT_RETURNED: Final = frozenset(
    {
        "prompt_logprobs",
        "return_prompt_ranks",
        "return_hidden_states",
        "return_routed_experts",
        "return_prompt_routed_experts",
    }
)
_GRAMMARS: Final[Mapping[str, tuple[str, str]]] = {
    "json": ("json_schema", "json_schema"),
    "regex": ("regex", "regex"),
    "grammar": ("ebnf", "ebnf"),
}
"""Keys of vLLM's structured outputs: our kind of grammar, and the name of its text."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Generation settings of a ``GRPOConfig``, under TRL's names."""

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    max_completion_length: int | None
    eos_token_ids: Sequence[int]
    """Ids that end a completion for TRL; the engine stops at these and at no others of its model's."""
    structured_outputs_regex: str | None = None
    generation_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Further settings, by vLLM's, transformers' or our names. They override the others, as in TRL."""


def sampling_params(settings: GenerationSettings) -> SamplingParams:
    """Return the sampling parameters that ``settings`` ask for.

    Raises:
        InvalidRequest: a setting has no equivalent, or a value cannot be honoured; nothing is dropped.
    """
    fields: dict[str, object] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "max_new_tokens": settings.max_completion_length,
        "logprobs": 0,
        "logprobs_mode": LogprobsMode.PROCESSED,
        # TRL counts a completion as truncated unless one of TRL's own ids ended it; the engine's model may have others.
        "ignore_eos": True,
    }
    eos, more_stops = list(settings.eos_token_ids), list[int]()
    for name, value in settings.generation_kwargs.items():
        if name in _TRL_DECIDES:
            _refuse(name, value, "TRL decides how many completions and which logprobs are returned; leave it out")
        if name in _NOT_RETURNED:
            _refuse(name, value, "TRL takes ids and the sampled tokens' logprobs only; leave it out")
        match name, value:
            case "eos_token_id", _:
                eos = _ids(name, value)
            case "stop_token_ids", _:
                more_stops = _ids(name, value)
            case "ignore_eos", bool():
                eos = [] if value else eos
            case "do_sample", bool():
                if not value:
                    fields["temperature"] = 0.0
            case "suppress_tokens", _:
                fields["logit_processors"] = [{"kind": "disallowed_tokens", "token_ids": _ids(name, value)}]
            case "structured_outputs", Mapping():
                fields["structured_output"] = _grammar(value)
            case _:
                fields[_OTHER_NAMES.get(name, name)] = value
    if settings.structured_outputs_regex is not None:
        if "structured_output" in fields:
            _refuse("generation_kwargs", "structured_outputs", "vllm_structured_outputs_regex is set too; give one")
        fields["structured_output"] = {"kind": "regex", "regex": settings.structured_outputs_regex}
    if fields["top_k"] in (None, -1):
        fields["top_k"] = 0
    if fields["min_p"] is None:
        fields["min_p"] = 0.0
    if isinstance(fields.get("stop"), list):
        fields["stop"] = tuple(fields["stop"])  # type: ignore[arg-type]
    if fields.get("stop") or fields.get("stop_regex"):
        # The ids that TRL gets from vLLM and transformers hold the stop string, so that no completion is empty.
        fields.setdefault("include_stop_str_in_output", True)
    fields["stop_token_ids"] = tuple(dict.fromkeys([*eos, *more_stops]))
    return check_sampling_params(fields)


def _grammar(given: Mapping[object, object]) -> dict[str, object]:
    named = {str(key): value for key, value in given.items() if value is not None}
    if len(named) != 1 or not named.keys() <= _GRAMMARS.keys():
        _refuse("structured_outputs", given, f"expected one of {', '.join(_GRAMMARS)}")
    ((key, text),) = named.items()
    kind, its_field = _GRAMMARS[key]
    return {"kind": kind, its_field: text if isinstance(text, str) else json.dumps(text)}


def _ids(name: str, value: object) -> list[int]:
    ids = [value] if isinstance(value, int) else value
    if not isinstance(ids, Sequence) or not all(type(one) is int for one in ids):
        _refuse(name, value, "expected a token id or a list of token ids")
    return list(ids)


def _refuse(name: str, value: object, remedy: str) -> NoReturn:
    raise InvalidRequest(f"generation_kwargs: {name}={shown(value)}: {remedy}", field=f"generation_kwargs.{name}")
