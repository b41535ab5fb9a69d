"""LoRA adapters: loaded, chosen per request, updated and unloaded."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import (
    DrivetrainError,
    EngineBusy,
    InvalidConfig,
    InvalidRequest,
    NonFiniteLogits,
    TooManyAdapters,
    WeightVerifyFailed,
)
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import ActionMask, LogprobsMode, SamplingParams
from drivetrain.types.weights import LoraSource, LoraTensors, WeightUpdateRequest
from drivetrain_conformance.assertions.calls_given_up import given_up
from drivetrain_conformance.assertions.event_loop_stalls import check_it_runs
from drivetrain_conformance.assertions.memory_use import COUNTED, check_steady, counted_of, held_by
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_greedy, check_same
from drivetrain_conformance.assertions.saved_models import check_saved
from drivetrain_conformance.assets.made_adapters import (
    Adapter,
    change_adapter,
    has_layers,
    make_adapter,
    merge,
    tensors_in,
)
from drivetrain_conformance.assets.served_models import ModelKind, Models
from drivetrain_conformance.assets.weight_sources import is_waited_for, with_another_digest
from drivetrain_conformance.engine_model.field_batches import field_batch
from drivetrain_conformance.engine_model.mixed_fields import Repeats, check_honoured
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, in_time, results_arrive
from drivetrain_conformance.harness.time_limits import until_ended
from drivetrain_conformance.references.oracle import HiddenStatesOracle, log_softmax
from drivetrain_conformance.references.reference_sampling import steps
from drivetrain_weight_sync import AdapterTensors, LoraSync, Strategy
from drivetrain_weight_sync.copying.digest import digests
from drivetrain_weight_sync.copying.plan import make_plan
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.transports.base import Sender
from drivetrain_weight_sync.transports.in_process import InProcessSender
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender

if TYPE_CHECKING:
    import torch

_CONFIG: Final = {"enable_lora": True, "max_loras": 6, "max_lora_rank": 12}
ROOM: Final = 64 * 1024
"""Bytes by which memory may grow with an adapter that is loaded and unloaded: allocator overhead."""
_LOADS: Final = 19
"""Adapters loaded one after another: more than the slots, up to 16, by which an engine may know them."""
_MOMENTS: Final = 16
"""Moments of a load at which it is cancelled."""
_LONG_NAME: Final = "the-policy-of-a-run-whose-adapters-have-names-that-differ-only-in-their-last-character"
_STREAMED: Final = 150
"""Tokens of a streamed prompt: more than a block of any prefix cache."""
_FORCE: Final = 100.0
"""A bias that no difference of logits outweighs."""
_GREEDY: Final = SamplingParams(max_new_tokens=12, temperature=0)


@dataclass(frozen=True, slots=True)
class _Made:
    """An adapter, and the model with that adapter merged in."""

    adapter: Adapter
    merged: Path

    @property
    def path(self) -> str:
        return str(self.adapter.path)


_SHAPES: Final[Mapping[int, tuple[Sequence[str], Mapping[str, object]]]] = {
    1: (("q_proj", "v_proj"), {}),
    2: (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), {"lora_alpha": 5}),
    3: (("o_proj", "down_proj"), {"lora_alpha": 24}),
}
"""By seed: the layers that an adapter changes, if the model has them, and further fields of its configuration."""
_made: Final[WeakKeyDictionary[Models, dict[tuple[Path, int, int], _Made]]] = WeakKeyDictionary()
"""Adapters and merged models of each run, shared by its cases: a merged model is as large as the model."""


def _make(bench: Bench, seed: int, rank: int = 4) -> _Made:
    """Return a random adapter of the engine's model; the same for the same arguments."""
    known, key = _made.setdefault(bench.models, {}), (bench.model, seed, rank)
    if key not in known:
        targets, settings = _SHAPES.get(seed, _SHAPES[1])
        if not has_layers(bench.model, targets):
            targets = _SHAPES[1][0]
        folder = bench.folder("adapter")
        adapter = make_adapter(bench.model, folder, seed=seed, rank=rank, targets=targets, settings=settings)
        known[key] = _Made(adapter, merge(bench.model, adapter, bench.folder("merged")))
    return known[key]


@asynccontextmanager
async def _loaded(bench: Bench, **made: _Made) -> AsyncGenerator[None, None]:
    """Keep adapters loaded under these names while the block runs."""
    names: list[str] = []
    try:
        for name, one in made.items():
            await bench.engine.load_lora_adapter(name, one.path)
            names.append(name)
        yield
    finally:
        for name in names:
            await bench.engine.unload_lora_adapter(name)


async def _answers(bench: Bench, prompts: Sequence[list[int]], lora: str | None) -> list[Completion]:
    return (await bench.engine.generate(list(prompts), _GREEDY, lora=lora)).completions


def _assert_made_by(bench: Bench, completions: Sequence[Completion], made: _Made | None) -> None:
    """Assert that these greedy answers come from the base model, with the adapter merged into it if one is given."""
    for completion in completions:
        check_greedy(bench, completion, model=made.merged if made else None)


# What an adapter does ---------------------------------------------------------------------------------------------


@case(Capability.LORA, config=_CONFIG)
async def an_adapter_adds_its_product(bench: Bench) -> None:
    """Requests with an adapter are answered as by the model with it merged in, requests without by the base.

    Adapters of attention, of the MLP and of both are tried, with several values of ``lora_alpha``.
    """
    prompts = bench.prompts(3)
    before = await bench.greedy(prompts)
    for seed in _SHAPES:
        made = _make(bench, seed)
        async with _loaded(bench, a=made):
            with_adapter = await _answers(bench, prompts, "a")
            check_same(bench, await bench.greedy(prompts), before)
        _assert_made_by(bench, with_adapter, made)
        assert [one.token_ids for one in with_adapter] != [one.token_ids for one in before], (
            "the adapter changes nothing"
        )
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.LORA, Capability.LOGPROBS_RAW, config=_CONFIG)
async def logprobs_are_those_with_the_adapter(bench: Bench) -> None:
    """Raw logprobs of sampled tokens are those of the model with the adapter merged in.

    So are hidden states, beside requests of the base.
    """
    made = _make(bench, seed=1)
    params = SamplingParams(max_new_tokens=12, n=2, logprobs=0, logprobs_mode=LogprobsMode.RAW)
    async with _loaded(bench, a=made):
        output = await bench.engine.generate(bench.prompts(2), params, lora="a")
        if bench.claims(Capability.HIDDEN_STATES):
            await _check_hidden_states(bench, made)
    for completion in output.completions:
        expected = bench.output_logprobs(completion, model=made.merged)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(expected)
        worst = max(abs(one - other) for one, other in zip(completion.logprobs, expected, strict=True))
        assert worst <= bench.tolerance(), f"a logprob is {worst:.3g} nats off that of the merged model"


