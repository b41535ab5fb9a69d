"""Engines on several ranks: they answer as the model does, and they sleep and update as one.

On a machine without a GPU, SGLang and vLLM run the cases of tensor parallelism with two ranks on its CPU, and the
mutants of ``drivetrain_conformance.mutants.ranks`` with them. Both refuse pipelines, replicas and whole experts on one
rank there, so that the cases of these run on two GPUs only, as do those of a GPU's memory. No mutant is about them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import WeightVerifyFailed
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.expert_choices import check_choices, experts_of, router_logprobs
from drivetrain_conformance.assertions.memory_use import held_by_ranks, parameter_bytes
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assertions.same_answers import check_greedy
from drivetrain_conformance.assertions.weight_checks import check_holds
from drivetrain_conformance.assets.made_adapters import make_adapter, merge, tensors_in
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import Between, a_matrix, tensors_of, with_another_digest
from drivetrain_conformance.harness.case import Hardware, case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.harness.time_limits import within
from drivetrain_conformance.references.oracle import token_logprobs
from drivetrain_weight_sync import LoraSync, Strategy, WeightSync

TOKENS: Final = 24
"""Length of each answer that is compared."""
BOUND: Final = 120.0
"""Timeout, in seconds, of each wait."""
_GIVEN_BACK: Final = 0.9
"""Least share of a rank's weights whose memory sleep gives back."""
ATTEMPTS: Final = 3
"""Attempts at aborts that may arrive too late: two busy ranks may leave a machine little time for anything else."""


@case(Capability.TENSOR_PARALLEL, hardware=Hardware.TWO_RANKS, own_engine=True, slow=True)
async def layers_split_over_two_ranks(bench: Bench) -> None:
    """With every layer split over two ranks the answers are the model's own."""
    async with bench.open(tensor_parallel_size=2) as engine:
        assert engine.tp_size == 2
        await _answers_as_the_model(bench, engine)


@case(Capability.PIPELINE_PARALLEL, hardware=Hardware.TWO_RANKS, own_engine=True)
async def one_layer_after_another_on_two_ranks(bench: Bench) -> None:
    """With the first layers on one rank and the last on another the answers are the model's own."""
    async with bench.open(pipeline_parallel_size=2) as engine:
        assert engine.pp_size == 2
        await _answers_as_the_model(bench, engine)


@case(Capability.DATA_PARALLEL, hardware=Hardware.TWO_RANKS, own_engine=True)
async def two_replicas(bench: Bench) -> None:
    """With a replica of the model on each of two ranks every request is answered once, as the model does."""
    async with bench.open(data_parallel_size=2) as engine:
        assert engine.dp_size == 2
        await _answers_as_the_model(bench, engine, prompts=32)


@case(
    Capability.TENSOR_PARALLEL,
    Capability.EXPERT_PARALLEL,
    model=ModelKind.MOE,
    hardware=Hardware.TWO_RANKS,
    own_engine=True,
)
async def experts_split_over_two_ranks(bench: Bench) -> None:
    """With half of a mixture's experts on each of two ranks the answers are the model's own."""
    async with bench.open(tensor_parallel_size=2, expert_parallel_size=2) as engine:
        assert engine.ep_size == 2
        await _answers_as_the_model(bench, engine)
        await _experts_are_the_routers_choice(bench, engine, bench.model)


@case(Capability.TENSOR_PARALLEL, Capability.WEIGHTS_DISK, hardware=Hardware.TWO_RANKS, own_engine=True)
async def an_update_reaches_every_rank(bench: Bench) -> None:
    """After an update an engine on two ranks answers as the new weights do, and after the reverse update as before."""
    async with bench.open(tensor_parallel_size=2) as engine:
        await _answers_as_the_model(bench, engine)
        for folder, version in ((bench.other_weights(), "others"), (bench.model, "back")):
            await engine.load_weights_from_disk(str(folder), version)
            assert engine.get_weight_version() == version
            await _answers_as_the_model(bench, engine, folder)


