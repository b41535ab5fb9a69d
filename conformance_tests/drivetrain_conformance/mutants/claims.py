"""Engines that say one thing and do another: wrong claims, refusals, configuration, and leaks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, ModelInfo
from drivetrain.engine.controller import Controller
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.model import StartedModel
from drivetrain.engine.states import EngineState
from drivetrain.engine.validation import as_prompts
from drivetrain.errors import EngineInternalError, InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, GenerationOutput
from drivetrain.types.prompts import TokenPrompt
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling import JsonSchema, SamplingParams
from drivetrain.types.weights import ApplyUpdate, WeightReply
from drivetrain_conformance.mutants.registry import mutant, spoiled_backend
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    answering,
    arguments_mutant,
    asking_for_params,
    claiming,
    config_mutant,
    own,
    result_mutant,
)


@spoiled_backend(
    caught_by="hidden_states/there_is_one_state_for_each_token", says="assert completion.hidden_states is not None"
)
def claims_hidden_states_and_has_none(backend: type[Backend]) -> type[Backend]:
    """It claims hidden states and returns completions without them."""

    def change(_: GenerateRequest, result: GenerateResult) -> GenerateResult:
        return dataclasses.replace(result, hidden_states=None)

    return answering(claiming(backend, Capability.HIDDEN_STATES), change)


@spoiled_backend(caught_by="hidden_states/states_are_those_of_the_last_layer", says="a state is off by")
def gives_the_state_after_each_token(backend: type[Backend]) -> type[Backend]:
    """A token's hidden state is the one that the next token is drawn from."""

    def change(_: GenerateRequest, result: GenerateResult) -> GenerateResult:
        states = result.hidden_states
        return result if not states else dataclasses.replace(result, hidden_states=[*states[1:], states[-1]])

    return answering(backend, change)


@spoiled_backend(caught_by="structured_output/json_follows_the_schema", says="JSONDecodeError")
def claims_json_and_ignores_the_schema(backend: type[Backend]) -> type[Backend]:
    """It claims structured output and samples as if no schema had been given."""
    return asking_for_params(claiming(backend, Capability.STRUCTURED_JSON), lambda _: {"structured_output": None})


@spoiled_backend(caught_by="structured_output/json_follows_the_schema", says="is not of the schema")
def ignores_rarer_keywords(backend: type[Backend]) -> type[Backend]:
    """It takes schemas with keywords that its library ignores."""

    def change(request: GenerateRequest) -> dict[str, object]:
        if not isinstance(request.params.structured_output, JsonSchema):
            return {}
        schema = json.loads(request.params.structured_output.json_schema)
        held = {key: value for key, value in schema.items() if key not in ("uniqueItems", "minimum", "minLength")}
        return {"structured_output": JsonSchema(json_schema=json.dumps(held))}

    return asking_for_params(backend, change)


@spoiled_backend(
    caught_by="structured_output/what_leaves_no_token_ends_in_an_error",
    says="expected NoTokenAllowed for sampling_params.structured_output, but nothing was raised",
)
def lets_a_mask_overrule_the_grammar(backend: type[Backend]) -> type[Backend]:
    """Where a grammar and a mask leave no token, one that the mask allows is drawn."""

    def change(request: GenerateRequest) -> dict[str, object]:
        return {"structured_output": None} if request.params.logit_processors else {}

    return asking_for_params(claiming(backend, Capability.STRUCTURED_REGEX), change)


