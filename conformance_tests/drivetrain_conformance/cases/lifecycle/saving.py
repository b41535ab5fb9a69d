"""Models that an engine saves: whole, loaded again, beside requests and updates."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.weight_transfers import WeightTransferHandle
from drivetrain.errors import EngineError, EngineStateError, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag
from drivetrain.types.weights import DiskSource, WeightUpdateRequest
from drivetrain_conformance.assertions.event_loop_stalls import check_it_runs
from drivetrain_conformance.assertions.full_disk import full_disk
from drivetrain_conformance.assertions.memory_use import COUNTED, check_steady, held_by, processes_of
from drivetrain_conformance.assertions.refusals import raises, refused
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assertions.saved_models import check_saved
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench

_TRIES: Final = 10
"""Times that an update is staged until enough was seen of it: on a busy machine a request may come too late."""
_SAVES: Final = 3
_ROOM: Final = 256 * 1024
"""Models saved between two measurements, and bytes by which memory may grow with each: allocator overhead."""


@case(Capability.SAVE_SHARDED, Capability.WEIGHTS_DISK, own_engine=True, slow=True)
async def a_saved_folder_loads_again(bench: Bench) -> None:
    """A folder saved after an update is complete: an engine loads it, tokenizer included, and answers alike."""

    async def save(engine: InferenceEngine, folder: Path) -> None:
        await engine.save_sharded_model(str(folder))

    await _saved_and_loaded_again(bench, save)


@case(Capability.SAVE_REMOTE, Capability.WEIGHTS_DISK, own_engine=True, slow=True)
async def a_model_saved_to_a_url_loads_again(bench: Bench) -> None:
    """A model saved to an fsspec URL after an update is complete: an engine that loads it answers alike."""

    async def save(engine: InferenceEngine, folder: Path) -> None:
        await engine.save_remote_model(folder.as_uri())

    await _saved_and_loaded_again(bench, save)


@case(Capability.SAVE_SHARDED, Capability.WEIGHTS_DISK, slow=True)
async def what_is_saved_is_what_is_served(bench: Bench) -> None:
    """After an update the new weights are saved, not those loaded at the start; saving disturbs nothing.

    It does not block the trainer's event loop.
    """
    engine = bench.engine
    own, prompts = engine.get_weight_version(), bench.prompts(3)
    first, folder = bench.folder("saved"), bench.folder("saved") / "made" / "on the way"
    before = await bench.greedy(prompts)
    async with check_it_runs():
        for path in (first, bench.folder("saved")):  # twice, so that short stalls add up
            await engine.save_sharded_model(str(path))
    await check_saved(engine, first, bench.model)
    await engine.load_weights_from_disk(str(bench.other_weights()), "others")
    others = await bench.greedy(prompts)
    await engine.save_sharded_model(str(folder))
    await check_saved(engine, folder, bench.other_weights())
    await _check_saving_leaves_nothing(bench)
    assert [c.token_ids for c in await bench.greedy(prompts)] == [c.token_ids for c in others]
    await engine.load_weights_from_disk(str(bench.model), own)
    check_same(bench, await bench.greedy(prompts), before)
    await engine.load_weights_from_disk(str(folder), "saved")
    check_same(bench, await bench.greedy(prompts), others, model=bench.other_weights())
    await engine.load_weights_from_disk(str(bench.model), own)


async def _check_saving_leaves_nothing(bench: Bench) -> None:
    """Check that nothing grows with saving, and with reading single tensors, if the engine can do that."""
    engine = bench.engine
    names = (
        [spec.name for spec in (await engine.weight_manifest()).tensors]
        if bench.claims(Capability.READ_WEIGHTS)
        else []
    )

    async def held_after_some() -> dict[str, int]:
        for _ in range(_SAVES):
            with tempfile.TemporaryDirectory() as folder:
                await engine.save_sharded_model(folder)
        for name in names[:_SAVES]:
            await engine.get_weights_by_name(name)
        return await held_by(engine)

    await held_after_some()  # the first ones fill caches
    await check_steady(held_after_some, {"bytes of memory": _SAVES * _ROOM, **COUNTED}, f"{_SAVES} saved models")


@case(Capability.SAVE_SHARDED)
async def nothing_is_saved_where_something_is(bench: Bench) -> None:
    """Saving to a folder that is not empty, a file, or an impossible path is refused and changes nothing there.

    On a full disk saving fails, and leaves no file.
    """
    engine = bench.engine
    full, around = bench.folder("full"), bench.folder("around")
    file = full / "config.json"
    file.write_text("of somebody else")
    wrong = {
        "a folder with a file in it": str(full),
        "a file": str(file),
        "a folder below a file": str(file / "saved"),
        "a place where nobody can make a folder": "/proc/saved",
        "no path": "",
        "a path that no system has": f"{around}/a\0b",
        "a home that nobody has": "~nobody-of-that-name/saved",
    }
    for what, path in wrong.items():
        with refused(InvalidRequest, field="path", otherwise=f"{what} was saved to"):
            await engine.save_sharded_model(path)
    assert [path.name for path in full.iterdir()] == [file.name]
    assert file.read_text() == "of somebody else"
    with full_disk(processes_of(engine)), raises(EngineError, "a full disk", otherwise="a model fits a full disk"):
        await engine.save_sharded_model(str(around / "saved"))
    assert not list(around.iterdir()), f"a save on a full disk left {list(around.iterdir())}"
    await engine.save_sharded_model(str(around / "saved"))


@case(Capability.SAVE_SHARDED)
async def a_relative_folder_is_the_trainers(bench: Bench) -> None:
    """A relative path is below the caller's working directory, wherever the engine runs; nothing else is left there."""
    around = bench.folder("around")
    with contextlib.chdir(around):
        await bench.engine.save_sharded_model("saved")
    assert [path.name for path in around.iterdir()] == ["saved"]
    await check_saved(bench.engine, around / "saved", bench.model)