@case(
    Capability.TENSOR_PARALLEL,
    Capability.WEIGHTS_DISK,
    model=ModelKind.MOE,
    hardware=Hardware.TWO_RANKS,
    own_engine=True,
    slow=True,
)
async def an_update_of_a_mixture_reaches_every_rank(bench: Bench) -> None:
    """A mixture whose experts are split over two ranks answers as its latest weights do."""
    async with bench.open(tensor_parallel_size=2) as engine:
        await _answers_as_the_model(bench, engine)
        await _experts_are_the_routers_choice(bench, engine, bench.model)
        other = bench.other_weights()
        await engine.load_weights_from_disk(str(other), "others")
        await _answers_as_the_model(bench, engine, other)
        await _experts_are_the_routers_choice(bench, engine, other)


@case(
    Capability.TENSOR_PARALLEL,
    Capability.WEIGHTS_SHARED_MEMORY,
    Capability.WEIGHTS_BROADCAST,
    Capability.READ_WEIGHTS,
    hardware=Hardware.TWO_RANKS,
    own_engine=True,
    slow=True,
)
async def a_push_reaches_every_rank(bench: Bench) -> None:
    """Weights pushed to two ranks read back as sent; a tensor that arrives altered fails verification."""
    await _reaches_every_rank(bench, [Strategy.SHARED_MEMORY, Strategy.BROADCAST])


@case(
    Capability.TENSOR_PARALLEL,
    Capability.WEIGHTS_CUDA_IPC,
    Capability.READ_WEIGHTS,
    hardware=Hardware.TWO_GPUS,
    own_engine=True,
    slow=True,
)
async def a_push_through_one_gpus_memory_reaches_every_rank(bench: Bench) -> None:
    """Weights pushed through the first GPU's memory reach the rank on that GPU and the rank on a second one."""
    await _reaches_every_rank(bench, [Strategy.CUDA_IPC], device="cuda:0")


@case(
    Capability.TENSOR_PARALLEL,
    Capability.EXPERT_PARALLEL,
    Capability.WEIGHTS_SHARED_MEMORY,
    Capability.WEIGHTS_CUDA_IPC,
    Capability.READ_WEIGHTS,
    model=ModelKind.MOE,
    hardware=Hardware.TWO_GPUS,
    own_engine=True,
)
async def a_push_reaches_the_rank_of_each_expert(bench: Bench) -> None:
    """With half of a mixture's experts on each of two ranks, each expert reaches its rank and reads back as sent."""
    strategies = [Strategy.SHARED_MEMORY, Strategy.CUDA_IPC]
    await _reaches_every_rank(bench, strategies, device="cuda:0", expert_parallel_size=2)


@case(
    Capability.TENSOR_PARALLEL,
    Capability.LORA,
    Capability.WEIGHTS_LORA_TENSORS,
    Capability.WEIGHTS_SHARED_MEMORY,
    Capability.WEIGHTS_BROADCAST,
    config={"enable_lora": True, "max_loras": 1, "max_lora_rank": 8},
    hardware=Hardware.TWO_RANKS,
    own_engine=True,
    slow=True,
)
async def an_adapter_reaches_every_rank(bench: Bench) -> None:
    """An adapter pushed as tensors to two ranks is served by both; one that is refused leaves the old one on both."""
    made = [make_adapter(bench.model, bench.folder("adapter"), seed=seed) for seed in (1, 2)]
    merged = [merge(bench.model, adapter, bench.folder("merged")) for adapter in made]
    given = [tensors_in(adapter.path) for adapter in made]
    async with bench.open(tensor_parallel_size=2) as engine:
        prompts, between = bench.prompts(2, engine=engine), Between(engine)
        params = SamplingParams(max_new_tokens=TOKENS, temperature=0)

        async def answers_as(model: Path) -> None:
            for completion in (await engine.generate(prompts, params, lora="a")).completions:
                check_greedy(bench, completion, engine, model)

        for strategy in (Strategy.SHARED_MEMORY, Strategy.BROADCAST):
            async with (
                LoraSync.connect(given[0], engine, "a", strategy) as first,
                LoraSync.connect(given[1], between, "a", strategy) as second,
            ):
                await first.push(version=f"{strategy.value} first")
                await answers_as(merged[0])
                between.change = partial(with_another_digest, name=next(iter(given[1].tensors)))
                with raises(WeightVerifyFailed, "a tensor that is not what was sent"):
                    await second.push(version="bad")
                assert engine.get_weight_version() == f"{strategy.value} first"
                await answers_as(merged[0])
                between.change = lambda request: request
                await second.push(version=f"{strategy.value} second")
                await answers_as(merged[1])
        await engine.unload_lora_adapter("a")


