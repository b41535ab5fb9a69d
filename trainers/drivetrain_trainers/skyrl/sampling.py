"""SkyRL's sampling parameters, which are SGLang's or vLLM's, translated to the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest

_RENAMED: Final = {
    "max_tokens": "max_new_tokens",
    "max_generate_length": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
    "lora_name": "lora",
}
_PAYLOAD_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_GRAMMARS: Final = ("json_schema", "regex", "ebnf")
_PROCESSORS: Final = {
    "action_mask": ("action_mask", "allowed_token_ids"),
    "disallowed_tokens": ("disallowed_tokens", "token_ids"),
}
"""SkyRL's field → kind of the engine's processor, and its field."""
_WRITTEN_PROCESSORS: Final = {"rl_action_mask": "action_mask", "disallowed_tokens": "disallowed_tokens"}
"""Prefix of a processor that SkyRL has written as text → the field that means the same."""


@dataclass(frozen=True, slots=True)
class SamplingCall:
    """Sampling parameters, and the arguments of ``generate`` that SkyRL puts among them."""

    params: Mapping[str, object]
    """Fields of ``SamplingParams``; the engine checks them."""
    lora: str | None
    priority: int

    @property
    def n(self) -> int:
        """Samples per prompt."""
        n = self.params.get("n", 1)
        return n if isinstance(n, int) else 1


def sampling_call(given: Mapping[str, object]) -> SamplingCall:
    """Translate the parameters of a batch. None is a default; fields that are unknown here go to the engine, which
    refuses them by name.

    Raises:
        InvalidRequest: A value cannot be honoured, or two names of one parameter disagree.
    """  # noqa: D205
    fields = _translated(given)
    _logprobs(fields)
    lora, priority = fields.pop("lora", None), fields.pop("priority", 0)
    if lora is not None and not isinstance(lora, str):
        raise InvalidRequest(f"lora_name={shown(lora)}: expected the name of a loaded adapter", field="lora_name")
    assert isinstance(priority, int)
    return SamplingCall(fields, lora, priority)


def payload_of(body: Mapping[str, object]) -> dict[str, object]:
    """Translate the body of an OpenAI request, in which SkyRL's engines take SGLang's fields too.

    Two keys have no effect: SkyRL's client needs ``session_id`` only to choose an engine, and token ids are returned
    for any ``return_token_ids``.

    Raises:
        InvalidRequest: A value cannot be honoured.
    """
    fields = _translated({name: value for name, value in body.items() if name != "session_id"})
    if fields.get("return_token_ids") is True:
        del fields["return_token_ids"]
    return {_PAYLOAD_NAMES.get(name, name): value for name, value in fields.items()}


def _translated(given: Mapping[str, object]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in given.items():
        if value is None:
            continue
        new = _RENAMED.get(name, name)
        if fields.get(new, value) != value:
            raise InvalidRequest(f"{name}={shown(value)}: {new}={shown(fields[new])} says otherwise", field=name)
        fields[new] = value
    if fields.get("top_k") == -1:
        del fields["top_k"]
    if fields.get("spaces_between_special_tokens") is True:
        del fields["spaces_between_special_tokens"]
    _keep_stops(fields)
    _priority(fields)
    _grammar(fields)
    _processors(fields)
    biases = fields.get("logit_bias")
    if isinstance(biases, Mapping):
        fields["logit_bias"] = {int(i) if isinstance(i, str) and i.isdecimal() else i: b for i, b in biases.items()}
    return fields


def _keep_stops(fields: dict[str, object]) -> None:
    """SkyRL always asks for stop strings to be kept, also if there are none."""
    keep = fields.pop("no_stop_trim", False)
    kept = fields.pop("include_stop_str_in_output", keep)
    if kept is not False and (fields.get("stop") or fields.get("stop_regex")):
        fields["include_stop_str_in_output"] = kept


def _priority(fields: dict[str, object]) -> None:
    priority = fields.get("priority", 0)
    if type(priority) is not int:
        raise InvalidRequest(f"priority={shown(priority)}: expected an integer; lower is sooner", field="priority")
    if "priority" in fields:
        fields["priority"] = -priority  # the engine's higher is sooner


def _grammar(fields: dict[str, object]) -> None:
    given = [name for name in _GRAMMARS if name in fields]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} are given; one grammar can hold at a time", field=given[1])
    for name in given:
        value = fields.pop(name)
        text = json.dumps(value) if isinstance(value, Mapping | bool) else value
        fields["structured_output"] = {"kind": name, name: text}


def _processors(fields: dict[str, object]) -> None:
    written = fields.pop("custom_logit_processor", None)
    if written is not None:
        name, ids = _read_processor(written)
        fields.setdefault(name, ids)
    if fields.get("custom_params") in (None, {}):
        fields.pop("custom_params", None)
    found: list[object] = []
    for name, (kind, field) in _PROCESSORS.items():
        given = fields.pop(name, None)
        if given:
            found.append({"kind": kind, field: given})
    if found:
        more = fields.get("logit_processors", ())
        fields["logit_processors"] = [*found, *(more if isinstance(more, list | tuple) else ())]


def _read_processor(written: object) -> tuple[str, list[int]]:
    prefix, _, ids = written.partition(":") if isinstance(written, str) else ("", "", "")
    numbers = [one for one in ids.split(",") if one]
    if prefix not in _WRITTEN_PROCESSORS or not all(one.isdecimal() for one in numbers):
        raise InvalidRequest(
            f"custom_logit_processor={shown(written)}: code cannot be sent to the engine; give action_mask, "
            "disallowed_tokens, or logit_processors",
            field="custom_logit_processor",
        )
    return _WRITTEN_PROCESSORS[prefix], [int(one) for one in numbers]


def _logprobs(fields: dict[str, object]) -> None:
    """Put SGLang's three fields into ``logprobs``; SkyRL's outputs hold the logprobs of sampled tokens only."""
    asked, top = fields.pop("return_logprob", False), fields.pop("top_logprobs_num", 0)
    start = fields.pop("logprob_start_len", -1)
    if start != -1:
        raise InvalidRequest(
            f"logprob_start_len={shown(start)}: outputs hold no logprobs of the prompt; leave it out",
            field="logprob_start_len",
        )
    if asked:
        fields.setdefault("logprobs", top)
    logprobs = fields.get("logprobs", 0)
    if logprobs not in (0, 1) or "prompt_logprobs" in fields:
        field = "prompt_logprobs" if "prompt_logprobs" in fields else "logprobs"
        raise InvalidRequest(
            f"{field}={shown(fields[field])}: outputs hold the sampled tokens' logprobs alone; give logprobs=0",
            field=field,
        )
    if logprobs is False:
        del fields["logprobs"]
    elif "logprobs" in fields:
        fields["logprobs"] = 0