async def _check_hidden_states(bench: Bench, made: _Made) -> None:
    """Check that hidden states with an adapter are the merged model's, and those without it the base's."""
    params = _GREEDY.model_copy(update={"return_hidden_states": True})
    calls = (bench.engine.generate(bench.prompts(2), params, lora=name) for name in ("a", None))
    outputs = await asyncio.gather(*calls)
    for output, model in zip(outputs, (made.merged, bench.model), strict=True):
        oracle = bench.oracle(model)
        if not isinstance(oracle, HiddenStatesOracle):
            return
        for completion in output.completions:
            check_greedy(bench, completion, model=model)
            first, drawn = len(completion.prompt_token_ids) - 1, len(completion.token_ids)
            states = oracle.hidden_states([*completion.prompt_token_ids, *completion.token_ids])
            off = float(np.abs(np.array(completion.hidden_states) - states[first : first + drawn]).max())
            allowed = bench.tolerance() * max(1.0, float(np.abs(states).max()))
            assert off <= allowed, f"a hidden state is off by {off:.3g}; {allowed:.3g} is allowed"


@case(Capability.LORA, config=_CONFIG)
async def requests_in_flight_use_different_adapters(bench: Bench) -> None:
    """Concurrent requests each use the adapter that they name, or none, and are answered as they are alone.

    As many adapters are in use at once as ``max_loras`` allows. A request with a diverged adapter ends in
    NonFiniteLogits; requests beside and after it are unaffected.
    """
    prompts = bench.prompts(2)
    one, two, three, *more = (f"{_LONG_NAME}-{end}" for end in ("a", "A", "b", "c", "d", "e"))
    made = {one: _make(bench, seed=1), two: _make(bench, seed=2, rank=8), three: _make(bench, seed=3)}
    # More adapters in a batch than kernels may have places for; equal ones under several names are several.
    every = {**made, **dict(zip(more, made.values(), strict=True))}
    names = (*every, None, one, None)
    async with _loaded(bench, **every):
        alone = [await _answers(bench, prompts, name) for name in names]
        together = await asyncio.gather(*(_answers(bench, prompts, name) for name in names))
    for name, *answers in zip(names, alone, together, strict=True):
        for completions in answers:
            _assert_made_by(bench, completions, every[name] if name else None)
    base, *adapted = [[one.token_ids for one in together[names.index(name)]] for name in (None, *made)]
    assert all(first != second for first, second in combinations(adapted, 2)), "two adapters answer alike"
    assert base not in adapted, "an adapter answers as the base does"
    folder = change_adapter(made[one].adapter, bench.folder("adapter"), _diverge)
    diverged = _Made(Adapter(folder, {}), bench.model)
    made["a"] = made[one]
    async with _loaded(bench, a=made["a"], diverged=diverged):
        users = ("diverged", None, "a", "diverged", "a")
        ends = await asyncio.gather(*(_answers(bench, prompts, name) for name in users), return_exceptions=True)
        ends.append(await _answers(bench, prompts, None))
    for user, end in zip((*users, None), ends, strict=True):
        if user == "diverged":
            assert isinstance(end, NonFiniteLogits), f"a request with an adapter that diverged ended as {end!r}"
            assert "'diverged'" in str(end), f"the error does not name the adapter: {end}"
        elif isinstance(end, BaseException):
            raise end
        else:
            _assert_made_by(bench, end, made[user] if user else None)
    async with _loaded(bench, diverged=diverged):
        await _check_its_place_is_clean(bench)


