"""Translation of OpenAI requests to calls of ``InferenceEngine``. Pure functions over typed values."""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.openai.forced_calls import schema_of_calls
from drivetrain.openai.messages import to_template
from drivetrain.openai.payloads import ChatPayload, CompletionPayload, Payload, ResponseFormat
from drivetrain.openai.schemas import grammar_of_schema
from drivetrain.types.prompts import ChatPrompt, Prompt, TextPrompt
from drivetrain.types.sampling import JsonSchema, LogprobsMode

_SAME: Final = (
    *("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "stop_regex", "include_stop_str_in_output"),
    *("ignore_eos", "skip_special_tokens", "logprobs_mode", "structured_output", "logit_processors"),
)
"""Fields with the same name in SamplingParams."""
_INNER: Final = re.compile(r"sampling_params\.(\w+)|\b(m(?:ax|in)_new_tokens)\b|\bprompts\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Call:
    """One engine call, with the request's own names of its fields."""

    id: str
    prompts: tuple[Prompt, ...]
    params: Mapping[str, object]
    """Fields of SamplingParams; the engine validates them."""
    lora: str | None
    priority: int
    names: Mapping[str, str]
    """Engine's field name → the request's field name."""

    @property
    def request_ids(self) -> list[str]:
        """Request ids, one per prompt; a single prompt's is the response's id."""
        if len(self.prompts) == 1:
            return [self.id]
        return [f"{self.id}-{index}" for index in range(len(self.prompts))]

    @contextmanager
    def refusals(self) -> Generator[None]:
        """Rewrite the engine's refusals to name the request's own fields."""
        try:
            yield
        except InvalidRequest as error:
            where = "" if error.field == "sampling_params" else error.field
            field = self.names.get(where) or self._renamed(where)
            raise InvalidRequest(self._renamed(str(error)), field=field) from error
        except UnsupportedCapability as error:
            raise UnsupportedCapability(self._renamed(str(error)), capability=error.capability) from error

    def _renamed(self, words: str) -> str:
        return _renamed(words, self.names, many=len(self.prompts) > 1)


def chat_call(asked: ChatPayload) -> Call:
    """Translate a chat completion request.

    Raises:
        InvalidRequest: A field cannot be honoured.
    """
    messages, media = to_template(asked.messages)
    prompt = ChatPrompt(
        messages=messages,
        tools=asked.tools if asked.shows_tools else (),
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        template_kwargs=asked.chat_template_kwargs,
        media=media,
    )
    limit = "max_completion_tokens" if asked.max_tokens is None else "max_tokens"
    fields: dict[str, object] = {}
    if (most := getattr(asked, limit)) is not None:
        fields["max_new_tokens"] = most
    if asked.logprobs:
        fields["logprobs"] = asked.top_logprobs or 0
    names = {
        "prompts": "messages",
        "template_kwargs": "chat_template_kwargs",
        "max_new_tokens": limit,
        "logprobs": "top_logprobs",
    }
    if (calls := schema_of_calls(asked)) is not None:
        if asked.structured_output is not None:
            raise InvalidRequest(
                "tool_choice demands a call, and a grammar is given too; both would constrain the output, so leave one "
                "of them out",
                field="tool_choice",
            )
        # response_format is that of the content, and an answer that is a call has none.
        asked = asked.model_copy(update={"response_format": None})
        fields["structured_output"] = calls
        names["structured_output"] = "tool_choice"
    return _call(asked, "chatcmpl", (prompt,), fields, names)


def completion_call(asked: CompletionPayload) -> Call:
    """Translate a completion request.

    Raises:
        InvalidRequest: A field cannot be honoured.
    """
    prompts = tuple(
        TextPrompt(text=prompt.text, add_special_tokens=asked.add_special_tokens)
        if isinstance(prompt, TextPrompt)
        else prompt
        for prompt in asked.prompt
    )
    fields: dict[str, object] = {"max_new_tokens": asked.max_tokens}
    if asked.logprobs is not None:
        fields["logprobs"] = asked.logprobs
    if asked.echo:
        _check_echo(asked)
        if asked.logprobs is not None:
            # Prompt logprobs are always raw, and one list must not mix modes.
            fields |= {"prompt_logprobs": asked.logprobs, "logprobs_mode": LogprobsMode.RAW}
    names = {"prompts": "prompt", "max_new_tokens": "max_tokens", "prompt_logprobs": "logprobs"}
    return _call(asked, "cmpl", prompts, fields, names)


def check_served(asked: Payload, model: str) -> str:
    """Return the model name to report in the response.

    Raises:
        InvalidRequest: The request names another model than the served one.
    """
    known = (model, Path(model).name)
    if asked.model is not None and asked.model not in known:
        raise InvalidRequest(f"model={shown(asked.model)} is not served here; served is {model!r}", field="model")
    return asked.model or model


def _check_echo(asked: CompletionPayload) -> None:
    if asked.logprobs is not None and asked.logprobs_mode not in (None, LogprobsMode.RAW):
        raise InvalidRequest(
            f"logprobs_mode={asked.logprobs_mode.value!r} with echo=True: the prompt's logprobs are always raw; "
            "leave it out, or do not echo",
            field="logprobs_mode",
        )


def _call(
    asked: Payload, kind: str, prompts: tuple[Prompt, ...], fields: dict[str, object], names: dict[str, str]
) -> Call:
    fields = {name: getattr(asked, name) for name in _SAME if getattr(asked, name) is not None} | fields
    names["request_ids"] = "request_id"
    if asked.min_tokens is not None:
        fields["min_new_tokens"] = asked.min_tokens
    names["min_new_tokens"] = "min_tokens"
    schema = _schema(asked.response_format)
    if schema is not None:
        if asked.structured_output is not None:
            raise InvalidRequest(
                "response_format and structured_output are both given; give one of them", field="response_format"
            )
        fields["structured_output"] = schema
        names["structured_output"] = "response_format"
    return Call(
        id=asked.request_id or f"{kind}-{uuid.uuid4().hex}",
        prompts=prompts,
        params=fields,
        lora=asked.lora,
        priority=asked.priority or 0,
        names=names,
    )


def _schema(form: ResponseFormat | None) -> JsonSchema | None:
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.json_schema if form.json_schema else {"type": "object"}
    return grammar_of_schema(schema, "response_format")


def _renamed(words: str, names: Mapping[str, str], *, many: bool) -> str:
    """Replace the engine's field names by the request's: ``sampling_params.min_new_tokens`` by ``min_tokens``."""

    def name(match: re.Match[str]) -> str:
        dotted, bare, index = match.groups()
        if index is not None:
            return f"{names['prompts']}[{index}]" if many else names["prompts"]
        inner: str = dotted or bare
        return names.get(inner, inner)

    return _INNER.sub(name, words.removeprefix("sampling_params: "))