@case(Capability.SAVE_REMOTE)
async def a_url_that_leads_nowhere_is_refused(bench: Bench) -> None:
    """A URL with an unknown or no protocol, or whose place is taken, is refused before any work."""
    full = bench.folder("full")
    (full / "config.json").write_text("of somebody else")
    wrong = {
        "a protocol that there is not": "telegraph://bucket/saved",
        "no protocol": str(bench.folder("saved")),
        "no place": "file://",
        "a relative path": "file://saved",
        "no URL": "",
        "a folder with a file in it": full.as_uri(),
    }
    for what, url in wrong.items():
        with refused(InvalidRequest, field="url", otherwise=f"{what} was saved to"):
            await bench.engine.save_remote_model(url)
    assert [path.read_text() for path in full.iterdir()] == ["of somebody else"]


@case(Capability.SAVE_SHARDED, Capability.SLEEP_WEIGHTS, Capability.WEIGHTS_DISK)
async def weights_that_are_lost_are_not_saved(bench: Bench) -> None:
    """Weights that are asleep, or woken without their values, are not saved; after an update they are."""
    engine, folder = bench.engine, bench.folder("saved")
    own = engine.get_weight_version()
    await engine.sleep([MemoryTag.WEIGHTS])
    with refused(EngineStateError, state="asleep", otherwise="weights that sleep are saved"):
        await engine.save_sharded_model(str(folder))
    await engine.wake_up([MemoryTag.WEIGHTS])
    with refused(EngineStateError, state="dirty", otherwise="weights that are lost are saved"):
        await engine.save_sharded_model(str(folder))
    assert not list(folder.iterdir())
    await engine.load_weights_from_disk(str(bench.model), own)
    await engine.save_sharded_model(str(folder))
    await check_saved(engine, folder, bench.model)


