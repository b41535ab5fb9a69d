"""Tool calls that are read wrongly from a model's text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import openai
from drivetrain.engine.engine import InferenceEngine
from drivetrain.openai.responses import ToolCall
from drivetrain.tool_calls.functions import FunctionCall
from drivetrain_conformance.mutants.registry import engine_mutants, mixed, mutant

Arguments = dict[str, Any]
Read = Callable[[str, list[Arguments]], list[Arguments]]
_CASE = "openai/tool_calls_are_read_from_the_text"


def _reading(engine: type[InferenceEngine], read: Read) -> type[InferenceEngine]:
    """Return an engine that reads other calls: ``read`` gets a text and its calls' arguments."""

    class Wrong(InferenceEngine):
        """Reads the calls of each answer anew."""

        async def chat_completion(
            self, payload: Mapping[str, object], *, timeout: float | None = None
        ) -> openai.ChatCompletion:
            answer = await super().chat_completion(payload, timeout=timeout)
            for choice in answer["choices"] if payload.get("tools") else ():
                message, text = choice["message"], self.decode(choice["token_ids"])
                calls = message.get("tool_calls", [])
                arguments = read(text, [json.loads(call["function"]["arguments"]) for call in calls])
                made: list[ToolCall] = [
                    {"id": f"{answer['id']}-{choice['index']}-{place}", "type": "function", "function": _call(given)}
                    for place, given in enumerate(arguments)
                ]
                message["tool_calls"] = made
                message["content"] = message["content"] if calls else text
            return answer

    return mixed(engine, Wrong)


def _call(arguments: Arguments) -> FunctionCall:
    return {"name": "add", "arguments": json.dumps(arguments)}


calls_mutant = engine_mutants(_reading)


@calls_mutant(_CASE, says='"city": 90210')
def makes_numbers_of_strings(text: str, calls: list[Arguments]) -> list[Arguments]:
    """An argument that may be a string or null is read as JSON."""
    return [{name: _as_json(value) for name, value in call.items()} for call in calls]


def _as_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


@calls_mutant(_CASE, says='"sure": "True"')
def keeps_pythons_names(text: str, calls: list[Arguments]) -> list[Arguments]:
    """A boolean that the model writes as Python does becomes a string."""
    return [{name: f"{value}" if value is True else value for name, value in call.items()} for call in calls]


@calls_mutant(_CASE, says='"note": "None"')
def keeps_pythons_none(text: str, calls: list[Arguments]) -> list[Arguments]:
    """An argument that may be null and that the model writes as None becomes a string."""
    return [{name: "None" if value is None else value for name, value in call.items()} for call in calls]


@calls_mutant(_CASE, says='the calls of add are [\'{"city": "a"}\']')
def ends_values_at_the_first_closing_tag(text: str, calls: list[Arguments]) -> list[Arguments]:
    """An argument's value ends where its closing tag first appears, even within the value."""
    return [
        {name: value.partition("</parameter>")[0] if isinstance(value, str) else value for name, value in call.items()}
        for call in calls
    ]


@calls_mutant(_CASE, says="Infinity")
def makes_large_numbers_infinite(text: str, calls: list[Arguments]) -> list[Arguments]:
    """A number too large for a float becomes infinite, which JSON cannot represent."""
    return [{"size": math.inf}] if "1e400" in text else calls


@calls_mutant(_CASE, says="the calls of add are []")
def takes_calls_without_arguments_for_none(text: str, calls: list[Arguments]) -> list[Arguments]:
    """A call whose arguments are null or empty is none."""
    return [call for call in calls if call]


@calls_mutant(_CASE, says="<think>")
def reads_calls_within_reasoning(text: str, calls: list[Arguments]) -> list[Arguments]:
    """A call that the model only considers within its reasoning is made."""
    return [{"a": 1}, *calls] if "<think>" in text else calls


@calls_mutant(_CASE, says="[TOOL_CALLS]add[ARGS]")
def reads_one_syntax_alone(text: str, calls: list[Arguments]) -> list[Arguments]:
    """Calls in another syntax than with the tag tool_call stay text."""
    return calls if "<tool_call>" in text else []


@calls_mutant(_CASE, says='"name": "none"')
def makes_calls_of_tools_that_there_are_not(text: str, calls: list[Arguments]) -> list[Arguments]:
    """A call of a tool that the request does not have is made."""
    return [{"a": 4}] if '"name": "none"' in text else calls


@mutant(_CASE, says="ids of calls are not unique")
class numbers_calls_from_zero(InferenceEngine):
    """Each answer numbers its calls from zero, so that two answers have the same ids."""

    async def chat_completion(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> openai.ChatCompletion:
        answer = await super().chat_completion(payload, timeout=timeout)
        for choice in answer["choices"]:
            for place, call in enumerate(choice["message"].get("tool_calls", [])):
                call["id"] = f"call_{place}"
        return answer


@mutant(_CASE, says='{"a": 1}}</tool_call>\' the calls of add are [\'{"a": 1}\']')
class looks_at_the_template_alone(InferenceEngine):
    """The configured tool_call_parser is ignored: the chat template decides."""

    async def chat_completion(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> openai.ChatCompletion:
        self.config = self.config.model_copy(update={"tool_call_parser": None})
        return await super().chat_completion(payload, timeout=timeout)
