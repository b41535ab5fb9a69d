"""Intermediate results: hidden states for value functions, routed experts for router replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import SamplingParams
from drivetrain.types.weights import WeightUpdateRequest
from drivetrain_conformance.assertions.expert_choices import check_choices, experts_of, router_logprobs
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.assets.weight_sources import from_disk
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, NoOracle, TooLate, end_requests
from drivetrain_conformance.harness.time_limits import result_of, within
from drivetrain_conformance.references.oracle import HiddenStatesOracle

_AT_ONCE: Final = 2
"""Requests that an engine runs at once, so that others wait."""
_STATES: Final = SamplingParams(max_new_tokens=8, temperature=0, return_hidden_states=True)
_EXPERTS: Final = SamplingParams(max_new_tokens=8, temperature=0, return_routed_experts=True)
_BOTH: Final = _EXPERTS.model_copy(update={"return_prompt_routed_experts": True})


@case()
async def neither_is_returned_unasked(bench: Bench) -> None:
    """A request that asks for neither hidden states nor routed experts gets neither."""
    (completion,) = await bench.greedy([bench.prompt()])
    assert completion.hidden_states is None
    assert completion.routed_experts is None


# Hidden states ----------------------------------------------------------------------------------------------------


@case(Capability.HIDDEN_STATES)
async def there_is_one_state_for_each_token(bench: Bench) -> None:
    """Each output token comes with the hidden state that it was drawn from, of the model's hidden size."""
    prompts = [bench.prompt(length) for length in (1, 5, 17)]
    output = await bench.engine.generate(prompts, _STATES.model_copy(update={"temperature": 1.0, "n": 2}))
    size = _config(bench)["hidden_size"]
    for completion in output.completions:
        assert _states(completion).shape == (len(completion.token_ids), size)


@case(Capability.HIDDEN_STATES)
async def states_are_those_of_the_last_layer(bench: Bench) -> None:
    """Hidden states are the inputs of the language model's head, as an independent forward pass computes them."""
    output = await bench.engine.generate([bench.prompt(length) for length in (3, 12)], _STATES)
    oracle = bench.oracle()
    if not isinstance(oracle, HiddenStatesOracle):
        raise NoOracle
    for completion in output.completions:
        prompt, drawn = completion.prompt_token_ids, completion.token_ids
        expected = oracle.hidden_states([*prompt, *drawn])[len(prompt) - 1 : len(prompt) + len(drawn) - 1]
        _assert_near(bench, _states(completion), expected)


