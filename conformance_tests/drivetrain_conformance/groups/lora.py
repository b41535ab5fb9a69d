"""LoRA adapters: loaded, chosen per request, updated and unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from drivetrain.capability import Capability
from drivetrain.errors import EngineBusy, InvalidRequest
from drivetrain.memory import PauseMode
from drivetrain.outputs import Completion
from drivetrain.sampling import LogprobsMode, SamplingParams
from drivetrain.weights import LoraSource, WeightUpdateRequest
from drivetrain_conformance.adapters import Adapter, make_adapter, merge
from drivetrain_conformance.answers import check_greedy, check_same
from drivetrain_conformance.bench import Bench
from drivetrain_conformance.case import case
from drivetrain_conformance.expect import refused
from drivetrain_conformance.models import Models

_CONFIG: Final = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_GREEDY: Final = SamplingParams(max_new_tokens=12, temperature=0)


@dataclass(frozen=True, slots=True)
class _Made:
    """An adapter, and the model that a request with it is answered by."""

    adapter: Adapter
    merged: Path

    @property
    def path(self) -> str:
        return str(self.adapter.path)


_made: Final[WeakKeyDictionary[Models, dict[tuple[Path, int, int], _Made]]] = WeakKeyDictionary()
"""Those of each run: a merged model is as large as the model, so the cases share them."""


def _make(bench: Bench, seed: int, rank: int = 4) -> _Made:
    """An adapter of the engine's model; the same for the same arguments."""
    known, key = _made.setdefault(bench.models, {}), (bench.model, seed, rank)
    if key not in known:
        adapter = make_adapter(bench.model, bench.folder("adapter"), seed=seed, rank=rank)
        known[key] = _Made(adapter, merge(bench.model, adapter, bench.folder("merged")))
    return known[key]


@asynccontextmanager
async def _loaded(bench: Bench, **made: _Made) -> AsyncGenerator[None, None]:
    """Adapters by their names, loaded while the block runs."""
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
    """Assert that these greedy answers are those of the base with the adapter merged into it, or of the base."""
    for completion in completions:
        check_greedy(bench, completion, model=made.merged if made else None)


# What an adapter does ---------------------------------------------------------------------------------------------


@case(Capability.LORA, config=_CONFIG)
async def an_adapter_adds_its_product(bench: Bench) -> None:
    """Requests with an adapter are answered as by the model with the adapter merged in, those without by the base."""
    prompts, made = bench.prompts(3), _make(bench, seed=1)
    before = await bench.greedy(prompts)
    async with _loaded(bench, a=made):
        with_adapter = await _answers(bench, prompts, "a")
        check_same(bench, await bench.greedy(prompts), before)
    _assert_made_by(bench, with_adapter, made)
    assert [one.token_ids for one in with_adapter] != [one.token_ids for one in before], "the adapter changes nothing"
    check_same(bench, await bench.greedy(prompts), before)


@case(Capability.LORA, Capability.LOGPROBS_RAW, config=_CONFIG)
async def logprobs_are_those_with_the_adapter(bench: Bench) -> None:
    """Raw logprobs of sampled tokens are those of the model with the adapter merged in."""
    made = _make(bench, seed=1)
    params = SamplingParams(max_new_tokens=12, n=2, logprobs=0, logprobs_mode=LogprobsMode.RAW)
    async with _loaded(bench, a=made):
        output = await bench.engine.generate(bench.prompts(2), params, lora="a")
    for completion in output.completions:
        expected = bench.output_logprobs(completion, model=made.merged)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(expected)
        worst = max(abs(one - other) for one, other in zip(completion.logprobs, expected, strict=True))
        assert worst <= bench.tolerance(), f"a logprob is {worst:.3g} nats off that of the merged model"


@case(Capability.LORA, config=_CONFIG)
async def requests_in_flight_use_different_adapters(bench: Bench) -> None:
    """Requests that run at once use the adapter that each names, or none, as they do alone."""
    prompts = bench.prompts(2)
    made = {"a": _make(bench, seed=1), "b": _make(bench, seed=2, rank=8)}
    names = ("a", None, "b", "a", None)
    async with _loaded(bench, **made):
        alone = [await _answers(bench, prompts, name) for name in names]
        together = await asyncio.gather(*(_answers(bench, prompts, name) for name in names))
    for name, one, other in zip(names, alone, together, strict=True):
        chosen = made[name] if name else None
        _assert_made_by(bench, one, chosen)
        _assert_made_by(bench, other, chosen)
    tokens = [[completion.token_ids for completion in answers] for answers in together[:3]]
    assert tokens[0] != tokens[2], "two adapters answer alike"
    assert tokens[1] not in (tokens[0], tokens[2]), "an adapter answers as the base does"


