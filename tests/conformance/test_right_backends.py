"""Backends that differ from ours and are right must be green: the suite may ask for no more than the contract says."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from drivetrain import Capability
from drivetrain.backend.base import Backend, EngineStats
from drivetrain.types.config import EngineConfig
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


def right(backend: type[Backend]) -> type[Backend]:
    return mixed(backend, KeepsNoCache)


def judgements() -> dict[str, Judgement]:
    cases = {case.id: case for case in all_cases()}
    made = Mutant("keeps_no_cache", "Keeps no cache.", CASES[0], ("",), spoil_backend=right)
    with Runner(suite_of_mutant("transformers", made)(), profile=PROFILES["smoke"]) as runner:
        return {name: runner.execute(cases[name]).judgement for name in (*CASES, OF_PREFIXES)}


def test_an_engine_that_keeps_no_cache_between_requests_is_green() -> None:
    # Cases that measure memory count what is allocated, and a process of many tests has freed memory to hand out again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own_process:
        judged = own_process.submit(judgements).result()
    assert {name: one.message for name, one in judged.items() if one.verdict is Verdict.FAILED} == {}
    assert {name: judged[name].verdict for name in CASES} == dict.fromkeys(CASES, Verdict.PASSED)
    assert judged[OF_PREFIXES].verdict is Verdict.REFUSED