@case(Capability.HIDDEN_STATES)
async def states_do_not_depend_on_the_batch_or_the_cache(bench: Bench) -> None:
    """Hidden states are complete and equal for a prompt alone, in a batch, and when its prefix is cached.

    They are so beside requests that ask for none, in streams, and for requests that were frozen and went on.
    """
    long = bench.prompt(min(400, bench.engine.model_info.context_length // 2))
    prompts = [bench.prompt(4), long, bench.prompt(9)]
    alone = [(await bench.engine.generate(prompt, _STATES)).completions[0] for prompt in prompts]
    again = (await bench.engine.generate(prompts, _STATES)).completions
    _assert_same(bench, again, alone)
    without = _STATES.model_copy(update={"return_hidden_states": False})
    each = [without, without, _STATES, without, _STATES, _STATES]
    beside = (await bench.engine.generate([*prompts, *prompts[::-1]], each)).completions
    asked = [completion for completion, params in zip(beside, each, strict=True) if params.return_hidden_states]
    _assert_same(bench, asked, [alone[2], alone[1], alone[0]])
    if bench.claims(Capability.STREAMING):
        chunks = [chunk async for chunk in bench.engine.generate_stream(prompts[0], _STATES)]
        _assert_same(bench, [chunk.completion for chunk in chunks if chunk.completion is not None], alone[:1])
    await _check_freezes(bench)


async def _check_freezes(bench: Bench) -> None:
    """Check that requests which were frozen have the states of all their tokens, beside one that asks for none."""
    prompts, asking = bench.prompts(2), bench.long(250, return_hidden_states=True)
    params = [asking.model_copy(update={"return_hidden_states": False}), asking]
    whole = (await bench.engine.generate(prompts, params)).completions
    for mode in bench.freezes():
        async with bench.in_flight(prompts, params) as task:
            await bench.engine.pause_generation(mode)
            await bench.engine.continue_generation()
            async with within():
                completions = (await task).completions
        _assert_same(bench, completions[1:], whole[1:])


def _assert_same(bench: Bench, got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Assert that greedy completions have the same tokens and states."""
    check_same(bench, got, expected)
    for one, other in zip(expected, got, strict=True):
        if one.token_ids == other.token_ids:
            _assert_near(bench, _states(other), _states(one))


def _states(completion: Completion) -> NDArray[np.float64]:
    assert completion.hidden_states is not None
    return np.array(completion.hidden_states, dtype=np.float64)


def _assert_near(bench: Bench, found: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    assert found.shape == expected.shape, f"expected states of shape {expected.shape}, got {found.shape}"
    worst = float(np.abs(found - expected).max())
    # A logprob's tolerance suits numbers around one; hidden states can be of any size.
    allowed = bench.tolerance() * max(1.0, float(np.abs(expected).max()))
    assert worst <= allowed, f"a state is off by {worst:.3g}; {allowed:.3g} is allowed"


# Experts ----------------------------------------------------------------------------------------------------------


@case(Capability.ROUTED_EXPERTS, model=ModelKind.MOE)
async def experts_have_their_shape_and_range(bench: Bench) -> None:
    """Experts have shape (tokens, MoE layers, experts per token); each is a valid id, and none repeats for a token."""
    prompts = [bench.prompt(length) for length in (1, 6, 20)]
    output = await bench.engine.generate(prompts, _EXPERTS.model_copy(update={"temperature": 1.0, "n": 2}))
    _, layers, count = router_logprobs(bench, prompts[0]).shape
    for completion in output.completions:
        experts = experts_of(completion)
        assert experts.shape == (len(completion.token_ids), layers, _config(bench)["num_experts_per_tok"])
        assert experts.min() >= 0
        assert experts.max() < count
        for row in experts.reshape(-1, experts.shape[-1]):
            assert len(set(row.tolist())) == len(row), f"a token was routed to an expert twice: {row}"


@case(Capability.ROUTED_EXPERTS, model=ModelKind.MOE)
async def experts_are_the_routers_choice(bench: Bench) -> None:
    """The experts of each token are those that the model's router ranks first, as a forward pass computes it."""
    output = await bench.engine.generate([bench.prompt(4), bench.prompt(11)], _EXPERTS)
    for completion in output.completions:
        ids, first = [*completion.prompt_token_ids, *completion.token_ids], len(completion.prompt_token_ids) - 1
        ranked = router_logprobs(bench, ids)[first : first + len(completion.token_ids)]
        check_choices(bench, ranked, experts_of(completion))


@case(Capability.ROUTED_EXPERTS, model=ModelKind.MOE)
async def experts_do_not_depend_on_the_batch_or_the_cache(bench: Bench) -> None:
    """A prompt's experts are the same alone, in a mixed batch, and when its prefix is cached."""
    long = bench.prompt(min(400, bench.engine.model_info.context_length // 2))
    prompts = [bench.prompt(4), long, bench.prompt(9)]
    alone = [(await bench.engine.generate(prompt, _EXPERTS)).completions[0] for prompt in prompts]
    again = (await bench.engine.generate(prompts, _EXPERTS)).completions
    check_same(bench, again, alone)
    for one, other in zip(alone, again, strict=True):
        assert experts_of(other).shape[0] == len(other.token_ids)
        if one.token_ids == other.token_ids:
            same = (np.sort(experts_of(one)) == np.sort(experts_of(other))).all(axis=-1).mean()
            assert same >= (1.0 if bench.tolerance() < 1e-2 else 0.9), f"only {same:.0%} of the choices are the same"


@case(Capability.ROUTED_EXPERTS, Capability.PROMPT_ROUTED_EXPERTS, model=ModelKind.MOE)
async def experts_of_the_prompt_are_the_routers_choice(bench: Bench) -> None:
    """Each prompt token has the experts that the router ranks first, though its prefix is cached."""
    long = bench.prompt(min(300, bench.engine.model_info.context_length // 2))
    prompts = [bench.prompt(4), long, bench.prompt(11)]
    plain = (await bench.engine.generate(prompts, _EXPERTS)).completions
    for experts in (completion.prompt_routed_experts for completion in plain):
        assert experts is None, f"nobody asked for the prompt's experts: {experts}"
    outputs = [await bench.engine.generate(given, _BOTH) for given in (prompts, [[*long, *bench.prompt(3)]])]
    for completion in (completion for output in outputs for completion in output.completions):
        own = _check_prompt(bench, completion)
        assert (np.sort(own[-1]) == np.sort(experts_of(completion)[0])).all(), "the last prompt token has other experts"


@case(
    Capability.ROUTED_EXPERTS,
    Capability.PROMPT_ROUTED_EXPERTS,
    Capability.STREAMING,
    model=ModelKind.MOE,
    config={"max_num_batched_tokens": 128, "max_num_seqs": 8},
    slow=True,
)
async def experts_of_the_prompt_are_whole_however_it_is_read(bench: Bench) -> None:
    """A prompt has all its experts if it is read in chunks, and if a request that asked for none had it cached.

    It has them for each sample, in streams, without those of the output, beside requests that ask for none, and if the
    request is frozen, retracted or aborted.
    """
    alone = SamplingParams(max_new_tokens=4, temperature=0, return_prompt_routed_experts=True)
    prompts = bench.prompts(3, min(400, bench.engine.model_info.context_length // 2))
    await bench.greedy(prompts)
    params = [alone, alone.model_copy(update={"n": 2, "temperature": 1.0}), _EXPERTS]
    given = [[*prompts[0], *bench.prompt(2)], [*prompts[1][:-30], *bench.prompt(150)], prompts[2]]
    output = await bench.engine.generate(given, params)
    for completion in output.completions[:-1]:
        assert completion.routed_experts is None, "only the prompt's experts were asked for"
        _check_prompt(bench, completion)
    assert output.completions[-1].prompt_routed_experts is None, "only the output's experts were asked for"
    freezes = bench.freezes()
    aborted = [(mode, True) for mode in (None, *freezes) if bench.claims(Capability.ABORT)]
    for mode, is_aborted in [(None, False), *((mode, False) for mode in freezes), *aborted]:

        async def interrupt(mode: PauseMode | None = mode, is_aborted: bool = is_aborted) -> None:
            if mode is not None:
                await bench.engine.pause_generation(mode)
            if is_aborted:
                await bench.engine.abort_generation()
            if mode is not None:
                await bench.engine.continue_generation()

        _check_whole(bench, await _interrupted(bench, given[1], interrupt))


async def _interrupted(bench: Bench, prompt: list[int], interrupt: Callable[[], Awaitable[object]]) -> Completion:
    """Stream an answer of 250 tokens or more with all experts, and do something once it has its first token."""
    asking = bench.long(250, prompt_length=len(prompt), return_routed_experts=True, return_prompt_routed_experts=True)
    async with within(), aclosing(bench.engine.generate_stream(prompt, asking)) as stream:
        chunks = [await anext(stream)]
        await interrupt()
        chunks += [chunk async for chunk in stream]
    completion = next(chunk.completion for chunk in chunks if chunk.completion is not None)
    assert completion.token_ids, "the stream gave a token that its completion does not have"
    return completion


@case(
    Capability.ROUTED_EXPERTS,
    Capability.PROMPT_ROUTED_EXPERTS,
    Capability.STREAMING,
    Capability.WEIGHTS_DISK,
    model=ModelKind.MOE,
    config={"max_num_seqs": _AT_ONCE},
    changes_weights=True,
    slow=True,
)
async def experts_are_those_of_the_weights_that_chose_them(bench: Bench) -> None:
    """After an update, a prompt that was cached before has the new weights' experts, with keep_prefix_cache=True too.

    So has a request that waited in the engine through the update. One that is retracted for it keeps the experts that
    its prompt and its tokens had.
    """
    engine, prompt = bench.engine, bench.prompt(min(300, bench.engine.model_info.context_length // 2))
    one, other = bench.model, bench.other_weights()
    models = {"one": one, "other": other, "kept": one, "later": other}
    await engine.generate(prompt, _BOTH)  # a refusal must come before the weights change
    await engine.update_named_weights(from_disk(one, "one"))
    for version, keeps in (("other", False), ("kept", True)):
        await engine.generate(prompt, _BOTH)
        await engine.update_named_weights(from_disk(models[version], version, keep_prefix_cache=keeps))
        for _ in range(2):
            (completion,) = (await engine.generate(prompt, _BOTH)).completions
            _check_whole(bench, completion, models)
    if {Capability.PAUSE_IN_PLACE, Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE} <= engine.capabilities:
        _check_whole(bench, await _waiting_through_an_update(bench, prompt, from_disk(one, "one")), models)
        await engine.update_named_weights(from_disk(one, "kept"))
    if not bench.claims(Capability.PAUSE_RETRACT) or not bench.claims(Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT):
        return
    update = partial(engine.update_named_weights, from_disk(other, "later", mode=PauseMode.RETRACT))
    _check_whole(bench, await _interrupted(bench, prompt, update), models)


async def _waiting_through_an_update(bench: Bench, prompt: list[int], old: WeightUpdateRequest) -> Completion:
    """Update to other weights in place, and keep the cache, while requests run and one with a cached prompt waits.

    Args:
        bench: The case's bench.
        prompt: The prompt of the request that waits.
        old: The update before, after which the prompt is cached.
    """
    engine = bench.engine
    await engine.update_named_weights(old)
    await engine.generate(prompt, _BOTH)
    # A fleet sends requests with one prompt to one of its engines.
    params = bench.long(250, prompt_length=len(prompt))
    async with bench.in_flight([prompt] * _AT_ONCE, params, tokens=0) as running:
        waiting = asyncio.create_task(engine.generate(prompt, _BOTH))
        try:
            async with within("a request to wait in the engine"):
                while (await engine.stats()).waiting == 0:
                    if running.done() or waiting.done():
                        raise TooLate("the requests that run ended before another one waited")
                    await asyncio.sleep(0.002)
            new = from_disk(bench.other_weights(), "other", mode=PauseMode.IN_PLACE, keep_prefix_cache=True)
            await engine.update_named_weights(new)
            if running.done():
                raise TooLate("the requests ended before the update, so this shows nothing")
            (completion,) = (await result_of(waiting)).completions
        finally:
            await end_requests(engine, waiting)
    return completion


def _check_whole(bench: Bench, completion: Completion, models: Mapping[str, Path] | None = None) -> None:
    """Check the experts of the prompt and of the output.

    Args:
        bench: The case's bench.
        completion: A completion with both.
        models: Folders of the weights, by their version; None if all are those of the bench's model.
    """
    folders = [None if models is None else models[span.version] for span in completion.weight_versions]
    _check_prompt(bench, completion, folders[0])
    ids, first, own = (
        [*completion.prompt_token_ids, *completion.token_ids],
        len(completion.prompt_token_ids) - 1,
        experts_of(completion),
    )
    assert len(own) == len(completion.token_ids), f"{len(own)} of {len(completion.token_ids)} tokens have experts"
    for span, folder in zip(completion.weight_versions, folders, strict=True):
        ranked = router_logprobs(bench, ids, folder)[first:]
        check_choices(bench, ranked[span.start : span.end], own[span.start : span.end])


def _check_prompt(bench: Bench, completion: Completion, model: Path | None = None) -> NDArray[np.int64]:
    """Check that each prompt token has the experts that the model's router ranks first; return them."""
    found, prompt = completion.prompt_routed_experts, completion.prompt_token_ids
    assert found is not None, "the prompt's experts are missing"
    assert len(found) == len(prompt), f"{len(found)} of {len(prompt)} prompt tokens have experts"
    own = found.to_numpy().astype(np.int64)
    check_choices(bench, router_logprobs(bench, prompt, model), own)
    return own


def _config(bench: Bench) -> dict[str, int]:
    loaded: dict[str, int] = json.loads((bench.model / "config.json").read_text(encoding="utf-8"))
    return loaded
