"""Weight versions and labels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from drivetrain.engine.states import EngineState
from drivetrain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStateError,
    InvalidRequest,
    WeightSyncError,
    WeightVersionGone,
)
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.calls_given_up import MOMENTS, given_up
from drivetrain_conformance.assertions.refusals import raises
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.assertions.weight_checks import check_made_by, load_all
from drivetrain_conformance.assets.weight_sources import from_disk
from drivetrain_conformance.cases.weight_sync.checks import (
    NEW,
    TOKENS,
    Late,
    check_serves,
    check_spans,
    check_state,
    one,
    one_by_one,
    same_label_again,
)
from drivetrain_conformance.cases.weight_sync.pushing import free_port
from drivetrain_conformance.engine_model.live_requests import Live, proceed, settle
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, in_time
from drivetrain_conformance.harness.time_limits import within


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
    for number, after_s in enumerate(MOMENTS):
        await given_up(engine.update_weight_version(f"given-up-{number}"), after_s)
        check_spans(await one(bench, prompts[0]), engine.get_weight_version())
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
    modes = bench.freezes()
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
    async with within():
        with raises(InvalidRequest, "an address that is none"):
            await ask("nowhere")
        with raises(EngineError, "a server that is not there"):
            await ask(f"http://127.0.0.1:{free_port()}", timeout=5)
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
