"""Weights from a trainer: the weights served after a successful or failed update, and requests in flight."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStartError,
    EngineStateError,
    InvalidConfig,
    InvalidRequest,
    NonFiniteLogits,
    WeightPlanMismatch,
    WeightSyncError,
    WeightTransferFailed,
    WeightVerifyFailed,
    WeightVersionGone,
)
from drivetrain.testing import tiny_model
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import Completion, FinishReason
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.weights import (
    BroadcastSource,
    CommunicatorSpec,
    CudaIpcSource,
    InProcessSource,
    SharedMemorySource,
    WeightSource,
    WeightUpdateRequest,
)
from drivetrain_conformance.assertions.event_loop_stalls import check_it_runs
from drivetrain_conformance.assertions.full_disk import full_disk
from drivetrain_conformance.assertions.lasting_state import with_a_state
from drivetrain_conformance.assertions.leftovers import (
    Holdings,
    check_nothing_left,
    listening_addresses,
    temporary_folder,
)
from drivetrain_conformance.assertions.memory_use import check_steady, held_by, held_bytes, mappings_of
from drivetrain_conformance.assertions.refusals import raises, refused
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assertions.weight_checks import (
    NEW,
    TOKENS,
    Late,
    check_boundary,
    check_dirty,
    check_holds,
    check_kept_cache,
    check_late,
    check_logprobs,
    check_made_by,
    check_recovers,
    check_serves,
    check_spans,
    check_state,
    from_disk,
    load_all,
    one,
    one_by_one,
    same_label_again,
    same_weights_again,
    unchanged,
    update_in_flight,
)
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import (
    FAULTS,
    FORMS,
    Between,
    a_matrix,
    bad_folders,
    in_bfloat16,
    in_form,
    is_waited_for,
    module_of,
    moved_tensor,
    nowhere,
    of_a_diverged_model,
    raw_bytes,
    tensors_of,
    with_another_digest,
    with_value,
    without_tensor,
    write_checkpoint,
)
from drivetrain_conformance.harness.case import Hardware, case
from drivetrain_conformance.harness.testbench import Bench, TooLate, check_held, in_time, until_idle
from drivetrain_conformance.model.replay import Live, proceed, settle
from drivetrain_weight_sync import Strategy, WeightInput, WeightSync, make_plan
from drivetrain_weight_sync.tensors.dtypes import nbytes_of
from drivetrain_weight_sync.transports.process_groups import GroupBackend

ONE_BUCKET: Final = 1 << 40
LONG_PROMPT: Final = 320
"""In tokens; caches find prefixes in whole blocks, of up to 128 tokens."""


# Each way to send ------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_IN_PROCESS, changes_weights=True)
async def weights_pushed_in_process_are_served(bench: Bench) -> None:
    """After an in-process push an engine answers as an independent pass over the weights does."""
    await _push_and_serve(bench, Strategy.IN_PROCESS)


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def weights_pushed_through_shared_memory_are_served(bench: Bench) -> None:
    """After a push through shared memory an engine answers as an independent pass over the weights does."""
    await _push_and_serve(bench, Strategy.SHARED_MEMORY)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def weights_pushed_through_a_folder_are_served(bench: Bench) -> None:
    """After a push through a folder an engine answers as an independent pass over the weights does.

    A push that finds the disk full fails; the engine keeps its weights, and no file is left.
    """
    await _check_a_full_disk_changes_nothing(bench, Strategy.DISK)
    await _push_and_serve(bench, Strategy.DISK)


@case(Capability.WEIGHTS_CUDA_IPC, changes_weights=True, hardware=Hardware.GPU)
async def weights_pushed_through_gpu_memory_are_served(bench: Bench) -> None:
    """After a push through memory of the same GPU an engine answers as an independent pass over the weights does."""
    tensors = tensors_of(bench.other_weights())
    WeightSync.connect(tensors, bench.engine, Strategy.CUDA_IPC)  # an unclaimed strategy is refused here
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    await _push_and_serve(bench, Strategy.CUDA_IPC, on_gpu)


@case(Capability.WEIGHTS_BROADCAST, changes_weights=True)
async def weights_that_were_broadcast_are_served(bench: Bench) -> None:
    """After a broadcast an engine answers as an independent pass over the weights does."""
    await _push_and_serve(bench, Strategy.BROADCAST)


async def _check_a_full_disk_changes_nothing(bench: Bench, strategy: Strategy | str) -> None:
    engine, directory, own = bench.engine, bench.folder("pushes"), bench.engine.get_weight_version()
    async with WeightSync.connect(tensors_of(bench.other_weights()), engine, strategy, directory=directory) as sync:
        with full_disk([psutil.Process()]), raises(WeightSyncError, "a push on a full disk") as failure:
            await sync.push(version="bad")
        assert str(directory) in str(failure.error), f"the error does not name the folder: {failure.error}"
        assert not list(directory.iterdir()), f"a push on a full disk left {list(directory.iterdir())}"
        check_state(engine, EngineState.READY)
        await check_serves(bench, bench.model, own)


async def _push_and_serve(bench: Bench, strategy: Strategy, source: WeightInput | None = None) -> None:
    other = bench.other_weights()
    async with WeightSync.connect(tensors_of(other) if source is None else source, bench.engine, strategy) as sync:
        assert sync.strategy is strategy
        result = await sync.push(version=NEW)
    assert (result.version, result.strategy) == (NEW, strategy)
    assert result.nbytes > 0
    assert 0 < result.paused_seconds < result.update_seconds
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def a_checkpoint_folder_is_served(bench: Bench) -> None:
    """After load_weights_from_disk() an engine answers as an independent pass over that folder does.

    An engine that holds float32 also accepts a folder in bfloat16.
    """
    other = bench.other_weights()
    await bench.engine.load_weights_from_disk(str(other), NEW)
    await check_serves(bench, other, NEW)
    if await _holds_float32(bench.engine):
        narrow = in_bfloat16(tensors_of(other))
        folder = write_checkpoint(bench.folder("narrow"), other, narrow)
        await bench.engine.load_weights_from_disk(str(folder), "bfloat16")
        await check_serves(bench, _widened(bench, narrow), "bfloat16")


async def _holds_float32(engine: InferenceEngine) -> bool:
    return {spec.dtype for spec in (await engine.weight_manifest()).tensors if "float" in spec.dtype} == {"float32"}


def _widened(bench: Bench, narrow: dict[str, torch.Tensor]) -> Path:
    """Write a folder with the same values in float32."""
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in narrow.items()}
    return write_checkpoint(bench.folder("widened"), bench.other_weights(), tensors)


@case(Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_DISK, changes_weights=True)
async def auto_picks_a_way_that_works(bench: Bench) -> None:
    """Strategy auto picks one that the engine claims, and its push gives the same answers as any other."""
    engine, other = bench.engine, bench.other_weights()
    old, new, prompts = tensors_of(bench.model), tensors_of(other), bench.prompts(2)
    async with (
        WeightSync.connect(new, engine, "shared_memory") as shared,
        WeightSync.connect(old, engine, "disk") as disk,
        WeightSync.connect(new, engine) as auto,
    ):
        assert auto.strategy is not Strategy.AUTO
        assert f"weights_{auto.strategy.value}" in {capability.value for capability in engine.capabilities}
        before = await one_by_one(bench, prompts)
        await auto.push(version="auto")
        by_auto = await one_by_one(bench, prompts)
        await disk.push(version="disk")
        check_same(bench, await one_by_one(bench, prompts), before)
        await shared.push(version="shared")
        check_same(bench, await one_by_one(bench, prompts), by_auto, model=other)
    await check_serves(bench, other, "shared")


# As if freshly loaded --------------------------------------------------------------------------------------------


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


@case(Capability.WEIGHTS_BROADCAST, Capability.LOGPROBS_RAW, own_engine=True)
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


# Buckets, order, forms -------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def small_buckets_serve_the_same(bench: Bench) -> None:
    """Weights pushed in many small buckets, one per layer, give the same answers as in a single bucket."""
    engine, other = bench.engine, bench.other_weights()
    old, new, prompts = tensors_of(bench.model), tensors_of(other), bench.prompts(2)
    answers: list[list[Completion]] = []
    buckets: list[int] = []
    for bucket_bytes in (ONE_BUCKET, 1, 100_000):
        await _push(engine, old, "back")
        async with WeightSync.connect(new, engine, "shared_memory", bucket_bytes=bucket_bytes) as sync:
            buckets.append((await sync.push(version=NEW)).buckets)
        answers.append(await one_by_one(bench, prompts))
        check_same(bench, answers[-1], answers[0], model=other)
    assert buckets[0] == 1
    assert buckets[1] > 2
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_SHARED_MEMORY, model=ModelKind.MOE, changes_weights=True)
async def a_mixture_of_experts_is_served_as_pushed(bench: Bench) -> None:
    """Experts and routers arrive complete in one bucket and in many, by the checkpoint's names and the module's."""
    engine, other = bench.engine, bench.other_weights()
    old, new, module = tensors_of(bench.model), tensors_of(other), module_of(other)
    sources = ((new, ONE_BUCKET), (new, 1), (module, 1), (module.state_dict(), ONE_BUCKET))
    for source, bucket_bytes in sources:
        await _push(engine, source, NEW, bucket_bytes)
        await check_serves(bench, other, NEW)
        await _push(engine, old, "back", bucket_bytes)
        await check_serves(bench, bench.model, "back")


@case(Capability.WEIGHTS_DISK, model=ModelKind.MOE, changes_weights=True)
async def a_mixture_of_experts_is_served_as_on_disk(bench: Bench) -> None:
    """Experts and routers of a checkpoint folder arrive complete."""
    other = bench.other_weights()
    await bench.engine.load_weights_from_disk(str(other), NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_SHARED_MEMORY, own_engine=True)
async def tied_weights_are_pushed_once_and_used_twice(bench: Bench) -> None:
    """A model with tied weights accepts them under either name, and uses the new weights in both places.

    stats() counts them once. Square matrices of gpt2, whose checkpoints hold them transposed, are not turned twice.
    Tensors that engines compute when they load DeepSeek's, such as the halves of a projection, follow each update.
    """
    for architecture, fields in _PUSHED.items():
        folder = tiny_model(architecture, dtype=bench.models.dtype, **fields)
        with _serves_or_names(architecture):
            # Some engines cache no prefixes where attention is latent, and refuse to be asked for it.
            caching = {"enable_prefix_caching": False} if architecture == "deepseek_v3" else {}
            engine = bench.create(model=folder, **caching)
            WeightSync.connect({}, engine, "shared_memory")  # an unclaimed strategy is refused before the engine starts
            async with engine:
                await _push_tied(bench, engine, folder)


_PUSHED: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen2": {"tie_word_embeddings": True},
    "gpt2": {"tie_word_embeddings": True},
    "deepseek_v3": {
        "first_k_dense_replace": 2,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
    },  # no layer has experts
}
"""Architectures, and fields of their configuration."""


@contextmanager
def _serves_or_names(architecture: str) -> Iterator[None]:
    """Let an engine refuse an architecture other than the suite's own, when it is created or starts, if it names it."""
    try:
        yield
    except (EngineStartError, InvalidConfig) as refusal:
        if architecture == "qwen2" or architecture not in str(refusal).lower():
            raise


