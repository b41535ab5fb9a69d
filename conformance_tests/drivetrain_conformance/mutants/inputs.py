"""Invalid inputs that are accepted: numbers beyond float32, invalid names, files outside a folder."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from drivetrain import openai
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.request_builder import ParamsLike
from drivetrain.errors import InvalidRequest
from drivetrain.types import arguments
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import GenerationOutput
from drivetrain.types.prompts import PromptLike
from drivetrain_conformance.mutants.registry import mixed, mutant, spoiled_engine
from drivetrain_conformance.mutants.spoil import arguments_mutant


@arguments_mutant(
    "errors/no_sampling_param_takes_a_wrong_value",
    says="expected InvalidRequest for sampling_params.temperature, but nothing was raised",
)
def takes_what_float32_cannot_hold(params: Mapping[str, object]) -> Mapping[str, object]:
    """A temperature so small that float32 rounds it to 0 is accepted as 0."""
    temperature = params.get("temperature")
    is_tiny = isinstance(temperature, float) and 0 < temperature < 1e-37
    return {**params, "temperature": 0} if is_tiny else params


@arguments_mutant(
    "errors/no_sampling_param_takes_a_wrong_value",
    says="expected InvalidRequest for sampling_params.top_k, but nothing was raised",
)
def takes_what_int32_cannot_hold(params: Mapping[str, object]) -> Mapping[str, object]:
    """A top_k of any size is accepted, and cut to what a kernel can hold."""
    top_k = params.get("top_k")
    return {**params, "top_k": min(top_k, 2**31 - 1)} if type(top_k) is int else params


@arguments_mutant(
    "errors/no_sampling_param_takes_a_wrong_value",
    says="expected InvalidRequest for sampling_params.logit_bias, but nothing was raised",
)
def takes_biases_that_become_infinite(params: Mapping[str, object]) -> Mapping[str, object]:
    """A finite bias beyond float32 is accepted and clamped."""
    biases = params.get("logit_bias")
    if not isinstance(biases, dict):
        return params
    is_large = any(isinstance(bias, float) and 1e30 < abs(bias) < 1e300 for bias in biases.values())
    return {**params, "logit_bias": dict.fromkeys(biases, 1e30)} if is_large else params


@arguments_mutant(
    "structured_output/a_regex_that_does_not_compile_is_refused",
    says="expected InvalidRequest for sampling_params.structured_output, but nothing was raised",
)
def generates_freely_by_an_empty_regex(params: Mapping[str, object]) -> Mapping[str, object]:
    """An empty regular expression is accepted as no constraint."""
    grammar = params.get("structured_output")
    is_empty = isinstance(grammar, dict) and grammar.get("regex") == ""
    return {**params, "structured_output": None} if is_empty else params


@spoiled_engine(
    caught_by="errors/other_arguments_of_a_wrong_type_are_refused", says="abort(request_id=3): AttributeError"
)
def looks_at_no_argument(engine: type[InferenceEngine]) -> type[InferenceEngine]:
    """Arguments are not checked, so that junk raises whatever error its first use causes."""
    unchecked = {
        name: inspect.unwrap(method)
        for name, method in inspect.getmembers(engine, inspect.isfunction)
        if method.__code__.co_filename == arguments.__file__
    }
    return mixed(engine, type("Wrong", (InferenceEngine,), {"__doc__": "Checks nothing.", **unchecked}))


@mutant("abort/an_id_that_begins_another_aborts_only_its_own", says="abort(None) was taken")
class takes_no_id_for_all(InferenceEngine):
    """Aborting None, such as an id that a trainer has lost, ends every request."""

    async def abort(self, request_id: str) -> None:
        await (self.abort_generation() if request_id is None else super().abort(request_id))


@mutant("openai/what_is_not_honoured_is_refused_by_name", says="'chat_template_kwargs': {'chat_template': '{% for")
class drops_the_template_of_a_request(InferenceEngine):
    """A chat template among a request's template variables is accepted and ignored."""

    async def chat_completion(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> openai.ChatCompletion:
        variables = payload.get("chat_template_kwargs")
        if isinstance(variables, dict) and "chat_template" in variables:
            payload = {**payload, "chat_template_kwargs": {}}
        return await super().chat_completion(payload, timeout=timeout)


@mutant("openai/an_empty_list_of_tool_calls_changes_no_prompt", says="with an empty list of tool calls the prompt is")
class takes_an_empty_list_for_calls(InferenceEngine):
    """A turn of the history with an empty list of tool calls loses its text, as a turn with calls has none."""

    async def chat_completion(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> openai.ChatCompletion:
        messages = cast("list[dict[str, object]]", payload["messages"])
        heard = [{**said, "content": ""} if "tool_calls" in said else said for said in messages]
        return await super().chat_completion({**payload, "messages": heard}, timeout=timeout)


@mutant("errors/an_error_quotes_a_long_value_in_part", says="characters of sampling_params.temperature")
class quotes_whole_values(InferenceEngine):
    """An error about a sampling param repeats the value, however long it is."""

    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        try:
            return await super().generate(prompts, sampling_params, **options)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error}; given: {sampling_params}", field=error.field) from error


@mutant(
    "weight_sync/a_bad_folder_is_refused_and_the_engine_serves_on",
    says="an index that names a file outside its folder was accepted",
)
class reads_files_outside_the_folder(InferenceEngine):
    """Files that a checkpoint's index names are read even outside its folder."""

    async def load_weights_from_disk(
        self, path: str | os.PathLike[str], version: str, *, mode: PauseMode | str = PauseMode.RETRACT
    ) -> None:
        index = Path(path) / "model.safetensors.index.json"
        if index.is_file():
            named = next(iter(json.loads(index.read_text())["weight_map"].values()))
            path = (Path(path) / named).parent
        await super().load_weights_from_disk(path, version, mode=mode)
