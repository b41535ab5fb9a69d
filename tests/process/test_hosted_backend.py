"""Calls to an engine in a host process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from drivetrain import (
    EngineConfig,
    EngineInternalError,
    EngineStateError,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    StopKind,
    TensorSpec,
    UnsupportedCapability,
    WeightManifest,
    WeightPlanMismatch,
    WireError,
)
from drivetrain.process import HostedBackend
from drivetrain.types.weights import CommitUpdate, LoadBuckets, WeightReply

Ask = Callable[..., GenerateRequest]
Make = Callable[..., HostedBackend]


async def test_a_request_comes_back_with_what_the_engine_sampled(hosted: HostedBackend, ask: Ask) -> None:
    result = await hosted.generate(ask(tokens=5))
    assert result.token_ids == [0, 1, 2, 3, 4]
    assert result.logprobs == [-1.5] * 5
    assert result.finish_reason is FinishReason.LENGTH
    assert result.weight_versions[0].version == "initial"


async def test_a_thousand_requests_at_once_each_get_their_own_result(hosted: HostedBackend, ask: Ask) -> None:
    results = await asyncio.gather(*(hosted.generate(ask(f"r{size}", size)) for size in range(1000)))
    assert [len(result.token_ids) for result in results] == list(range(1000))


async def test_a_request_in_a_batch_costs_the_trainer_little(hosted: HostedBackend, ask: Ask) -> None:
    """Normally about 20 µs of CPU; the bound catches only a change of order of magnitude."""
    costs = []
    for _ in range(5):
        requests = [ask(f"r{index}", 32) for index in range(1024)]
        before = time.process_time()
        await asyncio.gather(*map(hosted.generate, requests))
        costs.append((time.process_time() - before) / len(requests))
    assert min(costs) < 150e-6


async def test_a_stream_yields_each_step_and_ends(hosted: HostedBackend, ask: Ask) -> None:
    deltas = [delta async for delta in hosted.stream(ask(tokens=3))]
    assert [delta.token_ids for delta in deltas] == [[0], [1], [2], []]
    assert deltas[-1].result == await hosted.generate(ask(tokens=3))


async def test_control_calls_carry_their_types(hosted: HostedBackend) -> None:
    manifest = WeightManifest((TensorSpec("a.weight", "float32", (2, 3)),), {"b.weight": "a.weight"})
    assert await hosted.weight_manifest() == manifest
    assert await hosted.receive_weights(LoadBuckets((0, 1))) == WeightReply(2, 4)
    assert await hosted.embed([[1], [2, 3]], dimensions=8) == [[8.0, 1.0], [8.0, 2.0, 3.0]]


async def test_a_large_tensor_crosses_by_value(hosted: HostedBackend) -> None:
    tensor = await hosted.read_weight(str(64 * 2**20))
    assert tensor.data == bytes(range(256)) * (2**18)


async def test_the_hosted_backend_shows_what_the_real_one_does_by_itself(hosted: HostedBackend) -> None:
    assert hosted.counts_resumed_tokens
    assert not HostedBackend.counts_resumed_tokens
    assert hosted.native_stops == {StopKind.STRING}
    assert hosted.name == "fake"
    assert HostedBackend.native_stops == frozenset()


async def test_progress_reaches_the_caller_in_order(make: Make) -> None:
    reports: list[str] = []
    await make().start(reports.append)
    assert reports == ["reading the model", "from a thread"]


async def test_it_works_in_a_thread_that_is_not_the_main_one(make: Make, ask: Ask) -> None:
    backend = make()

    async def whole_life() -> list[int]:
        await backend.start(print)
        result = await backend.generate(ask())
        await backend.close()
        return result.token_ids

    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(whole_life())))
    thread.start()
    await asyncio.to_thread(thread.join)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert results == [[0, 1, 2, 3]]


async def test_two_engines_live_side_by_side(make: Make, ask: Ask) -> None:
    first, second = make(), make()
    await asyncio.gather(first.start(print), second.start(print))
    assert first.pid != second.pid
    await first.close()
    assert (await second.generate(ask())).token_ids == [0, 1, 2, 3]


# Errors ---------------------------------------------------------------------------------------------------------------


async def test_an_odd_exception_is_told_with_its_traceback_and_the_host_serves_on(
    hosted: HostedBackend, ask: Ask
) -> None:
    with pytest.raises(EngineInternalError, match=r"(?s)OddError: an engine's own exception.*fakeplug.py.*in generate"):
        await hosted.generate(ask("odd"))
    assert (await hosted.generate(ask())).token_ids == [0, 1, 2, 3]


async def test_drivetrains_errors_cross_with_class_message_and_fields(hosted: HostedBackend) -> None:
    with pytest.raises(WeightPlanMismatch, match="a CommitUpdate") as mismatch:
        await hosted.receive_weights(CommitUpdate("v"))
    assert (mismatch.value.missing, mismatch.value.extra) == (("a", "b"), ("c",))
    with pytest.raises(UnsupportedCapability, match="fake backend does not support") as unsupported:
        await hosted.reward_score([[1]])
    assert unsupported.value.capability == "reward_score"


async def test_an_error_class_of_a_plugin_crosses_as_the_one_it_derives_from(hosted: HostedBackend) -> None:
    with pytest.raises(InvalidRequest, match="only the plugin knows") as caught:
        await hosted.load_lora_adapter("own error", "/a", pinned=True)
    assert caught.value.field == "lora_name"


async def test_a_stream_that_breaks_yields_what_it_had_and_then_raises(hosted: HostedBackend, ask: Ask) -> None:
    stream = hosted.stream(ask("odd", 2))
    assert [(await anext(stream)).token_ids for _ in range(2)] == [[0], [1]]
    with pytest.raises(EngineInternalError, match="in the middle of a stream"):
        await anext(stream)


async def test_an_engine_that_cancels_a_call_by_itself_is_an_error_not_a_cancellation(
    hosted: HostedBackend, ask: Ask
) -> None:
    with pytest.raises(EngineInternalError, match="cancelled generate by itself"):
        await hosted.generate(ask("cancel itself"))


async def test_a_result_of_the_wrong_type_is_refused_by_name(hosted: HostedBackend, ask: Ask) -> None:
    with pytest.raises(WireError, match="the engine's generate returned another type than declared"):
        await hosted.generate(ask("wrong type"))
    with pytest.raises(EngineInternalError, match="the engine's generate returned cannot be sent"):
        await hosted.generate(ask("unsendable"))
    assert (await hosted.generate(ask())).token_ids == [0, 1, 2, 3]


# Cancelling -----------------------------------------------------------------------------------------------------------


async def seen(hosted: HostedBackend, aborted: int, cancelled: int) -> None:
    async with asyncio.timeout(60):
        while True:
            stats = await hosted.stats()
            if (stats.running, stats.waiting) == (aborted, cancelled):
                return
            await asyncio.sleep(0.01)


async def test_cancelling_a_call_cancels_and_aborts_it_in_the_host(hosted: HostedBackend, ask: Ask) -> None:
    waiting = asyncio.create_task(hosted.generate(ask("wait")))
    other = asyncio.create_task(hosted.generate(ask("wait too")))
    await hosted.stats()  # a later call: when it is answered, the host has both
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await seen(hosted, aborted=1, cancelled=1)
    assert not other.done()
    other.cancel()


async def test_closing_a_stream_early_closes_and_aborts_it_in_the_host(hosted: HostedBackend, ask: Ask) -> None:
    stream = hosted.stream(ask("wait", 3))
    assert (await anext(stream)).token_ids == [0]
    await stream.aclose()
    await seen(hosted, aborted=1, cancelled=1)


# Misuse ---------------------------------------------------------------------------------------------------------------


async def test_calls_before_start_and_after_close_are_refused(make: Make, ask: Ask) -> None:
    backend = make()
    with pytest.raises(EngineStateError, match="was not started"):
        await backend.generate(ask())
    await backend.start(print)
    with pytest.raises(EngineStateError, match="started before"):
        await backend.start(print)
    await backend.close()
    with pytest.raises(EngineStateError, match="is closed"):
        await backend.generate(ask())
    with pytest.raises(EngineStateError, match="is closed"):
        await anext(backend.stream(ask()))


async def test_a_call_from_another_event_loop_is_refused_and_does_no_harm(hosted: HostedBackend, ask: Ask) -> None:
    with pytest.raises(EngineStateError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(hosted.abort(["r"])))
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (await hosted.generate(ask())).token_ids == [0, 1, 2, 3]


def test_an_engine_whose_event_loop_is_over_can_still_be_closed(
    plugin: Path, config_for: Callable[[], EngineConfig], ask: Ask
) -> None:
    me = psutil.Process()
    files, children = me.num_fds(), me.children(recursive=True)
    backend = HostedBackend(config_for(), "fake")
    asyncio.run(backend.start(print))
    with pytest.raises(EngineStateError, match="another event loop"):
        asyncio.run(backend.generate(ask()))
    asyncio.run(backend.close())
    assert me.children(recursive=True) == children
    assert me.num_fds() == files


# Closing --------------------------------------------------------------------------------------------------------------


async def test_close_fails_those_who_wait_and_is_idempotent(make: Make, ask: Ask) -> None:
    backend = make()
    await backend.start(print)
    waiting = asyncio.create_task(backend.generate(ask("wait")))
    await asyncio.sleep(0.05)
    await asyncio.gather(backend.close(), backend.close())
    await backend.close()
    with pytest.raises(EngineStateError, match="is closed"):
        await waiting
    assert backend.child_processes() == []


async def test_close_of_an_engine_that_was_never_started_does_nothing(make: Make) -> None:
    await make().close()


async def test_an_engine_that_does_not_close_is_killed_at_the_deadline(make: Make) -> None:
    backend = make("hang on close", close=0.5)
    await backend.start(print)
    began = time.monotonic()
    await backend.close()
    assert 0.5 <= time.monotonic() - began < 60, "it hangs for ten minutes"


async def test_an_error_of_the_engines_close_is_told_and_the_host_is_gone_all_the_same(make: Make) -> None:
    backend = make("fail on close")
    await backend.start(print)
    with pytest.raises(EngineInternalError, match="OddError: cannot close"):
        await backend.close()
    assert backend.child_processes() == []