@case(Capability.LORA, config=_CONFIG)
async def cached_prefixes_are_not_shared_between_adapters(bench: Bench) -> None:
    """A long prompt that the base or another adapter has seen is computed anew by each adapter."""
    prompt = bench.prompt(min(400, bench.engine.model_info.context_length // 2))
    made = {"a": _make(bench, seed=1), "b": _make(bench, seed=2)}
    async with _loaded(bench, **made):
        for name in (None, "a", "b", "a", None):
            _assert_made_by(bench, await _answers(bench, [prompt], name), made[name] if name else None)


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
    """An engine that claims adapters without enable_lora serves them; one that does not refuses them."""
    made = _make(bench, seed=1)
    async with _loaded(bench, a=made):
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)


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
    """A request for an adapter that was never loaded is refused, naming it and those that are loaded."""
    async with _loaded(bench, known=_make(bench, seed=1)):
        with refused(InvalidRequest, field="lora", naming="known"):
            await _answers(bench, bench.prompts(1), "unknown")
        with refused(InvalidRequest, field="lora_name", naming="unknown"):
            await bench.engine.unload_lora_adapter("unknown")


@case(Capability.LORA, config=_CONFIG)
async def a_name_is_given_once(bench: Bench) -> None:
    """Loading under a name that is taken, or empty, is refused; the adapter that has it is served on."""
    made, other = _make(bench, seed=1), _make(bench, seed=2)
    async with _loaded(bench, a=made):
        for path in (made.path, other.path):
            with refused(InvalidRequest, field="lora_name", naming="'a'"):
                await bench.engine.load_lora_adapter("a", path)
        with refused(InvalidRequest, field="lora_name"):
            await bench.engine.load_lora_adapter("", other.path)
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)