async def _check_its_place_is_clean(bench: Bench) -> None:
    """Check that a short request which takes the place of a diverged one, beside a longer one, is not affected."""
    lengths = [min(length, bench.engine.model_info.context_length // 4) for length in (200, 100)]
    longest, diverged = map(bench.prompt, lengths)
    async with bench.in_flight([longest], bench.long(250, prompt_length=len(longest))) as task:
        with refused(NonFiniteLogits):
            await bench.engine.generate(diverged, _GREEDY, lora="diverged")
        _assert_made_by(bench, await _answers(bench, bench.prompts(1), None), None)
        _assert_made_by(bench, (await task).completions, None)


def _diverge(_: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    """Make finite tensors so large that their product overflows."""
    for tensor in tensors.values():
        tensor.mul_(1e20)


@case(Capability.LORA, config=_CONFIG)
async def an_adapter_holds_in_streams_pauses_and_sleeps(bench: Bench) -> None:
    """An adapter applies to streams and prompt logprobs, and stays in effect through freezes and sleep.

    Every other field of a request holds with it.
    """
    engine, made = bench.engine, _make(bench, seed=1)
    prompts = bench.prompts(2)
    async with _loaded(bench, a=made):
        if bench.claims(Capability.STREAMING):
            chunks = [chunk async for chunk in engine.generate_stream(prompts, _GREEDY, lora="a")]
            _assert_made_by(bench, [chunk.completion for chunk in chunks if chunk.completion is not None], made)
        if bench.claims(Capability.PROMPT_LOGPROBS):
            await _check_prompt_logprobs(bench, bench.prompt(24), made)
        await _check_fields(bench, made)
        await _check_eos_is_ignored(bench)
        batch, streamed = field_batch(bench), bench.claims(Capability.STREAMING)
        await check_honoured(bench, batch, Repeats(), streamed=streamed, lora="a", model=made.merged)
        for mode in bench.freezes():
            async with bench.in_flight(prompts, bench.long(250), lora="a") as task:
                await engine.pause_generation(mode)
                await engine.continue_generation()
                _assert_made_by(bench, (await task).completions, made)
        if bench.claims(Capability.SLEEP_KV_CACHE):
            await engine.sleep({MemoryTag.KV_CACHE})
            await engine.wake_up({MemoryTag.KV_CACHE})
        _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
        if bench.claims(Capability.SLEEP_WEIGHTS) and bench.claims(Capability.WEIGHTS_DISK):
            await engine.sleep({MemoryTag.WEIGHTS})
            await engine.wake_up({MemoryTag.WEIGHTS})
            await engine.load_weights_from_disk(str(bench.model), engine.get_weight_version())
        _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
        _assert_made_by(bench, await _answers(bench, prompts, None), None)


async def _check_prompt_logprobs(bench: Bench, prompt: list[int], made: _Made) -> None:
    """Check that a prompt's logprobs are the merged model's, also with max_new_tokens=0."""
    rows = log_softmax(bench.oracle(made.merged).logits(prompt))
    for count in (1, 0) if bench.claims(Capability.SCORE_TOKENS) else (1,):
        params = SamplingParams(max_new_tokens=count, temperature=0, prompt_logprobs=0)
        (completion,) = (await bench.engine.generate([prompt], params, lora="a")).completions
        assert completion.prompt_logprobs is not None
        for at, found in enumerate(completion.prompt_logprobs[1:], 1):
            off = abs((found or 0.0) - float(rows[at - 1][prompt[at]]))
            assert off <= bench.tolerance(), f"a prompt logprob is {off:.3g} nats off that of the merged model"


async def _check_fields(bench: Bench, made: _Made) -> None:
    """Check that penalties, biases, masks and stop ids work with an adapter: greedy tokens are the best after them."""
    fields: dict[str, object] = {"max_new_tokens": 12, "temperature": 0}
    few = sorted(set(bench.prompt(40)))
    for needed, name, value in (
        (Capability.REPETITION_PENALTY, "repetition_penalty", 1.2),
        (Capability.FREQUENCY_PENALTY, "frequency_penalty", 0.5),
        (Capability.PRESENCE_PENALTY, "presence_penalty", 0.4),
        (Capability.LOGIT_BIAS, "logit_bias", dict.fromkeys(few[::2], 1.5)),
        (Capability.LOGIT_PROCESSORS, "logit_processors", (ActionMask(allowed_token_ids=tuple(few)),)),
    ):
        if bench.claims(needed):
            fields[name] = value
    params = SamplingParams.model_validate(fields)
    for completion in (await bench.engine.generate(bench.prompts(2), params, lora="a")).completions:
        rows = bench.output_logits(completion, made.merged)
        for token, step in zip(completion.token_ids, steps(completion, rows, params, bench.tolerance()), strict=True):
            step.check_drawn(token, params, 2 * bench.tolerance(), f"with an adapter, token {token}")
        if bench.claims(Capability.STOP_TOKEN_IDS):
            stopping = params.model_copy(update={"stop_token_ids": (completion.token_ids[0],)})
            (ended,) = (await bench.engine.generate(completion.prompt_token_ids, stopping, lora="a")).completions
            assert len(ended.token_ids) == 1, f"with an adapter, a stop token id did not end {ended.token_ids}"


async def _check_eos_is_ignored(bench: Bench) -> None:
    """Check that EOS ends no request that uses the adapter ``a`` and ignores EOS, whichever call makes it."""
    engine = bench.engine
    if not (bench.claims(Capability.IGNORE_EOS) and bench.claims(Capability.LOGIT_BIAS)):
        return
    eos, count = engine.model_info.eos_token_ids[0], 5
    bias = {"ignore_eos": True, "logit_bias": {eos: _FORCE}}
    params = SamplingParams.model_validate({"max_new_tokens": count, "temperature": 0, **bias})
    found = [("generate()", (await engine.generate(bench.prompt(), params, lora="a")).completions[0])]
    if bench.claims(Capability.STREAMING):
        chunks = [chunk async for chunk in engine.generate_stream(bench.prompt(), params, lora="a")]
        found += [("generate_stream()", one.completion) for one in chunks if one.completion is not None]
    chat = await engine.generate([{"role": "user", "content": "Who rows?"}], params, lora="a")
    found.append(("generate() of messages", chat.completions[0]))
    for call, completion in found:
        assert completion.token_ids == [eos] * count, (
            f"with an adapter, EOS ended a request of {call} that ignores it: {completion.token_ids} of {count} tokens"
        )


@case(Capability.LORA, config=_CONFIG)
async def cached_prefixes_are_not_shared_between_adapters(bench: Bench) -> None:
    """A long prompt that the base or another adapter has cached is computed anew by each adapter."""
    prompt = bench.prompt(min(400, bench.engine.model_info.context_length // 2))
    made = {"a": _make(bench, seed=1), "b": _make(bench, seed=2)}
    async with _loaded(bench, **made):
        for name in (None, "a", "b", "a", None):
            _assert_made_by(bench, await _answers(bench, [prompt], name), made[name] if name else None)
        if bench.claims(Capability.STREAMING):
            for first, second in (("a", None), ("b", "a"), (None, "b")):
                await _check_a_streamed_prefix_is_its_own(bench, made, first, second)


async def _check_a_streamed_prefix_is_its_own(
    bench: Bench, made: Mapping[str, _Made], first: str | None, second: str | None
) -> None:
    """Check that a prompt which was streamed with ``first`` is computed anew with ``second``."""
    prompt = bench.prompt(min(_STREAMED, bench.engine.model_info.context_length // 2))
    caches = bench.claims(Capability.PREFIX_CACHE)
    if caches:
        await bench.engine.reset_prefix_cache()
    chunks = [chunk async for chunk in bench.engine.generate_stream([prompt], _GREEDY, lora=first)]
    streamed = [chunk.completion for chunk in chunks if chunk.completion is not None]
    _assert_made_by(bench, streamed, made[first] if first else None)
    (answer,) = await _answers(bench, [prompt], second)
    assert not caches or answer.cached_tokens == 0, (
        f"a prompt that was streamed with adapter {first} was found with adapter {second}: "
        f"{answer.cached_tokens} tokens were cached"
    )
    _assert_made_by(bench, [answer], made[second] if second else None)


@case(Capability.LORA, config=_CONFIG)
async def a_pinned_adapter_is_served(bench: Bench) -> None:
    """An adapter that is loaded with pinned=True is served and unloaded like any other."""
    made = _make(bench, seed=1)
    await bench.engine.load_lora_adapter("a", made.path, pinned=True)
    _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)
    await bench.engine.unload_lora_adapter("a")
    with refused(InvalidRequest, field="lora"):
        await _answers(bench, bench.prompts(1), "a")


@case(Capability.LORA)
async def adapters_without_enable_lora(bench: Bench) -> None:
    """An engine that claims adapters without enable_lora serves them; any other refuses them."""
    made = _make(bench, seed=1)
    async with _loaded(bench, a=made):
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)


# Its settings -----------------------------------------------------------------------------------------------------

_SETTINGS: Final[Mapping[str, tuple[Sequence[str], Mapping[str, object]]]] = {
    "use_rslora": (("q_proj", "v_proj"), {"use_rslora": True}),
    "alpha_pattern": (("q_proj", "v_proj"), {"alpha_pattern": {"q_proj": 64, "v_proj": 1}}),
    "rank_pattern": (("q_proj", "v_proj"), {"rank_pattern": {"q_proj": 2}}),
    "layers_to_transform": (("q_proj", "v_proj"), {"layers_to_transform": [1]}),
    "target_modules": (("q_proj", "v_proj"), {"target_modules": None}),
    "lm_head": (("lm_head",), {}),
    "embed_tokens": (("embed_tokens",), {}),
    # Engines fuse these layers with others, which must stay unchanged.
    "q_proj": (("k_proj",), {}),
    "gate_proj": (("up_proj",), {}),
    "k_proj": (("v_proj",), {}),
    "q_proj beside k_proj": (("k_proj", "v_proj"), {}),
}
"""Adapters by what a refusal must contain, up to a space: their layers, and fields of their configuration."""

_NOT_PLAIN: Final[Mapping[str, object]] = {
    "init_lora_weights": "pissa",
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
    "target_parameters": ["mlp.experts.down_proj"],
    "layer_replication": [[0, 2], [1, 2]],
    "alora_invocation_tokens": [1, 2],
    "use_dora": True,
    "use_qalora": True,
    "a_field_that_nobody_knows": 1,
}
"""Fields that turn an adapter with plain LoRA tensors into something else."""


def _set(fields: Mapping[str, object], config: dict[str, object], _: object) -> None:
    config.update(fields)


async def _is_taken(engine: InferenceEngine, adapter: Adapter, naming: str) -> bool:
    """Load an adapter as ``a``; return False if it is refused with a message that contains ``naming``."""
    try:
        await engine.load_lora_adapter("a", str(adapter.path))
    except InvalidRequest as error:
        said = str(error)
    else:
        return True
    assert naming in said, f"the refusal does not name {naming!r}: {said}"
    return False


@case(Capability.LORA, config=_CONFIG)
async def every_setting_is_honoured_or_refused(bench: Bench) -> None:
    """An adapter's scales, ranks and layers are those of its configuration; a field with another effect is refused.

    A refusal names the field, and the base serves on unchanged. Mend it where the backend loads an adapter:
    ``drivetrain_weight_sync.receiver.lora_adapters`` reads and checks a folder, and ``PlainAdapters`` folds ranks
    and scales in.
    """
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts)
    plain = _make(bench, seed=1)
    for field, value in _NOT_PLAIN.items():
        path = change_adapter(plain.adapter, bench.folder("adapter"), partial(_set, {field: value}))
        with refused(InvalidRequest, naming=field, otherwise=f"an adapter with {field}={value!r} is taken as plain"):
            await bench.engine.load_lora_adapter("a", str(path))
    check_same(bench, await bench.greedy(prompts), before)
    for name, adapter in _made_by_setting(bench):
        if not await _is_taken(bench.engine, adapter, name):
            continue
        answers = await _answers(bench, prompts, "a")
        await bench.engine.unload_lora_adapter("a")
        _assert_made_by(bench, answers, _Made(adapter, merge(bench.model, adapter, bench.folder("merged"))))
    check_same(bench, await bench.greedy(prompts), before)


def _made_by_setting(bench: Bench) -> Iterator[tuple[str, Adapter]]:
    """Yield an adapter for each of these settings, with the word that a refusal must contain."""
    for name, (targets, settings) in _SETTINGS.items():
        tied = name == "embed_tokens" and not has_layers(bench.model, ("lm_head",))
        if has_layers(bench.model, targets) and not tied:
            folder = bench.folder("adapter")
            yield name.split()[0], make_adapter(bench.model, folder, seed=5, targets=targets, settings=settings)


_OF_A_MIXTURE: Final[Sequence[Sequence[str]]] = (
    ("q_proj", "v_proj"),
    ("down_proj",),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Layers of a mixture of experts that adapters adapt: first the attention's alone, then also those of each expert."""


@case(Capability.LORA, Capability.MOE, config=_CONFIG, own_engine=True)
async def a_mixture_of_experts_takes_adapters_or_is_refused(bench: Bench) -> None:
    """With enable_lora, adapters of a mixture are applied or refused by name; or the engine refuses to start with one.

    The error then names ``enable_lora``: say so in ``Backend.validate``. After a refusal the base serves on.
    """
    async with AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(bench.open(model=bench.model_of(ModelKind.MOE)))
        except InvalidConfig as error:
            refusal = error
        else:
            await _check_adapters_of_a_mixture(bench, engine)
            return
    assert refusal.field == "enable_lora", f"the error names the field {refusal.field!r}: {refusal}"


async def _check_adapters_of_a_mixture(bench: Bench, engine: InferenceEngine) -> None:
    model, prompts = bench.model_of(ModelKind.MOE), bench.prompts(2, engine=engine)
    before = await bench.greedy(prompts, engine=engine)
    for targets in _OF_A_MIXTURE:
        adapter = make_adapter(model, bench.folder("adapter"), seed=1, targets=targets)
        if not await _is_taken(engine, adapter, "experts"):
            assert targets is not _OF_A_MIXTURE[0], "an adapter of the attention alone is refused"
            continue
        merged = merge(model, adapter, bench.folder("merged"))
        for completion in (await engine.generate(prompts, _GREEDY, lora="a")).completions:
            check_greedy(bench, completion, engine, merged)
        await engine.unload_lora_adapter("a")
    check_same(bench, await bench.greedy(prompts, engine=engine), before, engine, model)


# Names ------------------------------------------------------------------------------------------------------------


@case(Capability.LORA, config=_CONFIG)
async def an_unloaded_adapter_is_refused(bench: Bench) -> None:
    """After unloading, a request for the adapter is refused, and so is unloading it again; the base serves on."""
    made, prompts = _make(bench, seed=1), bench.prompts(2)
    async with _loaded(bench, a=made):
        _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
    with refused(InvalidRequest, field="lora", naming="'a'"):
        await _answers(bench, prompts, "a")
    with refused(InvalidRequest, field="lora_name", naming="'a'"):
        await bench.engine.unload_lora_adapter("a")
    _assert_made_by(bench, await _answers(bench, prompts, None), None)


@case(Capability.LORA, config=_CONFIG)
async def an_unknown_adapter_is_refused(bench: Bench) -> None:
    """A request for an adapter that was never loaded is refused, naming it and the loaded ones."""
    async with _loaded(bench, known=_make(bench, seed=1)):
        with refused(InvalidRequest, field="lora", naming="known"):
            await _answers(bench, bench.prompts(1), "unknown")
        with refused(InvalidRequest, field="lora_name", naming="unknown"):
            await bench.engine.unload_lora_adapter("unknown")


@case(Capability.LORA, config=_CONFIG)
async def a_name_is_given_once(bench: Bench) -> None:
    """Loading under a name that is taken, or empty, is refused; the adapter of that name is served on."""
    made, other = _make(bench, seed=1), _make(bench, seed=2)
    async with _loaded(bench, a=made):
        for path in (made.path, other.path):
            with refused(InvalidRequest, field="lora_name", naming="'a'"):
                await bench.engine.load_lora_adapter("a", path)
        with refused(InvalidRequest, field="lora_name"):
            await bench.engine.load_lora_adapter("", other.path)
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)


@case(Capability.LORA, config=_CONFIG, slow=True)
async def a_name_may_come_back_as_another_adapter(bench: Bench) -> None:
    """A name that is loaded again with another path serves the other adapter, also for a cached prompt.

    Adapters that are loaded and unloaded leave nothing behind, and do not block the trainer's event loop.
    """
    made, other = _make(bench, seed=1), _make(bench, seed=2)
    prompts = [bench.prompt(), bench.prompt(min(400, bench.engine.model_info.context_length // 2))]
    async with _loaded(bench, a=made):
        first = await _answers(bench, prompts, "a")
    async with _loaded(bench, a=other):
        second = await _answers(bench, prompts, "a")
    _assert_made_by(bench, first, made)
    _assert_made_by(bench, second, other)
    assert [one.token_ids for one in first] != [one.token_ids for one in second], "the first adapter is still served"
    await _check_a_folder_is_read_again(bench, prompts, made, other)
    await _check_many_loads(bench, prompts[1], (made, other, _make(bench, seed=3), _make(bench, seed=4)))

    large = _make(bench, seed=2, rank=8)

    async def held_after_some() -> dict[str, int]:
        async with check_it_runs():
            for one in [large] * 4:
                async with _loaded(bench, a=one):
                    pass
        return await held_by(bench.engine)  # outside of the check: it collects garbage

    await held_after_some()  # the first ones fill caches
    room = {"bytes of memory": 4 * ROOM, **COUNTED}
    await check_steady(held_after_some, room, "four adapters that were loaded and unloaded")


async def _check_a_folder_is_read_again(bench: Bench, prompts: Sequence[list[int]], *adapters: _Made) -> None:
    """Check that a folder to which a trainer writes one adapter after another is served as it is when it is loaded."""
    latest = bench.folder("latest")
    for one in adapters:
        for file in one.adapter.path.iterdir():
            shutil.copyfile(file, latest / file.name)
        await bench.engine.load_lora_adapter("a", str(latest))
        answers = await _answers(bench, prompts, "a")
        if bench.claims(Capability.PROMPT_LOGPROBS):
            await _check_prompt_logprobs(bench, prompts[0], one)
        await bench.engine.unload_lora_adapter("a")
        _assert_made_by(bench, answers, one)


async def _check_many_loads(bench: Bench, prompt: list[int], adapters: Sequence[_Made]) -> None:
    """Check that a cached prompt is never taken for another adapter's, however many were loaded since.

    The first and the last adapter differ in nothing but their values, so one may take the other's place in memory.
    """
    for one in islice(cycle(adapters), _LOADS):
        async with _loaded(bench, a=one):
            _assert_made_by(bench, await _answers(bench, [prompt], "a"), one)


# What cannot be loaded --------------------------------------------------------------------------------------------


@case(Capability.LORA, config=_CONFIG)
async def no_more_adapters_than_the_limit(bench: Bench) -> None:
    """One adapter more than max_loras is refused, naming the limit; after unloading one it loads."""
    first, second, third = (_make(bench, seed=seed) for seed in (1, 2, 3))
    others = dict.fromkeys("bdefg", second)
    async with _loaded(bench, **others):
        async with _loaded(bench, a=first):
            with refused(TooManyAdapters, field="lora_name", naming="max_loras"):
                await bench.engine.load_lora_adapter("c", third.path)
            with refused(InvalidRequest, field="lora"):
                await _answers(bench, bench.prompts(1), "c")
            _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), first)
        async with _loaded(bench, c=third):
            _assert_made_by(bench, await _answers(bench, bench.prompts(2), "c"), third)
            _assert_made_by(bench, await _answers(bench, bench.prompts(2), "b"), second)


@case(Capability.LORA, config=_CONFIG)
async def no_larger_rank_than_the_limit(bench: Bench) -> None:
    """An adapter whose rank is above max_lora_rank is refused, naming the limit, and takes no slot.

    Nor does it stay in memory.
    """
    large, prompts = make_adapter(bench.model, bench.folder("adapter"), seed=1, rank=16), bench.prompts(2)
    pattern = {"rank_pattern": {"v_proj": 16}}
    partly = make_adapter(bench.model, bench.folder("adapter"), seed=1, settings=pattern)
    for folder in (large.path, partly.path):
        with refused(InvalidRequest, naming="max_lora_rank"):
            await bench.engine.load_lora_adapter("large", str(folder))
    made = {"a": _make(bench, seed=2, rank=12), "b": _make(bench, seed=1)}
    async with _loaded(bench, **made):
        for name, one in made.items():
            _assert_made_by(bench, await _answers(bench, prompts, name), one)
    wide = make_adapter(bench.model, bench.folder("adapter"), seed=1, rank=256)

    async def held_after_some() -> dict[str, int]:
        for _ in range(4):
            with refused(InvalidRequest, naming="max_lora_rank"):
                await bench.engine.load_lora_adapter("wide", str(wide.path))
        return await held_by(bench.engine)

    await held_after_some()  # the first ones fill caches
    room = {"bytes of memory": 4 * ROOM, **COUNTED}
    await check_steady(held_after_some, room, "four adapters that were refused")


def _without(tensors: dict[str, torch.Tensor], part: str, most: int) -> None:
    """Remove up to ``most`` tensors whose names contain ``part``."""
    for name in [name for name in tensors if part in name][:most]:
        del tensors[name]


_DEFECTS: Final[Mapping[str, Callable[[dict[str, object], dict[str, torch.Tensor]], object]]] = {
    "no lora_B": lambda _, tensors: _without(tensors, "lora_B", len(tensors)),
    "one lora_B missing": lambda _, tensors: _without(tensors, "lora_B", 1),
    "a layer missing": lambda _, tensors: _without(tensors, "layers.0.", len(tensors)),
    "NaN": lambda _, tensors: next(iter(tensors.values()))[0].fill_(float("nan")),
    "an infinite lora_alpha": lambda config, _: config.update(lora_alpha=float("inf")),
    "another rank than its r": lambda config, _: config.update(r=8),
}


@case(Capability.LORA, config=_CONFIG)
async def what_is_no_adapter_is_refused(bench: Bench) -> None:
    """A path that holds no adapter of this model, or a damaged one, is refused, and the engine serves on."""
    made, empty, broken, cut = _make(bench, seed=1), *(bench.folder("adapter") for _ in range(3))
    (broken / "adapter_config.json").write_text("{", encoding="utf-8")
    make_adapter(bench.model, cut, seed=1)
    (cut / "adapter_model.safetensors").unlink()
    misfit = make_adapter(bench.model, bench.folder("adapter"), seed=1, columns=24).path
    folders = {"no folder": bench.folder("adapter") / "missing", "an empty folder": empty, "no JSON": broken}
    folders |= {"no tensors": cut, "other shapes": misfit}
    for what, change in _DEFECTS.items():
        folders[what] = change_adapter(made.adapter, bench.folder("adapter"), change)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        folders[f"a FIFO {file}"] = endless = make_adapter(bench.model, bench.folder("adapter"), seed=1).path
        (endless / file).unlink()
        os.mkfifo(endless / file)
    held = []
    for what, path in folders.items():
        with refused(InvalidRequest, otherwise=f"an adapter with {what} is taken"):
            await bench.engine.load_lora_adapter("a", str(path))
        with refused(InvalidRequest, field="lora"):
            await _answers(bench, bench.prompts(1), "a")
        held.append(counted_of(bench.engine))
        for part in path.iterdir() if path.is_dir() else ():
            assert not (part.is_fifo() and is_waited_for(part)), f"a thread waits in open() for {what}"
    for what in ("threads", "descriptors"):
        counts = [one[what] for one in held]
        # A pool occasionally adds a few. A leak adds one with every refusal.
        assert counts[-1] - counts[0] < len(counts) - 1, f"{what} grow while adapters are refused: {counts}"
    _assert_made_by(bench, await _answers(bench, bench.prompts(1), None), None)
    async with _loaded(bench, a=made):
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)


@case(Capability.LORA, Capability.IGNORE_EOS, config=_CONFIG)
async def an_adapter_in_use_is_not_unloaded(bench: Bench) -> None:
    """Unloading an adapter that requests in flight use is refused; they, and later requests, keep using it.

    That another adapter comes and goes meanwhile changes none of their tokens.
    """
    made, other = _make(bench, seed=1), _make(bench, seed=2)
    async with _loaded(bench, a=made):
        async with bench.in_flight(bench.prompts(2), bench.long(ignore_eos=True), lora="a") as flying:
            with in_time(flying), refused(EngineBusy, naming="2 requests"):
                await bench.engine.unload_lora_adapter("a")
            _assert_made_by(bench, await _answers(bench, bench.prompts(1), "a"), made)
            async with _loaded(bench, b=other):
                _assert_made_by(bench, await _answers(bench, bench.prompts(1), "a"), made)
            _assert_made_by(bench, await _answers(bench, bench.prompts(1), "a"), made)
        _assert_made_by(bench, (await flying).completions, made)
    with refused(InvalidRequest, field="lora"):
        await _answers(bench, bench.prompts(1), "a")
    for mode in (None, *bench.freezes()):
        await _check_ended_requests_use_no_adapter(bench, made, mode)


async def _check_ended_requests_use_no_adapter(bench: Bench, made: _Made, mode: PauseMode | None) -> None:
    """Check that an adapter can be unloaded once its requests were aborted or given up, here after a pause began.

    An engine that counts an adapter's requests must notice also those that end in its queue.
    """
    engine = bench.engine
    for aborted in (True, False):
        async with _loaded(bench, a=made):
            async with bench.in_flight(bench.prompts(2), bench.long(ignore_eos=True), lora="a") as flying:
                if mode is not None:
                    await engine.pause_generation(mode)
                if aborted and bench.claims(Capability.ABORT):
                    await engine.abort_generation()
                else:
                    flying.cancel()
                await until_ended(flying)
            if mode is not None:
                await engine.continue_generation()


@case(Capability.LORA, Capability.PAUSE_WAIT, Capability.IGNORE_EOS, config=_CONFIG, slow=True)
async def an_adapter_whose_unload_is_given_up_is_served(bench: Bench) -> None:
    """An unload that is cancelled while it waits for a pause to end changes nothing."""
    engine, made = bench.engine, _make(bench, seed=1)
    async with _loaded(bench, a=made):
        async with bench.in_flight(bench.prompts(2), bench.long(ignore_eos=True)) as flying:
            pausing = asyncio.create_task(engine.pause_generation(PauseMode.WAIT))
            await asyncio.sleep(0.1)
            unloading = asyncio.create_task(engine.unload_lora_adapter("a"))
            await asyncio.sleep(0.1)
            with in_time(flying):
                assert not unloading.done(), "the adapter was unloaded while a pause waited for requests"
            unloading.cancel()
            await asyncio.wait([unloading])
        await pausing
        await engine.continue_generation()
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)
        for mode in (*[PauseMode.WAIT] * bench.claims(Capability.PAUSE_WAIT), *bench.freezes()):
            await _check_a_request_at_the_gate(bench, made, mode)


async def _check_a_request_at_the_gate(bench: Bench, made: _Made, mode: PauseMode) -> None:
    """Check that a request which arrived during a pause keeps its adapter loaded, and is answered with it."""
    engine = bench.engine
    await engine.pause_generation(mode)
    waiting = asyncio.create_task(_answers(bench, bench.prompts(2), "a"))
    try:
        requests = engine.parts.in_flight
        while requests.waiting + requests.running < 2:  # of an engine elsewhere, they wait at the gate there
            assert not waiting.done(), f"a request was answered during a pause of mode {mode.value}"
            await asyncio.sleep(0)
        with refused(EngineBusy, naming="2 requests", otherwise="an adapter that requests at the gate use is unloaded"):
            await engine.unload_lora_adapter("a")
    finally:
        await engine.continue_generation()
        await until_ended(waiting)
        waiting.cancel()
    _assert_made_by(bench, await waiting, made)


# Weights ----------------------------------------------------------------------------------------------------------


@case(Capability.LORA, Capability.WEIGHTS_LORA, config=_CONFIG, changes_weights=True)
async def an_adapter_is_updated_in_place(bench: Bench) -> None:
    """A weight update from an adapter's folder changes that adapter alone, under a new version; no prefix is stale."""
    made, other, newer = _make(bench, seed=1), _make(bench, seed=2), _make(bench, seed=3)
    prompts = [bench.prompt(), bench.prompt(min(400, bench.engine.model_info.context_length // 2))]
    base = await bench.greedy(prompts)
    async with _loaded(bench, a=made, b=other):
        _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
        source = LoraSource(lora_name="a", path=newer.path)
        await bench.engine.update_named_weights(WeightUpdateRequest(version="newer-adapter", source=source))
        assert bench.engine.get_weight_version() == "newer-adapter"
        _assert_made_by(bench, await _answers(bench, prompts, "a"), newer)
        _assert_made_by(bench, await _answers(bench, prompts, "b"), other)
        check_same(bench, await bench.greedy(prompts), base)


@case(Capability.LORA, Capability.WEIGHTS_LORA, Capability.IGNORE_EOS, config=_CONFIG, changes_weights=True)
async def an_adapter_that_cannot_be_updated_serves_on(bench: Bench) -> None:
    """A bad adapter update, or one with requests in flight, is refused; mode wait first lets the requests end."""
    made, newer, prompts = _make(bench, seed=1), _make(bench, seed=3), bench.prompts(2)
    version = bench.engine.get_weight_version()

    def update(path: str, mode: PauseMode) -> WeightUpdateRequest:
        return WeightUpdateRequest(version="newer", source=LoraSource(lora_name="a", path=path), mode=mode)

    async with _loaded(bench, a=made):
        with refused(InvalidRequest):
            await bench.engine.update_named_weights(update(str(bench.folder("adapter")), PauseMode.WAIT))
        async with bench.in_flight(prompts, bench.long(200, ignore_eos=True), lora="a") as flying:
            for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
                with in_time(flying), refused(EngineBusy, naming="2 requests"):
                    await bench.engine.update_named_weights(update(newer.path, mode))
            assert bench.engine.get_weight_version() == version
            _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
            await bench.engine.update_named_weights(update(newer.path, PauseMode.WAIT))
            await results_arrive(bench.engine)
            assert flying.done(), "the update came before the requests had ended"
        _assert_made_by(bench, (await flying).completions, made)
        assert bench.engine.get_weight_version() == "newer"
        _assert_made_by(bench, await _answers(bench, prompts, "a"), newer)


# From tensors -----------------------------------------------------------------------------------------------------

_FROM_MEMORY: Final = {
    Capability.WEIGHTS_IN_PROCESS: Strategy.IN_PROCESS,
    Capability.WEIGHTS_SHARED_MEMORY: Strategy.SHARED_MEMORY,
    Capability.WEIGHTS_CUDA_IPC: Strategy.CUDA_IPC,
    Capability.WEIGHTS_BROADCAST: Strategy.BROADCAST,
}
_SCORED: Final = _GREEDY.model_copy(update={"logprobs": 0, "logprobs_mode": LogprobsMode.RAW})


@dataclass(frozen=True, slots=True)
class _Policy:
    """A policy that is trained: its adapter's tensors, and the names under which it is served."""

    name: str
    tensors: AdapterTensors

    @classmethod
    def of(cls, name: str, made: _Made, strategy: Strategy) -> _Policy:
        """Return a policy with copies of an adapter's tensors, where the strategy sends them from."""
        held = tensors_in(made.adapter.path)
        device = "cuda" if strategy is Strategy.CUDA_IPC else "cpu"
        return cls(name, AdapterTensors(held.config, {key: one.to(device) for key, one in held.tensors.items()}))

    def becomes(self, made: _Made) -> None:
        """Write an adapter of the same form over the tensors, as an optimiser's step does."""
        for key, tensor in tensors_in(made.adapter.path).tensors.items():
            self.tensors.tensors[key].copy_(tensor)


async def _scored(bench: Bench, prompts: Sequence[list[int]], lora: str | None) -> list[Completion]:
    return (await bench.engine.generate(list(prompts), _SCORED, lora=lora)).completions


@case(Capability.LORA, Capability.WEIGHTS_LORA_TENSORS, Capability.LOGPROBS_RAW, config=_CONFIG, changes_weights=True)
async def adapters_are_updated_from_tensors(bench: Bench) -> None:
    """Two adapters that are pushed as tensors, in turns, are served as if they had been loaded from folders.

    Each transport that the engine claims is tried. Answers and logprobs are those of the folders, also for cached
    prompts and after an update of the base in between; each push publishes its version. The base and the other adapter
    serve on unchanged. Unusual scales, ranks and layers are honoured or refused, as they are in folders.
    """
    engine = bench.engine
    one, other, newer = (_make(bench, seed=seed) for seed in (1, 2, 4))
    strategies = [strategy for needed, strategy in _FROM_MEMORY.items() if bench.claims(needed)]
    # An engine that takes no adapters as tensors refuses this.
    LoraSync.connect(tensors_in(one.adapter.path), engine, strategy=next(iter(strategies), Strategy.SHARED_MEMORY))
    prompts = [bench.prompt(), bench.prompt(min(400, engine.model_info.context_length // 2))]
    base = await bench.greedy(prompts)
    expected: dict[Path, list[Completion]] = {}
    for made in (one, other, newer):
        async with _loaded(bench, folder=made):
            expected[made.merged] = await _scored(bench, prompts, "folder")
    auto = LoraSync.connect(tensors_in(one.adapter.path), engine).strategy
    assert auto in strategies, f"strategy auto is {auto}, though adapters can be taken by {strategies}"
    for strategy in strategies:
        first, second = _Policy.of("first", one, strategy), _Policy.of("second", other, strategy)
        async with (
            LoraSync.connect(first.tensors, engine, first.name, strategy) as sync,
            LoraSync.connect(second.tensors, engine, second.name, strategy) as beside,
        ):
            served: dict[str, _Made] = {}
            for step, (policy, made) in enumerate(
                [(first, one), (second, other), (first, newer), (second, other), (first, one)]
            ):
                policy.becomes(made)
                pushing = sync if policy is first else beside
                result = await pushing.push(version=f"{strategy.value}-{step}")
                assert result.strategy is strategy
                assert result.version == engine.get_weight_version() == f"{strategy.value}-{step}"
                served[policy.name] = made
                for name, its in served.items():
                    answers = await _scored(bench, prompts, name)
                    _assert_made_by(bench, answers, its)
                    check_same(bench, answers, expected[its.merged], model=its.merged)
            check_same(bench, await bench.greedy(prompts), base)
            if bench.claims(Capability.WEIGHTS_DISK):
                await _check_an_update_of_the_base(bench, sync, first, one, newer)
        for name in served:
            await engine.unload_lora_adapter(name)
            with refused(InvalidRequest, field="lora"):
                await _answers(bench, prompts, name)
    for name, adapter in _made_by_setting(bench):
        await _check_setting_of_tensors(bench, name, adapter)
    check_same(bench, await bench.greedy(prompts), base)


async def _check_setting_of_tensors(bench: Bench, name: str, adapter: Adapter) -> None:
    """Check that an adapter with an unusual setting or layer is served as its tensors say, or refused by name."""
    async with LoraSync.connect(tensors_in(adapter.path), bench.engine, "a") as sync:
        said = ""
        try:
            await sync.push(version=f"with-{name}")
        except InvalidRequest as error:
            said = str(error)
        if said:
            assert name in said, f"the refusal does not name {name!r}: {said}"
            return
        merged = merge(bench.model, adapter, bench.folder("merged"))
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), _Made(adapter, merged))
    await bench.engine.unload_lora_adapter("a")


async def _check_an_update_of_the_base(bench: Bench, sync: LoraSync, policy: _Policy, *adapters: _Made) -> None:
    """Check that an adapter holds over new base weights, and can be pushed again over them; then restore the base."""
    new_base, prompts = bench.other_weights(), bench.prompts(2)
    await bench.engine.load_weights_from_disk(str(new_base), "new-base")
    for made in adapters:
        if made is not adapters[0]:
            policy.becomes(made)
            await sync.push(version="over-the-new-base")
        together = merge(new_base, made.adapter, bench.folder("merged"))
        for completion in await _answers(bench, prompts, policy.name):
            check_greedy(bench, completion, model=together)
            assert completion.weight_version == bench.engine.get_weight_version()
    await bench.engine.load_weights_from_disk(str(bench.model), "old-base")


def _of_another_rank(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    """Double the rank in one layer alone, against the configuration."""
    import torch

    name = next(iter(tensors))
    tensors[name] = torch.cat([tensors[name], tensors[name]])


@case(Capability.LORA, Capability.WEIGHTS_LORA_TENSORS, Capability.IGNORE_EOS, config=_CONFIG, changes_weights=True)
async def an_adapter_refused_as_tensors_leaves_the_old_one(bench: Bench) -> None:
    """An adapter that no folder may hold is refused as tensors too, and the old one serves on; nothing is left over.

    Tensors that differ from their digests are named. With mode retract or in_place, a push is refused while requests
    use the adapter. With mode wait they end with the old adapter, and none is answered by the new one before. Loads and
    unloads that are cancelled leave nothing either, whatever the engine was doing.
    """
    engine, made, newer, prompts = bench.engine, _make(bench, seed=1), _make(bench, seed=4), bench.prompts(2)
    given = tensors_in(made.adapter.path)
    async with _loaded(bench, a=made):
        version = engine.get_weight_version()

        async def refuse(name: str, adapter: AdapterTensors, kind: type[DrivetrainError], what: str) -> None:
            async with _pushed_unchecked(engine, name, adapter) as request:
                with refused(kind, otherwise=f"an adapter with {what} is taken as tensors"):
                    await engine.update_named_weights(request)

        for field, value in _NOT_PLAIN.items():
            await refuse("a", AdapterTensors({**given.config, field: value}, given.tensors), InvalidRequest, field)  # type: ignore[dict-item]
        wide = tensors_in(make_adapter(bench.model, bench.folder("adapter"), seed=1, rank=64).path)
        misfit = tensors_in(make_adapter(bench.model, bench.folder("adapter"), seed=1, columns=24).path)
        wrong = {"more than max_lora_rank": wide, "other shapes": misfit}
        for what, change in {**_DEFECTS, "a layer of another rank": _of_another_rank}.items():
            config, tensors = dict(given.config), {key: one.clone() for key, one in given.tensors.items()}
            change(config, tensors)  # type: ignore[arg-type]
            wrong[what] = AdapterTensors(config, tensors)
        for what, adapter in wrong.items():
            await refuse("a", adapter, InvalidRequest, what)
        await _check_digests(bench, given)
        others = {f"other-{number}": made for number in range(1, _CONFIG["max_loras"])}
        async with _loaded(bench, **others):
            await refuse("another", given, TooManyAdapters, "more than max_loras")
        now = engine.get_weight_version()
        assert now == version, f"a refused push changed the version from {version} to {now}"
        _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
        await _check_requests_in_flight(bench, made, newer)
        await _check_calls_given_up(bench, newer)

        async def held_after_some() -> dict[str, int]:
            for what in ("NaN", "more than max_lora_rank"):
                await refuse("a", wrong[what], InvalidRequest, what)
            return await held_by(engine)

        await held_after_some()  # the first ones fill caches
        room = {"bytes of memory": 4 * ROOM, **COUNTED}
        await check_steady(held_after_some, room, "two adapters that were refused as tensors")


async def _check_digests(bench: Bench, given: AdapterTensors) -> None:
    """Check that a tensor that is not what was sent is named, and that digests of all tensors must be given."""
    async with _pushed_unchecked(bench.engine, "a", given) as request:
        name = next(iter(given.tensors))
        with refused(WeightVerifyFailed, naming=name, otherwise="a tensor of an adapter that is not what was sent"):
            await bench.engine.update_named_weights(with_another_digest(request, name))
        few = {key: value for key, value in (request.digests or {}).items() if key != name}
        with refused(InvalidRequest, naming=name, otherwise="an adapter with a tensor that has no digest"):
            await bench.engine.update_named_weights(request.model_copy(update={"digests": few}))


async def _check_calls_given_up(bench: Bench, made: _Made) -> None:
    """Check that loads and unloads, cancelled at many moments, change no other adapter and leave no slot taken."""
    engine, prompts, loaded = bench.engine, bench.prompts(2), bench.engine.parts.loaded_adapters
    kept, others = _make(bench, seed=2), {f"other-{number}": made for number in range(2, _CONFIG["max_loras"])}
    took = math.inf
    for _ in range(3):  # the first load is slow
        begun = time.monotonic()
        async with _loaded(bench, b=made):
            took = min(took, time.monotonic() - begun)
    async with _pushed_unchecked(engine, "kept", tensors_in(kept.adapter.path)) as request:
        await engine.update_named_weights(request)
    for moment in range(_MOMENTS):
        await given_up(engine.load_lora_adapter("b", made.path), took * moment / _MOMENTS)
        if loaded.find("b") is None:  # otherwise the load had ended before
            await engine.load_lora_adapter("b", made.path)
        unloading = asyncio.ensure_future(engine.unload_lora_adapter("b"))
        while loaded.find("b") is not None and not unloading.done():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        unloading.cancel()
        await asyncio.wait([unloading])
        if loaded.find("b") is not None:
            _assert_made_by(bench, await _answers(bench, prompts, "b"), made)
            await engine.unload_lora_adapter("b")
    async with _loaded(bench, **others):
        for name in ("a", *others):
            _assert_made_by(bench, await _answers(bench, prompts[:1], name), made)
        _assert_made_by(bench, await _answers(bench, prompts, "kept"), kept)
    await engine.unload_lora_adapter("kept")


async def _check_requests_in_flight(bench: Bench, made: _Made, newer: _Made) -> None:
    """Check that requests in flight end with the adapter ``made`` before ``newer`` is served under its name."""
    engine, prompts, adapter = bench.engine, bench.prompts(2), tensors_in(newer.adapter.path)
    async with bench.in_flight(prompts, bench.long(200, ignore_eos=True), lora="a") as flying:
        for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
            async with _pushed_unchecked(engine, "a", adapter, mode) as request:
                with in_time(flying), refused(EngineBusy, naming="2 requests"):
                    await engine.update_named_weights(request)
        _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
        async with _pushed_unchecked(engine, "a", adapter) as request:
            pushing = asyncio.create_task(engine.update_named_weights(request))
            arriving = asyncio.create_task(_answers(bench, prompts, "a"))
            await pushing
        await results_arrive(engine)
        assert flying.done(), "the update came before the requests had ended"
    _assert_made_by(bench, (await flying).completions, made)
    assert engine.get_weight_version() == "unchecked"
    for completion in await arriving:
        # It came while the new adapter was being staged: served by one of the two, as its version says.
        _assert_made_by(bench, [completion], newer if completion.weight_version == "unchecked" else made)
    _assert_made_by(bench, await _answers(bench, prompts, "a"), newer)


@case(Capability.LORA, Capability.WEIGHTS_DISK, config=_CONFIG, changes_weights=True)
async def the_base_is_updated_beneath_an_adapter(bench: Bench) -> None:
    """After an update of the base, requests with an adapter are answered by the new base and the adapter together.

    Requests that are frozen for the update continue with their adapter. A save stores the new base alone.
    """
    new_base, prompts = bench.other_weights(), bench.prompts(2)
    made = _make(bench, seed=1)
    together = _Made(made.adapter, merge(new_base, made.adapter, bench.folder("merged")))
    async with _loaded(bench, a=made):
        before = await _answers(bench, prompts, "a")
        for mode in bench.freezes():
            async with bench.in_flight(prompts, bench.long(250), lora="a") as task:
                # The same weights, so that one model has made all tokens.
                await bench.engine.load_weights_from_disk(str(bench.model), f"again-{mode.value}", mode=mode)
                _assert_made_by(bench, (await task).completions, made)
        await bench.engine.load_weights_from_disk(str(new_base), "new-base")
        after = await _answers(bench, prompts, "a")
        await _check_eos_is_ignored(bench)
        plain = await _answers(bench, prompts, None)
        if bench.claims(Capability.SAVE_SHARDED):
            saved = bench.folder("saved")
            await bench.engine.save_sharded_model(saved)
            await check_saved(bench.engine, saved, new_base)
    _assert_made_by(bench, before, made)
    _assert_made_by(bench, after, together)
    for completion in plain:
        check_greedy(bench, completion, model=new_base)


@asynccontextmanager
async def _pushed_unchecked(
    engine: InferenceEngine, name: str, adapter: AdapterTensors, mode: PauseMode = PauseMode.WAIT
) -> AsyncGenerator[WeightUpdateRequest, None]:
    """Put an adapter where the engine can read it, without the trainer's checks; yield the request to load it."""
    sender: Sender = InProcessSender() if engine.supports(Capability.WEIGHTS_IN_PROCESS) else SharedMemorySender()
    plan = make_plan(spec_of(name, tensor) for name, tensor in adapter.tensors.items())
    try:
        sender.begin(plan)
        for tensor_name, tensor in adapter.tensors.items():
            sender.put(tensor_name, tensor, held=True)
        yield WeightUpdateRequest(
            version="unchecked",
            source=sender.source(),
            plan=plan,
            digests=digests(adapter.tensors),
            mode=mode,
            lora=LoraTensors(lora_name=name, config=dict(adapter.config)),
        )
    finally:
        sender.close()