async def _push_tied(bench: Bench, engine: InferenceEngine, folder: Path) -> None:
    other = bench.models.with_other_weights(folder)
    for source in (module_of(other), tensors_of(other)):
        await _push(engine, tensors_of(folder), "back")
        await _push(engine, source, NEW)
        check_made_by(bench, await bench.greedy(bench.prompts(3, engine=engine), engine=engine), other, engine)
        await check_holds(engine, tensors_of(other))
    if engine.supports(Capability.WEIGHTS_DISK):
        for path in (folder, other):
            await engine.load_weights_from_disk(str(path), path.name)
            check_made_by(bench, await bench.greedy(bench.prompts(3, engine=engine), engine=engine), path, engine)
    stats, manifest = await engine.stats(), await engine.weight_manifest()
    sizes = {spec.name: nbytes_of(spec) for spec in manifest.tensors}
    tied, once = sum(sizes[name] for name in set(manifest.aliases.values())), sum(sizes.values())
    engines = max(1, round(stats.weight_bytes / once))  # a fleet counts the weights of each
    # An engine may pad a vocabulary; it may not count a tied tensor twice.
    assert not tied or stats.weight_bytes < engines * once + tied * 3 // 4, (
        f"it counts {stats.weight_bytes} bytes of weights, where all are {once}, {tied} of them tied"
    )


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def a_trainer_pushes_after_every_step(bench: Bench) -> None:
    """Each push of one connection sends the values that its tensors hold at that time."""
    policy = tensors_of(bench.model)
    async with WeightSync.connect(policy, bench.engine, "shared_memory", bucket_bytes=100_000) as sync:
        for step in (1, 2, 1):
            for name, tensor in tensors_of(bench.other_weights(step)).items():
                policy[name].copy_(tensor)
            await sync.push(version=f"step-{step}")
            await check_serves(bench, bench.other_weights(step), f"step-{step}")


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def going_back_to_earlier_weights_gives_their_answers(bench: Bench) -> None:
    """Pushing other weights and then the first ones again restores the first answers.

    In between, diverged weights with NaN logits end every request in NonFiniteLogits, whatever its params, and leave no
    NaN behind, such as in a cache. Requests that fail leak no memory.
    """
    engine, prompts = bench.engine, [bench.prompt(length) for length in (6, 19, 33, 46)]
    before = await one_by_one(bench, prompts)
    await engine.load_weights_from_disk(str(bench.other_weights()), NEW)
    await check_serves(bench, bench.other_weights(), NEW)
    diverged = write_checkpoint(bench.folder("diverged"), bench.model, of_a_diverged_model(tensors_of(bench.model)))
    await engine.load_weights_from_disk(str(diverged), "diverged")
    for params in (SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=4, temperature=0)):
        with refused(NonFiniteLogits, naming="of-nan"):
            await engine.generate(prompts[0], params, request_ids=["of-nan"])
    requests = (engine.generate(prompt, SamplingParams(max_new_tokens=4)) for prompt in prompts)
    ends = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(end) for end in ends} == {NonFiniteLogits}, f"requests of diverged weights ended as {ends}"
    logprobs = {"logprobs": True, "logprobs_mode": "raw"} if bench.claims(Capability.LOGPROBS_RAW) else {}
    with refused(NonFiniteLogits, otherwise="a chat of diverged weights was answered"):
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        await engine.chat_completion(chat | logprobs)
    with refused(NonFiniteLogits, otherwise="a text completion of diverged weights was answered"):
        await engine.completion({"prompt": prompts[0], "max_tokens": 4})
    await _check_failures_leave_nothing(bench)
    async with check_it_runs():
        for version in ("there", "and", "back"):  # so that short stalls add up
            await engine.load_weights_from_disk(str(bench.model), version)
    check_same(bench, await one_by_one(bench, prompts), before)
    await check_serves(bench, bench.model, "back")


_OF_A_REQUEST: Final = 12 * 1024
"""Bytes by which memory may grow with a request: allocator overhead."""


