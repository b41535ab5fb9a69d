"""Backends that differ from ours and are right must be green: the suite may ask for no more than the contract says."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
from collections.abc import AsyncGenerator
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, asynccontextmanager

import pytest

from drivetrain import Capability, CompletionChunk, EngineStateError, GenerationOutput, InvalidConfig
from drivetrain.backend.base import Backend, EngineStats
from drivetrain.backend.toolkit.model_folder import config_levels
from drivetrain.engine.generation import Generation, Params, Prompts, Whole
from drivetrain.engine.parts import PartKinds
from drivetrain.engine.request_builder import CallOptions
from drivetrain.engine.scoring import ScoringCall
from drivetrain.errors import WeightBaseMismatch
from drivetrain.types.config import EngineConfig
from drivetrain.types.weights import ApplyUpdate, PluginSource, PrepareUpdate, WeightMessage, WeightReply
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.run_profile import PROFILES
from drivetrain_conformance.harness.runner import Runner
from drivetrain_conformance.harness.verdict import Judgement, Verdict
from drivetrain_conformance.mutants.registry import Mutant, mixed
from drivetrain_conformance.mutants.run import suite_of_mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend

CASES = (
    "generate/greedy_takes_the_most_likely_token",
    "sleep/a_training_step",
    "sleep/any_order_of_tags",
    "sleep/half_awake_can_sleep_again",
    "sleep/memory_is_taken_again_step_by_step",
    "sleep/requests_frozen_in_place_keep_the_cache_awake",
    "sleep/retracted_requests_survive_a_sleep_of_the_cache",
    "sleep/the_memory_of_the_cache_comes_back",
    "weight_sync/rollouts_after_a_sleep_are_of_the_pushed_policy",
)
OF_PREFIXES = "sleep/no_prefix_is_found_after_a_sleep"


class KeepsNoCache(CorrectBackend):
    """Keeps no keys and values once a request has ended, and claims that the cache can sleep, as it takes no memory."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"enable_prefix_caching": False}))

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return super().capabilities(config) - {Capability.PREFIX_CACHE}

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        return dataclasses.replace(stats, kv_cache_bytes=stats.kv_cache_bytes if stats.running else 0)


class RunsTwoAtOnce(CorrectBackend):
    """Runs two requests at once, and lets others wait for one of them to end."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"max_num_seqs": 2}))


class ServesText(CorrectBackend):
    """Serves models of text alone, and refuses others before they start."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return super().capabilities(config) - {Capability.IMAGES, Capability.VIDEO, Capability.AUDIO}

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        for fields in config_levels(config.model):
            if {"vision_config", "audio_config"} & set(fields):
                raise InvalidConfig("this engine serves models of text alone", field="model")
        super().validate(config)


class HasNoSeeds(CorrectBackend):
    """Draws from one stream of random numbers, so that no request has a seed of its own."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return super().capabilities(config) - {Capability.SEED}


class CannotReadWeights(CorrectBackend):
    """Keeps weights in a form that cannot be read back, and names the class of a model that it does not serve."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return super().capabilities(config) - {Capability.READ_WEIGHTS}

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        for fields in config_levels(config.model):
            if fields.get("architectures") == ["DeepseekV3ForCausalLM"]:
                raise InvalidConfig("a DeepseekV3ForCausalLM is not served", field="model")
        super().validate(config)

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        source = message.request.source if isinstance(message, PrepareUpdate) else None
        if isinstance(source, PluginSource) and source.data.get("base") is not None:
            raise WeightBaseMismatch("weights in another form cannot be the base of a delta")
        return await super().receive_weights(message)


class TellsOfUpdatesLate(CorrectBackend):
    """Serves new weights for a while before it answers that they were applied."""

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        reply = await super().apply_weights(update)
        await asyncio.sleep(0.3)
        return reply


class RefusesLate(Generation):
    """Refuses a request after it has answered calls that were made later.

    So does an engine of another process, when this process reads several answers at once.
    """

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: Params,
        options: CallOptions,
        *,
        whole: Whole | None = None,
        scored: ScoringCall | None = None,
    ) -> GenerationOutput:
        async with _late_refusals():
            return await super().generate(prompts, sampling_params, options, whole=whole, scored=scored)

    async def stream(
        self, prompts: Prompts, sampling_params: Params, options: CallOptions
    ) -> AsyncGenerator[CompletionChunk, None]:
        async with _late_refusals(), aclosing(super().stream(prompts, sampling_params, options)) as chunks:
            async for chunk in chunks:
                yield chunk


@asynccontextmanager
async def _late_refusals() -> AsyncGenerator[None, None]:
    try:
        yield
    except EngineStateError:
        await asyncio.sleep(0.05)  # ample for the answer to another call
        raise


RIGHT: dict[type[CorrectBackend | Generation], dict[str, Verdict]] = {
    KeepsNoCache: {**dict.fromkeys(CASES, Verdict.PASSED), OF_PREFIXES: Verdict.REFUSED},
    RunsTwoAtOnce: {"streaming/tokens_come_while_others_are_generated": Verdict.PASSED},
    ServesText: {
        "multimodal/another_image_has_another_answer": Verdict.REFUSED,
        "multimodal/another_video_has_another_answer": Verdict.REFUSED,
        "multimodal/another_sound_has_another_answer": Verdict.REFUSED,
        "openai/images_in_messages_reach_the_prompt": Verdict.REFUSED,
    },
    CannotReadWeights: {
        "weight_sync/tied_weights_are_pushed_once_and_used_twice": Verdict.PASSED,
        "weight_sync/only_what_changed_is_pushed": Verdict.PASSED,
    },
    HasNoSeeds: {"openai/answers_are_json_where_tokens_cannot_be_drawn": Verdict.PASSED},
    TellsOfUpdatesLate: {"weight_sync/frozen_requests_go_on_where_they_were": Verdict.PASSED},
    RefusesLate: {"histories/random_sleeps_keep_the_contract": Verdict.PASSED},
}
"""Backends and parts of an engine, and what the suite must say of them."""


def judgements(kind: type[CorrectBackend | Generation]) -> dict[str, Judgement]:
    def right(backend: type[Backend]) -> type[Backend]:
        return mixed(backend, kind)

    def right_part(kinds: PartKinds) -> PartKinds:
        return dataclasses.replace(kinds, generation=mixed(kinds.generation, kind))

    cases = {case.id: case for case in all_cases()}
    made = Mutant(kind.__name__, "Is right.", next(iter(RIGHT[kind])), ("",))
    is_part = issubclass(kind, Generation)
    made = (
        dataclasses.replace(made, spoil_part=right_part) if is_part else dataclasses.replace(made, spoil_backend=right)
    )
    with Runner(suite_of_mutant("transformers", made)(), profile=PROFILES["smoke"]) as runner:
        return {name: runner.execute(cases[name]).judgement for name in RIGHT[kind]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_an_engine_that_is_right_is_green(kind: type[CorrectBackend | Generation]) -> None:
    # Cases that measure memory count what is allocated, and a process of many tests has freed memory to hand out again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own_process:
        judged = own_process.submit(judgements, kind).result()
    assert {name: one.message for name, one in judged.items() if one.verdict is Verdict.FAILED} == {}
    assert {name: one.verdict for name, one in judged.items()} == RIGHT[kind]
