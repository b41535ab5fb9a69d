"""Invalid inputs that are accepted: numbers beyond float32, invalid names, files outside a folder."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from drivetrain import openai
from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.request_builder import ParamsLike
from drivetrain.errors import EngineStartError, InvalidConfig, InvalidRequest, NonFiniteLogits
from drivetrain.types import arguments
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import GenerationOutput
from drivetrain.types.prompts import PromptLike
from drivetrain.types.sampling import SamplingParams
from drivetrain.types.weights import DiskSource, PrepareUpdate, WeightMessage, WeightReply
from drivetrain_conformance.mutants.registry import mixed, mutant, spoiled_engine
from drivetrain_conformance.mutants.spoil import CorrectBackend, arguments_mutant, fifos_in, waits_in_open


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
    says="expected InvalidRequest for sampling_params.temperature, but nothing was raised",
)
def takes_text_for_a_temperature(params: Mapping[str, object]) -> Mapping[str, object]:
    """A temperature that is given as text is read as a number."""
    temperature = params.get("temperature")
    return {**params, "temperature": 0.5} if temperature == "0.5" else params


@arguments_mutant(
    "errors/no_sampling_param_takes_a_wrong_value",
    says="expected InvalidRequest for sampling_params.top_p, but nothing was raised",
)
def takes_truth_for_a_share(params: Mapping[str, object]) -> Mapping[str, object]:
    """A top_p of True is read as 1."""
    return {**params, "top_p": 1.0} if params.get("top_p") is True else params


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
    "errors/no_sampling_param_takes_a_wrong_value",
    says="expected InvalidRequest for sampling_params.logit_processors, but nothing was raised",
)
def follows_the_first_of_contradicting_masks(params: Mapping[str, object]) -> Mapping[str, object]:
    """Where masks contradict each other, the first one alone is followed."""
    processors = params.get("logit_processors")
    return {**params, "logit_processors": processors[:1]} if isinstance(processors, list) else params


@arguments_mutant(
    "sampling/an_action_mask_allows_nothing_else",
    says="expected InvalidRequest for sampling_params.logit_processors, but nothing was raised",
)
def ends_early_where_a_mask_leaves_only_stops(params: Mapping[str, object]) -> Mapping[str, object]:
    """Where a mask allows only ids that end generation, min_new_tokens is ignored."""
    return {**params, "min_new_tokens": 0} if params.get("logit_processors") else params


@mutant("errors/no_sampling_param_takes_a_wrong_value", says="of a copy: AssertionError: expected InvalidRequest")
class takes_copied_params_unchecked(InferenceEngine):
    """Params that were copied with a wrong value are taken, and generated with as if they had the default."""

    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        if isinstance(sampling_params, SamplingParams):
            try:
                SamplingParams.model_validate(sampling_params)
            except ValidationError:
                sampling_params = {"max_new_tokens": 1}
        return await super().generate(prompts, sampling_params, **options)


@arguments_mutant(
    "structured_output/a_regex_that_does_not_compile_is_refused",
    says="expected InvalidRequest for sampling_params.structured_output, but nothing was raised",
)
def generates_freely_by_an_empty_regex(params: Mapping[str, object]) -> Mapping[str, object]:
    """An empty regular expression is accepted as no constraint."""
    grammar = params.get("structured_output")
    is_empty = isinstance(grammar, dict) and grammar.get("regex") == ""
    return {**params, "structured_output": None} if is_empty else params


@arguments_mutant(
    "structured_output/a_schema_that_is_no_json_is_refused",
    says="expected InvalidRequest for sampling_params.structured_output, but nothing was raised",
)
def follows_no_reference_to_a_url(params: Mapping[str, object]) -> Mapping[str, object]:
    """A reference of a JSON schema to a URL is accepted and constrains nothing."""
    grammar = params.get("structured_output")
    schema = str(grammar.get("json_schema")) if isinstance(grammar, dict) else ""
    return {**params, "structured_output": None, "max_new_tokens": 1} if '"$ref": "https:' in schema else params


@arguments_mutant(
    "structured_output/a_schema_that_is_no_json_is_refused",
    says="expected InvalidRequest for sampling_params.structured_output, but nothing was raised",
)
def follows_no_reference_to_itself(params: Mapping[str, object]) -> Mapping[str, object]:
    """A reference of a JSON schema that leads back to itself is accepted and constrains nothing."""
    grammar = params.get("structured_output")
    is_circular = isinstance(grammar, dict) and grammar.get("json_schema") == '{"$ref": "#"}'
    return {**params, "structured_output": None, "max_new_tokens": 1} if is_circular else params


@mutant(
    "structured_output/a_grammar_that_does_not_compile_is_refused",
    says="the error names the field 'sampling_params', not 'sampling_params.structured_output'",
)
class refuses_grammars_without_their_name(CorrectBackend):
    """A grammar that does not compile is refused as a mistake somewhere in the sampling params."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        try:
            return await super().generate(request)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), field="sampling_params") from error