async def _reaches_every_rank(
    bench: Bench, strategies: Sequence[Strategy], device: str = "cpu", expert_parallel_size: int = 1
) -> None:
    other = bench.other_weights()
    async with bench.open(tensor_parallel_size=2, expert_parallel_size=expert_parallel_size) as engine:
        for strategy in strategies:
            WeightSync.connect({}, engine, strategy)  # an unclaimed strategy is refused before a GPU is used
        between = Between(engine)
        tensors, first = (
            {name: tensor.to(device) for name, tensor in tensors_of(folder).items()} for folder in (other, bench.model)
        )
        for strategy in strategies:
            pushed = {name: tensor.clone() for name, tensor in first.items()}
            async with WeightSync.connect(pushed, engine, strategy) as sync:
                for number, values in enumerate((first, first, tensors)):
                    for name, tensor in pushed.items():
                        tensor.copy_(values[name])
                    await sync.push(version=f"{strategy.value} {number}")
            await check_holds(engine, tensors)
            await _answers_as_the_model(bench, engine, other)
            async with WeightSync.connect(first, between, strategy) as back:
                name = a_matrix(await engine.weight_manifest())
                between.change = partial(with_another_digest, name=name)
                with raises(WeightVerifyFailed, "a tensor that is not what was sent") as failure:
                    await back.push(version="bad")
                assert failure.error.tensors == (name,)
                _check_state(engine, EngineState.DIRTY)
                between.change = lambda request: request
                await back.push(version="back")
            await check_holds(engine, first)
        assert (await engine.validate_weights()).ok


@case(
    Capability.TENSOR_PARALLEL,
    Capability.SLEEP_WEIGHTS,
    Capability.SLEEP_KV_CACHE,
    Capability.WEIGHTS_DISK,
    model=ModelKind.LARGE,
    hardware=Hardware.TWO_RANKS,
    own_engine=True,
    slow=True,
)
async def every_rank_gives_its_memory_back(bench: Bench) -> None:
    """Sleep frees memory on each of two ranks; after a wake-up in steps and an update the engine answers as before."""
    async with bench.open(tensor_parallel_size=2) as engine:
        share = parameter_bytes(engine) / 2
        for turn in range(3):
            awake = held_by_ranks(engine)
            await engine.sleep([MemoryTag.WEIGHTS])  # first: a large cache would hide the difference
            asleep = held_by_ranks(engine)
            # Some process of the start may have ended meanwhile.
            given_back = sorted(awake[place] - asleep[place] for place in awake.keys() & asleep.keys())[-2:]
            assert min(given_back) >= _GIVEN_BACK * share, f"the ranks gave {given_back} bytes back, of {share:.0f}"
            await engine.sleep([MemoryTag.KV_CACHE])
            await engine.wake_up([MemoryTag.WEIGHTS])
            _check_state(engine, EngineState.ASLEEP)
            await engine.load_weights_from_disk(str(bench.model), f"turn-{turn}")
            await engine.wake_up([MemoryTag.KV_CACHE])
            _check_state(engine, EngineState.READY)
            await _answers_as_the_model(bench, engine)


@case(Capability.DATA_PARALLEL, Capability.PAUSE_WAIT, hardware=Hardware.TWO_RANKS, own_engine=True)
async def a_pause_holds_every_replica(bench: Bench) -> None:
    """A pause of two replicas waits for the requests of both; later requests wait until it ends, and none is lost."""
    async with bench.open(data_parallel_size=2) as engine:
        prompts = bench.prompts(16, engine=engine)
        early = asyncio.create_task(bench.greedy(prompts, TOKENS, engine))
        async with within(seconds=BOUND):
            while engine.parts.in_flight.running < len(prompts) and not early.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
        pausing = asyncio.create_task(engine.pause_generation(PauseMode.WAIT))
        async with within(seconds=BOUND):
            while not engine.is_paused:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
            late = asyncio.create_task(bench.greedy(prompts, TOKENS, engine))
            await pausing
            answers = await early
            await asyncio.sleep(0.1)
            assert not late.done()
            await engine.continue_generation()
            answers += await late
        for completion in answers:
            check_greedy(bench, completion, engine, bench.model)


