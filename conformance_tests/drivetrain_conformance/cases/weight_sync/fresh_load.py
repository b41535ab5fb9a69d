"""After a push, the engine answers as if it had loaded the weights at its start."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.capability import Capability
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.weight_checks import check_holds
from drivetrain_conformance.assets.weight_sources import tensors_of
from drivetrain_conformance.cases.weight_sync.checks import NEW, check_serves
from drivetrain_conformance.harness.case import Hardware, case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import Strategy, WeightSync
from drivetrain_weight_sync.transports.process_groups import GroupBackend


@case(Capability.WEIGHTS_IN_PROCESS, Capability.LOGPROBS_RAW, own_engine=True)
async def a_push_in_process_equals_a_fresh_load(bench: Bench) -> None:
    """Answers and logprobs after an in-process push are exactly those of an engine that was opened on the weights."""
    await _equals_a_fresh_load(bench, [Strategy.IN_PROCESS])


@case(Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_DISK, Capability.LOGPROBS_RAW, own_engine=True)
async def a_push_on_one_host_equals_a_fresh_load(bench: Bench) -> None:
    """Answers and logprobs after shared-memory and disk pushes are exactly those of an engine opened on the weights."""
    await _equals_a_fresh_load(bench, [Strategy.SHARED_MEMORY, Strategy.DISK])


@case(Capability.WEIGHTS_CUDA_IPC, Capability.LOGPROBS_RAW, own_engine=True, hardware=Hardware.GPU)
async def a_push_through_gpu_memory_equals_a_fresh_load(bench: Bench) -> None:
    """Answers and logprobs after a push through GPU memory are exactly those of an engine opened on the weights."""
    await _equals_a_fresh_load(bench, [Strategy.CUDA_IPC], device="cuda")


@case(Capability.WEIGHTS_CUDA_IPC, changes_weights=True, hardware=Hardware.GPU)
async def pushes_through_gpu_memory_bring_what_is_there_then(bench: Bench) -> None:
    """Repeated pushes of the same tensors through GPU memory each bring the tensors' values at that time."""
    await _follows(bench, share_tensors=False)


@case(Capability.WEIGHTS_CUDA_IPC, changes_weights=True, hardware=Hardware.GPU)
async def pushes_of_shared_tensors_bring_what_is_there_then(bench: Bench) -> None:
    """Repeated pushes with share_tensors=True, which the engine reads in place, bring the values at that time."""
    await _follows(bench, share_tensors=True)


async def _follows(bench: Bench, *, share_tensors: bool) -> None:
    engine, other = bench.engine, bench.other_weights()
    WeightSync.connect({}, engine, Strategy.CUDA_IPC)  # an unclaimed strategy is refused before a GPU is used
    first, second = ({n: t.cuda() for n, t in tensors_of(folder).items()} for folder in (bench.model, other))
    trained = {name: tensor.clone() for name, tensor in first.items()}
    async with WeightSync.connect(trained, engine, Strategy.CUDA_IPC, share_tensors=share_tensors) as sync:
        for number, folder in enumerate((bench.model, bench.model, other, bench.model, other)):
            for name, tensor in trained.items():
                tensor.copy_((first if folder is bench.model else second)[name])
            await sync.push(version=f"{NEW} {number}")
            await check_holds(engine, trained)
        moved = {name: tensor.clone() for name, tensor in first.items()}
        trained.update(moved)
        await sync.push(version="moved")
        await check_holds(engine, moved)
        trained.update({name: tensor.copy_(second[name]) for name, tensor in moved.items()})
        await sync.push(version=NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_BROADCAST, Capability.LOGPROBS_RAW, own_engine=True, slow=True)
async def a_broadcast_equals_a_fresh_load(bench: Bench) -> None:
    """Answers and logprobs after a broadcast are exactly those of an engine that was opened on the weights."""
    await _equals_a_fresh_load(bench, [Strategy.BROADCAST])


@case(Capability.WEIGHTS_BROADCAST, Capability.LOGPROBS_RAW, own_engine=True, hardware=Hardware.TWO_GPUS)
async def a_broadcast_between_gpus_equals_a_fresh_load(bench: Bench) -> None:
    """Answers and logprobs after a broadcast from a second GPU over NCCL are exactly those of a fresh load."""
    await _equals_a_fresh_load(bench, [Strategy.BROADCAST], device="cuda:1", group_backend="nccl")


@case(Capability.WEIGHTS_CUDA_IPC, Capability.LOGPROBS_RAW, own_engine=True, hardware=Hardware.TWO_GPUS)
async def a_push_between_gpus_equals_a_fresh_load(bench: Bench) -> None:
    """Answers after a push from a second GPU's memory, which ``auto`` picks, are exactly those of a fresh load."""
    await _equals_a_fresh_load(bench, [Strategy.CUDA_IPC], device="cuda:1")


async def _equals_a_fresh_load(
    bench: Bench, strategies: Sequence[Strategy], device: str = "cpu", group_backend: GroupBackend = "gloo"
) -> None:
    other, prompts = bench.other_weights(), [[17, 42, 99, 7], list(range(33, 73))]
    pushed = bench.create()
    for strategy in strategies:
        WeightSync.connect({}, pushed, strategy, group_backend=group_backend)  # an unclaimed strategy is refused here
    old, new = (
        {name: tensor.to(device) for name, tensor in tensors_of(model).items()} for model in (bench.model, other)
    )
    there, back = (
        [WeightSync.connect(tensors, pushed, strategy, group_backend=group_backend) for strategy in strategies]
        for tensors in (new, old)
    )
    async with bench.open(model=other) as fresh:
        expected = await _numbers(fresh, prompts)
    async with pushed:
        before = await _numbers(pushed, prompts)
        assert before != expected
        if Strategy.CUDA_IPC in strategies:
            assert WeightSync.connect(new, pushed).strategy is Strategy.CUDA_IPC
        for to_new, to_old in zip(there, back, strict=True):
            async with to_new, to_old:
                await to_new.push(version=NEW)
                assert await _numbers(pushed, prompts) == expected, f"{to_new.strategy.value}: not as freshly loaded"
                await to_old.push(version="old")
                assert await _numbers(pushed, prompts) == before, f"{to_old.strategy.value}: not as freshly loaded"


async def _numbers(engine: InferenceEngine, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float] | None]]:
    """Return greedy token ids and logprobs of each prompt, each alone in the engine."""
    params = SamplingParams(max_new_tokens=16, temperature=0, logprobs=0, logprobs_mode=LogprobsMode.RAW)
    completions = [(await engine.generate(prompt, params)).completions[0] for prompt in prompts]
    return [(completion.token_ids, completion.logprobs) for completion in completions]