@spoiled_engine(
    caught_by="errors/other_arguments_of_a_wrong_type_are_refused", says="abort(request_id=3): AttributeError"
)
def looks_at_no_argument(engine: type[InferenceEngine]) -> type[InferenceEngine]:
    """Arguments are not checked, so that junk raises the error of its first use."""
    unchecked = {
        name: inspect.unwrap(method)
        for name, method in inspect.getmembers(engine, inspect.isfunction)
        if method.__code__.co_filename == arguments.__file__
    }
    return mixed(engine, type("Wrong", (InferenceEngine,), {"__doc__": "Checks nothing.", **unchecked}))


@mutant("errors/an_unknown_sampling_param_is_refused_with_its_likely_name", says="the error does not name '0 is off'")
class names_no_remedy(InferenceEngine):
    """An error about a known sampling param names the param, and not the value that is meant."""

    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        try:
            return await super().generate(prompts, sampling_params, **options)
        except InvalidRequest as error:
            if "did you mean" in str(error) or "there is no such field" in str(error):
                raise
            raise InvalidRequest("the value is out of range", field=error.field) from error


@mutant(
    "errors/other_arguments_of_a_wrong_type_are_refused",
    says="update_weight_version(version='\\ud800'): AssertionError",
)
class takes_a_version_that_is_no_text(InferenceEngine):
    """A weight version that no file or message can hold, such as half a surrogate pair, is accepted."""

    async def update_weight_version(self, version: str) -> None:
        await super().update_weight_version(version if version != "\ud800" else "surrogate")


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


