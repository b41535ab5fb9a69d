"""Buckets, their order, and the forms of a source."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import (
    EngineStartError,
    InvalidConfig,
    NonFiniteLogits,
)
from drivetrain.testing import tiny_model
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.event_loop_stalls import check_it_runs
from drivetrain_conformance.assertions.memory_use import COUNTED, check_steady, held_by
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_prompt_logprobs, check_same
from drivetrain_conformance.assertions.weight_checks import check_holds, check_made_by
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import Tensors, in_bfloat16, tensors_of, write_checkpoint
from drivetrain_conformance.cases.multimodal.checks import SEEN, check_seen, with_images
from drivetrain_conformance.cases.multimodal.media_files import pattern_pixel, png
from drivetrain_conformance.cases.weight_sync.checks import NEW, check_serves, one_by_one, same_weights_again
from drivetrain_conformance.cases.weight_sync.pushing import ONE_BUCKET, holds_float32, push_source, widened
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.random_property import random_property
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_weight_sync import WeightInput, WeightSync
from drivetrain_weight_sync.tensors.dtypes import nbytes_of

_FORMS: Final = ("mapping", "pairs", "function", "module")
"""Forms in which a trainer may hand over weights."""


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def small_buckets_serve_the_same(bench: Bench) -> None:
    """Weights pushed in many small buckets, one per layer, give the same answers as in a single bucket."""
    engine, other = bench.engine, bench.other_weights()
    old, new, prompts = tensors_of(bench.model), tensors_of(other), bench.prompts(2)
    answers: list[list[Completion]] = []
    buckets: list[int] = []
    for bucket_bytes in (ONE_BUCKET, 1, 100_000):
        await push_source(engine, old, "back")
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
    old, new, module = tensors_of(bench.model), tensors_of(other), _module_of(other)
    sources = ((new, ONE_BUCKET), (new, 1), (module, 1), (module.state_dict(), ONE_BUCKET))
    for source, bucket_bytes in sources:
        await push_source(engine, source, NEW, bucket_bytes)
        await check_serves(bench, other, NEW)
        await push_source(engine, old, "back", bucket_bytes)
        await check_serves(bench, bench.model, "back")


@case(Capability.WEIGHTS_DISK, model=ModelKind.MOE, changes_weights=True)
async def a_mixture_of_experts_is_served_as_on_disk(bench: Bench) -> None:
    """Experts and routers of a checkpoint folder arrive complete."""
    other = bench.other_weights()
    await bench.engine.load_weights_from_disk(str(other), NEW)
    await check_serves(bench, other, NEW)


@case(Capability.WEIGHTS_SHARED_MEMORY, own_engine=True, slow=True)
async def tied_weights_are_pushed_once_and_used_twice(bench: Bench) -> None:
    """A model with tied weights accepts them under either name, and uses the new weights in both places.

    stats() counts them once. Square matrices of gpt2, whose checkpoints hold them transposed, are not turned twice.
    Tensors that engines compute when they load DeepSeek's, such as the halves of a projection, follow each update. The
    vision model and the projector of a LLaVA, for which engines have names of their own, are updated too.
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
    "llava": {},
}
"""Architectures, and fields of their configuration."""


@contextmanager
def _serves_or_names(architecture: str) -> Iterator[None]:
    """Let an engine refuse an architecture other than the suite's own, when it is created or starts, if it names it."""
    try:
        yield
    except (EngineStartError, InvalidConfig) as refusal:
        # As "deepseek_v3" or as DeepseekV3ForCausalLM.
        if architecture == "qwen2" or architecture.replace("_", "") not in str(refusal).lower().replace("_", ""):
            raise


async def _push_tied(bench: Bench, engine: InferenceEngine, folder: Path) -> None:
    other = bench.models.with_other_weights(folder)
    for source in (_module_of(other), tensors_of(other)):
        await push_source(engine, tensors_of(folder), "back")
        await push_source(engine, source, NEW)
        check_made_by(bench, await bench.greedy(bench.prompts(3, engine=engine), engine=engine), other, engine)
        if engine.supports(Capability.READ_WEIGHTS):
            await check_holds(engine, tensors_of(other))
        if engine.supports(Capability.IMAGES):
            images = [png(pattern_pixel)]
            (completion,) = (await engine.generate(with_images(images), SEEN)).completions
            check_seen(bench, completion, images, other, engine=engine)
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


