"""One weight update over all engines: all commit, or those that did not are named and get nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import warm_python
from drivetrain import (
    Capability,
    Completion,
    DeadlineExceeded,
    DiskSource,
    EngineInternalError,
    EngineStateError,
    GenerateRequest,
    InferenceEngine,
    InvalidRequest,
    InvalidWeights,
    Isolation,
    LoraSource,
    MemberLost,
    PauseMode,
    TokenDelta,
    UnsupportedCapability,
    WeightSyncError,
    WeightTransferFailed,
    WeightUpdateRequest,
    WeightVerifyFailed,
    WeightVersionGone,
)
from drivetrain_conformance.assets.made_adapters import make_adapter
from drivetrain_fleet import Health
from drivetrain_fleet.agreement import fleet_capabilities
from drivetrain_fleet.kept_adapters import KeptAdapters
from drivetrain_fleet.members import Member
from drivetrain_weight_sync import WeightSync
from fleets import GREEDY, LONG, Fleet, answer_lost, fleet_of, local, spoiled, tensors_for, until

BROKEN = EngineInternalError("the disk is on fire")


def versions(completions: Iterable[Completion]) -> set[str]:
    return {span.version for completion in completions for span in completion.weight_versions}


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def pushed(fleet: Fleet, version: str, strategy: str = "auto") -> None:
    async with WeightSync.connect(await tensors_for(fleet), fleet, strategy) as sync:
        await sync.push(version=version)


@pytest.mark.parametrize("strategy", ["auto", "in_process", "shared_memory", "disk", "delta", "broadcast"])
async def test_one_push_reaches_every_engine(model: Path, strategy: str) -> None:
    isolation = "inline" if strategy in ("auto", "in_process") else "process"
    engines = [local(model), local(model, isolation=isolation)]
    async with fleet_of(engines, model) as fleet:
        tensors = await tensors_for(fleet)
        async with WeightSync.connect(tensors, fleet, strategy) as sync:
            for version in ("one", "two"):
                result = await sync.push(version=version)
                assert result.tensors == len(tensors)
        assert [engine.get_weight_version() for engine in (fleet, *engines)] == ["two"] * 3
        name = next(iter(tensors))
        for engine in engines:
            assert (await engine.get_weights_by_name(name)).data == tensors[name].numpy().tobytes()
        output = await fleet.generate([[1, 2], [3, 4], [5]], GREEDY)
        assert versions(output.completions) == {"two"}


async def test_what_cannot_reach_several_engines_is_refused_by_name(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        with pytest.raises(UnsupportedCapability, match="cuda_ipc"):
            WeightSync.connect(await tensors_for(fleet), fleet, "cuda_ipc")


def test_gpu_memory_is_mapped_by_a_fleet_whose_engines_are_in_other_processes(model: Path) -> None:
    maps = Capability.WEIGHTS_CUDA_IPC

    def engine(isolation: Isolation) -> InferenceEngine:
        made = local(model)
        return InferenceEngine(
            made.config, made.parts.backend, capabilities=frozenset({maps}), isolation=isolation, versions={}
        )

    assert maps in fleet_capabilities([engine(Isolation.PROCESS), engine(Isolation.PROCESS)], frozenset())
    assert maps not in fleet_capabilities([engine(Isolation.PROCESS), engine(Isolation.INLINE)], frozenset())
    assert maps not in fleet_capabilities([engine(Isolation.PROCESS), local(model)], frozenset())


async def test_sources_are_read_once(model: Path) -> None:
    async with fleet_of(3, model) as fleet:
        tensors = await tensors_for(fleet)
        reads: list[str] = []

        def source() -> Iterable[tuple[str, object]]:
            for name, tensor in tensors.items():
                reads.append(name)
                yield name, tensor

        async with WeightSync.connect(source, fleet, "shared_memory") as sync:  # type: ignore[arg-type]
            await sync.push(version="one")
        assert sorted(reads) == sorted(tensors)


async def test_requests_in_flight_go_on_with_the_new_version(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1, 2], [3, 4], [5, 6], [7]], LONG))
        await until(lambda: all(fleet.report(f"engine-{i}").samples == 2 for i in range(2)))
        await pushed(fleet, "one")
        output = await task
        assert versions(output.completions) == {"initial", "one"}
        assert all(len(completion.token_ids) == 900 for completion in output.completions)
        assert fleet.health() == ["ready", "ready"]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "bucket by bucket"])
async def test_an_update_by_hand_reaches_every_engine(model: Path, at_once: bool) -> None:
    async with fleet_of(2, model) as fleet:
        request = WeightUpdateRequest(version="hand", source=DiskSource(path=str(model)), mode=PauseMode.RETRACT)
        task = asyncio.create_task(fleet.generate([[1, 2], [3, 4]], LONG))
        await until(lambda: fleet.parts.in_flight.running == 2)
        async with fleet.weight_update(request, at_once=at_once) as update:
            for index in range(0 if at_once else update.buckets):
                await update.load([index])
        assert at_once or update.nbytes > 0
        assert versions((await task).completions) == {"initial", "hand"}
        assert [one.version for one in fleet.members] == ["hand", "hand"]


@pytest.mark.parametrize("call", ["prepare_weight_update", "apply_update"])
async def test_an_engine_that_does_not_commit_is_stale_and_gets_nothing(model: Path, call: str) -> None:
    async with fleet_of(3, model) as fleet:
        with spoiled(fleet.member("engine-1"), **{call: BROKEN}):
            await pushed(fleet, "one")
        assert fleet.health() == ["ready", "stale", "ready"]
        assert "on fire" in fleet.report("engine-1").why
        assert "one" in fleet.report("engine-1").why
        assert fleet.get_weight_version() == "one"
        output = await fleet.generate([[i] for i in range(12)], GREEDY)
        assert versions(output.completions) == {"one"}
        assert fleet.member("engine-1").load.taken == 0
        await pushed(fleet, "two")
        assert fleet.health() == ["ready", "ready", "ready"]
        assert versions((await fleet.generate([[i] for i in range(12)], GREEDY)).completions) == {"two"}
        assert fleet.member("engine-1").load.taken > 0


async def test_an_engine_that_misses_an_update_may_lag_and_its_completions_say_so(model: Path) -> None:
    async with fleet_of(2, model, max_staleness=2) as fleet:
        late = fleet.member("engine-1")
        with spoiled(late, prepare_weight_update=BROKEN):
            for behind, version in enumerate(("one", "two"), 1):
                await pushed(fleet, version)
                assert fleet.health() == ["ready", "lagging"]
                assert late.status.behind == behind
                assert version in fleet.report("engine-1").why
                output = await fleet.generate([[i] for i in range(8)], GREEDY)
                assert versions(output.completions) == {"initial", version}
                assert all(len(one.weight_versions) == 1 for one in output.completions)
            assert fleet.get_weight_version() == "two"
            await pushed(fleet, "three")  # now it would be three versions behind
        assert fleet.health() == ["ready", "stale"]
        assert versions((await fleet.generate([[i] for i in range(8)], GREEDY)).completions) == {"three"}
        await pushed(fleet, "four")
        assert fleet.health() == ["ready", "ready"]
        assert versions((await fleet.generate([[i] for i in range(8)], GREEDY)).completions) == {"four"}


@pytest.mark.slow
async def test_an_engine_that_lags_keeps_its_requests_and_follows_a_pause(model: Path) -> None:
    async with fleet_of(2, model, max_staleness=1) as fleet:
        task = asyncio.create_task(fleet.generate([[1, 2], [3, 4]], LONG))
        await until(lambda: all(fleet.report(f"engine-{i}").samples == 1 for i in range(2)))
        with spoiled(fleet.member("engine-1"), prepare_weight_update=BROKEN):
            await pushed(fleet, "one")
        await fleet.pause_generation(PauseMode.IN_PLACE)
        assert fleet.health() == ["paused", "paused"]
        await fleet.continue_generation()
        assert fleet.health() == ["ready", "lagging"]
        spans = sorted([span.version for span in one.weight_versions] for one in (await task).completions)
        assert spans == [["initial"], ["initial", "one"]]


@pytest.mark.parametrize("call", ["apply_update", "commit_update"])
async def test_an_engine_whose_weights_may_have_been_touched_does_not_lag(model: Path, call: str) -> None:
    async with fleet_of(2, model, max_staleness=9) as fleet:
        with spoiled(fleet.member("engine-1"), **{call: BROKEN}):
            request = WeightUpdateRequest(version="one", source=DiskSource(path=str(model)), mode=PauseMode.RETRACT)
            async with fleet.weight_update(request, at_once=call == "apply_update") as update:
                for index in range(0 if call == "apply_update" else update.buckets):
                    await update.load([index])
        assert fleet.health() == ["ready", "stale"]


async def test_an_engine_that_lags_is_stale_once_it_or_the_fleet_is_relabelled(model: Path) -> None:
    async with fleet_of(3, model, max_staleness=9) as fleet:
        with (
            spoiled(fleet.member("engine-1"), prepare_weight_update=BROKEN),
            spoiled(fleet.member("engine-2"), prepare_weight_update=BROKEN),
        ):
            await pushed(fleet, "one")
        assert fleet.health() == ["ready", "lagging", "lagging"]
        await fleet.member("engine-1").engine.update_weight_version("by another")
        assert fleet.health() == ["ready", "stale", "lagging"]
        await fleet.update_weight_version("renamed")
        assert fleet.health() == ["ready", "stale", "stale"]


async def test_a_pinned_request_goes_to_an_engine_of_its_version(model: Path) -> None:
    async with fleet_of(2, model, max_staleness=1) as fleet:
        prompts = [[i] for i in range(8)]
        with spoiled(fleet.member("engine-1"), prepare_weight_update=BROKEN):
            await pushed(fleet, "one")
        for version, other in (("one", "engine-1"), ("initial", "engine-0")):
            taken = fleet.member(other).load.taken
            output = await fleet.generate(prompts, GREEDY, weight_version=version)
            assert versions(output.completions) == {version}
            chunks = [chunk async for chunk in fleet.generate_stream(prompts, GREEDY, weight_version=version)]
            assert versions(chunk.completion for chunk in chunks if chunk.completion) == {version}
            assert fleet.member(other).load.taken == taken, "an engine of another version was asked, and refused"
        with pytest.raises(WeightVersionGone, match=r"'never' is not served.*engine-0 serves 'one', engine-1 serves"):
            await fleet.generate(prompts, GREEDY, weight_version="never")
        with pytest.raises(InvalidRequest, match="weight_version") as caught:
            await fleet.generate(prompts, GREEDY, weight_version="")
        assert caught.value.field == "weight_version"
        await pushed(fleet, "two")
        with pytest.raises(WeightVersionGone, match="'initial' is not served"):
            await fleet.generate(prompts, GREEDY, weight_version="initial")
        assert versions((await fleet.generate(prompts, GREEDY)).completions) == {"two"}
        assert [one.samples for one in fleet.members] == [0, 0]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("engines", [1, 2])
async def test_a_pinned_request_that_would_span_an_update_is_refused(model: Path, engines: int, streamed: bool) -> None:
    async with fleet_of(engines, model) as fleet:
        one = fleet.member("engine-0").engine if engines == 1 else fleet
        seen: list[int] = []

        async def run() -> None:
            if not streamed:
                await one.generate([[1, 2]], LONG, weight_version="initial")
                return
            async for chunk in one.generate_stream([[1, 2]], LONG, weight_version="initial"):
                seen.extend(chunk.token_ids)

        task = asyncio.create_task(run())
        await until(lambda: one.parts.in_flight.running == 1)
        await pushed(fleet, "one")
        with pytest.raises(WeightVersionGone, match="initial"):
            await task
        assert len(seen) < 900
        assert one.parts.in_flight.running == 0
        assert versions((await one.generate([[1, 2]], GREEDY, weight_version="one")).completions) == {"one"}


async def test_a_pinned_request_that_waits_through_an_update_is_refused(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        await fleet.pause_generation(PauseMode.WAIT)
        task = asyncio.create_task(fleet.generate([[1, 2]], GREEDY, weight_version="initial"))
        await until(lambda: fleet.parts.in_flight.waiting == 1)
        await pushed(fleet, "one")
        await fleet.continue_generation()
        with pytest.raises(WeightVersionGone, match="initial"):
            await task


async def test_an_engine_that_commits_but_does_not_say_so_is_stale_too(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        with answer_lost(fleet.member("engine-1"), "apply_update"):
            await pushed(fleet, "one")
        assert fleet.health() == ["ready", "stale"]
        assert versions((await fleet.generate([[i] for i in range(6)], GREEDY)).completions) == {"one"}
        await pushed(fleet, "two")
        assert fleet.health() == ["ready", "ready"]


@pytest.mark.parametrize("call", ["begin_update", "load_buckets", "commit_update"])
async def test_an_engine_that_is_left_behind_bucket_by_bucket_is_stale(model: Path, call: str) -> None:
    async with fleet_of(2, model) as fleet:
        request = WeightUpdateRequest(version="hand", source=DiskSource(path=str(model)), mode=PauseMode.RETRACT)
        with spoiled(fleet.member("engine-0"), **{call: BROKEN}):
            async with fleet.weight_update(request) as update:
                for index in range(update.buckets):
                    await update.load([index])
        assert fleet.health() == ["stale", "ready"]
        assert fleet.state.value == "ready"
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"hand"}
        await pushed(fleet, "whole")
        assert fleet.health() == ["ready", "ready"]


async def test_requests_of_an_engine_that_is_left_behind_end_or_move(model: Path) -> None:
    async with fleet_of(2, model, max_samples_per_engine=2) as fleet:
        running = [asyncio.create_task(fleet.generate([i, 2], LONG)) for i in range(4)]
        waiting = asyncio.create_task(fleet.generate([9], GREEDY))
        await until(lambda: fleet.begun("engine-0") == fleet.begun("engine-1") == 2)
        with spoiled(fleet.member("engine-1"), apply_update=BROKEN):
            await pushed(fleet, "one")
        ended = await asyncio.gather(*running, return_exceptions=True)
        lost = [one for one in ended if isinstance(one, MemberLost)]
        assert len(lost) == 2
        assert all(error.member == "engine-1" and "tokens" in str(error) for error in lost)
        completions = [c for one in ended if not isinstance(one, BaseException) for c in one.completions]
        assert len(completions) == 2
        assert versions(completions) == {"initial", "one"}
        assert versions((await waiting).completions) == {"one"}


@pytest.mark.parametrize("call", ["prepare_weight_update", "apply_update"])
async def test_too_few_engines_fail_the_whole_update(model: Path, call: str) -> None:
    async with fleet_of(2, model, min_engines=2) as fleet:
        with spoiled(fleet.member("engine-1"), **{call: BROKEN}), pytest.raises(WeightSyncError) as raised:
            await pushed(fleet, "one")
        assert "engine-1" in str(raised.value)
        assert "min_engines=2" in str(raised.value)
        assert fleet.get_weight_version() == "initial"
        if call == "prepare_weight_update":  # nothing was changed
            assert fleet.health() == ["ready", "ready"]
            assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"initial"}
        else:
            assert isinstance(raised.value, WeightTransferFailed)
            assert (fleet.state.value, fleet.health()) == ("dirty", ["stale", "stale"])
            with pytest.raises(EngineStateError, match="dirty"):
                await fleet.generate([1], GREEDY)
        await pushed(fleet, "two")
        assert (fleet.state.value, fleet.health()) == ("ready", ["ready", "ready"])
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"two"}


async def test_no_token_is_made_with_weights_that_the_fleet_does_not_commit(model: Path) -> None:
    async with fleet_of(2, model, min_engines=2) as fleet:
        tasks = [asyncio.create_task(fleet.generate([i, 2], LONG)) for i in range(4)]
        await until(lambda: all(fleet.report(f"engine-{i}").samples == 2 for i in range(2)))
        with spoiled(fleet.member("engine-1"), apply_update=BROKEN), pytest.raises(WeightTransferFailed):
            await pushed(fleet, "never")
        assert fleet.member("engine-0").engine.get_weight_version() == "never"  # this one had committed
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        await pushed(fleet, "two")
        outputs = await asyncio.gather(*tasks)
        found = versions(completion for output in outputs for completion in output.completions)
        assert found == {"initial", "two"}


async def test_a_source_that_is_wrong_is_refused_by_all_and_changes_nothing(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        tensors = await tensors_for(fleet)
        name = next(iter(tensors))
        async with WeightSync.connect(tensors, fleet) as sync:
            tensors[name][0] = float("nan")
            with pytest.raises(InvalidWeights):
                await sync.push(version="nan")
        with (
            spoiled(fleet.member("engine-1"), prepare_weight_update=InvalidWeights("nan", tensors=["x"])),
            spoiled(fleet.member("engine-0")) as other,
            pytest.raises(InvalidWeights, match="engine-1") as raised,
        ):
            await pushed(fleet, "one")
        assert raised.value.tensors == ("x",)
        assert "forget_weight_update" in other.made
        assert (fleet.health(), fleet.get_weight_version()) == (["ready", "ready"], "initial")
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"initial"}


async def test_an_engine_that_fails_to_verify_is_stale_and_all_failing_raise_their_error(model: Path) -> None:
    error = WeightVerifyFailed("differs", tensors=["x"])
    async with fleet_of(2, model) as fleet:
        with (
            spoiled(fleet.member("engine-0"), apply_update=error),
            spoiled(fleet.member("engine-1"), apply_update=error),
            pytest.raises(WeightVerifyFailed, match=r"engine-0.*engine-1") as raised,
        ):
            await pushed(fleet, "one")
        assert raised.value.tensors == ("x",)
        assert fleet.state.value == "dirty"


async def test_a_push_that_is_cancelled_leaves_nothing_that_serves_another_version(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        member = fleet.member("engine-1")
        begun = asyncio.Event()

        async def hang(*arguments: object) -> object:
            begun.set()
            await asyncio.sleep(600)
            return None

        with spoiled(member) as calls:
            calls.instead["apply_update"] = hang
            task = asyncio.create_task(pushed(fleet, "one"))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (fleet.state.value, fleet.health()) == ("dirty", ["stale", "stale"])
        await pushed(fleet, "two")
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"two"}


async def test_what_another_holder_changes_on_an_engine_makes_it_stale(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        engine = fleet.member("engine-1").engine
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.report("engine-1").samples == 1)
        await engine.load_weights_from_disk(str(model), "theirs")
        assert fleet.report("engine-1").health is Health.STALE
        assert "theirs" in fleet.report("engine-1").why or "another holder" in fleet.report("engine-1").why
        with pytest.raises(MemberLost, match="engine-1"):
            await task
        output = await fleet.generate([[i] for i in range(6)], GREEDY)
        assert versions(output.completions) == {"initial"}
        await pushed(fleet, "ours")
        assert fleet.health() == ["ready", "ready"]


async def test_a_relabel_reaches_all_or_names_who_is_stale(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        await fleet.update_weight_version("a")
        assert [one.version for one in fleet.members] == ["a", "a"]
        assert fleet.health() == ["ready", "ready"]
        with spoiled(fleet.member("engine-0"), update_weight_version=DeadlineExceeded("late")):
            await fleet.update_weight_version("b")
        assert fleet.health() == ["stale", "ready"]
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"b"}
        with (
            spoiled(fleet.member("engine-1"), update_weight_version=DeadlineExceeded("late")),
            pytest.raises(DeadlineExceeded, match="engine-1"),
        ):
            await fleet.update_weight_version("c")
        assert fleet.get_weight_version() == "b"
        assert fleet.report("engine-1").health is Health.READY


async def test_an_engine_that_was_left_frozen_goes_on_once_it_is_synced(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.begun("engine-0") == fleet.begun("engine-1") == 1)
        with spoiled(fleet.member("engine-1"), apply_update=BROKEN):
            await pushed(fleet, "one")
        with pytest.raises(MemberLost):
            await task
        assert fleet.member("engine-1").engine.is_paused
        await until(lambda: not fleet.parts.in_flight.running)
        await pushed(fleet, "two")
        assert fleet.health() == ["ready", "ready"]
        assert not fleet.member("engine-1").engine.is_paused
        assert versions((await fleet.generate([[i] for i in range(4)], GREEDY)).completions) == {"two"}


@pytest.mark.parametrize("dirty", [(0,), (0, 1), (1,), (0, 1, 2)], ids=str)
async def test_engines_with_committed_weights_serve_beside_one_whose_update_failed(
    model: Path, dirty: tuple[int, ...]
) -> None:
    engines = [local(model) for _ in range(3)]
    for engine in engines:
        await engine.start()
    for number in dirty:
        with pytest.raises(WeightTransferFailed, match="the trainer is gone"):
            async with engines[number].weight_update(
                WeightUpdateRequest(version="half", source=DiskSource(path=str(model)))
            ):
                raise WeightTransferFailed("the trainer is gone")
    async with fleet_of(engines, model) as fleet:
        healths = ["stale" if number in dirty else "ready" for number in range(3)]
        assert fleet.health() == healths
        for number, report in enumerate(fleet.members):
            assert ("its weights are dirty" in report.why) == (number in dirty)
        if "ready" in healths:
            initial = engines[healths.index("ready")].get_weight_version()
            assert fleet.get_weight_version() == initial
            assert versions((await fleet.generate([[i] for i in range(4)], GREEDY)).completions) == {initial}
        await pushed(fleet, "whole")
        assert fleet.health() == ["ready"] * 3


async def test_an_engine_that_dies_after_its_commit_does_not_count(model: Path) -> None:
    for min_engines in (1, 2):
        async with fleet_of(2, model, min_engines=min_engines) as fleet:
            member = fleet.member("engine-1")
            made = member.calls.apply_update

            async def commit_and_die(*arguments: object, member: Member = member, made: Any = made) -> object:
                applied = await made(*arguments)
                member.fail("killed")
                return applied

            with spoiled(member) as calls:
                calls.instead["apply_update"] = commit_and_die
                if min_engines == 1:
                    await pushed(fleet, "one")
                    assert fleet.health() == ["ready", "failed"]
                    assert versions((await fleet.generate([[1]], GREEDY)).completions) == {"one"}
                else:
                    with pytest.raises(WeightTransferFailed, match="min_engines=2"):
                        await pushed(fleet, "one")
                    assert fleet.state.value == "dirty"


async def test_an_engine_that_is_relabelled_by_another_holder_is_stale(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        await fleet.member("engine-0").engine.update_weight_version("theirs")
        assert fleet.health() == ["stale", "ready"]
        assert "theirs" in fleet.report("engine-0").why
        assert versions((await fleet.generate([[1], [2]], GREEDY)).completions) == {"initial"}


async def test_a_completion_of_a_version_that_was_not_committed_is_not_handed_out(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        member = fleet.member("engine-0")
        stream = member.calls.stream

        async def other_version(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            async for delta in stream(request):
                if delta.result is not None:
                    spans = [replace(span, version="never") for span in delta.result.weight_versions]
                    delta = replace(delta, result=replace(delta.result, weight_versions=spans))
                yield delta

        with spoiled(member) as calls:
            calls.instead["stream"] = other_version  # type: ignore[assignment]
            with pytest.raises(MemberLost, match="never"):
                await fleet.generate([1], GREEDY)
        assert fleet.health() == ["stale", "ready"]


async def test_an_engine_that_is_synced_gets_the_adapters_that_it_missed(model: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        make_adapter(model, tmp_path / str(seed), seed=seed)
    engines = [local(model, enable_lora=True) for _ in range(2)]
    async with fleet_of(engines, model) as fleet:
        await fleet.load_lora_adapter("a", str(tmp_path / "1"))
        fleet.member("engine-1").left_behind("for the test")
        await fleet.unload_lora_adapter("a")
        await fleet.load_lora_adapter("a", str(tmp_path / "2"))  # engine-1 has another one of this name
        await pushed(fleet, "one")
        assert fleet.health() == ["ready", "ready"]
        answers = [(await engine.generate([1, 2, 3], GREEDY, lora="a")).completions[0].logprobs for engine in engines]
        assert answers[0] == pytest.approx(answers[1], abs=1e-4)


async def test_an_engine_that_joins_gets_an_adapter_whose_folder_was_removed(model: Path, tmp_path: Path) -> None:
    engines = [local(model, enable_lora=True, weight_version=f"v{index}") for index in range(2)]
    async with fleet_of(engines[:1], model) as fleet:
        for seed in (1, 2):  # as LoraSync: each push removes the folder of the one before it, and its end the last
            folder = tmp_path / str(seed)
            folder.mkdir()
            make_adapter(model, folder, seed=seed)
            await fleet.update_named_weights(
                WeightUpdateRequest(
                    version=f"a{seed}", source=LoraSource(lora_name="a", path=str(folder)), mode=PauseMode.WAIT
                )
            )
            shutil.rmtree(folder)
        assert len(names_in(tmp_path)) == 1
        await fleet.add(engines[1])
        await pushed(fleet, "one")
        assert fleet.health() == ["ready", "ready"]
        answers = [(await engine.generate([1, 2, 3], GREEDY, lora="a")).completions[0].logprobs for engine in engines]
        assert answers[0] == pytest.approx(answers[1], abs=1e-4)
        await fleet.unload_lora_adapter("a")
        assert names_in(tmp_path) == []


def test_what_a_killed_fleet_kept_goes_with_the_next_adapter(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")
    program = "import os, sys; from drivetrain_fleet.kept_adapters import KeptAdapters\n"
    program += "KeptAdapters().keep('a', sys.argv[1]); os.kill(os.getpid(), 9)"
    killed = warm_python.run("-c", program, str(tmp_path / "mine"))
    assert killed.returncode == -9
    (orphan,) = (path for path in tmp_path.iterdir() if path.name != "mine")
    first, second = KeptAdapters(), KeptAdapters()
    kept = [Path(one.keep("a", str(tmp_path / "mine"))) for one in (first, second)]
    assert not orphan.exists()
    assert all((folder / "adapter_config.json").read_text() == "{}" for folder in kept), (
        "a living fleet's is left alone"
    )
    first.close()
    second.close()
    assert names_in(tmp_path) == ["mine"]


async def test_an_adapter_whose_folder_is_gone_is_refused_by_name_to_an_engine_that_joins(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    make_adapter(model, folder, seed=1)
    engines = [local(model, enable_lora=True) for _ in range(2)]
    async with fleet_of(engines[:1], model) as fleet:
        await fleet.load_lora_adapter("a", str(folder))
        shutil.rmtree(folder)
        with pytest.raises(EngineStateError, match=r"adapter 'a': its folder .*mine is gone\. Unload"):
            await fleet.add(engines[1])
        assert fleet.health() == ["ready"]
        await fleet.unload_lora_adapter("a")
        await fleet.add(engines[1])
        assert fleet.health() == ["ready", "ready"]


@pytest.mark.slow
async def test_a_commit_after_which_requests_do_not_go_on_leaves_the_fleet_paused(model: Path) -> None:
    async with fleet_of(2, model) as fleet:
        task = asyncio.create_task(fleet.generate([[1], [2]], LONG))
        await until(lambda: fleet.begun("engine-0") == fleet.begun("engine-1") == 1)
        with spoiled(fleet.member("engine-1"), apply_update=BROKEN), spoiled(fleet.member("engine-0")) as other:
            other.instead["apply_update"] = _broken
            with pytest.raises(WeightTransferFailed):
                await pushed(fleet, "never")
        with spoiled(fleet.member("engine-1"), continue_generation=BROKEN), pytest.raises(EngineInternalError):
            await pushed(fleet, "one")
        assert (fleet.state.value, fleet.get_weight_version()) == ("paused", "one")
        await fleet.continue_generation()
        assert versions((await task).completions) == {"initial", "one"}
        assert fleet.health() == ["ready", "ready"]


async def _broken(*arguments: object) -> object:
    raise BROKEN


@pytest.mark.slow
async def test_after_a_failed_update_no_engine_goes_on_though_another_does_not_freeze(model: Path) -> None:
    async with fleet_of(2, model, min_engines=2) as fleet:
        tasks = [asyncio.create_task(fleet.generate([i, 2], LONG)) for i in range(2)]
        await until(lambda: fleet.begun("engine-0") == fleet.begun("engine-1") == 1)
        member = fleet.member("engine-1")
        held = 0
        with spoiled(member, apply_update=BROKEN) as calls:
            pause = calls.calls.pause_generation

            async def once(mode: PauseMode, timeout: float | None) -> object:
                nonlocal held
                held += 1
                if held > 1:
                    raise BROKEN
                await pause(mode, timeout)
                return None

            calls.instead["pause_generation"] = once
            with pytest.raises(WeightTransferFailed):
                await pushed(fleet, "never")
        assert held == 2
        assert fleet.member("engine-0").engine.get_weight_version() == "never"
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in tasks)
        await pushed(fleet, "two")
        outputs = await asyncio.gather(*tasks)
        assert versions(c for output in outputs for c in output.completions) == {"initial", "two"}