@case(Capability.LORA, config=_CONFIG)
async def a_name_may_come_back_as_another_adapter(bench: Bench) -> None:
    """After unloading, the same name with another path is the other adapter, also for a prompt that is cached."""
    made, other = _make(bench, seed=1), _make(bench, seed=2)
    prompts = [bench.prompt(), bench.prompt(min(400, bench.engine.model_info.context_length // 2))]
    async with _loaded(bench, a=made):
        first = await _answers(bench, prompts, "a")
    async with _loaded(bench, a=other):
        second = await _answers(bench, prompts, "a")
    _assert_made_by(bench, first, made)
    _assert_made_by(bench, second, other)
    assert [one.token_ids for one in first] != [one.token_ids for one in second], "the first adapter is still served"


# What cannot be loaded --------------------------------------------------------------------------------------------


@case(Capability.LORA, config=_CONFIG)
async def no_more_adapters_than_the_limit(bench: Bench) -> None:
    """One adapter more than max_loras is refused, naming the limit; after unloading one it loads."""
    first, second, third = (_make(bench, seed=seed) for seed in (1, 2, 3))
    async with _loaded(bench, b=second):
        async with _loaded(bench, a=first):
            with refused(InvalidRequest, naming="max_loras"):
                await bench.engine.load_lora_adapter("c", third.path)
            with refused(InvalidRequest, field="lora"):
                await _answers(bench, bench.prompts(1), "c")
            _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), first)
        async with _loaded(bench, c=third):
            _assert_made_by(bench, await _answers(bench, bench.prompts(2), "c"), third)
            _assert_made_by(bench, await _answers(bench, bench.prompts(2), "b"), second)


@case(Capability.LORA, config=_CONFIG)
async def no_larger_rank_than_the_limit(bench: Bench) -> None:
    """An adapter whose rank is above max_lora_rank is refused, naming the limit, and takes no place."""
    large, prompts = make_adapter(bench.model, bench.folder("adapter"), seed=1, rank=16), bench.prompts(2)
    with refused(InvalidRequest, naming="max_lora_rank"):
        await bench.engine.load_lora_adapter("large", str(large.path))
    made = {"a": _make(bench, seed=2, rank=8), "b": _make(bench, seed=1)}
    async with _loaded(bench, **made):
        for name, one in made.items():
            _assert_made_by(bench, await _answers(bench, prompts, name), one)


@case(Capability.LORA, config=_CONFIG)
async def what_is_no_adapter_is_refused(bench: Bench) -> None:
    """A path that is not there or holds no adapter of this model is refused; the engine serves on, the name is free."""
    made, empty, broken, cut = _make(bench, seed=1), *(bench.folder("adapter") for _ in range(3))
    (broken / "adapter_config.json").write_text("{", encoding="utf-8")
    make_adapter(bench.model, cut, seed=1)
    (cut / "adapter_model.safetensors").unlink()
    misfit = make_adapter(bench.model, bench.folder("adapter"), seed=1, columns=24).path
    for path in (bench.folder("adapter") / "missing", empty, broken, cut, misfit):
        with refused(InvalidRequest):
            await bench.engine.load_lora_adapter("a", str(path))
        with refused(InvalidRequest, field="lora"):
            await _answers(bench, bench.prompts(1), "a")
        _assert_made_by(bench, await _answers(bench, bench.prompts(1), None), None)
    async with _loaded(bench, a=made):
        _assert_made_by(bench, await _answers(bench, bench.prompts(2), "a"), made)


@case(Capability.LORA, Capability.IGNORE_EOS, config=_CONFIG)
async def an_adapter_in_use_is_not_unloaded(bench: Bench) -> None:
    """Unloading an adapter that requests under way use is refused; they, and later ones, use it on."""
    made = _make(bench, seed=1)
    async with _loaded(bench, a=made):
        async with bench.in_flight(bench.prompts(2), bench.long(ignore_eos=True), lora="a"):
            with refused(EngineBusy, naming="2 requests"):
                await bench.engine.unload_lora_adapter("a")
            _assert_made_by(bench, await _answers(bench, bench.prompts(1), "a"), made)
    with refused(InvalidRequest, field="lora"):
        await _answers(bench, bench.prompts(1), "a")


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
    """An update from a bad folder, or while requests had to change adapters, is refused; mode wait ends them first."""
    made, newer, prompts = _make(bench, seed=1), _make(bench, seed=3), bench.prompts(2)
    version = bench.engine.get_weight_version()

    def update(path: str, mode: PauseMode) -> WeightUpdateRequest:
        return WeightUpdateRequest(version="newer", source=LoraSource(lora_name="a", path=path), mode=mode)

    async with _loaded(bench, a=made):
        with refused(InvalidRequest):
            await bench.engine.update_named_weights(update(str(bench.folder("adapter")), PauseMode.WAIT))
        async with bench.in_flight(prompts, bench.long(200, ignore_eos=True), lora="a") as flying:
            for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
                with refused(EngineBusy, naming="2 requests"):
                    await bench.engine.update_named_weights(update(newer.path, mode))
            assert bench.engine.get_weight_version() == version
            _assert_made_by(bench, await _answers(bench, prompts, "a"), made)
            await bench.engine.update_named_weights(update(newer.path, PauseMode.WAIT))
            assert flying.done(), "the update came before the requests had ended"
        _assert_made_by(bench, (await flying).completions, made)
        assert bench.engine.get_weight_version() == "newer"
        _assert_made_by(bench, await _answers(bench, prompts, "a"), newer)


@case(Capability.LORA, Capability.WEIGHTS_DISK, config=_CONFIG, changes_weights=True)
async def the_base_is_updated_beneath_an_adapter(bench: Bench) -> None:
    """After an update of the base, requests with an adapter are answered by the new base and the adapter together."""
    new_base, prompts = bench.other_weights(), bench.prompts(2)
    made = _make(bench, seed=1)
    together = _Made(made.adapter, merge(new_base, made.adapter, bench.folder("merged")))
    async with _loaded(bench, a=made):
        before = await _answers(bench, prompts, "a")
        await bench.engine.load_weights_from_disk(str(new_base), "new-base")
        after = await _answers(bench, prompts, "a")
        plain = await _answers(bench, prompts, None)
    _assert_made_by(bench, before, made)
    _assert_made_by(bench, after, together)
    for completion in plain:
        check_greedy(bench, completion, model=new_base)