@case(Capability.WEIGHTS_DISK, changes_weights=True, slow=True)
async def going_back_to_earlier_weights_gives_their_answers(bench: Bench) -> None:
    """Pushing other weights and then the first ones again restores the first answers.

    The logprobs of a prompt, too, are those of the current weights. In between, diverged weights with NaN logits end
    every request in NonFiniteLogits, whatever its params, and leave no NaN behind, such as in a cache. Requests that
    fail leak no memory.
    """
    engine, prompts = bench.engine, [bench.prompt(length) for length in (6, 19, 33, 46)]
    before = await one_by_one(bench, prompts)
    await _check_scores(bench, prompts, bench.model)
    await engine.load_weights_from_disk(str(bench.other_weights()), NEW)
    await check_serves(bench, bench.other_weights(), NEW)
    await _check_scores(bench, prompts, bench.other_weights())
    diverged = write_checkpoint(bench.folder("diverged"), bench.model, _of_a_diverged_model(tensors_of(bench.model)))
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
    await _check_scores(bench, prompts, bench.model)


async def _check_scores(bench: Bench, prompts: list[list[int]], model: Path) -> None:
    """Check that the logprobs of these prompts are those of ``model``, if the engine returns prompts' logprobs.

    A batch holds each prompt twice, so that a fleet computes it on more than one engine.
    """
    if not bench.claims(Capability.PROMPT_LOGPROBS):
        return
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=0)
    for completion in (await bench.engine.generate([*prompts, *prompts], params)).completions:
        check_prompt_logprobs(bench, completion, model)


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
    room = {"bytes of memory": rounds * 4 * _OF_A_REQUEST, **COUNTED}
    await check_steady(held_after_some, room, f"{rounds} calls that failed")


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
async def every_form_of_source_is_served(bench: Bench) -> None:
    """A mapping, pairs, a generator function that reuses its buffer, and a torch module all arrive alike.

    An engine that holds float32 accepts bfloat16 tensors exactly: none is refused, and none is rounded.
    """
    engine, other = bench.engine, bench.other_weights()
    old, backwards = tensors_of(bench.model), dict(reversed(tensors_of(other).items()))
    for form in _FORMS:
        await push_source(engine, old, "back")
        await push_source(engine, _in_form(form, backwards, other), form)
        await check_serves(bench, other, form)
    if await holds_float32(engine):
        narrow = in_bfloat16(backwards)
        await push_source(engine, old, "back")
        await push_source(engine, narrow, "bfloat16")
        await check_serves(bench, widened(bench, narrow), "bfloat16")


@case(Capability.WEIGHTS_SHARED_MEMORY, changes_weights=True)
def any_buckets_order_and_form_serve_the_same(bench: Bench) -> None:
    """Whatever the bucket size and the order and form of the source, the answers afterwards are the same."""
    engine, other, prompts = bench.engine, bench.other_weights(), bench.prompts(2)
    old, new = tensors_of(bench.model), tensors_of(other)

    async def answers(source: WeightInput, bucket_bytes: int) -> list[Completion]:
        await push_source(engine, old, "back")
        await push_source(engine, source, NEW, bucket_bytes)
        return await one_by_one(bench, prompts)

    expected = bench.run(answers(new, ONE_BUCKET))  # a refusal is raised here, not as a counterexample

    @random_property(min(bench.profile.examples, 8), bench.seed)
    @given(
        order=st.permutations(sorted(new)),
        form=st.sampled_from([form for form in _FORMS if form != "module"]),
        bucket_bytes=st.integers(1, 2 * sum(tensor.nbytes for tensor in new.values())),
    )
    def holds(order: list[str], form: str, bucket_bytes: int) -> None:
        shuffled = {name: new[name] for name in order}
        check_same(bench, bench.run(answers(_in_form(form, shuffled, other), bucket_bytes)), expected, model=other)

    holds()


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


def _of_a_diverged_model(tensors: Tensors) -> Tensors:
    """Return finite tensors with matrices so large that activations overflow and the logits are NaN."""
    return {name: _overflowing(tensor) if _multiplies(name, tensor) else tensor for name, tensor in tensors.items()}


def _multiplies(name: str, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 1 and not ("embed" in name or "lm_head" in name)


def _overflowing(tensor: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(tensor.dtype).max
    factor: float = min(most**0.6, most / 2) / (float(tensor.abs().max()) or 1.0)
    return (tensor.double() * factor).to(tensor.dtype)


def _module_of(folder: Path) -> PreTrainedModel:
    """Load a folder's model as a trainer holds it, in the checkpoint's dtype."""
    with no_progress_bars():
        config = AutoConfig.from_pretrained(folder)
        kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        module: PreTrainedModel = kind.from_pretrained(folder, dtype="auto")
    return module


def _reused_buffer(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in one buffer, which is overwritten as soon as the next tensor is requested."""
    buffer = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        yield name, view
        buffer.fill_(255)


def _in_form(form: str, tensors: Tensors, folder: Path) -> WeightInput:
    """Return these tensors (for ``module``, those of the folder) in one of the :data:`_FORMS`."""
    match form:
        case "mapping":
            return tensors
        case "pairs":
            return list(tensors.items())
        case "function":
            return lambda: _reused_buffer(tensors)
        case "module":
            return _module_of(folder)
        case _:
            raise AssertionError(form)