@case(Capability.SAVE_SHARDED, Capability.STREAMING, model=ModelKind.LARGE, slow=True)
async def requests_run_on_during_a_save(bench: Bench) -> None:
    """Tokens keep coming while weights are saved, and are the same.

    They keep coming while an update from the saved folder is staged, too.
    """
    engine, prompt, folder = bench.engine, bench.prompt(), bench.folder("saved")
    params = bench.long(50)
    (whole,) = (await engine.generate([prompt], params)).completions
    saving: asyncio.Task[None] | None = None
    during, last = 0, None
    async for chunk in engine.generate_stream([prompt], params):
        if saving is None:
            saving = asyncio.create_task(engine.save_sharded_model(str(folder)))
        during += not saving.done()
        last = chunk.completion
    assert saving is not None
    await saving
    assert during >= 5, f"{during} chunks came during the save"
    assert last is not None
    check_same(bench, [last], [whole])
    if bench.claims(Capability.WEIGHT_STAGING) and bench.claims(Capability.WEIGHTS_DISK):
        await _check_requests_run_on_during_staging(bench, folder)


async def _check_requests_run_on_during_staging(bench: Bench, folder: Path) -> None:
    """Check that tokens come while an update from a large folder is staged, which is tried until enough were seen."""
    during: list[int] = []
    while len(during) < _TRIES:
        during.append(await _tokens_during_staging(bench, folder))
        if during[-1] >= 3:  # one step may be under way when staging begins
            return
    raise AssertionError(f"{during} tokens came while an update was staged, in as many trials")


async def _tokens_during_staging(bench: Bench, folder: Path) -> int:
    """Stage an update while a stream runs, and count the tokens that come meanwhile."""
    update = WeightUpdateRequest(version="staged", source=DiskSource(path=str(folder)))
    staging: WeightTransferHandle[None] | None = None
    during = 0
    async with aclosing(bench.engine.generate_stream([bench.prompt()], bench.long())) as chunks:
        async for chunk in chunks:
            if staging is None:
                staging = await bench.engine.start_weight_transfer(update)
            elif staging.staged:
                break
            else:
                during += len(chunk.token_ids)
    assert staging is not None
    await staging.wait()
    await staging.cancel()
    return during


@case(Capability.SAVE_SHARDED, Capability.WEIGHTS_DISK)
async def an_update_waits_for_a_save(bench: Bench) -> None:
    """An update waits for the saves requested before it, so that each saves the weights of one version."""
    engine, own = bench.engine, bench.engine.get_weight_version()
    await engine.save_sharded_model(str(bench.folder("first")))  # refused here if unclaimed, before an update
    folders = [bench.folder("saved") for _ in range(12)]
    ended: list[str] = []

    async def recording_its_end(what: str, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        finally:
            ended.append(what)

    results = await asyncio.gather(
        *(recording_its_end("save", engine.save_sharded_model(str(folder))) for folder in folders),
        recording_its_end("update", engine.load_weights_from_disk(str(bench.other_weights()), "others")),
        return_exceptions=True,
    )
    for refusal in results:
        if isinstance(refusal, UnsupportedCapability):
            raise refusal
    waited = ended == ["save"] * len(folders) + ["update"] and not any(results)
    assert waited, f"the update did not wait for the saves: {ended}; {results}"
    for folder in folders:
        await check_saved(engine, folder, bench.model)
    await engine.load_weights_from_disk(str(bench.model), own)


async def _saved_and_loaded_again(
    bench: Bench, save: Callable[[InferenceEngine, Path], Coroutine[object, object, None]]
) -> None:
    folder, others = bench.folder("saved"), bench.other_weights()
    async with bench.open() as engine:
        prompts = bench.prompts(4, engine=engine)
        await engine.load_weights_from_disk(str(others), "others")
        before = await bench.greedy(prompts, engine=engine)
        await save(engine, folder)
        await check_saved(engine, folder, others)
        check_same(bench, await bench.greedy(prompts, engine=engine), before, engine, others)
    async with bench.open(model=folder) as engine:
        check_same(bench, await bench.greedy(prompts, engine=engine), before, engine, others)