async def _check_failures_leave_nothing(bench: Bench) -> None:
    """Check that the memory does not grow with requests that fail, which these weights make all of them do."""
    engine, rounds = bench.engine, 4
    prompts = bench.prompts(4, min(400, engine.model_info.context_length // 2))

    async def held_after_some() -> dict[str, int]:
        for _ in range(rounds):
            with refused(NonFiniteLogits):
                await engine.generate(prompts, SamplingParams(max_new_tokens=4))
        return await held_by(engine)

    await held_after_some()  # the first ones fill caches
    room = {"bytes of memory": rounds * 4 * _OF_A_REQUEST, "threads": 1, "descriptors": 1, "tasks": 1}
    await check_steady(held_after_some, room, f"{rounds} calls that failed")


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def every_form_of_source_is_served(bench: Bench) -> None:
    """A mapping, pairs, a generator function that reuses its buffer, and a torch module all arrive alike.

    An engine that holds float32 accepts bfloat16 tensors exactly: none is refused, and none is rounded.
    """
    engine, other = bench.engine, bench.other_weights()
    old, backwards = tensors_of(bench.model), dict(reversed(tensors_of(other).items()))
    for form in FORMS:
        await _push(engine, old, "back")
        await _push(engine, in_form(form, backwards, other), form)
        await check_serves(bench, other, form)
    if await _holds_float32(engine):
        narrow = in_bfloat16(backwards)
        await _push(engine, old, "back")
        await _push(engine, narrow, "bfloat16")
        await check_serves(bench, _widened(bench, narrow), "bfloat16")


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
def any_buckets_order_and_form_serve_the_same(bench: Bench) -> None:
    """Whatever the bucket size and the order and form of the source, the answers afterwards are the same."""
    engine, other, prompts = bench.engine, bench.other_weights(), bench.prompts(2)
    old, new = tensors_of(bench.model), tensors_of(other)

    async def answers(source: WeightInput, bucket_bytes: int) -> list[Completion]:
        await _push(engine, old, "back")
        await _push(engine, source, NEW, bucket_bytes)
        return await one_by_one(bench, prompts)

    expected = bench.run(answers(new, ONE_BUCKET))  # a refusal is raised here, not as a counterexample

    @seed(bench.seed)
    @settings(
        max_examples=min(bench.profile.examples, 8),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        order=st.permutations(sorted(new)),
        form=st.sampled_from([form for form in FORMS if form != "module"]),
        bucket_bytes=st.integers(1, 2 * sum(tensor.nbytes for tensor in new.values())),
    )
    def holds(order: list[str], form: str, bucket_bytes: int) -> None:
        shuffled = {name: new[name] for name in order}
        check_same(bench, bench.run(answers(in_form(form, shuffled, other), bucket_bytes)), expected, model=other)

    holds()


async def _push(engine: InferenceEngine, source: WeightInput, version: str, bucket_bytes: int = ONE_BUCKET) -> None:
    async with WeightSync.connect(source, engine, "shared_memory", bucket_bytes=bucket_bytes) as sync:
        await sync.push(version=version)


@case(Capability.WEIGHTS_DISK)
async def the_manifest_names_the_checkpoint(bench: Bench) -> None:
    """weight_manifest() lists every tensor of the checkpoint once, with its checkpoint name, shape and dtype."""
    await same_weights_again(bench)
    manifest = await bench.engine.weight_manifest()
    stored = tensors_of(bench.model)
    named = {spec.name: spec for spec in manifest.tensors}
    assert len(named) == len(manifest.tensors), "a tensor is listed twice"
    assert {manifest.aliases.get(name, name) for name in stored} == set(named)
    assert set(manifest.aliases.values()) <= set(named)
    for name, tensor in stored.items():
        spec = named[manifest.aliases.get(name, name)]
        assert spec.shape == tuple(tensor.shape), name
        held = {str(tensor.dtype).removeprefix("torch."), bench.engine.model_info.dtype}
        assert spec.dtype in held, f"{name} is {spec.dtype}"


# Refusals --------------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_SHARED_MEMORY)
async def wrong_tensors_are_refused_by_name(bench: Bench) -> None:
    """A push of missing, extra, misshapen, mistyped or non-finite tensors is refused by name and changes nothing."""
    engine, tensors = bench.engine, tensors_of(bench.other_weights())
    WeightSync.connect(tensors, engine, "shared_memory")  # an unclaimed strategy is refused before the manifest is read
    async with unchanged(bench):
        name = a_matrix(await engine.weight_manifest())
        for fault in FAULTS:
            wrong = dict(tensors)
            fault.spoil(wrong, name)
            for source in (wrong, list(wrong.items())):
                with raises(fault.kind, fault.what) as refusal:
                    await _push(engine, source, "bad")
                fault.check_named(refusal.error, name)
                check_state(engine, EngineState.READY, fault.what)


@case(Capability.WEIGHTS_DISK)
async def a_wrong_checkpoint_is_refused_by_name(bench: Bench) -> None:
    """A folder with missing, extra, misshapen, mistyped or non-finite tensors is refused by name, changing nothing."""
    engine, tensors = bench.engine, tensors_of(bench.other_weights())
    await same_weights_again(bench)
    async with unchanged(bench):
        name = a_matrix(await engine.weight_manifest())
        for fault in FAULTS:
            wrong = dict(tensors)
            fault.spoil(wrong, name)
            folder = write_checkpoint(bench.folder("wrong"), bench.model, wrong)
            with raises(fault.kind, fault.what) as refusal:
                await engine.load_weights_from_disk(str(folder), "bad")
            fault.check_named(refusal.error, name)
            check_state(engine, EngineState.READY, fault.what)


@case(Capability.WEIGHTS_DISK)
async def a_bad_folder_is_refused_and_the_engine_serves_on(bench: Bench) -> None:
    """A folder that is missing, empty, truncated or garbage is refused, naming it, and changes nothing."""
    engine = bench.engine
    await same_weights_again(bench)
    async with unchanged(bench):
        for what, folder in bad_folders(bench.models, bench.model).items():
            with raises((InvalidRequest, WeightSyncError), what) as refusal:
                await engine.load_weights_from_disk(str(folder), "bad")
            assert folder.name in str(refusal.error), what
            check_state(engine, EngineState.READY, what)
            fifo = folder / "model.safetensors"
            assert not (fifo.is_fifo() and is_waited_for(fifo)), f"a thread waits in open() for {what}"


@case(Capability.WEIGHTS_DISK)
async def a_wrong_argument_of_an_update_is_refused(bench: Bench) -> None:
    """An empty version, an unknown pause mode and digests of other files are refused before anything changes."""
    engine, other = bench.engine, bench.other_weights()
    await same_weights_again(bench)
    async with unchanged(bench):
        with raises(InvalidRequest, "an empty version") as refusal:
            await engine.load_weights_from_disk(str(other), "")
        assert refusal.error.field == "version"
        with raises(InvalidRequest, "an unknown mode") as refusal:
            await engine.load_weights_from_disk(str(other), NEW, mode="later")
        assert refusal.error.field == "mode"
        names = [spec.name for spec in (await engine.weight_manifest()).tensors]
        with raises(WeightSyncError, "digests of other files"):
            await engine.update_named_weights(from_disk(other, digests=dict.fromkeys(names, 1)))


@case(Capability.WEIGHTS_IN_PROCESS)
async def tensors_that_nobody_registered_are_refused(bench: Bench) -> None:
    """An in-process update with a key that no sender registered is refused with a typed error and changes nothing."""
    await _refuse_source(bench, InProcessSource(key="nobody"))


@case(Capability.WEIGHTS_SHARED_MEMORY)
async def shared_memory_that_is_not_there_is_refused(bench: Bench) -> None:
    """A shared-memory update whose arena is gone is refused with a typed error and changes nothing."""
    path = str(nowhere(bench.models))
    await _refuse_source(bench, SharedMemorySource(path=path, nbytes=1 << 40, bucket_offsets=(0,)))


@case(Capability.WEIGHTS_CUDA_IPC, hardware=Hardware.GPU)
async def gpu_memory_that_is_not_there_is_refused(bench: Bench) -> None:
    """An update with a handle to memory of an unknown GPU is refused with a typed error and changes nothing."""
    WeightSync.connect({}, bench.engine, Strategy.CUDA_IPC)  # an unclaimed strategy is refused before anything else
    segment = bytes(64) + struct.pack("<qq", 0, 1 << 40)
    places = bytes(16 * len((await bench.engine.weight_manifest()).tensors))
    await _refuse_source(bench, CudaIpcSource(name="nobody's", gpus=("GPU-0",), segments=segment, places=places))


@case(Capability.WEIGHTS_BROADCAST)
async def a_group_that_was_not_formed_is_refused(bench: Bench) -> None:
    """A broadcast in a group that the engine did not join is refused in time with a typed error and changes nothing."""
    await _refuse_source(bench, BroadcastSource(group_name="nobody"))


async def _refuse_source(bench: Bench, source: WeightSource) -> None:
    engine = bench.engine
    refusals = (InvalidRequest, WeightSyncError, EngineStateError)
    async with unchanged(bench), asyncio.timeout(60):
        request = WeightUpdateRequest(version=NEW, source=source, plan=make_plan([]), digests={})
        with raises(refusals, "an update of no tensor at all"):
            await engine.update_named_weights(request)
        plan = make_plan((await engine.weight_manifest()).tensors, ONE_BUCKET)
        digests = {spec.name: 0 for spec in plan.tensors}
        with raises(refusals, f"a source ({source.kind}) that is not there"):
            await engine.update_named_weights(request.model_copy(update={"plan": plan, "digests": digests}))
        check_state(engine, EngineState.READY)


@case(Capability.WEIGHTS_BROADCAST, own_engine=True)
async def a_group_that_nobody_joins_does_not_hang(bench: Bench) -> None:
    """Waiting for a trainer that never joins the group ends in a typed error at its deadline; the engine serves on."""
    engine = bench.create(timeouts={"weight_update": 5})
    WeightSync.connect({}, engine, "broadcast")  # an unclaimed strategy is refused before the engine starts
    spec = CommunicatorSpec(
        master_address="127.0.0.1",
        master_port=_free_port(),
        rank_offset=1,
        world_size=2,
        group_name="nobody",
        backend="gloo",
    )
    refusals = (DeadlineExceeded, EngineError, WeightSyncError, InvalidRequest)
    async with engine:
        prompts = bench.prompts(2, engine=engine)
        before = await bench.greedy(prompts, engine=engine)
        async with asyncio.timeout(60):
            with raises(refusals, "a group that nobody else joined"):
                await engine.init_weight_update_communicator(spec)
            with raises(refusals, "leaving a group that never was"):
                await engine.destroy_weight_update_communicator("nobody")
        check_state(engine, EngineState.READY)
        check_same(bench, await bench.greedy(prompts, engine=engine), before, engine)


@case(Capability.WEIGHTS_BROADCAST, changes_weights=True)
async def a_group_is_formed_once_and_left_once(bench: Bench) -> None:
    """A second group of the same name is refused without harming the first; a group can be left only once.

    Nobody listens for members of a group on this machine but at a loopback address.
    """
    between, before = Between(bench.engine), listening_addresses()
    async with WeightSync.connect(tensors_of(bench.other_weights()), between, "broadcast") as sync:
        await sync.push(version="first")
        (spec,) = between.groups
        if ip_address(spec.master_address).is_loopback:
            exposed = [one for one in listening_addresses() - before if not ip_address(one.host).is_loopback]
            assert not exposed, f"for a group at {spec.master_address} other hosts can connect to {exposed}"
        with raises(InvalidRequest, "a second group of one name"):
            await bench.engine.init_weight_update_communicator(spec)
        await sync.push(version=NEW)
        assert between.groups == [spec]
    with raises(InvalidRequest, "leaving a group that was left"):
        await bench.engine.destroy_weight_update_communicator(spec.group_name)
    await check_serves(bench, bench.other_weights(), NEW)


@case(Capability.WEIGHTS_SHARED_MEMORY)
async def a_wrong_plan_is_refused_by_the_engine(bench: Bench) -> None:
    """The engine itself checks plan, geometry, digests and arena before it changes anything, whoever sends them."""
    engine = bench.engine
    between = Between(engine)
    async with (
        WeightSync.connect(tensors_of(bench.other_weights()), between, "shared_memory") as sync,
        unchanged(bench),
    ):
        name = a_matrix(await engine.weight_manifest())

        def undigested(request: WeightUpdateRequest) -> WeightUpdateRequest:
            digests = {other: value for other, value in (request.digests or {}).items() if other != name}
            return request.model_copy(update={"digests": digests})

        def short(request: WeightUpdateRequest) -> WeightUpdateRequest:
            return request.model_copy(update={"source": request.source.model_copy(update={"nbytes": 256})})

        between.change = lambda request: without_tensor(request, name)
        with raises(WeightPlanMismatch, "a plan without a tensor") as refusal:
            await sync.push(version="bad")
        assert refusal.error.missing == (name,)
        between.change = lambda request: moved_tensor(request, name)
        with raises(WeightPlanMismatch, "a tensor at an odd place") as refusal:
            await sync.push(version="bad")
        assert refusal.error.mismatched == (name,)
        for change in (undigested, short):
            between.change = change
            with raises(InvalidRequest, change.__name__):
                await sync.push(version="bad")


# Failed updates --------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def an_update_that_breaks_off_leaves_the_engine_dirty(bench: Bench) -> None:
    """When the sender is lost between two buckets the engine refuses to serve until a full update is committed."""
    engine = bench.engine
    version = engine.get_weight_version()
    await same_weights_again(bench)
    plan = make_plan((await engine.weight_manifest()).tensors, 1)
    with raises(WeightTransferFailed, "half of an update") as failure:
        async with engine.weight_update(from_disk(bench.other_weights(), plan=plan)) as update:
            await update.load(range(update.buckets // 2))
            raise ConnectionError("the trainer was lost")
    assert "the trainer was lost" in str(failure.error)
    await check_dirty(bench, version)
    await check_recovers(bench)


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def the_push_after_one_that_broke_off_just_works(bench: Bench) -> None:
    """A push that breaks between two buckets leaves the engine dirty; the same connection's next push mends it."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    between = Between(engine, buckets=1)
    async with WeightSync.connect(tensors_of(other), between, "shared_memory", bucket_bytes=1) as sync:
        with raises(WeightTransferFailed, "a part of an update"):
            await sync.push(version="broken")
        await check_dirty(bench, version)
        between.buckets = None
        await sync.push(version=NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def a_cancelled_update_leaves_the_engine_dirty(bench: Bench) -> None:
    """Cancelling the trainer's task during an update leaves the engine dirty, and a full push mends it."""
    engine = bench.engine
    version = engine.get_weight_version()
    await same_weights_again(bench)
    begun = asyncio.Event()

    async def stuck() -> None:
        async with engine.weight_update(from_disk(bench.other_weights())):
            begun.set()
            await asyncio.Event().wait()

    update = asyncio.create_task(stuck())
    async with asyncio.timeout(60):
        await begun.wait()
    update.cancel()
    with raises(asyncio.CancelledError, "a cancelled update"):
        await update
    await check_dirty(bench, version)
    await check_recovers(bench)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def an_incomplete_update_is_not_committed(bench: Bench) -> None:
    """An update that leaves out a bucket, or loads one that does not exist, leaves the engine dirty."""
    engine = bench.engine
    version = engine.get_weight_version()
    with raises(WeightTransferFailed, "an update without any bucket"):
        async with engine.weight_update(from_disk(bench.other_weights())):
            pass
    await check_dirty(bench, version)
    with raises(WeightTransferFailed, "a bucket that is not in the plan"):
        async with engine.weight_update(from_disk(bench.other_weights())) as update:
            await load_all(update)
            await update.load([update.buckets])
    await check_dirty(bench, version)
    await check_recovers(bench)


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def what_arrives_otherwise_than_sent_is_found(bench: Bench) -> None:
    """A tensor with a wrong digest is named, its version is not published, and the engine is dirty."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    between = Between(engine)
    async with WeightSync.connect(tensors_of(other), between, "shared_memory") as sync:
        name = a_matrix(await engine.weight_manifest())
        between.change = partial(with_another_digest, name=name)
        with raises(WeightVerifyFailed, "a tensor that is not what was sent") as failure:
            await sync.push(version="bad")
        assert failure.error.tensors == (name,)
        assert name in str(failure.error)
        await check_dirty(bench, version)
        between.change = lambda request: request
        await sync.push(version=NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_IN_PROCESS, changes_weights=True)
async def a_source_that_is_written_to_during_a_push_is_found(bench: Bench) -> None:
    """A push whose source is modified while it is read fails verification, naming the tensor."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    tensors, between = tensors_of(other), Between(engine)
    async with WeightSync.connect(tensors, between, "in_process") as sync:
        name = a_matrix(await engine.weight_manifest())

        def trains_on(request: WeightUpdateRequest) -> WeightUpdateRequest:
            tensors[name][0, 0] += 1
            return request

        between.change = trains_on
        with raises(WeightVerifyFailed, "a tensor that changed on the way") as failure:
            await sync.push(version="bad")
        assert failure.error.tensors == (name,)
        await check_dirty(bench, version)
        tensors[name].copy_(tensors_of(other)[name])
        between.change = lambda request: request
        await sync.push(version=NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, Capability.PAUSE_WAIT, own_engine=True)
async def every_step_of_an_update_has_a_deadline(bench: Bench) -> None:
    """A step beyond timeouts.weight_update raises DeadlineExceeded; the engine is dirty only if the update began."""
    limit, other = 0.4 * 2**bench.attempt, bench.other_weights()
    async with bench.open(timeouts={"weight_update": limit}) as engine:
        version, prompts = engine.get_weight_version(), bench.prompts(4, engine=engine)
        long = SamplingParams(
            max_new_tokens=engine.model_info.context_length - len(prompts[0]),
            temperature=0,
            ignore_eos=engine.supports(Capability.IGNORE_EOS),
        )
        async with bench.in_flight(prompts, long, engine) as running:
            with in_time(running), raises(DeadlineExceeded, "a wait beyond its deadline"):
                await engine.load_weights_from_disk(str(other), "late", mode="wait")
            check_state(engine, EngineState.READY)
            assert engine.get_weight_version() == version
            if running.done():
                raise TooLate("the requests ended, so nothing was waited for")
            check_made_by(bench, (await running).completions[:1], bench.model, engine)
        with raises(DeadlineExceeded, "a step beyond its deadline"):
            async with engine.weight_update(from_disk(other)) as update:
                took = min([await _seconds(load_all(update)) for _ in range(3)])  # the first time is slow
                often = math.ceil(5 * limit / took)
                for more in (1, 5, 25):  # the measured time may have been inflated by other work
                    await update.load(list(range(update.buckets)) * often * more)
        check_state(engine, EngineState.DIRTY)
        assert engine.get_weight_version() == version
        try:
            await engine.load_weights_from_disk(str(other), NEW)
        except DeadlineExceeded as error:
            raise TooLate("the machine is too busy for an update within the deadline") from error
        check_state(engine, EngineState.READY)
        assert engine.get_weight_version() == NEW
        check_made_by(bench, await bench.greedy(prompts[:3], engine=engine), other, engine)


async def _seconds(step: Coroutine[object, object, None]) -> float:
    begun = time.monotonic()
    await step
    return time.monotonic() - begun


@case(
    Capability.WEIGHTS_DISK,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.PAUSE_RETRACT,
    Capability.VERSION_SPANS,
    changes_weights=True,
)
async def requests_outlive_an_update_that_breaks_off(bench: Bench) -> None:
    """Requests in flight and new ones wait while the engine is dirty, and complete once an update is committed."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    await same_weights_again(bench)
    await same_label_again(engine)
    async with bench.in_flight(bench.prompts(2), bench.long()) as running, Late(bench) as late:
        with raises(WeightTransferFailed, "an update that broke off"):
            async with engine.weight_update(from_disk(other)):
                late.arrive()
                assert await late.is_held(), "a request was served in the middle of an update"
                raise ConnectionError("the trainer was lost")
        await check_dirty(bench, version)
        assert await late.is_held(), "a request was served by weights of no version"
        with in_time(running):
            assert not running.done(), "requests went on with weights of no version"
        await engine.load_weights_from_disk(str(other), "recovered")
        for completion in (await running).completions:
            check_spans(completion, version, "recovered")
            check_boundary(bench, completion, bench.model, other)
        check_made_by(bench, [await late.completion()], other)
    await check_serves(bench, other, "recovered")


# Versions --------------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def a_version_is_published_at_commit(bench: Bench) -> None:
    """Until commit the engine reports the old version, is updating, and makes new requests wait."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    async with Late(bench) as late:
        async with engine.weight_update(from_disk(other)) as update:
            check_state(engine, EngineState.UPDATING)
            assert engine.is_paused
            assert engine.get_weight_version() == version
            late.arrive()
            await load_all(update)
            assert await late.is_held(), "a request was served in the middle of an update"
            assert engine.get_weight_version() == version, "the version was published before the commit"
        assert engine.get_weight_version() == NEW
        check_made_by(bench, [await late.completion()], other)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def updates_come_one_after_another(bench: Bench) -> None:
    """Two concurrent updates run one after the other and are both committed; nested updates are refused."""
    engine, first, second = bench.engine, bench.other_weights(1), bench.other_weights(2)
    await asyncio.gather(
        engine.load_weights_from_disk(str(first), "first"),
        engine.load_weights_from_disk(str(second), "second"),
    )
    await check_serves(bench, second, "second")
    async with engine.weight_update(from_disk(first, "outer")) as outer:
        with raises(EngineStateError, "an update within another") as refusal:
            await engine.load_weights_from_disk(str(second), "inner")
        assert refusal.error.state == "updating"
        await load_all(outer)
    await check_serves(bench, first, "outer")


@case(Capability.WEIGHTS_DISK, changes_weights=True)
async def a_bucket_after_the_end_of_an_update_is_refused(bench: Bench) -> None:
    """Loading a bucket outside of an update raises a typed error; the engine serves on with the committed weights."""
    engine, other = bench.engine, bench.other_weights()
    async with engine.weight_update(from_disk(other)) as update:
        await load_all(update)
    with raises((EngineStateError, WeightSyncError), "a bucket of an update that has ended"):
        await update.load([0])
    await check_serves(bench, other, NEW)


@case(Capability.VERSION_SPANS)
async def a_new_label_changes_no_answer(bench: Bench) -> None:
    """update_weight_version() renames the weights without changing answers; later completions carry the new name."""
    engine, prompts = bench.engine, bench.prompts(2)
    version = engine.get_weight_version()
    before = await one_by_one(bench, prompts)
    await engine.update_weight_version("renamed")
    assert engine.get_weight_version() == "renamed"
    after = await one_by_one(bench, prompts)
    check_same(bench, after, before)
    for completion in after:
        check_spans(completion, "renamed")
    with raises(InvalidRequest, "an empty version") as refusal:
        await engine.update_weight_version("")
    assert refusal.error.field == "version"
    assert engine.get_weight_version() == "renamed", "a refused label changed the version"
    await engine.update_weight_version(version)
    check_spans(await one(bench, prompts[0]), version)


@case(Capability.VERSION_SPANS)
async def a_new_label_divides_what_is_in_flight(bench: Bench) -> None:
    """Tokens in flight carry the label at the time they were sampled, and are otherwise unchanged."""
    engine = bench.engine
    version = engine.get_weight_version()
    await same_label_again(engine)
    async with bench.in_flight(bench.prompts(2), bench.long(TOKENS)) as running:
        await engine.update_weight_version("renamed")
        completions = (await running).completions
    await engine.update_weight_version(version)
    for completion in completions:
        with in_time(completion):
            check_spans(completion, version, "renamed")
    check_made_by(bench, completions, bench.model)
    freezing = {Capability.PAUSE_IN_PLACE: PauseMode.IN_PLACE, Capability.PAUSE_RETRACT: PauseMode.RETRACT}
    modes = [mode for needed, mode in freezing.items() if bench.claims(needed)]
    if modes and bench.claims(Capability.STREAMING):
        completion, before = await _renamed_while_frozen(bench, modes[0])
        check_spans(completion, version, "renamed")
        assert completion.weight_versions[0].end == before, (
            f"{before} tokens were made before the new label, and the spans are {completion.weight_versions}"
        )


@case(Capability.VERSION_SPANS)
async def a_pinned_request_is_of_its_version(bench: Bench) -> None:
    """A request pinned to a weight version has tokens of that version only, or raises WeightVersionGone."""
    engine, prompt = bench.engine, bench.prompt()
    version = engine.get_weight_version()
    params = SamplingParams(max_new_tokens=8, temperature=0)
    pinned = (await engine.generate(prompt, params, weight_version=version)).completions
    check_same(bench, pinned, (await engine.generate(prompt, params)).completions)
    check_spans(pinned[0], version)
    with raises(WeightVersionGone, "a version that was never served"):
        await engine.generate(prompt, params, weight_version="never")
    with raises(InvalidRequest, "an empty version") as refusal:
        await engine.generate(prompt, params, weight_version="")
    assert refusal.error.field == "weight_version"
    async with bench.in_flight([prompt], bench.long(TOKENS), weight_version=version) as running:
        await engine.update_weight_version("renamed")
        try:
            with in_time(running), raises(WeightVersionGone, "a version that was replaced in flight"):
                await running
            with raises(WeightVersionGone, "a version that was replaced"):
                await engine.generate(prompt, params, weight_version=version)
        finally:
            await engine.update_weight_version(version)


async def _renamed_while_frozen(bench: Bench, mode: PauseMode) -> tuple[Completion, int]:
    """Relabel while a stream is frozen; return its completion, and its number of tokens at that moment."""
    engine = bench.engine
    version = engine.get_weight_version()
    stream = Live(engine.generate_stream(bench.prompt(), bench.long(TOKENS)))
    try:
        await proceed(stream, tokens=5)
        await engine.pause_generation(mode)
        await asyncio.sleep(0.1)  # let tokens that were made before the pause arrive
        await settle(engine, stream)
        if stream.done:
            raise TooLate("the stream ended before it was frozen")
        before = stream.seen
        await engine.update_weight_version("renamed")
        await engine.continue_generation()
        (completion,) = await stream.result()
    finally:
        if engine.is_paused:
            await engine.continue_generation()
        await stream.drop()
        await engine.update_weight_version(version)
    return completion, before


@case()
async def a_remote_version_is_asked_for_in_bounded_time(bench: Bench) -> None:
    """get_remote_weight_version() returns the server's answer, or raises a typed error in time if there is none."""
    ask = bench.engine.get_remote_weight_version
    async with asyncio.timeout(60):
        with raises(InvalidRequest, "an address that is none"):
            await ask("nowhere")
        with raises(EngineError, "a server that is not there"):
            await ask(f"http://127.0.0.1:{_free_port()}", timeout=5)
        async with _server("") as silent:
            with raises(DeadlineExceeded, "a server that does not answer"):
                await ask(silent, timeout=0.2)
        async with _server(_OK + '{"weight_version": "step-7"}') as speaking:
            assert await ask(speaking) == "step-7"
        others = ("no JSON", "[]", '{"weight_version": 7}', "{}")
        for answer in (*(_OK + body for body in others), "220 mail.example ready\r\n"):
            async with _server(answer) as confused:
                with raises(EngineError, f"the answer {answer!r}"):
                    await ask(confused)


_OK: Final = "HTTP/1.1 200 OK\r\n\r\n"


@asynccontextmanager
async def _server(answer: str) -> AsyncIterator[str]:
    """Yield the address of a server that gives every request this answer, or none if it is empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer.encode())
        if not answer:
            await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# Requests in flight ----------------------------------------------------------------------------------------------

_SPANS: Final = (Capability.WEIGHTS_DISK, Capability.VERSION_SPANS, Capability.LOGPROBS_RAW)


async def _check_state_is_kept(bench: Bench, mode: PauseMode) -> None:
    """Check that an update to the same weights changes no token, not even of requests that depend on other state."""
    engine, own = bench.engine, bench.engine.get_weight_version()
    await same_weights_again(bench)
    params = with_a_state(bench, TOKENS)
    prompts = bench.prompts(len(params))
    if not params:
        return
    whole = (await engine.generate(prompts, params)).completions
    async with bench.in_flight(prompts, params) as running:
        await engine.load_weights_from_disk(str(bench.model), "the same again", mode=mode)
        if running.done():
            raise TooLate("the requests ended before the update, so this shows nothing")
        check_same(bench, (await running).completions, whole)
    await engine.load_weights_from_disk(str(bench.model), own)


@case(*_SPANS, Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT, Capability.PAUSE_RETRACT, changes_weights=True)
async def retracted_requests_go_on_with_the_new_weights(bench: Bench) -> None:
    """Requests retracted for an update continue as if the new weights had read their tokens; spans mark the switch.

    They keep all other state: their random stream, schedule, counts and half-written stop text.
    """
    await _check_state_is_kept(bench, PauseMode.RETRACT)
    updated = await update_in_flight(bench, PauseMode.RETRACT)
    for completion in updated.completions:
        check_spans(completion, updated.old, NEW)
        check_boundary(bench, completion, bench.model, bench.other_weights())
        before, after = completion.weight_versions
        check_logprobs(bench, completion, bench.model, before)
        check_logprobs(bench, completion, bench.other_weights(), after)
    check_late(bench, updated)


@case(*_SPANS, Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE, Capability.PAUSE_IN_PLACE, changes_weights=True)
async def frozen_requests_go_on_where_they_were(bench: Bench) -> None:
    """Requests frozen in place for an update continue on their cache; spans mark the switch to the new weights.

    They keep all other state: their random stream, schedule, counts and half-written stop text.
    """
    await _check_state_is_kept(bench, PauseMode.IN_PLACE)
    updated = await update_in_flight(bench, PauseMode.IN_PLACE)
    for completion in updated.completions:
        check_spans(completion, updated.old, NEW)
        check_boundary(bench, completion, bench.model, bench.other_weights(), recomputed=False)
        check_logprobs(bench, completion, bench.model, completion.weight_versions[0])
        check_kept_cache(bench, completion, bench.model, bench.other_weights())
    check_late(bench, updated)


@case(*_SPANS, Capability.PAUSE_ABORT, changes_weights=True)
async def aborted_requests_are_of_the_old_weights_alone(bench: Bench) -> None:
    """Requests aborted for an update return their tokens so far, all made by the old weights and labelled so."""
    updated = await update_in_flight(bench, PauseMode.ABORT)
    for completion in updated.completions:
        with in_time(completion):
            assert completion.finish_reason is FinishReason.ABORT
        check_spans(completion, updated.old)
        check_logprobs(bench, completion, bench.model, completion.weight_versions[0])
    check_late(bench, updated)


@case(*_SPANS, Capability.PAUSE_WAIT, changes_weights=True)
async def awaited_requests_end_before_the_weights_change(bench: Bench) -> None:
    """Requests that an update waits for run to their end, all made by the old weights and labelled so."""
    updated = await update_in_flight(bench, PauseMode.WAIT)
    for completion in updated.completions:
        assert completion.finish_reason is not FinishReason.ABORT
        check_spans(completion, updated.old)
        check_logprobs(bench, completion, bench.model, completion.weight_versions[0])
    check_late(bench, updated)


@case(
    Capability.WEIGHTS_DISK,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.VERSION_SPANS,
    Capability.PAUSE_RETRACT,
    changes_weights=True,
)
async def requests_frozen_by_a_pause_go_on_after_it(bench: Bench) -> None:
    """Requests frozen by a pause stay frozen during an update; continuing resumes them with the new weights."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    await same_weights_again(bench)
    await same_label_again(engine)
    async with bench.in_flight(bench.prompts(2), bench.long(TOKENS)) as running:
        await engine.pause_generation("retract")
        await engine.load_weights_from_disk(str(other), NEW)
        check_state(engine, EngineState.PAUSED)
        await check_held(engine, running)
        done, _ = await asyncio.wait([running], timeout=0.05)
        assert not done, "the update let requests go on that a pause had frozen"
        await engine.continue_generation()
        for completion in (await running).completions:
            check_spans(completion, version, NEW)
            check_boundary(bench, completion, bench.model, other)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_DISK, Capability.PAUSE_WAIT, changes_weights=True)
async def an_update_while_paused_leaves_the_engine_paused(bench: Bench) -> None:
    """Two updates during a pause do not end it; requests that waited are served by the second when it ends."""
    engine, first, second = bench.engine, bench.other_weights(2), bench.other_weights(1)
    await same_weights_again(bench)
    await engine.pause_generation("wait")
    async with Late(bench) as late:
        late.arrive()
        await engine.load_weights_from_disk(str(first), "first")
        await engine.load_weights_from_disk(str(second), "second")
        check_state(engine, EngineState.PAUSED)
        assert await late.is_held(), "the update ended the pause"
        await engine.continue_generation()
        check_made_by(bench, [await late.completion()], second)
    await check_serves(bench, second, "second")


# Prefix cache ----------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_DISK, Capability.PREFIX_CACHE, changes_weights=True)
async def no_prefix_of_older_weights_is_used(bench: Bench) -> None:
    """A prompt cached under older weights is computed again after an update, and then cached under the new ones."""
    engine, other = bench.engine, bench.other_weights()
    await engine.reset_prefix_cache()
    prompt = bench.prompt(LONG_PROMPT)
    await one(bench, prompt)
    assert (await one(bench, prompt)).cached_tokens > 0, "the prompt was not cached, so the rest shows nothing"
    await engine.load_weights_from_disk(str(other), NEW)
    after = await one(bench, prompt)
    assert after.cached_tokens == 0
    again = await one(bench, prompt)
    assert again.cached_tokens > 0
    check_made_by(bench, [after, again], other)


@case(Capability.WEIGHTS_DISK, Capability.PREFIX_CACHE, changes_weights=True)
async def a_prefix_of_older_weights_is_kept_by_name(bench: Bench) -> None:
    """Only keep_prefix_cache=True lets prompts use what older weights cached."""
    engine, other = bench.engine, bench.other_weights()
    await engine.reset_prefix_cache()
    prompt = bench.prompt(LONG_PROMPT)
    await one(bench, prompt)
    await engine.update_named_weights(from_disk(other, keep_prefix_cache=True))
    assert (await one(bench, prompt)).cached_tokens > 0
    await engine.load_weights_from_disk(str(other), "again")
    assert (await one(bench, prompt)).cached_tokens == 0


@case(
    Capability.WEIGHTS_DISK,
    Capability.PREFIX_CACHE,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE,
    Capability.PAUSE_IN_PLACE,
    changes_weights=True,
)
async def a_frozen_request_leaves_no_stale_prefix(bench: Bench) -> None:
    """The old cache of a request frozen in place through an update is not used by later requests.

    Nor is it if the request is aborted after the update.
    """
    for aborted in (False, True) if bench.claims(Capability.ABORT) else (False,):
        first, second = await _prefix_of_a_request_in_flight(bench, PauseMode.IN_PLACE, aborted=aborted)
        assert first.cached_tokens == 0, f"{first.cached_tokens} tokens were found that older weights had cached"
        check_made_by(bench, [first, second], bench.other_weights())


@case(
    Capability.WEIGHTS_DISK,
    Capability.PREFIX_CACHE,
    Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT,
    Capability.PAUSE_RETRACT,
    changes_weights=True,
)
async def a_retracted_request_leaves_no_stale_prefix(bench: Bench) -> None:
    """The prefix that later requests share with one retracted for an update was computed by the new weights."""
    completions = await _prefix_of_a_request_in_flight(bench, PauseMode.RETRACT)
    check_made_by(bench, completions, bench.other_weights())


async def _prefix_of_a_request_in_flight(
    bench: Bench, mode: PauseMode, *, aborted: bool = False
) -> tuple[Completion, Completion]:
    """Update in ``mode`` while a request with a long prompt runs; once it has ended, ask for its prompt twice.

    Check that the prefix of a request that had ended before is not found either.

    Args:
        bench: The workplace.
        mode: The update's mode.
        aborted: Abort the request right after the update.
    """
    engine = bench.engine
    await engine.load_weights_from_disk(str(bench.model), "before")
    await engine.reset_prefix_cache()
    prompt, ended = bench.prompt(LONG_PROMPT), bench.prompt(LONG_PROMPT)
    await one(bench, ended)
    async with bench.in_flight([prompt], bench.long(TOKENS, prompt_length=LONG_PROMPT)) as running:
        await engine.load_weights_from_disk(str(bench.other_weights()), NEW, mode=mode)
        if running.done():
            raise TooLate("the request ended before the update, so this shows nothing")
        if aborted:
            await engine.abort_generation()
        await running
    await until_idle(engine)
    again = await one(bench, ended)
    assert again.cached_tokens == 0, f"{again.cached_tokens} tokens were found that older weights had cached"
    check_made_by(bench, [again], bench.other_weights())
    return await one(bench, prompt), await one(bench, prompt)


# Sleep -----------------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_SHARED_MEMORY, Capability.SLEEP_WEIGHTS, Capability.SLEEP_KV_CACHE, changes_weights=True)
async def rollouts_after_a_sleep_are_of_the_pushed_policy(bench: Bench) -> None:
    """Sleep, wake the weights, push, wake the cache, generate: answers come from the policy pushed in that step."""
    engine, policy = bench.engine, tensors_of(bench.model)
    async with WeightSync.connect(policy, engine, "shared_memory", bucket_bytes=100_000) as sync:
        await sync.push(version=engine.get_weight_version())  # the same weights, so this changes nothing
        both = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]
        for step in (1, 2, 1):
            for name, tensor in tensors_of(bench.other_weights(step)).items():
                policy[name].copy_(tensor)
            await engine.sleep(both)
            with raises(EngineStateError, "a push to weights that have no memory") as refusal:
                await sync.push(version="too-early")
            assert refusal.error.state == "asleep"
            await engine.wake_up([MemoryTag.WEIGHTS])
            await sync.push(version=f"step-{step}")
            check_state(engine, EngineState.ASLEEP)
            await engine.wake_up([MemoryTag.KV_CACHE])
            await check_serves(bench, bench.other_weights(step), f"step-{step}")


# Reading back ----------------------------------------------------------------------------------------------------


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def tensors_read_back_are_those_that_were_pushed(bench: Bench) -> None:
    """get_weights_by_name() returns every tensor of the manifest bitwise as it was last pushed.

    The second push changes only the last bit of each value: a small step of training arrives, too.
    """
    engine, pushed = bench.engine, tensors_of(bench.other_weights())
    async with WeightSync.connect(pushed, engine, "shared_memory", bucket_bytes=1) as sync:
        with raises(InvalidRequest, "a tensor that the model has not") as refusal:
            await engine.get_weights_by_name("model.ghost.weight")
        assert "model.ghost.weight" in str(refusal.error)
        for name in pushed:  # a read after the push must not return what was read before it
            await engine.get_weights_by_name(name)
        await sync.push(version=NEW)
        await _check_all_read_back(engine, pushed)
        for tensor in pushed.values():
            if tensor.is_floating_point():
                tensor.view(_BITS[tensor.itemsize]).bitwise_xor_(1)
        await sync.push(version="one bit later")
        await _check_all_read_back(engine, pushed)


_BITS: Final = {2: torch.int16, 4: torch.int32}
"""Integers as wide as a float, by their bytes."""


async def _check_all_read_back(engine: InferenceEngine, pushed: Mapping[str, torch.Tensor]) -> None:
    manifest = await engine.weight_manifest()
    names = [*(spec.name for spec in manifest.tensors), *manifest.aliases]
    by_main_name = {manifest.aliases.get(name, name): tensor for name, tensor in pushed.items()}
    for name in names:
        read, tensor = await engine.get_weights_by_name(name), by_main_name[manifest.aliases.get(name, name)]
        assert read.spec.shape == tuple(tensor.shape), name
        assert read.data == raw_bytes(tensor), f"{name} is not what was pushed"


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_DISK)
async def weights_are_validated_where_they_lie(bench: Bench) -> None:
    """validate_weights() checks every tensor; check_weight_sync_integrity() accepts the right version and no other."""
    engine = bench.engine
    await same_weights_again(bench)
    report = await engine.validate_weights()
    assert report.ok, f"NaN in {report.nan}, infinity in {report.infinite}"
    assert report.checked == len((await engine.weight_manifest()).tensors)
    version = engine.get_weight_version()
    right = await engine.check_weight_sync_integrity(version)
    assert right.ok
    assert right.actual_version == version
    wrong = await engine.check_weight_sync_integrity("of-no-step")
    assert not wrong.ok
    assert wrong.actual_version == version


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def a_tensor_of_zeros_is_reported(bench: Bench) -> None:
    """validate_weights() names all-zero tensors without calling them wrong.

    It names tensors with infinity or NaN, which only a sender that does not check them can bring, and calls them wrong.
    """
    engine, tensors = bench.engine, tensors_of(bench.other_weights())
    async with WeightSync.connect(tensors, engine, "shared_memory") as sync:
        before = set((await engine.validate_weights()).all_zero)
        name = a_matrix(await engine.weight_manifest())
        tensors[name].zero_()
        await sync.push(version=NEW)
    report = await engine.validate_weights()
    assert set(report.all_zero) - before == {name}
    assert report.ok
    await _check_bad_values_are_reported(bench, name)


async def _check_bad_values_are_reported(bench: Bench, name: str) -> None:
    """Push infinity and NaN past the sender's own check, and look at the report."""
    engine, tensors = bench.engine, tensors_of(bench.model)
    for value in (math.inf, -math.inf, math.nan):
        between = Between(engine)
        between.change = partial(with_value, name=name, tensor=tensors[name], value=value)
        async with WeightSync.connect(tensors, between, "shared_memory") as sync:
            try:
                await sync.push(version="bad")
            except WeightSyncError:
                return  # the engine itself refuses such values
        report = await engine.validate_weights()
        found = report.nan if math.isnan(value) else report.infinite
        assert found == (name,), f"{name} holds {value}; NaN is reported in {report.nan}, infinity in {report.infinite}"
        assert not report.ok


@case(Capability.READ_WEIGHTS, Capability.WEIGHTS_DISK, Capability.SLEEP_WEIGHTS, changes_weights=True)
async def weights_asleep_are_not_read(bench: Bench) -> None:
    """Reading a tensor that is asleep raises a typed error, and the engine lives on."""
    engine, other = bench.engine, bench.other_weights()
    await same_weights_again(bench)
    manifest = await engine.weight_manifest()
    name = a_matrix(manifest)
    await engine.get_weights_by_name(name)
    await engine.sleep([MemoryTag.WEIGHTS])
    assert await engine.weight_manifest() == manifest, "asleep, it holds other tensors"
    with raises(EngineStateError, "reading a tensor that has no memory"):
        await engine.get_weights_by_name(name)
    with raises(EngineStateError, "validating tensors that have no memory"):
        await engine.validate_weights()
    await engine.wake_up([MemoryTag.WEIGHTS])
    await engine.load_weights_from_disk(str(other), NEW)
    await check_serves(bench, other, NEW)


# Deltas ----------------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_PLUGIN, changes_weights=True)
async def only_what_changed_is_pushed(bench: Bench) -> None:
    """A delta carries only changed values, and afterwards the engine answers as the new weights do.

    A delta that finds the disk full fails; the engine keeps its weights, and no file is left.
    """
    await _check_a_full_disk_changes_nothing(bench, "delta")
    policy = tensors_of(bench.model)
    async with WeightSync.connect(policy, bench.engine, "delta") as sync:
        whole = await sync.push(version="whole")
        assert whole.sent_nbytes >= whole.nbytes
        mixed = _take_a_third(bench, policy)
        assert (await sync.push(version=NEW)).sent_nbytes < 0.7 * whole.sent_nbytes
        await check_serves(bench, mixed, NEW)
        assert (await sync.push(version="again")).sent_nbytes < 0.1 * whole.sent_nbytes
        await check_serves(bench, mixed, "again")


@case(Capability.WEIGHTS_PLUGIN, Capability.WEIGHTS_DISK, changes_weights=True)
async def a_delta_is_never_added_to_other_weights(bench: Bench) -> None:
    """If the engine got other weights since the last push, the next push by delta sends every tensor whole."""
    policy = tensors_of(bench.model)
    async with WeightSync.connect(policy, bench.engine, "delta") as sync:
        await sync.push(version="whole")
        await bench.engine.load_weights_from_disk(str(bench.other_weights()), "another")
        mixed = _take_a_third(bench, policy)
        result = await sync.push(version=NEW)
        assert result.sent_nbytes >= result.nbytes
        await check_serves(bench, mixed, NEW)


@case(Capability.WEIGHTS_PLUGIN, Capability.SLEEP_WEIGHTS, changes_weights=True)
async def a_delta_is_never_added_to_weights_that_slept(bench: Bench) -> None:
    """After a sleep of the weights a push by delta sends every tensor whole."""
    policy = tensors_of(bench.model)
    async with WeightSync.connect(policy, bench.engine, "delta") as sync:
        await bench.engine.sleep(tags=[MemoryTag.WEIGHTS])
        await bench.engine.wake_up(tags=[MemoryTag.WEIGHTS])
        await sync.push(version="whole")
        await bench.engine.sleep(tags=[MemoryTag.WEIGHTS])
        await bench.engine.wake_up(tags=[MemoryTag.WEIGHTS])
        mixed = _take_a_third(bench, policy)
        result = await sync.push(version=NEW)
        assert result.sent_nbytes >= result.nbytes
        await check_serves(bench, mixed, NEW)


def _take_a_third(bench: Bench, policy: dict[str, torch.Tensor]) -> Path:
    """Set a third of the values to those of other weights; return a folder with the result."""
    other = tensors_of(bench.other_weights())
    for name, tensor in policy.items():
        tensor.view(-1)[::3] = other[name].view(-1)[::3]
    return write_checkpoint(bench.folder("mixed"), bench.model, policy)


# In the background -----------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def a_push_is_staged_while_the_engine_serves(bench: Bench) -> None:
    """A transfer by WeightSync leaves the old weights serving until finish(), and then serves the staged ones."""
    engine, other = bench.engine, bench.other_weights()
    version, source = engine.get_weight_version(), tensors_of(other)
    async with WeightSync.connect(source, engine, "shared_memory") as sync:
        given_up = await sync.start_weight_transfer(version="never")
        await given_up.cancel()
        handle = await sync.start_weight_transfer(version=NEW)
        async with asyncio.timeout(60):
            await handle.wait()
        assert handle.progress == 1
        for tensor in source.values():
            tensor.zero_()  # finish() must apply what was staged, not the source's later values
        await check_serves(bench, bench.model, version)
        await handle.finish()
        await check_serves(bench, other, NEW)
        with raises(WeightSyncError, "a transfer that was given up"):
            await given_up.finish()


@case(Capability.WEIGHT_STAGING, Capability.WEIGHTS_DISK, changes_weights=True)
async def weights_are_staged_while_generation_goes_on(bench: Bench) -> None:
    """A transfer by the engine leaves the old weights serving until finish(), and then serves the staged ones."""
    engine, other = bench.engine, bench.other_weights()
    version = engine.get_weight_version()
    staged = write_checkpoint(bench.folder("staged"), bench.model, tensors_of(other))
    handle = await engine.start_weight_transfer(from_disk(staged))
    await check_serves(bench, bench.model, version)
    async with asyncio.timeout(60):
        await handle.wait()
    assert handle.staged
    shutil.rmtree(staged)  # finish() must apply what was staged, without the source
    await check_serves(bench, bench.model, version)
    await handle.finish()
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHT_STAGING, Capability.WEIGHTS_DISK)
async def a_cancelled_transfer_changes_nothing(bench: Bench) -> None:
    """A cancelled transfer, staged or not, cannot be finished; a transfer from a bad folder fails, naming it."""
    engine, other = bench.engine, bench.other_weights()
    early = await engine.start_weight_transfer(from_disk(other))
    async with unchanged(bench):
        await early.cancel()
        late = await engine.start_weight_transfer(from_disk(other))
        await late.wait()
        await late.cancel()
        for handle in (early, late):
            assert not handle.staged
            with raises(WeightSyncError, "a transfer that was given up"):
                await handle.finish()
        bad = await engine.start_weight_transfer(from_disk(nowhere(bench.models)))
        with raises((InvalidRequest, WeightSyncError), "a folder that is not there") as refusal:
            await bad.finish()
        assert "nowhere" in str(refusal.error)


