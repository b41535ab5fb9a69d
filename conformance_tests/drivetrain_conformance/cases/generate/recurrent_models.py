"""Recurrent models: their states stay right through batches, caches and control calls.

A state is one tensor for all tokens of a row. It is silently wrong if it is lost or mixed up where rows join, leave or
move, where buffers grow, where a prefix is taken from a cache, and where padding is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import EngineStartError, InvalidConfig, InvalidRequest, UnsupportedCapability
from drivetrain.testing import tiny_model
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.same_answers import check_greedy
from drivetrain_conformance.assets.made_adapters import has_layers, make_adapter, merge
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.harness.time_limits import within

_LONG: Final = 180
"""Tokens of an answer for which buffers of keys, values and states grow."""
_BOUND: Final = 120.0
_ADAPTED: Final = ("q_proj", "v_proj")


def _make_recurrent_case(architecture: str, keeps: str) -> None:
    async def body(bench: Bench) -> None:
        await _check_model(bench, architecture)

    body.__name__ = f"{architecture}_is_right_or_refused"
    body.__doc__ = f"""A model that keeps {keeps}, such as {architecture}, is right or refused at start.

    Its answers are those of a plain forward pass in batches, beside aborted rows, through freezes, with cached
    prefixes, with adapters and after updates. An engine that cannot serve it raises InvalidConfig or EngineStartError.
    """
    case(own_engine=True, slow=True)(body)


for _architecture, _keeps in {
    "mamba2": "recurrent states alone",
    "falcon_h1": "recurrent states beside keys and values",
    "qwen3_next": "recurrent states in some of its layers",
}.items():
    _make_recurrent_case(_architecture, _keeps)


async def _check_model(bench: Bench, architecture: str) -> None:
    """Raise unless an engine serves a tiny model of this architecture as a plain forward pass, or refuses to start."""
    model = tiny_model(architecture, dtype=bench.models.dtype)
    adapted = has_layers(model, _ADAPTED)
    async with AsyncExitStack() as stack:
        engine = await _served(stack, bench, model, enable_lora=True) if adapted else None
        engine = engine or await _served(stack, bench, model)
        if engine is None:
            return  # the engine does not serve this kind of model
        await _check_rows(bench, engine, model)
        if engine.supports(Capability.ABORT):
            await _check_an_abort(bench, engine, model)
        await _check_freezes(bench, engine, model)
        if engine.supports(Capability.LORA):
            await _check_adapters(bench, engine, model)
        await _check_sleeps(bench, engine, model)
        if engine.supports(Capability.WEIGHTS_DISK):
            await _check_an_update(bench, engine, model)


async def _served(stack: AsyncExitStack, bench: Bench, model: Path, **fields: object) -> InferenceEngine | None:
    """Return an engine that serves ``model`` until the stack is closed; None if it is refused.

    A refusal that names ``enable_prefix_caching`` is heeded.
    """
    try:
        return await stack.enter_async_context(bench.open(model=model, **fields))
    except InvalidConfig as refusal:
        if refusal.field != "enable_prefix_caching" or "enable_prefix_caching" in fields:
            return None
        return await _served(stack, bench, model, **fields, enable_prefix_caching=False)
    except (UnsupportedCapability, EngineStartError):
        return None


async def _check_rows(bench: Bench, engine: InferenceEngine, model: Path) -> None:
    """Check rows of several lengths, repeated prompts, and prompts that go on from an answer."""
    prompts = [bench.prompt(length, engine) for length in (3, 40, 17)]
    answers = await _answers(engine, prompts, 12)
    for again in (await _answers(engine, prompts, 12), await _answers(engine, prompts, 12)):
        _check(bench, again, engine, model)
    _check(bench, answers, engine, model)
    turns = [[*one.prompt_token_ids, *one.token_ids, *bench.prompt(9, engine)] for one in answers]
    for lasting in (_LONG, 12):
        _check(bench, await _answers(engine, turns, lasting), engine, model)


async def _check_an_abort(bench: Bench, engine: InferenceEngine, model: Path) -> None:
    """Check the row that takes the place of an aborted one, and a row that joins then."""
    prompts = [bench.prompt(length, engine) for length in (30, 12, 20)]
    params = _params(engine, _LONG)
    async with bench.in_flight(prompts[:2], params, engine, tokens=0, request_ids=["one", "other"]) as task:
        await engine.abort("one")
        joined = await _answers(engine, prompts[2:], 12)
        async with within(seconds=_BOUND):
            completions = (await task).completions
    _check(bench, [*completions, *joined], engine, model)


async def _check_freezes(bench: Bench, engine: InferenceEngine, model: Path) -> None:
    """Check that rows continue where they were after each kind of freeze."""
    for mode in bench.freezes(engine):
        prompts = [bench.prompt(length, engine) for length in (25, 6)]
        async with bench.in_flight(prompts, _params(engine, _LONG), engine, tokens=0) as task:
            await engine.pause_generation(mode)
            await engine.continue_generation()
            async with within(seconds=_BOUND):
                completions = (await task).completions
        _check(bench, completions, engine, model)


async def _check_adapters(bench: Bench, engine: InferenceEngine, model: Path) -> None:
    """Check that a prompt's cache is not taken for that of another adapter, or of none."""
    prompts = [bench.prompt(length, engine) for length in (33, 8)]
    adapter = make_adapter(model, bench.folder("adapter"), seed=1, targets=_ADAPTED)
    try:
        await engine.load_lora_adapter("a", str(adapter.path))
    except InvalidRequest:
        return  # this kind of model takes no adapters
    merged = merge(model, adapter, bench.folder("merged"))
    for name, expected in (("a", merged), (None, model), ("a", merged), (None, model)):
        output = await engine.generate(prompts, _params(engine, 12), lora=name)
        _check(bench, output.completions, engine, expected)
    await engine.unload_lora_adapter("a")


