"""Several engines as one: the page, who gets a sample, control of all, and engines that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    Capability,
    DeadlineExceeded,
    EngineBusy,
    EngineDied,
    EngineInternalError,
    EngineState,
    EngineStateError,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    LoraSource,
    MemberLost,
    MemoryTag,
    PauseMode,
    PromptLike,
    SamplingParams,
    WeightUpdateRequest,
    WeightVersionGone,
    attach,
    create_engine,
)
from drivetrain.testing import tiny_model
from drivetrain_fleet import Health, InferenceEngineClient, RoutingPolicy
from drivetrain_weight_sync import WeightSync
from fleets import GREEDY, LONG, Fleet, fleet_of, local, spoiled, tensors_for, until, until_health

BROKEN = EngineInternalError("the device is on fire")


# The page ---------------------------------------------------------------------------------------------------------


async def test_the_page_is_the_same_over_several_engines(model: Path) -> None:
    prompts: list[PromptLike] = ["hello", [5, 6, 7], [8] * 40]
    params = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=0, n=2)
    async with local(model) as engine:
        expected = await engine.generate(prompts, params)
        whole = (await engine.generate("hello", SamplingParams(max_new_tokens=30, temperature=0.0))).completions[0]
        stopping = SamplingParams(max_new_tokens=30, temperature=0.0, stop=(whole.text[4:6],))
        stopped = (await engine.generate("hello", stopping)).completions[0]
    async with fleet_of(2, model) as fleet:
        output = await fleet.generate(prompts, params)
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in expected.completions]
        for one, other in zip(output.completions, expected.completions, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        found = (await fleet.generate("hello", stopping)).completions[0]
        assert (found.text, found.token_ids, found.matched_stop) == (
            stopped.text,
            stopped.token_ids,
            stopped.matched_stop,
        )
        streamed = [chunk async for chunk in fleet.generate_stream("hello", GREEDY)]
        assert [i for chunk in streamed for i in chunk.token_ids] == expected.completions[0].token_ids
        assert await fleet.chat_completion({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
        assert all(member.load.taken for member in fleet.backend.members)
        assert all((one.samples, one.tokens) == (0, 0) for one in fleet.members)


async def test_a_fleet_is_shared_by_handle(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        other = await attach(await fleet.handle())
        output = await other.generate([[1], [2], [3]], GREEDY)
        assert len(output.completions) == 3
        pinned = await other.generate([[1], [2]], GREEDY, weight_version="initial")
        assert {one.weight_version for one in pinned.completions} == {"initial"}
        with pytest.raises(WeightVersionGone, match="never"):
            await other.generate([[1]], GREEDY, weight_version="never")
        await other.teardown()
        assert fleet.health() == ["ready", "ready"]


async def test_turns_of_a_session_go_to_one_engine(model: Path) -> None:
    async with fleet_of(3, model, routing=RoutingPolicy(prefix_affinity=False)) as fleet:
        for _ in range(2):
            session = await fleet.open_session(800)
            parent = None
            before = {member.name: member.load.taken for member in fleet.backend.members}
            for _ in range(4):
                output = await fleet.generate_with_session(session, [[1, 2, 3]], GREEDY, parent_request_id=parent)
                parent = output.completions[0].request_id
            grown = sorted(member.load.taken - before[member.name] for member in fleet.backend.members)
            assert grown == [0, 0, 4]


async def test_a_prompt_goes_where_its_prefix_was(model: Path) -> None:
    async with fleet_of(3, model) as fleet:
        prompt = [7] * 100
        cached = []
        for turn in range(3):
            output = await fleet.generate([prompt], GREEDY)
            cached.append(output.completions[0].cached_tokens)
            prompt = prompt + output.completions[0].token_ids + [turn] * 20
        assert cached[0] == 0
        assert all(cached[1:])
        assert sorted(member.load.taken for member in fleet.backend.members) == [0, 0, 3]


async def test_samples_are_spread_by_load(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        long = asyncio.create_task(fleet.generate([[1]], LONG))
        await until(lambda: fleet.report("engine-0").samples == 1)
        await fleet.generate([[2], [3], [4]], GREEDY)
        assert [member.load.taken for member in fleet.backend.members] == [1, 3]
        await fleet.abort_generation()
        assert (await long).completions[0].finish_reason.value == "abort"


# The queue --------------------------------------------------------------------------------------------------------


async def test_samples_wait_in_a_bounded_queue(model: Path) -> None:
    async with fleet_of(2, model, max_samples_per_engine=1, max_waiting=2) as fleet:
        running = [asyncio.create_task(fleet.generate([[i]], LONG, request_ids=[f"r{i}"])) for i in range(4)]
        await until(lambda: fleet.backend.sending.waiting == 2)
        assert [one.samples for one in fleet.members] == [1, 1]
        with pytest.raises(EngineBusy, match="max_waiting=2"):
            await fleet.generate([9], GREEDY)
        await fleet.abort("r3")
        aborted = (await running[3]).completions[0]
        assert (aborted.finish_reason.value, aborted.token_ids) == ("abort", [])
        await fleet.abort("r0")
        await running[0]
        await until(lambda: fleet.backend.sending.waiting == 0)
        running[1].cancel()
        await until(lambda: sum(one.samples for one in fleet.members) == 1)
        await fleet.generate([9], GREEDY)
        await fleet.abort_generation()
        await asyncio.gather(*running[1:], return_exceptions=True)
        assert [one.samples for one in fleet.members] == [0, 0]
        assert (await fleet.stats()).running == 0


async def test_a_sample_that_is_cancelled_in_the_queue_leaves_nothing(model: Path) -> None:
    async with fleet_of(1, model, max_samples_per_engine=1) as fleet:
        running = asyncio.create_task(fleet.generate([[1]], LONG))
        await until(lambda: fleet.report("engine-0").samples == 1)
        waiting = asyncio.create_task(fleet.generate([[2]], LONG))
        await until(lambda: fleet.backend.sending.waiting == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert fleet.backend.sending.waiting == 0
        await fleet.abort_generation()
        await running
        assert (await fleet.generate([3], GREEDY)).completions[0].token_ids


# Failover ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_sample_without_a_token_goes_to_another_engine(model: Path, streamed: bool) -> None:
    async with fleet_of(2, model) as fleet:
        with spoiled(fleet.member("engine-0")) as calls:

            async def die(request: object) -> object:
                raise EngineDied("killed")
                yield

            calls.instead["stream"] = die  # type: ignore[assignment]
            if streamed:
                chunks = [chunk async for chunk in fleet.generate_stream([1, 2], GREEDY)]
                assert chunks[-1].completion is not None
            else:
                assert len((await fleet.generate([[1, 2], [3], [4]], GREEDY)).completions) == 3
        assert fleet.health() == ["failed", "ready"]
        assert fleet.state.value == "ready"
        assert "killed" in fleet.report("engine-0").why


async def test_a_sample_with_tokens_fails_by_name_and_is_not_repeated(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        member = fleet.member("engine-0")
        stream = member.calls.stream
        with spoiled(member) as calls:

            async def die_later(request: object) -> object:
                steps = stream(request)  # type: ignore[arg-type]
                yield await anext(steps)
                await steps.aclose()
                raise EngineDied("killed")

            calls.instead["stream"] = die_later  # type: ignore[assignment]
            with pytest.raises(MemberLost, match="1 tokens when engine-0 was lost") as raised:
                await fleet.generate([1, 2], GREEDY)
        assert raised.value.member == "engine-0"
        assert fleet.member("engine-1").load.taken == 0
        assert (await fleet.generate([1, 2], GREEDY)).completions


async def test_without_exact_failover_a_sample_that_an_engine_had_fails(model: Path) -> None:
    async with fleet_of(2, model, exact_failover=False) as fleet:
        with spoiled(fleet.member("engine-0"), generate=EngineDied("killed")) as calls:
            with pytest.raises(MemberLost, match="may have begun"):
                await fleet.generate([1, 2], GREEDY)
            assert "stream" not in calls.made
        assert len((await fleet.generate([[1, 2], [3]], GREEDY)).completions) == 2


async def test_a_request_that_no_engine_may_serve_is_refused(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        for member in fleet.backend.members:
            member.left_behind("for the test")
        with pytest.raises(EngineStateError, match="engine-0 is stale") as raised:
            await fleet.generate([1, 2], GREEDY)
        assert raised.value.state == "stale"
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
        assert (await fleet.generate([1, 2], GREEDY)).completions


async def test_errors_of_a_request_are_its_own(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        with spoiled(fleet.member("engine-0")) as calls:

            async def fail(request: object) -> object:
                raise BROKEN
                yield

            calls.instead["stream"] = fail  # type: ignore[assignment]
            with pytest.raises(EngineInternalError, match="on fire"):
                await fleet.generate([1, 2], GREEDY)
        assert fleet.health() == ["ready", "ready"]


# Control ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_holds_all_and_lets_all_go_on(model: Path, mode: PauseMode) -> None:
    async with fleet_of(2, model) as fleet:
        params = GREEDY if mode is PauseMode.WAIT else LONG
        tasks = [asyncio.create_task(fleet.generate([[i]], params)) for i in range(4)]
        # Short requests may have ended before the last one began.
        await until(lambda: fleet.parts.in_flight.running == 4 or any(task.done() for task in tasks))
        await fleet.pause_generation(mode)
        assert fleet.state.value == "paused"
        late = asyncio.create_task(fleet.generate([9], GREEDY))
        made = [ticket.made for i in range(2) for ticket in fleet.backend.sending.of(fleet.member(f"engine-{i}"))]
        await asyncio.sleep(0.1)
        again = [ticket.made for i in range(2) for ticket in fleet.backend.sending.of(fleet.member(f"engine-{i}"))]
        assert made == again
        assert not late.done()
        await fleet.continue_generation()
        assert (await late).completions[0].finish_reason.value != "abort"
        reasons = {(await task).completions[0].finish_reason.value for task in tasks}
        assert reasons == ({"abort"} if mode is PauseMode.ABORT else {"length"})
        assert fleet.health() == ["ready", "ready"]


async def test_a_pause_that_one_engine_refuses_is_undone_and_says_who(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.parts.in_flight.running == 2)
        with (
            spoiled(fleet.member("engine-1"), pause_generation=BROKEN),
            pytest.raises(EngineInternalError, match=r"engine-1.*on fire.*put back"),
        ):
            await fleet.pause_generation("retract")
        assert (fleet.state.value, fleet.health()) == ("ready", ["ready", "ready"])
        await fleet.pause_generation("retract")
        with (
            spoiled(fleet.member("engine-0"), continue_generation=BROKEN),
            pytest.raises(EngineInternalError, match=r"engine-0.*put back"),
        ):
            await fleet.continue_generation()
        assert (fleet.state.value, fleet.health()) == ("paused", ["paused", "paused"])
        await fleet.continue_generation()
        assert {c.finish_reason.value for c in (await task).completions} == {"length"}


async def test_an_engine_that_cannot_be_put_back_is_stale(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.begun("engine-0") == fleet.begun("engine-1") == 1)
        with (
            spoiled(fleet.member("engine-1"), pause_generation=BROKEN),
            spoiled(fleet.member("engine-0"), continue_generation=BROKEN),
            pytest.raises(EngineInternalError, match="engine-1"),
        ):
            await fleet.pause_generation("in_place")
        assert fleet.health() == ["stale", "ready"]
        assert "could not be undone" in fleet.report("engine-0").why
        with pytest.raises(MemberLost, match="engine-0"):
            await task
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
        await fleet.continue_generation()
        assert fleet.health() == ["ready", "ready"]


async def test_the_death_of_the_last_engine_is_the_fleets(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        for name in ("engine-0", "engine-1"):
            member = fleet.member(name)
            stream = member.calls.stream
            with spoiled(member) as calls:

                async def die_later(request: object, stream: Any = stream) -> object:
                    steps = stream(request)
                    yield await anext(steps)
                    await steps.aclose()
                    raise EngineDied("killed")

                calls.instead["stream"] = die_later  # type: ignore[assignment]
                expected = MemberLost if name == "engine-0" else EngineDied
                with pytest.raises(expected, match="killed"):
                    await fleet.generate([1, 2], GREEDY)
        for call in (lambda: fleet.generate([1, 2], GREEDY), fleet.stats, fleet.weight_manifest, fleet.sleep):
            with pytest.raises(EngineDied, match=r"every engine of the fleet has failed.*killed"):
                await call()
    with pytest.raises(EngineDied, match="killed"):
        await fleet.generate([1, 2], GREEDY)


async def test_an_engine_that_dies_while_it_lists_its_tensors_is_lost_alone(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        with spoiled(fleet.member("engine-0"), weight_manifest=EngineDied("killed")):
            assert (await fleet.weight_manifest()).tensors
        assert fleet.health() == ["failed", "ready"]
        assert (await fleet.generate([1, 2], GREEDY)).completions


async def test_all_sleep_and_wake_or_are_put_back(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        await fleet.sleep([MemoryTag.KV_CACHE])
        assert [member.engine.state.value for member in fleet.backend.members] == ["asleep", "asleep"]
        with pytest.raises(EngineStateError, match="asleep"):
            await fleet.generate([1], GREEDY)
        await fleet.wake_up()
        assert fleet.health() == ["ready", "ready"]
        with (
            spoiled(fleet.member("engine-1"), sleep=BROKEN),
            pytest.raises(MemberLost, match="engine-1"),
        ):
            await fleet.sleep([MemoryTag.KV_CACHE])
        assert [member.engine.state.value for member in fleet.backend.members] == ["ready", "ready"]
        await fleet.sleep()
        await fleet.wake_up()
        assert fleet.state.value == "dirty"
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
        assert (fleet.state.value, fleet.health()) == ("ready", ["ready", "ready"])
        assert (await fleet.generate([[1], [2]], GREEDY)).completions


async def test_an_engine_that_another_put_to_sleep_is_woken_with_all(model: Path) -> None:
    """An earlier fleet may have left the engine asleep when its process was killed."""
    async with fleet_of(2, model) as fleet:
        asleep = fleet.member("engine-0").engine
        await asleep.sleep([MemoryTag.KV_CACHE])
        await until_health(fleet, "engine-0", Health.PAUSED)
        assert [member.why for member in fleet.members] == ["asleep (kv_cache)", ""]
        assert (await fleet.generate([[1], [2]], GREEDY)).completions
        await fleet.wake_up()
        assert fleet.health() == ["ready", "ready"]
        assert [member.why for member in fleet.members] == ["", ""]


@pytest.mark.slow
async def test_retracted_requests_stay_through_sleep_and_a_push(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.parts.in_flight.running == 2)
        await fleet.pause_generation("retract")
        await fleet.sleep()
        await fleet.wake_up([MemoryTag.WEIGHTS])
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
        await fleet.wake_up()
        await fleet.continue_generation()
        assert {len(c.token_ids) for c in (await task).completions} == {900}
        assert fleet.health() == ["ready", "ready"]


# Agreement --------------------------------------------------------------------------------------------------------


async def test_engines_that_differ_are_refused_by_name(model: Path) -> None:
    cases: list[tuple[str, InferenceEngine]] = [
        ("tokenizer", local(tiny_model("llama"))),
        ("dtype", local(model, dtype="bfloat16")),
        ("architecture", local(tiny_model("qwen3"), tokenizer=str(model))),
        ("tensors", local(tiny_model("qwen2", num_hidden_layers=3))),
    ]
    for field, other in cases:
        fleet = InferenceEngineClient({"one": local(model), "two": other})
        with pytest.raises(InvalidConfig, match=f"one and two differ in {field}") as raised:
            await fleet.start()
        assert raised.value.field == field
        assert fleet.state.value == "failed"
        assert other.state.value == "closed"


async def test_the_context_is_the_shortest_and_capabilities_are_shared(model: Path) -> None:
    engines = [
        local(model),
        local(model, context_length=64, enable_prefix_caching=False),
        local(model, isolation="process"),
    ]
    fleet = InferenceEngineClient(engines)
    assert not fleet.supports(Capability.PREFIX_CACHE)
    assert not fleet.supports(Capability.WEIGHTS_IN_PROCESS)
    assert fleet.supports(Capability.WEIGHTS_SHARED_MEMORY)
    async with fleet:
        assert fleet.model_info.context_length == 64
        with pytest.raises(InvalidRequest, match="64"):
            await fleet.generate([[1] * 80], GREEDY)


def test_wrong_arguments_are_refused_by_name(model: Path) -> None:
    one = local(model)
    with pytest.raises(InvalidConfig, match="empty"):
        InferenceEngineClient([])
    with pytest.raises(InvalidConfig, match="one engine"):
        InferenceEngineClient([one, one])
    counts = ("min_engines", "max_staleness", "max_waiting", "max_samples_per_engine")
    wrong = [(field, value) for field in counts for value in (-1, True, "1", 1.5)]
    wrong += [("min_engines", 2), ("min_engines", 0), ("max_waiting", 0), ("max_samples_per_engine", 0)]
    wrong += [("routing", 5), ("exact_failover", "no"), ("resume", "no")]
    for field, value in wrong:
        with pytest.raises(InvalidConfig, match=field) as caught:
            InferenceEngineClient([one], **{field: value})  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(InvalidConfig, match="exact_failover=False") as caught:
        InferenceEngineClient([one], resume=True, exact_failover=False)
    assert caught.value.field == "resume"
    for engines in (5, None, "one", ["one"], {1: one}):
        with pytest.raises(InvalidConfig, match="engines"):
            InferenceEngineClient(engines)  # type: ignore[arg-type]


async def test_an_engine_that_does_not_start_takes_the_fleet_with_it(model: Path, tmp_path: Path) -> None:
    good = local(model)
    bad = create_engine("transformers", model=str(model), tokenizer=str(tmp_path))
    fleet = InferenceEngineClient([good, bad])
    with pytest.raises(InvalidConfig):
        await fleet.start()
    assert fleet.state.value == "failed"
    assert good.state.value in ("closed", "failed")


# Engines that come and go -----------------------------------------------------------------------------------------


async def test_an_engine_that_joins_is_stale_unless_it_is_shown_to_serve_the_same(model: Path) -> None:
    async with fleet_of(1, model) as fleet:
        assert await fleet.add(local(model)) == "engine-1"
        assert fleet.health() == ["ready", "ready"]
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
            assert await fleet.add(local(model, weight_version="one"), "late") == "late"
            assert fleet.report("late").health is Health.STALE
            output = await fleet.generate([[i] for i in range(6)], GREEDY)
            assert fleet.member("late").load.taken == 0
            await sync.push(version="two")
        assert fleet.health() == ["ready", "ready", "ready"]
        output = await fleet.generate([[i] for i in range(6)], GREEDY)
        assert {completion.weight_version for completion in output.completions} == {"two"}
        assert fleet.member("late").load.taken > 0


async def test_a_push_while_an_engine_starts_reaches_the_others_and_leaves_it_stale(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, let_it_start = local(model), asyncio.Event()
    start = late.start

    async def start_later(progress: Callable[[str], None] | None = None) -> None:
        await let_it_start.wait()
        await start(progress)

    monkeypatch.setattr(late, "start", start_later)
    async with fleet_of(2, model) as fleet:
        joining = asyncio.create_task(fleet.add(late, "late"))
        await until(lambda: fleet.health() == ["ready", "ready", "starting"])
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")
            assert fleet.health() == ["ready", "ready", "starting"]
            output = await fleet.generate([[i] for i in range(6)], GREEDY)
            assert {completion.weight_version for completion in output.completions} == {"one"}
            let_it_start.set()
            assert await joining == "late"
            assert fleet.health() == ["ready", "ready", "stale"]
            await fleet.generate([[i] for i in range(6)], GREEDY)
            assert fleet.member("late").load.taken == 0
            await sync.push(version="two")
        assert fleet.health() == ["ready", "ready", "ready"]


async def test_a_push_before_the_fleet_has_started_is_refused(model: Path) -> None:
    fleet = InferenceEngineClient([local(model), local(model)])
    starting = asyncio.create_task(fleet.start())
    await until(lambda: fleet.state is EngineState.STARTING)
    with pytest.raises(EngineStateError, match="starting"):
        await fleet.load_weights_from_disk(model, "one")
    await starting
    assert (await fleet.generate([[1]], GREEDY)).completions[0].weight_version == "initial"
    await fleet.teardown()


async def test_a_folder_that_the_fleet_serves_makes_a_newcomer_ready(model: Path) -> None:
    async with fleet_of(1, model) as fleet:
        await fleet.load_weights_from_disk(model, "step-1")
        await fleet.add(local(model, weight_version="step-1"))
        assert fleet.health() == ["ready", "ready"]


async def test_an_engine_that_does_not_fit_is_not_taken(model: Path) -> None:
    async with fleet_of(1, model) as fleet:
        other = local(tiny_model("llama"))
        with pytest.raises(InvalidConfig, match="engine-0 and other differ"):
            await fleet.add(other, "other")
        await other.teardown()
        short = local(model, context_length=32)
        with pytest.raises(InvalidConfig, match="context length of 32"):
            await fleet.add(short)
        await short.teardown()
        with pytest.raises(InvalidConfig, match="prefix_cache"):
            await fleet.add(local(model, enable_prefix_caching=False))
        with pytest.raises(InvalidConfig, match="has an engine of this name"):
            await fleet.add(local(model), "engine-0")
        assert fleet.health() == ["ready"]


async def test_a_fleet_that_was_never_started_closes_its_engines(model: Path) -> None:
    async with local(model) as owned:
        page, plain = await attach(await owned.handle()), local(model)
        fleet = InferenceEngineClient([page, plain])
        await fleet.teardown()
        await fleet.teardown()
        assert [one.state.value for one in (fleet, page, plain)] == ["closed"] * 3
        assert owned.state.value == "ready", "the page is detached, and its engine goes on"
        with pytest.raises(EngineStateError):
            await page.stats()


async def test_an_engine_that_leaves_ends_what_it_has(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        params = SamplingParams(max_new_tokens=300, temperature=0.0, ignore_eos=True)
        task = asyncio.create_task(fleet.generate([[1], [2]], params))
        await until(lambda: fleet.report("engine-0").samples == 1)
        leaving = asyncio.create_task(fleet.remove("engine-0"))
        await until(lambda: fleet.report("engine-0").health is Health.DRAINING)
        await fleet.generate([[3], [4]], GREEDY)
        assert fleet.member("engine-0").load.taken == 1
        engine = await leaving
        assert {len(completion.token_ids) for completion in (await task).completions} == {300}
        assert engine.state.value == "ready"
        assert [one.name for one in fleet.members] == ["engine-1"]
        with pytest.raises(EngineStateError, match="no other engine stays"):
            await fleet.remove("engine-1")
        with pytest.raises(InvalidRequest, match="no such engine"):
            await fleet.remove("engine-0")
        assert await fleet.add(engine, "back") == "back"
        assert fleet.health() == ["ready", "ready"]


async def test_gpus_are_those_of_the_engines_that_are_in_the_fleet(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceEngine, "gpus", property(lambda engine: (f"GPU-{id(engine)}",)))
    async with fleet_of(2, model) as fleet:
        both = fleet.gpus
        engine = await fleet.remove("engine-0")
        assert fleet.gpus == tuple(gpu for gpu in both if gpu not in engine.gpus)
        assert len(both) == 2
        assert len(fleet.gpus) == 1
        await fleet.add(engine)
        assert set(fleet.gpus) == set(both)


@pytest.mark.slow
async def test_an_engine_that_drains_too_long_stays_draining(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.report("engine-0").samples == 1)
        with pytest.raises(DeadlineExceeded, match="engine-0"):
            await fleet.remove("engine-0", timeout=0.05)
        assert fleet.report("engine-0").health is Health.DRAINING
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
            await sync.push(version="one")  # it still serves, so it is updated
        completions = (await task).completions
        assert {span.version for c in completions for span in c.weight_versions} <= {"initial", "one"}
        await (await fleet.remove("engine-0")).teardown()


async def test_adapters_are_on_all_engines_or_on_none(model: Path, tmp_path: Path) -> None:
    from drivetrain_conformance.assets.made_adapters import make_adapter

    (tmp_path / "a").mkdir()
    make_adapter(model, tmp_path / "a", seed=1)
    engines = [local(model, enable_lora=True) for _ in range(2)]
    async with fleet_of(engines, model) as fleet:
        with (
            spoiled(fleet.member("engine-1"), load_lora_adapter=BROKEN),
            pytest.raises(EngineInternalError, match=r"engine-1.*No engine has it"),
        ):
            await fleet.load_lora_adapter("a", str(tmp_path / "a"))
        assert all(not engine.parts.loaded_adapters.names for engine in engines)
        await fleet.load_lora_adapter("a", str(tmp_path / "a"))
        output = await fleet.generate([[1, 2, 3]] * 2, GREEDY, lora="a")
        plain = await fleet.generate([[1, 2, 3]], GREEDY)
        assert output.completions[0].logprobs == output.completions[1].logprobs
        assert output.completions[0].logprobs != plain.completions[0].logprobs
        late = local(model, enable_lora=True)
        await fleet.add(late)
        assert late.parts.loaded_adapters.names == ("a",)
        with (
            spoiled(fleet.member("engine-0"), unload_lora_adapter=BROKEN),
            pytest.raises(EngineInternalError, match="engine-0"),
        ):
            await fleet.unload_lora_adapter("a")
        assert all(engine.parts.loaded_adapters.names == ("a",) for engine in (*engines, late))
        await fleet.unload_lora_adapter("a")
        assert all(not engine.parts.loaded_adapters.names for engine in (*engines, late))


async def test_names_of_a_fleet_are_given_or_made(model: Path) -> None:
    fleet = Fleet({"big": local(model), "small": local(model)})
    assert [one.name for one in fleet.members] == ["big", "small"]
    assert [one.health for one in fleet.members] == [Health.STARTING, Health.STARTING]
    assert fleet.describe().backend == "transformers"
    async with fleet:
        with pytest.raises(InvalidRequest, match="unknown"):
            await fleet.remove("unknown")


async def hang(*arguments: object) -> object:
    await asyncio.sleep(600)
    return None


@pytest.mark.slow
async def test_a_pause_that_takes_too_long_is_undone(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.begun("engine-0") == fleet.begun("engine-1") == 1)
        with spoiled(fleet.member("engine-1")) as calls:
            calls.instead["pause_generation"] = hang
            with pytest.raises(DeadlineExceeded):
                await fleet.pause_generation("retract", timeout=0.2)
        assert fleet.state.value == "ready"
        assert {completion.finish_reason.value for completion in (await task).completions} == {"length"}
        await fleet.pause_generation("retract")
        assert fleet.health() == ["paused", "paused"]
        await fleet.continue_generation()
        assert fleet.health() == ["ready", "ready"]


@pytest.mark.parametrize("tag", [MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
async def test_a_sleep_that_takes_too_long_is_undone(model: Path, tag: MemoryTag) -> None:
    async with fleet_of(2, model) as fleet:
        with spoiled(fleet.member("engine-1")) as calls:
            calls.instead["sleep"] = hang
            with pytest.raises(DeadlineExceeded):
                await fleet.sleep([tag], timeout=0.2)
            assert fleet.state.value == "ready"
            await fleet.wake_up()
        if tag is MemoryTag.WEIGHTS:  # those of the first engine have slept
            async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:
                await sync.push(version="one")
        assert fleet.health() == ["ready", "ready"]
        assert (await fleet.generate([[1], [2]], GREEDY)).completions
        await fleet.sleep([tag])
        assert [member.engine.state.value for member in fleet.backend.members] == ["asleep", "asleep"]
        await fleet.wake_up()


async def test_an_adapter_is_replaced_on_engines_that_have_room_for_no_other(model: Path, tmp_path: Path) -> None:
    from drivetrain_conformance.assets.made_adapters import make_adapter

    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        make_adapter(model, tmp_path / str(seed), seed=seed)
    engines = [local(model, enable_lora=True, max_loras=1) for _ in range(2)]
    async with fleet_of(engines, model) as fleet:
        await fleet.load_lora_adapter("a", str(tmp_path / "1"))
        before = (await fleet.generate([[1, 2, 3]], GREEDY, lora="a")).completions[0]
        request = WeightUpdateRequest(
            version="second", source=LoraSource(lora_name="a", path=str(tmp_path / "2")), mode=PauseMode.WAIT
        )
        await fleet.update_named_weights(request)
        after = (await fleet.generate([[1, 2, 3]] * 2, GREEDY, lora="a")).completions
        assert after[0].logprobs != before.logprobs
        assert {completion.weight_version for completion in after} == {"second"}
        assert fleet.health() == ["ready", "ready"]
        with spoiled(fleet.member("engine-0"), update_adapter=BROKEN):
            await fleet.update_named_weights(request.model_copy(update={"version": "third"}))
        assert fleet.health() == ["stale", "ready"]
        assert (await fleet.generate([[1, 2, 3]], GREEDY, lora="a")).completions[0].weight_version == "third"


async def test_the_first_engine_names_the_version(model: Path) -> None:
    async with local(model) as engine:
        await engine.update_weight_version("theirs")
        other = await attach(await engine.handle())
        async with fleet_of([other, local(model)], model) as fleet:
            assert fleet.get_weight_version() == "theirs"
            assert fleet.health() == ["ready", "stale"]
            output = await fleet.generate([[1], [2]], GREEDY)
            assert {completion.weight_version for completion in output.completions} == {"theirs"}
        assert engine.state.value == "ready"
