"""The engine page for trainers without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import warm_python
from drivetrain import (
    DrivetrainError,
    EngineDied,
    EngineStateError,
    FinishReason,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    SyncEngine,
    create_engine,
    sync_engine,
)
from drivetrain.testing import tiny_model
from drivetrain_fleet import InferenceEngineClient
from drivetrain_weight_sync import WeightSync
from engines import HANGING

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
THREAD = "drivetrain-sync-engine"


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_model("qwen2"))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[SyncEngine]:
    with sync_engine("transformers", model=model) as engine:
        yield engine


@pytest.fixture
def other(model: str) -> Iterator[SyncEngine]:
    with sync_engine("transformers", model=model) as engine:
        yield engine


def greedy_ids(engine: SyncEngine, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return engine.generate(prompt, params).completions[0].token_ids


async def awaited_ids(model: str, prompts: list[list[int]]) -> list[list[int]]:
    async with create_engine("transformers", model=model) as engine:
        return [one.token_ids for one in (await engine.generate(prompts, GREEDY)).completions]


def test_answers_are_those_of_the_page_that_is_awaited(engine: SyncEngine, model: str) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    expected = asyncio.run(awaited_ids(model, prompts))
    assert [greedy_ids(engine, prompt) for prompt in prompts] == expected
    chunks = list(engine.generate_stream(prompts[0], GREEDY))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected[0]
    assert engine.decode(expected[0]) == "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("attached", [False, True])
def test_all_chunks_of_a_sample_share_its_prompt(engine: SyncEngine, attached: bool) -> None:
    """A prompt may have a hundred thousand tokens, which are not copied for each chunk."""
    prompts = [[5, 6, 7], [8, 9]]
    with sync_engine(engine.handle()) if attached else nullcontext(engine) as asked:
        chunks = list(asked.generate_stream(prompts, GREEDY))
    for index, prompt in enumerate(prompts):
        first, *others = (chunk.prompt_token_ids for chunk in chunks if chunk.prompt_index == index)
        assert list(first) == prompt
        assert all(ids is first for ids in others)


def test_every_call_of_the_page_blocks_here() -> None:
    left_out = {
        *("teardown", "get_remote_weight_version"),
        # Steps of an update, which WeightSync takes.
        *("init_weight_update_communicator", "destroy_weight_update_communicator", "prepare_weight_update"),
        *("release_weight_sources", "start_weight_transfer", "weight_update"),
    }
    for name, call in inspect.getmembers(InferenceEngine, callable):
        if not name.startswith("_") and name not in left_out:
            mine = getattr(SyncEngine, name)
            assert not inspect.iscoroutinefunction(mine), name
            if inspect.iscoroutinefunction(call):
                assert inspect.signature(mine) == inspect.signature(call), name


def test_errors_are_those_of_the_page(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([5], {"temperature": -1})
    assert caught.value.field == "sampling_params.temperature"
    stream = engine.generate_stream([5], {"temperature": -1})
    with pytest.raises(InvalidRequest):
        next(stream)


def test_threads_may_call_at_once(engine: SyncEngine) -> None:
    prompts = [[token] for token in range(5, 21)]
    alone = [greedy_ids(engine, prompt) for prompt in prompts]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda prompt: greedy_ids(engine, prompt), prompts)) == alone


def test_a_stream_that_is_left_ends_in_the_engine(engine: SyncEngine) -> None:
    stream = engine.generate_stream([5], LONG)
    next(stream)
    engine.pause_generation("in_place")  # so that it cannot end by itself
    assert engine.stats().running == 1
    del stream
    deadline = time.monotonic() + HANGING
    while engine.stats().running:
        assert time.monotonic() < deadline
    engine.continue_generation()


def test_a_pause_in_another_thread_ends_a_call(engine: SyncEngine) -> None:
    with ThreadPoolExecutor(1) as threads:
        stream = engine.generate_stream([5], LONG)
        next(stream)
        rest = threads.submit(list, stream)
        engine.pause_generation("abort")
        last = rest.result(HANGING)[-1]
    engine.continue_generation()
    assert last.completion is not None
    assert last.completion.finish_reason is FinishReason.ABORT


def test_a_trainer_pushes_its_weights(other: SyncEngine) -> None:
    changed = tiny_model("qwen2", seed=1)
    sync = WeightSync.connect(AutoModelForCausalLM.from_pretrained(changed), other.engine)
    other.run(sync.push(version="step-1"))
    other.run(sync.close())
    assert other.get_weight_version() == "step-1"
    assert [greedy_ids(other, [5, 6, 7])] == asyncio.run(awaited_ids(str(changed), [[5, 6, 7]]))


def test_a_call_in_the_engines_own_thread_is_refused(engine: SyncEngine) -> None:
    async def callback() -> None:
        engine.generate([5], GREEDY)

    async def ending() -> None:
        engine.teardown()

    for work in (callback, ending):
        with pytest.raises(EngineStateError, match="own thread"):
            engine.run(work())
    assert greedy_ids(engine, [5]), "it serves on"


def test_an_engine_that_was_closed_is_refused(model: str) -> None:
    engine = sync_engine("transformers", model=model)
    with engine:
        stream = engine.generate_stream([5], LONG)
        next(stream)
        waiting = ThreadPoolExecutor(1).submit(list, stream)
    last = waiting.result(HANGING)[-1]
    assert last.completion is not None
    assert last.completion.finish_reason is FinishReason.ABORT
    engine.teardown()
    with pytest.raises(EngineStateError, match="closed"):
        engine.generate([5], GREEDY)


def test_an_engine_that_died_says_so_in_every_call(model: str) -> None:
    with sync_engine("transformers", model=model, isolation="process") as engine:
        with ThreadPoolExecutor(3) as threads:
            waiting: list[Future[Any]] = [
                threads.submit(engine.generate, [5], LONG),
                threads.submit(list, engine.generate_stream([5], LONG)),
            ]
            while engine.stats().running < len(waiting):
                time.sleep(0.01)
            assert engine.engine.host_pid is not None
            os.kill(engine.engine.host_pid, signal.SIGKILL)
            for one in waiting:
                with pytest.raises(EngineDied, match="was killed by SIGKILL"):
                    one.result(HANGING)
        for _ in range(2):
            for call in (lambda: engine.generate([5], GREEDY), lambda: next(engine.generate_stream([5])), engine.stats):
                with pytest.raises(EngineDied, match="was killed by SIGKILL"):
                    call()
            engine.teardown()


def test_an_engine_that_does_not_start_leaves_no_thread(tmp_path: Path) -> None:
    before = [thread for thread in threading.enumerate() if thread.name == THREAD]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DrivetrainError, match="tokenizer"), sync_engine("transformers", model=str(tmp_path)):
        pass
    assert [thread for thread in threading.enumerate() if thread.name == THREAD] == before


def test_a_fleet_and_a_handle_block_as_well(model: str, other: SyncEngine) -> None:
    with sync_engine(other.handle()) as attached:
        assert greedy_ids(attached, [5, 6]) == greedy_ids(other, [5, 6])
    assert greedy_ids(other, [5, 6]), "the owner serves on"
    fleet = InferenceEngineClient([create_engine("transformers", model=model) for _ in range(2)])
    with sync_engine(fleet) as two:
        assert greedy_ids(two, [5, 6]) == greedy_ids(other, [5, 6])


def test_what_it_cannot_take_is_refused(engine: SyncEngine, model: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sync_engine(create_engine("transformers", model=model), dtype="float32")
    assert caught.value.field == "dtype"
    with pytest.raises(EngineStateError, match="another event loop"):
        sync_engine(engine.engine)


def test_ctrl_c_ends_the_call_and_the_engine(model: str) -> None:
    script = (
        "import os, signal, sys, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from drivetrain import SamplingParams, sync_engine\n"
        "with sync_engine('transformers', model=sys.argv[1]) as engine:\n"
        "    def interrupt():\n"
        "        while not engine.stats().running: pass\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Thread(target=interrupt, daemon=True).start()\n"
        "    try: engine.generate([5], SamplingParams(max_new_tokens=1000, ignore_eos=True))\n"
        "    except KeyboardInterrupt: print('interrupted', engine.generate([5], {'max_new_tokens': 2}) is not None)\n"
    )
    done = warm_python.run("-c", script, model, timeout=HANGING * 3)
    assert (done.returncode, done.stdout) == (0, "interrupted True\n"), done.stderr


OPEN = {
    "an inline engine": ["inline()"],
    "a fleet": ["sync_engine(fleet())"],
    "an attached engine": ["inline()", "sync_engine(made[0].handle())"],
    "an attached fleet": ["sync_engine(fleet())", "sync_engine(made[0].handle())"],
}
"""Expressions that make engines, of which the last is asked."""


@pytest.mark.parametrize("made", OPEN.values(), ids=OPEN)
def test_the_interpreter_ends_while_engines_are_in_the_middle_of_a_step(model: str, made: list[str]) -> None:
    script = (
        "import sys, threading\n"
        "from drivetrain import EngineError, SamplingParams, create_engine, sync_engine\n"
        "from drivetrain_fleet import InferenceEngineClient\n"
        "def one(): return create_engine('transformers', model=sys.argv[1])\n"
        "def inline(): return sync_engine(one())\n"
        "def fleet(): return InferenceEngineClient([one(), one()])\n"
        "made = []\n"
        f"for make in {made}:\n"
        "    made.append(eval(make))\n"
        "    made[-1].__enter__()\n"
        "engine = made.pop()\n"
        "def ask():\n"
        "    try: engine.generate([[5], [6], [7]], SamplingParams(max_new_tokens=1000, ignore_eos=True))\n"
        "    except EngineError: pass\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "while not engine.stats().running: pass\n"
    )
    done = warm_python.run("-c", script, model, timeout=HANGING * 3)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_serves_on_when_the_interpreter_of_a_holder_ends(model: str, other: SyncEngine) -> None:
    script = (
        "import sys, threading\n"
        "from drivetrain import EngineError, EngineHandle, SamplingParams, sync_engine\n"
        "engine = sync_engine(EngineHandle(*sys.argv[1:]))\n"
        "def ask():\n"
        "    try: engine.generate([5], SamplingParams(max_new_tokens=1000, ignore_eos=True))\n"
        "    except EngineError: pass\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "while not engine.stats().running: pass\n"
    )
    handle = other.handle()
    done = warm_python.run("-c", script, handle.address, handle.key, timeout=HANGING * 3)
    assert (done.returncode, done.stderr) == (0, "")
    deadline = time.monotonic() + HANGING
    while other.stats().running:  # the holder's request is aborted
        assert time.monotonic() < deadline
    assert greedy_ids(other, [5])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_leaves_the_block_of_its_parents_engine(model: str) -> None:
    with sync_engine("transformers", model=model) as engine:
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            status = 1
            try:
                engine.__exit__(None, None, None)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert greedy_ids(engine, [5])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_is_refused_instead_of_waiting(engine: SyncEngine) -> None:
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        try:
            engine.generate([5], GREEDY)
        except EngineStateError as error:
            os._exit(0 if "attach to engine.handle()" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert greedy_ids(engine, [5])


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_an_engine_in_two_event_loops_is_refused_by_name(model: str, isolation: str) -> None:
    engine = create_engine("transformers", model=model, isolation=isolation)
    own = asyncio.new_event_loop()
    own.run_until_complete(engine.start())
    calls = [
        lambda: engine.generate([5], GREEDY),
        lambda: engine.load_weights_from_disk(model, "2"),
        engine.pause_generation,
        engine.teardown,
    ]
    for call in calls:

        async def elsewhere(call: Callable[[], Coroutine[Any, Any, object]] = call) -> None:
            with pytest.raises(EngineStateError, match="another event loop"):
                await call()

        asyncio.run(elsewhere())
    assert own.run_until_complete(engine.generate([5], GREEDY)).completions[0].token_ids, "it serves on"
    own.run_until_complete(engine.teardown())
    own.close()