# Leaks -----------------------------------------------------------------------------------------------------------


@case(Capability.WEIGHTS_IN_PROCESS, own_engine=True)
async def many_pushes_in_process_leave_nothing_behind(bench: Bench) -> None:
    """Repeated in-process pushes leak no memory, descriptors or files."""
    await _push_many(bench, [Strategy.IN_PROCESS])


@case(Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_DISK, own_engine=True)
async def many_pushes_on_one_host_leave_nothing_behind(bench: Bench) -> None:
    """Repeated pushes through shared memory and folders leak no memory, descriptors or files."""
    await _push_many(bench, [Strategy.SHARED_MEMORY, Strategy.DISK])


@case(Capability.WEIGHTS_CUDA_IPC, own_engine=True, hardware=Hardware.GPU)
async def many_pushes_through_gpu_memory_leave_nothing_behind(bench: Bench) -> None:
    """Repeated pushes through GPU memory leak no memory on either side, descriptors or files."""
    await _push_many(bench, [Strategy.CUDA_IPC], device="cuda")


ARENA: Final = "memfd:drivetrain-weights"
"""Name under which the system shows a trainer's memory that an engine maps."""
GROWTH: Final = 16 * 1024
"""Bytes by which memory may grow per push: allocator overhead."""


async def _push_many(bench: Bench, strategies: Sequence[Strategy], device: str = "cpu") -> None:
    """Push a model of a few megabytes repeatedly, and check for leaks."""
    folder = tiny_model("qwen2", dtype=bench.models.dtype, hidden_size=128, intermediate_size=1024)
    tensors, cycles = tensors_of(folder), max(20, bench.profile.cycles)
    engine = bench.create(model=folder)
    syncs = [WeightSync.connect(tensors, engine, strategy, bucket_bytes=1 << 20) for strategy in strategies]
    tensors.update({name: tensor.to(device) for name, tensor in tensors.items()})
    with temporary_folder(bench.folder("pushes")):
        at_first = Holdings.now()
        async with engine:
            for sync in syncs:
                async with sync:
                    for _ in range(5):
                        await sync.push(version="warm-up")
                    held, weights = Holdings.now(), (await engine.stats()).weight_bytes
                    some = cycles // 10

                    async def memory_after_some(sync: WeightSync = sync, some: int = some) -> dict[str, int]:
                        for step in range(some):
                            await sync.push(version=f"step-{step}")
                        return {"bytes of memory": _memory(engine)}

                    await check_steady(
                        memory_after_some, {"bytes of memory": GROWTH * some}, f"{some} pushes", measurements=10
                    )
                    await check_nothing_left(held)
                    assert (await engine.stats()).weight_bytes == weights
                mapped = mappings_of(engine, ARENA)
                assert not mapped, f"the trainer's memory is still mapped {mapped} times once it is done"
        await check_nothing_left(at_first)


def _memory(engine: InferenceEngine) -> int:
    """Return the engine's memory, plus the trainer's unless the engine runs in the trainer's process."""
    is_here = engine.host_pid is None and not engine.model_info.device.startswith("cuda")
    return held_bytes(engine) + (0 if is_here else psutil.Process().memory_info().rss)