async def _check_sleeps(bench: Bench, engine: InferenceEngine, model: Path) -> None:
    """Check answers after the caches, the weights and both have slept; no slept cache knows a prompt."""
    tags = [MemoryTag.KV_CACHE] if engine.supports(Capability.SLEEP_KV_CACHE) else []
    turns = [tags] if tags else []
    if engine.supports(Capability.SLEEP_WEIGHTS) and engine.supports(Capability.WEIGHTS_DISK):
        turns += [[MemoryTag.WEIGHTS], [MemoryTag.WEIGHTS, *tags]]
    prompts = [bench.prompt(length, engine) for length in (31, 7)]
    for asleep in turns:
        await _answers(engine, prompts, 12)
        await engine.sleep(asleep)
        await engine.wake_up()
        if engine.state is EngineState.DIRTY:  # weights that were not kept
            await engine.load_weights_from_disk(str(model), engine.get_weight_version())
        again = await _answers(engine, prompts, 12)
        _check(bench, again, engine, model)
        cached = [one.cached_tokens for one in again]
        assert MemoryTag.KV_CACHE not in asleep or not any(cached), (
            f"after a sleep of the KV cache, {cached} tokens of prompts were found in the prefix cache"
        )
    if tags:
        await _check_many_sleeps(bench, engine, model, 4 * bench.profile.cycles)


async def _check_many_sleeps(bench: Bench, engine: InferenceEngine, model: Path, cycles: int) -> None:
    """Check the answers after each of ``cycles`` sleeps of the caches."""
    prompts = [bench.prompt(length, engine) for length in (9, 4)]
    for _ in range(cycles):
        await engine.sleep([MemoryTag.KV_CACHE])
        await engine.wake_up()
        _check(bench, await _answers(engine, prompts, 3), engine, model)


async def _check_an_update(bench: Bench, engine: InferenceEngine, model: Path) -> None:
    """Check that no state of older weights, or from before a reset, is used."""
    prompts = [bench.prompt(length, engine) for length in (28, 5)]
    other = bench.models.with_other_weights(model)
    _check(bench, await _answers(engine, prompts, 12), engine, model)
    await engine.load_weights_from_disk(str(other), "other")
    _check(bench, await _answers(engine, prompts, 12), engine, other)
    if engine.supports(Capability.PREFIX_CACHE):
        await engine.reset_prefix_cache()
        again = await _answers(engine, prompts, 12)
        _check(bench, again, engine, other)
        cached = [one.cached_tokens for one in again]
        assert not any(cached), f"after a reset, {cached} tokens of prompts were found in the prefix cache"


async def _answers(engine: InferenceEngine, prompts: Sequence[list[int]], count: int) -> list[Completion]:
    return (await engine.generate(list(prompts), _params(engine, count))).completions


def _params(engine: InferenceEngine, count: int) -> SamplingParams:
    raw = engine.supports(Capability.LOGPROBS_RAW)
    return SamplingParams(
        temperature=0,
        max_new_tokens=count,
        ignore_eos=engine.supports(Capability.IGNORE_EOS),
        logprobs=0 if raw else None,
        logprobs_mode=LogprobsMode.RAW if raw else None,
    )


def _check(bench: Bench, completions: Sequence[Completion], engine: InferenceEngine, model: Path) -> None:
    """Check that tokens are the likeliest, and their logprobs as precise as the engine's dtype."""
    for completion in completions:
        check_greedy(bench, completion, engine, model)
        expected = bench.output_logprobs(completion, model=model)
        for at, (value, right) in enumerate(zip(completion.logprobs or (), expected, strict=False)):
            assert abs(value - right) <= bench.tolerance(engine), (
                f"the logprob of token {at} of {len(completion.token_ids)} is {value:.5f}; a plain forward pass gives "
                f"{right:.5f}"
            )