@mutant("openai/what_is_not_honoured_is_refused_by_name", says="'temperature': True")
class takes_truth_for_a_number(InferenceEngine):
    """A boolean where the OpenAI API has a number is read as 1 or 0."""

    async def chat_completion(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> openai.ChatCompletion:
        is_true = payload.get("temperature") is True
        payload = {**payload, "temperature": 1.0} if is_true else payload
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

    def quoted(self, params: object, options: Mapping[str, object]) -> object:
        """Return the argument that an error repeats."""
        return params

    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        try:
            return await super().generate(prompts, sampling_params, **options)
        except InvalidRequest as error:
            given = self.quoted(sampling_params, options)
            raise InvalidRequest(f"{error}; given: {given}", field=error.field) from error


@mutant("errors/an_error_quotes_a_long_value_in_part", says="characters of lora")
class quotes_whole_names(quotes_whole_values):
    """An error about an adapter repeats its name, however long it is."""

    def quoted(self, params: object, options: Mapping[str, object]) -> object:
        """Return the adapter's name."""
        return options.get("lora")


@mutant(
    "errors/an_unknown_configuration_field_is_refused_with_its_likely_name", says="the error repeats what may be a key"
)
class quotes_all_options(CorrectBackend):
    """An error about the configuration repeats the engine's options, which may include a key."""

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        try:
            super().validate(config)
        except InvalidConfig as error:
            raise InvalidConfig(f"{error}; given: {config.engine_kwargs}", field=error.field) from error


@mutant("lifecycle/a_life", says="the error repeats what may be a key")
class quotes_the_options_with_which_it_does_not_start(InferenceEngine):
    """The error of a failed start repeats the engine's options, which may include a token."""

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        try:
            await super().start(progress)
        except EngineStartError as error:
            raise EngineStartError(f"{error}; given: {self.config.engine_kwargs}") from error


@mutant(
    "weight_sync/a_bad_folder_is_refused_and_the_engine_serves_on",
    says="an index that names a file outside its folder was accepted",
)
class reads_files_outside_the_folder(InferenceEngine):
    """Files that a checkpoint's index names are read even outside its folder."""

    async def load_weights_from_disk(
        self, path: str | os.PathLike[str], version: str, *, mode: PauseMode | str = PauseMode.RETRACT
    ) -> None:
        named = _first_file(path)
        folder = path if named is None else (Path(path) / named).parent
        await super().load_weights_from_disk(folder, version, mode=mode)


@mutant(
    "weight_sync/a_bad_folder_is_refused_and_the_engine_serves_on",
    says="an index that names an absolute path was accepted",
)
class reads_files_by_absolute_paths(InferenceEngine):
    """Files that a checkpoint's index names by an absolute path are read, though relative paths stay within."""

    async def load_weights_from_disk(
        self, path: str | os.PathLike[str], version: str, *, mode: PauseMode | str = PauseMode.RETRACT
    ) -> None:
        named = _first_file(path)
        folder = named.parent if named is not None and named.is_absolute() else path
        await super().load_weights_from_disk(folder, version, mode=mode)


def _first_file(folder: str | os.PathLike[str]) -> Path | None:
    """Return a file that the folder's index names, as it is written there; None without an index."""
    index = Path(folder) / "model.safetensors.index.json"
    return Path(next(iter(json.loads(index.read_text())["weight_map"].values()))) if index.is_file() else None


@mutant("weight_sync/a_bad_folder_is_refused_and_the_engine_serves_on", says="a FIFO in place of a file was accepted")
class takes_a_fifo_for_no_weights(InferenceEngine):
    """A FIFO among a checkpoint's files is passed over, and the version is published."""

    async def load_weights_from_disk(
        self, path: str | os.PathLike[str], version: str, *, mode: PauseMode | str = PauseMode.RETRACT
    ) -> None:
        if (Path(path) / "model.safetensors").is_fifo():
            await self.update_weight_version(version)
        else:
            await super().load_weights_from_disk(path, version, mode=mode)


@mutant(
    "weight_sync/a_bad_folder_is_refused_and_the_engine_serves_on",
    says="a thread waits in open() for a FIFO in place of a file",
)
class waits_in_open_for_weights(CorrectBackend):
    """A FIFO among a checkpoint's files is refused, but a thread waits in open() for a writer."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, PrepareUpdate) and isinstance(message.request.source, DiskSource):
            for file in fifos_in(message.request.source.path):
                await waits_in_open(file)
        return await super().receive_weights(message)


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="a chat of diverged weights was answered")
class answers_chats_with_nan(InferenceEngine):
    """A chat whose logits are NaN is answered with logprobs of NaN, which JSON cannot hold."""

    async def chat_completion(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> openai.ChatCompletion:
        try:
            return await super().chat_completion(payload, timeout=timeout)
        except NonFiniteLogits:
            token = {"token": "x", "logprob": math.nan, "bytes": None, "top_logprobs": []}
            return cast(openai.ChatCompletion, {"choices": [{"index": 0, "logprobs": {"content": [token]}}]})


@mutant("openai/answers_are_json_where_tokens_cannot_be_drawn", says="float values are not JSON compliant")
class answers_with_minus_infinity(InferenceEngine):
    """An alternative that could not be drawn has a logprob of minus infinity, which JSON cannot hold."""

    async def chat_completion(
        self, payload: Mapping[str, object], *, timeout: float | None = None
    ) -> openai.ChatCompletion:
        answer = await super().chat_completion(payload, timeout=timeout)
        for choice in answer["choices"]:
            for entry in choice["logprobs"]["content"] if choice["logprobs"] else ():
                entry["top_logprobs"].append({"token": "x", "logprob": -math.inf, "bytes": None})
        return answer