@spoiled_backend(
    caught_by="structured_output/raw_logprobs_are_those_before_the_grammar", says="nats off the model's own"
)
def gives_raw_logprobs_after_the_grammar(backend: type[Backend]) -> type[Backend]:
    """Where a grammar leaves a single token, its raw logprob is 0."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if request.params.structured_output is None or result.logprobs is None:
            return result
        # In the case's expression only the dash, one token of the model, may follow the third letter.
        logprobs = [
            0.0 if token == ord("-") else own for token, own in zip(result.token_ids, result.logprobs, strict=True)
        ]
        return dataclasses.replace(result, logprobs=logprobs)

    return answering(backend, change)


@spoiled_backend(
    caught_by="structured_output/processed_logprobs_are_those_within_the_grammar",
    says="allowed tokens have probability",
)
def gives_processed_logprobs_before_the_grammar(backend: type[Backend]) -> type[Backend]:
    """Processed logprobs are as if the grammar allowed as many tokens again."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if request.params.structured_output is None or result.logprobs is None or result.top_logprobs is None:
            return result
        half = math.log(2)
        tops = [[(token, logprob - half) for token, logprob in top] for top in result.top_logprobs]
        return dataclasses.replace(result, logprobs=[logprob - half for logprob in result.logprobs], top_logprobs=tops)

    return answering(backend, change)


@spoiled_backend(
    caught_by="structured_output/the_whole_output_matches_the_regex", says="nothing came to the grammar's end: ['"
)
def goes_on_past_the_end_of_a_grammar(backend: type[Backend]) -> type[Backend]:
    """Where EOS is ignored, tokens follow after a grammar is complete."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if request.params.structured_output is None:
            return result
        token_ids = list(f"cat-{sum(result.token_ids) % 1000:03}".encode())  # a token of the model is a byte
        eos = request.stop_token_ids[0]
        if request.params.ignore_eos:
            token_ids = (token_ids * request.max_new_tokens)[: request.max_new_tokens]
        else:
            token_ids.append(eos)
        return dataclasses.replace(
            result,
            token_ids=token_ids,
            finish_reason=FinishReason.LENGTH if request.params.ignore_eos else FinishReason.STOP,
            matched_stop=None if request.params.ignore_eos else eos,
            weight_versions=[dataclasses.replace(result.weight_versions[0], start=0, end=len(token_ids))],
        )

    return answering(claiming(backend, Capability.STRUCTURED_REGEX), change)


@result_mutant("hidden_states/experts_are_the_routers_choice", says="was routed in layer")
def gives_the_experts_after_each_token(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """A token's experts are those of the pass that the next token is drawn from."""
    experts = result.routed_experts
    return dataclasses.replace(result, routed_experts=experts and experts[1:] + experts[-1:])


