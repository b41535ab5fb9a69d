"""The work of a request is bounded: it cannot use up memory or block the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from drivetrain import (
    DeadlineExceeded,
    EngineBusy,
    EngineDied,
    EngineState,
    FinishReason,
    InferenceEngine,
    InvalidRequest,
    PauseMode,
    TextPrompt,
)
from drivetrain.checks.limits import MOST_SAMPLES, SAMPLES_AT_ONCE, SAMPLES_UNDER_WAY
from drivetrain.engine.loaded_adapters import LoadedLora
from drivetrain.text import chat_templates
from drivetrain_transformers.engine import TransformersBackend
from engines import OpenEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Samples -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [MOST_SAMPLES + 1, 10**6, 2**31])
async def test_more_samples_than_a_prompt_can_have_are_refused(engine: InferenceEngine, n: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"n={n}: .*less than or equal to {MOST_SAMPLES}") as refused:
        await engine.generate("a", {"n": n})
    assert refused.value.field == "sampling_params.n"


async def test_more_samples_than_a_call_can_have_are_refused(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="65 prompts ask for 1064960 completions; expected at most 1048576"):
        await engine.generate([[1]] * 65, {"n": MOST_SAMPLES})


async def test_the_event_loop_gets_turns_while_a_large_call_starts(engine: InferenceEngine) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    await engine.pause_generation(PauseMode.ABORT)
    call = asyncio.create_task(engine.generate([1, 2], {"n": SAMPLES_UNDER_WAY, "max_new_tokens": 1}))
    await asyncio.sleep(0)
    await engine.abort_generation()
    turns = 0
    await call
    counting.cancel()
    assert turns >= SAMPLES_UNDER_WAY / SAMPLES_AT_ONCE - 1
    await engine.continue_generation()


async def test_samples_that_are_not_made_yet_are_aborted_with_the_others(engine: InferenceEngine) -> None:
    count = SAMPLES_UNDER_WAY + 100
    await engine.pause_generation(PauseMode.ABORT)
    call = asyncio.create_task(engine.generate([1, 2], {"n": count, "max_new_tokens": 1}, request_ids=["many"]))
    await asyncio.sleep(0.1)
    await engine.abort(f"many/{count - 1}")  # abort one sample by itself, before it is created
    await engine.abort("many")
    output = await asyncio.wait_for(call, 60)
    assert [one.sample_index for one in output.completions] == list(range(count))
    assert {one.finish_reason for one in output.completions} == {FinishReason.ABORT}
    await engine.continue_generation()


async def test_one_sample_of_several_is_aborted_by_its_own_id(engine: InferenceEngine) -> None:
    await engine.pause_generation(PauseMode.ABORT)
    call = asyncio.create_task(engine.generate([1, 2], {"n": 3, "max_new_tokens": 1}, request_ids=["few"]))
    await asyncio.sleep(0)
    for other in ("few/3", "few/01", "few/-1", "few/x", "few/1/0", "else"):
        await engine.abort(other)
    await engine.abort("few/1")
    await engine.continue_generation()
    output = await call
    assert [one.finish_reason is FinishReason.ABORT for one in output.completions] == [False, True, False]


@pytest.mark.parametrize(("n", "other", "other_n"), [(3, "one/2", 1), (1, "one", 2), (3, "one", 3), (1, "one", 1)])
async def test_ids_of_samples_under_way_are_taken(engine: InferenceEngine, n: int, other: str, other_n: int) -> None:
    async def call(request_id: str, samples: int) -> None:
        await engine.generate([1, 2], {"n": samples, "max_new_tokens": 1}, request_ids=[request_id])

    for first, second in ((("one", n), (other, other_n)), ((other, other_n), ("one", n))):
        await engine.pause_generation(PauseMode.ABORT)
        waiting = asyncio.create_task(call(*first))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="already under way"):
            await call(*second)
        await engine.continue_generation()
        await waiting
    await call("one/3", 1)


async def test_seeds_of_samples_do_not_depend_on_how_they_are_made(open_engine: OpenEngine) -> None:
    async with open_engine(seed=7) as first, open_engine(seed=7) as second:
        together = await first.generate([[1, 2]] * 2, {"n": 2, "max_new_tokens": 8})
        apart = [await second.generate([1, 2], {"n": 2, "max_new_tokens": 8}) for _ in range(2)]
        ids = [one.token_ids for output in apart for one in output.completions]
        assert [one.token_ids for one in together.completions] == ids
        assert len({tuple(one) for one in ids}) > 1


# Stops ---------------------------------------------------------------------------------------------------------------

BACKTRACKS = "(a|[a])+$b"


async def test_a_stop_regex_that_backtracks_ends_its_own_request_alone(engine: InferenceEngine) -> None:
    (a,) = engine.tokenizer.inner("a", add_special_tokens=False)["input_ids"]
    plain = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    only_a = {**plain, "logit_processors": [{"kind": "action_mask", "allowed_token_ids": [a]}]}
    before = await engine.generate([1, 2], plain)
    neighbour = asyncio.create_task(engine.generate([1, 2], plain))
    with pytest.raises(InvalidRequest, match="takes longer than") as refused:
        await engine.generate([1, 2], {**only_a, "stop_regex": BACKTRACKS}, timeout=60)
    assert refused.value.field == "sampling_params.stop_regex"
    stream = engine.generate_stream([1, 2], {**only_a, "stop_regex": BACKTRACKS}, timeout=60)
    with pytest.raises(InvalidRequest, match="takes longer than"):
        _ = [chunk async for chunk in stream]
    assert (await neighbour).completions[0].token_ids == before.completions[0].token_ids
    after = await engine.generate([1, 2], {**plain, "stop_regex": BACKTRACKS})
    assert after.completions[0].token_ids == before.completions[0].token_ids


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"stop_regex": "a" * 5000}, "at most 4096 characters"),
        ({"stop": ["a" * 5000]}, "at most 4096 characters"),
        ({"stop": ["a"] * 1025}, "at most 1024 items"),
        ({"stop_token_ids": range(10**9)}, "stop_token_ids"),
        ({"logit_processors": [{"kind": "disallowed_tokens", "token_ids": range(10**9)}]}, "logit_processors"),
    ],
)
async def test_stops_are_bounded(engine: InferenceEngine, params: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await engine.generate([1, 2], params)


# Prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [range(10**9), [range(10**9)], [[1, 2], range(10**9)]])
async def test_what_is_far_longer_than_the_context_is_refused_before_it_is_read(
    engine: InferenceEngine, prompt: Any
) -> None:
    with pytest.raises(InvalidRequest, match="has 1000000000 tokens, more than the context length of 1024"):
        await engine.generate(prompt)
    with pytest.raises(InvalidRequest, match="has 1000000000 tokens, more than the context length of 1024"):
        await anext(engine.generate_stream(prompt))
    if isinstance(prompt, list):
        with pytest.raises(InvalidRequest, match="more than the context length of 1024"):
            await engine.compute_logprobs(prompt)


async def test_a_long_text_is_refused_by_its_beginning(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"prompts\[1\] is a text of 20000000 characters"):
        await engine.generate(["a", "b" * 20_000_000])


async def test_a_chat_template_that_does_not_end_holds_up_nobody(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages on which the model's own template never ends wait alone, while other requests are answered."""
    monkeypatch.setattr(chat_templates, "LONGEST_S", 10_000.0)
    ends, endless = ([{"role": "user", "content": content}] for content in ("a", "forever"))
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with open_engine() as engine:
        engine.tokenizer.inner.chat_template = (
            "{% if messages[0].content == 'forever' %}" + loops + "{% endif %}{{ messages[0].content }}"
        )
        with pytest.raises(DeadlineExceeded, match="1 completions"):
            await engine.generate(endless, params, timeout=0.1)
        stuck = asyncio.create_task(engine.generate(endless, params))
        await asyncio.sleep(0)
        assert (await engine.generate(ends, params)).completions[0].prompt_token_ids == [ord("a")]
        assert len((await engine.generate([1, 2], params)).completions[0].token_ids) == 4
        assert not stuck.done()
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck


async def test_prompts_are_the_same_whichever_thread_reads_them(engine: InferenceEngine) -> None:
    params = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    texts = [f"{index} " * 40 for index in range(200)]
    together = await engine.generate(texts, params)
    ids = [engine.tokenizer.encode(TextPrompt(text=text)) for text in texts]
    assert [one.prompt_token_ids for one in together.completions] == ids
    again = await engine.generate(ids, params)
    assert [one.token_ids for one in again.completions] == [one.token_ids for one in together.completions]


async def test_a_request_is_under_way_while_its_prompt_is_read(open_engine: OpenEngine) -> None:
    """It can be aborted, its id is taken, and its adapter cannot be unloaded."""
    chat = [{"role": "user", "content": "a"}]
    async with open_engine(enable_lora=True) as engine:
        engine.parts.loaded_adapters.put("mine", LoadedLora("mine", False))
        call = asyncio.create_task(engine.generate(chat, {"n": 2}, request_ids=["chat"], lora="mine"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="'chat' is already under way"):
            await engine.generate([1, 2], request_ids=["chat"])
        with pytest.raises(EngineBusy, match="used by 2 requests"):
            await engine.unload_lora_adapter("mine")
        await engine.abort("chat")
        output = await call
    assert [one.finish_reason for one in output.completions] == [FinishReason.ABORT] * 2
    assert [one.token_ids for one in output.completions] == [[], []]


# The scheduler's thread ----------------------------------------------------------------------------------------------


async def test_a_scheduler_that_does_not_come_back_from_a_step_is_found_out(open_engine: OpenEngine) -> None:
    goes_on, threads = threading.Event(), list[threading.Thread]()
    timeouts = {"step": 0.5, "weight_update": 0.5, "close": 0.5}
    async with open_engine(timeouts=timeouts) as engine:
        backend = engine.parts.backend
        assert isinstance(backend, TransformersBackend)
        runner = backend.runner

        def step() -> None:
            threads.append(threading.current_thread())
            goes_on.wait()

        runner.scheduler.step = step  # type: ignore[method-assign]
        with pytest.raises(EngineDied, match=r"made no step for 0\.5 s, with 2 requests in flight"):
            await engine.generate([[1, 2], [3, 4]])
        assert engine.state is EngineState.FAILED
    # The engine was closed though its thread cannot be ended.
    (thread,) = threads
    assert thread.is_alive()
    goes_on.set()
    thread.join(240)
    assert not thread.is_alive()