@case(Capability.TENSOR_PARALLEL, Capability.ABORT, hardware=Hardware.TWO_RANKS, own_engine=True, slow=True)
async def an_abort_ends_a_request_on_every_rank(bench: Bench) -> None:
    """An abort returns requests that run on two ranks, and the ranks stay in step: later answers are correct."""
    async with bench.open(tensor_parallel_size=2) as engine:
        await engine.abort("an id that no request has")
        params = SamplingParams(max_new_tokens=800, temperature=0, ignore_eos=engine.supports(Capability.IGNORE_EOS))
        for _ in range(ATTEMPTS):
            prompts = bench.prompts(4, engine=engine)
            async with bench.in_flight(prompts, params, engine, request_ids=["a", "b", "c", "d"]) as task:
                for request_id in ("b", "a", "d", "c"):
                    await engine.abort(request_id)
                async with within(seconds=BOUND):
                    completions = (await task).completions
            if all(completion.finish_reason is FinishReason.ABORT for completion in completions):
                break
        else:
            raise AssertionError("requests that were aborted while they ran went on to their end")
        for completion in completions:
            check_greedy(bench, completion, engine, bench.model)
        await _answers_as_the_model(bench, engine)


# ----------------------------------------------------------------------------------------------------------------------


def _check_state(engine: InferenceEngine, state: EngineState) -> None:
    assert engine.state is state


async def _answers_as_the_model(
    bench: Bench, engine: InferenceEngine, model: Path | None = None, prompts: int = 6
) -> None:
    """Check one request alone, and several of different lengths together, against the likeliest tokens of ``model``."""
    params = SamplingParams(max_new_tokens=TOKENS, temperature=0)
    if engine.supports(Capability.LOGPROBS_RAW):
        params = params.model_copy(update={"logprobs": 0, "logprobs_mode": LogprobsMode.RAW})
    asked = [bench.prompt(3 + 5 * (index % 7), engine) for index in range(prompts)]
    alone, together = [(await engine.generate(given, params)).completions for given in (asked[:1], asked)]
    answers = [*alone, *together]
    assert [completion.prompt_token_ids for completion in answers] == [asked[0], *asked]
    for completion in answers:
        assert completion.token_ids
        check_greedy(bench, completion, engine, model or bench.model)
        _check_logprobs(bench, completion, engine, model or bench.model)


def _check_logprobs(bench: Bench, completion: Completion, engine: InferenceEngine, model: Path) -> None:
    """Check raw logprobs, if there are any, against those of ``model``, under the rounding that is closest."""
    if completion.logprobs is None:
        return
    ids, tolerance = completion.token_ids, bench.tolerance(engine)
    assert len(completion.logprobs) == len(ids), f"{len(completion.logprobs)} logprobs of {len(ids)} tokens"
    references = [token_logprobs(bench.output_logits(completion, model), ids)]
    for at, value in enumerate(completion.logprobs):
        if abs(value - references[0][at]) > tolerance and len(references) == 1:
            rounded = bench.rounded_output_logits(completion, engine, model)
            references += [token_logprobs(rows, ids) for rows in rounded]
        nearest = min((reference[at] for reference in references), key=lambda found: abs(found - value))
        assert abs(value - nearest) <= tolerance, (
            f"the logprob of token {at} is {value:.5f}; the reference says {nearest:.5f}"
        )


async def _experts_are_the_routers_choice(bench: Bench, engine: InferenceEngine, model: Path) -> None:
    """Check the experts of each token of a prompt and an output, if the engine returns them."""
    if not engine.supports(Capability.ROUTED_EXPERTS):
        return
    with_prompt = engine.supports(Capability.PROMPT_ROUTED_EXPERTS)
    params = SamplingParams(
        max_new_tokens=TOKENS, temperature=0, return_routed_experts=True, return_prompt_routed_experts=with_prompt
    )
    prompts = bench.prompts(3, 11, engine)
    for completion in (await engine.generate(prompts, params)).completions:
        ids, own = [*completion.prompt_token_ids, *completion.token_ids], experts_of(completion)
        first = len(completion.prompt_token_ids) - 1
        ranked = router_logprobs(bench, ids, model)
        check_choices(bench, ranked[first : first + len(completion.token_ids)], own, engine)
        if with_prompt:
            assert completion.prompt_routed_experts is not None
            of_prompt = completion.prompt_routed_experts.to_numpy().astype(np.int64)
            check_choices(bench, ranked[: first + 1], of_prompt, engine)