@result_mutant("hidden_states/experts_are_the_routers_choice", says="was routed in layer")
def gives_the_layers_experts_in_reverse(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The last layer's experts come first."""
    experts = result.routed_experts
    return dataclasses.replace(result, routed_experts=experts and RoutedExperts.of(experts.to_numpy()[:, ::-1]))


@result_mutant(
    "parallel/an_update_of_a_mixture_reaches_every_rank", says="was routed in layer", needs=Capability.TENSOR_PARALLEL
)
def counts_the_experts_of_one_rank(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Experts are numbered among those of their rank."""
    experts = result.routed_experts
    return dataclasses.replace(result, routed_experts=experts and RoutedExperts.of(experts.to_numpy() // 2))


@result_mutant("hidden_states/experts_of_the_prompt_are_the_routers_choice", says="prompt tokens have experts")
def leaves_out_the_experts_of_the_last_prompt_token(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The last prompt token's experts come with the first token drawn alone."""
    experts = result.prompt_routed_experts
    return dataclasses.replace(result, prompt_routed_experts=experts and experts[:-1])


@mutant("hidden_states/experts_of_the_prompt_are_the_routers_choice", says="prompt tokens have experts")
class gives_no_experts_of_a_cached_prefix(CorrectBackend):
    """The prompt's experts begin where its cached prefix ends."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        params = request.params
        if not params.return_prompt_routed_experts:
            return await super().generate(request)
        without = params.model_copy(update={"return_prompt_routed_experts": False, "max_new_tokens": 1, "n": 1})
        name = f"{request.request_id}-without"
        other = dataclasses.replace(request, request_id=name, params=without, max_new_tokens=1)
        cached = (await super().generate(other)).cached_tokens
        result = await super().generate(request)
        experts = result.prompt_routed_experts
        return dataclasses.replace(result, prompt_routed_experts=experts and experts[cached:])


_WHOLE = "hidden_states/experts_of_the_prompt_are_whole_however_it_is_read"


@result_mutant(_WHOLE, says="was routed in layer")
def gives_the_last_chunks_experts_to_the_first(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """The record of a prompt's experts has room for one chunk of it."""
    experts, room = result.prompt_routed_experts, 128
    if experts is None or len(experts) <= room:
        return result
    return dataclasses.replace(result, prompt_routed_experts=experts[-room:] + experts[room:])


@result_mutant(_WHOLE, says="tokens have experts")
def loses_the_experts_of_aborted_requests(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """A request's experts are read when it ends by itself."""
    is_lost = result.finish_reason is FinishReason.ABORT and result.routed_experts is not None
    return dataclasses.replace(result, routed_experts=RoutedExperts()) if is_lost else result


@mutant("hidden_states/experts_are_those_of_the_weights_that_chose_them", says="was routed in layer")
class gives_the_experts_that_older_weights_chose(CorrectBackend):
    """A prompt's experts are cached by its ids, also across weight updates."""

    _kept: dict[tuple[int, ...], RoutedExperts] = own(dict)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result, prompt = await super().generate(request), tuple(request.prompt_token_ids)
        if result.prompt_routed_experts is None:
            return result
        first = self._kept.setdefault(prompt, result.prompt_routed_experts)
        return dataclasses.replace(result, prompt_routed_experts=first)


@mutant("hidden_states/experts_are_those_of_the_weights_that_chose_them", says="was routed in layer")
class gives_the_experts_of_the_weights_on_arrival(CorrectBackend):
    """A prompt's experts are kept by its ids and the weights at which its request came, also if it waits for others."""

    _kept: dict[tuple[int, ...], RoutedExperts] = own(dict)
    _updates: list[str] = own(list)

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        reply = await super().apply_weights(update)
        self._updates.append(update.version)
        return reply

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        key = (len(self._updates), *request.prompt_token_ids)
        result = await super().generate(request)
        if result.prompt_routed_experts is None:
            return result
        return dataclasses.replace(
            result, prompt_routed_experts=self._kept.setdefault(key, result.prompt_routed_experts)
        )


@mutant("abort/ids_that_are_not_running_are_passed_over", says="claims abort, and refuses it")
class claims_abort_and_refuses_it(CorrectBackend):
    """It claims to abort requests, and its primitive was never written."""

    async def abort(self, request_ids: list[str]) -> None:
        raise self._unsupported(Capability.ABORT)


@mutant("lora/adapters_without_enable_lora", says="expected UnsupportedCapability for one of lora")
class passes_over_what_it_does_not_claim(InferenceEngine):
    """Adapters that it cannot serve are loaded, used and unloaded without an effect, and without an error."""

    async def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, pinned: bool = False
    ) -> None:
        """Load nothing."""

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload nothing."""

    async def generate(self, *prompts: Any, **options: Any) -> GenerationOutput:
        return await super().generate(*prompts, **{**options, "lora": None})


@mutant("sleep/the_memory_of_cuda_graphs_comes_back", says="expected UnsupportedCapability for one of sleep_cuda_graph")
class refuses_vaguely(InferenceEngine):
    """An unclaimed call fails with an error that does not name the missing capability."""

    async def sleep(self, tags: Iterable[MemoryTag | str] | None = None, **options: Any) -> None:
        if Capability.SLEEP_CUDA_GRAPH not in self.capabilities:
            raise EngineInternalError("'NoneType' object has no attribute 'graphs'")
        await super().sleep(tags, **options)


@mutant(
    "lifecycle/a_profile_is_a_trace_that_a_viewer_opens",
    says="refused for hicache_storage, which this case does not need",
)
class refuses_for_the_wrong_capability(InferenceEngine):
    """It refuses to record a profile, and names a capability of the cache."""

    async def start_profile(self, directory: str | os.PathLike[str]) -> None:
        await self.clear_hicache_storage()


@mutant(
    "sleep/the_memory_of_cuda_graphs_comes_back",
    says="refused, but left something changed: state was 'ready' and is 'paused'",
)
class refuses_after_work(InferenceEngine):
    """The engine pauses before it refuses a call that it cannot do."""

    async def sleep(self, tags: Iterable[MemoryTag | str] | None = None, **options: Any) -> None:
        await self.pause_generation(PauseMode.WAIT)
        await super().sleep(tags, **options)
        await self.continue_generation()


@config_mutant("lora/no_larger_rank_than_the_limit", says="expected InvalidRequest, but nothing was raised")
def swallows_a_configured_limit(_: EngineConfig) -> Mapping[str, object]:
    """The configured max_lora_rank is taken and not passed on to its engine."""
    return {"max_lora_rank": None}


@mutant("generate/every_file_that_names_an_end_is_heeded", says="only some are known")
class does_not_know_the_models_eos(CorrectBackend):
    """It says that the model has no EOS ids, so that generation runs on past those that the tokenizer does not name."""

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return dataclasses.replace(await super().start(report), eos_token_ids=())


@mutant("lifecycle/a_life", says="are left behind")
class leaves_a_process_behind(CorrectBackend):
    """A process that it started outlives its teardown."""

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        self.helper = await asyncio.to_thread(subprocess.Popen, command)
        return await super().start(report)


@arguments_mutant(
    "errors/an_unknown_sampling_param_is_refused_with_its_likely_name",
    says="expected InvalidRequest for sampling_params.max_new_tokesn, but nothing was raised",
)
def ignores_misspelt_params(params: Mapping[str, object]) -> Mapping[str, object]:
    """Sampling params that there are not are ignored."""
    return {name: value for name, value in params.items() if name in SamplingParams.model_fields}


@mutant(
    "generate/a_prompt_that_fills_the_context_is_refused",
    says="expected InvalidRequest for prompts[0], but nothing was raised",
)
class truncates_long_prompts(InferenceEngine):
    """A prompt that does not fit is cut to what does, in silence."""

    async def generate(self, prompts: Any, *args: Any, **options: Any) -> GenerationOutput:
        room = self.model_info.context_length - 1
        shorter = [
            TokenPrompt(token_ids=tuple(prompt.token_ids[-room:])) if isinstance(prompt, TokenPrompt) else prompt
            for prompt in as_prompts(prompts)
        ]
        return await super().generate(shorter, *args, **options)


@mutant(
    "generate/a_timeout_is_a_typed_error_and_the_engine_serves_on",
    says="expected DeadlineExceeded, but nothing was raised",
)
class ignores_timeouts(InferenceEngine):
    """A call's own timeout is taken and not kept."""

    async def generate(self, *prompts: Any, **options: Any) -> GenerationOutput:
        options["timeout"] = None
        return await super().generate(*prompts, **options)


@mutant("errors/a_configuration_field_that_asks_for_nothing_is_taken", says="is refused")
class refuses_what_asks_for_nothing(CorrectBackend):
    """A bound on adapters is refused where none are loaded."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        if config.max_loras is not None and not config.enable_lora:
            raise InvalidConfig(f"max_loras={config.max_loras}: there are no adapters", field="max_loras")
        return super().capabilities(config)


@mutant("generate/every_file_that_names_an_end_is_heeded", says="only some are known")
class ignores_the_tokenizers_end(StartedModel):
    """An EOS that only the tokenizer names is none."""

    def with_all_eos_ids(self, info: ModelInfo) -> ModelInfo:
        return info


@mutant("faults/a_host_killed_while_it_sleeps", says="is refused for the engine's state alone")
class forgets_that_it_died(Controller):
    """An engine that died refuses requests as one that is in a wrong state."""

    def require_admission(self, action: str) -> None:
        dataclasses.replace(self.status, died=False).require_admission(action)


@mutant("faults/a_host_killed_while_it_generates", says="the engine was ready")
class hears_late_of_a_death(InferenceEngine):
    """An engine says for half a second after its death that it is ready, while its calls already fail."""

    _heard: float | None = None

    @property
    def state(self) -> EngineState:
        if super().state is not EngineState.FAILED:
            return super().state
        now = time.monotonic()
        self._heard = self._heard or now
        return EngineState.READY if now < self._heard + 0.5 else EngineState.FAILED
