"""Engines that start, describe themselves, fail and close."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from safetensors.torch import load_file, save_file

from drivetrain.backend.base import EngineStats
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.engine.validation import MODE_CAPABILITY
from drivetrain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStartError,
    EngineStateError,
    InvalidConfig,
    InvalidRequest,
    UnsupportedCapability,
)
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation, Task
from drivetrain.types.outputs import Completion, FinishReason, VersionSpan
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.leftovers import Holdings, check_nothing_left, temporary_folder
from drivetrain_conformance.assertions.memory_use import (
    held_by_this_process,
    parameter_bytes,
)
from drivetrain_conformance.assertions.pooled_inputs import SHORT_CONTEXT
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_greedy, check_same
from drivetrain_conformance.assets.made_adapters import make_adapter
from drivetrain_conformance.assets.served_models import ModelKind, copy_model
from drivetrain_conformance.cases.lifecycle.precision import check_dtype
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import (
    Bench,
    NoOracle,
    TooLate,
    end_requests,
    in_time,
    ordinary_ids,
    until_idle,
)
from drivetrain_conformance.harness.time_limits import LIMIT, result_of, slowdown, until_ended, within
from drivetrain_conformance.references.oracle import log_softmax

_AMPLE: Final = 3600.0
"""A timeout in seconds that no call reaches."""
QUICK: Final = 5.0
"""Seconds within which an engine may start although its deadline passed: the event loop had no time to look."""
_TRIES: Final = 10
"""Times that requests are asked until enough was seen of them: on a busy machine they may end unseen."""
_STEPS: Final = 4
"""Steps over which prompts must be seen to begin: more than it takes if they merely arrive one after another."""
_LASTING: Final = 60
"""Length of a request beside which others wait for their turn."""
_INPUTS: Final = (16, 64, 256, 1024)
"""Inputs to embed or score in one call until it outlasts a timeout: an answer that comes at once is kept."""
SHORT: Final = SamplingParams(max_new_tokens=4, temperature=0)


# Starting -------------------------------------------------------------------------------------------------------------


@case(own_engine=True)
async def a_life(bench: Bench) -> None:
    """From creation to teardown an engine reports its state correctly, and refuses calls that the state rules out.

    Meanwhile it obeys its configuration: dtype, context length, prompt tokens of a step, concurrent requests with and
    without an adapter, tokenizer and first version. Without trust_remote_code, code beside the model is not run.
    """
    stages: list[tuple[str, str]] = []
    threads: set[int] = set()
    model, code_ran = _with_code_beside_it(bench)
    engine = bench.create(model=model, **_settings_that_are_taken(bench))

    def note(stage: str) -> None:
        stages.append((stage, engine.describe().state))
        threads.add(threading.get_ident())

    _check_state(engine, EngineState.CREATED)
    await _everything_is_refused(bench, engine, "created")
    await engine.start(note)
    try:
        assert threads <= {threading.get_ident()}, "the progress callback was called in another thread"
        assert stages, "the progress callback was never called"
        assert all(stage for stage, _ in stages)
        assert {state for _, state in stages} == {"starting"}
        _check_state(engine, EngineState.READY)
        assert not engine.is_paused
        assert engine.status.asleep == frozenset()
        assert engine.get_weight_version() == engine.config.weight_version
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        await _refused(engine.start(), "ready")
        _check_state(engine, EngineState.READY)
        (completion,) = await bench.greedy([bench.prompt(engine=engine)], 4, engine)
        assert 0 < len(completion.token_ids) <= 4
        await _check_first_version(engine, completion)
        assert not code_ran.exists(), "code beside the model was run, where trust_remote_code is False"
        await check_dtype(bench, engine)
        await _check_context_length(bench, engine)
        await _check_long_prompt(bench, engine)
        await _check_prompts_of_a_step(bench, engine)
        await _check_stop_string(bench, engine)
        await _check_logprobs_mode(bench, engine)
        await _check_requests_at_once(bench, engine)
        if engine.supports(Capability.LORA):
            adapter = make_adapter(bench.model, bench.folder("adapter"), seed=1)
            await engine.load_lora_adapter("a", str(adapter.path))
            await _check_requests_at_once(bench, engine, lora="a")
            await _check_priorities_with_an_adapter(bench, engine)
    finally:
        async with within():
            await engine.teardown()
    for _ in range(2):
        _check_state(engine, EngineState.CLOSED)
        await _everything_is_refused(bench, engine, "closed")
        await _refused(engine.start(), "closed")
        async with within():
            await engine.teardown()
    await _check_engine_kwargs(bench)


_UNKNOWN: Final = "an_argument_that_no_engine_has"
_SECRET: Final = "hf-0123456789"


async def _check_engine_kwargs(bench: Bench) -> None:
    """Check that engine_kwargs reach the engine: one that it does not know is refused by name, at the latest there.

    The error does not repeat a token among them.
    """
    try:
        engine = bench.create(engine_kwargs={_UNKNOWN: 1, "hf_token": _SECRET})
    except (InvalidConfig, UnsupportedCapability):
        return  # another case checks that such a refusal names the field
    said = ""
    try:
        await engine.start()
        await engine.teardown()
    except (InvalidConfig, EngineStartError) as refusal:
        said = str(refusal)
    assert said, f"it started with engine_kwargs={{{_UNKNOWN!r}: 1}}, so they do not reach the engine"
    assert _UNKNOWN in said, f"the error does not name the argument {_UNKNOWN}: {said}"
    assert _SECRET not in said, f"the error repeats what may be a key: {said}"


_CONTEXT: Final = 701
"""Not a multiple of any engine's block size, and above the cap that some would apply."""
_MOST: Final = 20
"""Above 8 and 16, which a limit of the engine's own may be."""
_SETTINGS: Final[Mapping[str, object]] = {
    "weight_version": "of-the-configuration",
    "context_length": _CONTEXT,
    "max_num_batched_tokens": 128,
    "max_num_seqs": _MOST,
    "dtype": "bfloat16",
    "enable_lora": True,
    "logprobs_mode": "raw",
}


def _settings_that_are_taken(bench: Bench) -> dict[str, object]:
    """Return the ``_SETTINGS`` that the backend accepts; another case checks that refusals name the field."""
    taken: dict[str, object] = {}
    for name, value in {**_SETTINGS, "tokenizer": str(_with_another_tokenizer(bench))}.items():
        with suppress(InvalidConfig, UnsupportedCapability):
            bench.create(**{name: value})
            taken[name] = value
    own = json.loads((bench.model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    if isinstance(own, int) and own < _CONTEXT:
        taken.pop("context_length", None)
    return taken


def _with_code_beside_it(bench: Bench) -> tuple[Path, Path]:
    """Return a copy of the model with code that trust_remote_code would run, and the file that the code writes."""
    folder, ran = _copied(bench, "code"), bench.folder("ran") / "ran"
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    (name,) = config["architectures"]
    file.write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": f"beside.{name}"}}), encoding="utf-8")
    code = f"from transformers import {name}\n\nopen({str(ran)!r}, 'w').close()\n"
    (folder / "beside.py").write_text(code, encoding="utf-8")
    return folder, ran


def _with_another_tokenizer(bench: Bench) -> Path:
    """Copy the model without its weights; each letter and digit of its vocabulary has the id of the next one there."""
    folder = bench.folder("tokenizer")
    copy_model(bench.model, folder, without="*.safetensors")
    file = folder / "tokenizer.json"
    if file.is_file():
        made = json.loads(file.read_text(encoding="utf-8"))
        vocab = made["model"].get("vocab")
        if isinstance(vocab, dict):
            letters = [text for text in vocab if len(text) == 1 and text.isascii() and text.isalnum()]
            vocab |= dict(zip(letters, [vocab[text] for text in [*letters[1:], *letters[:1]]], strict=True))
            file.unlink()  # it may be read-only
            file.write_text(json.dumps(made), encoding="utf-8")
    return folder


async def _check_prompts_of_a_step(bench: Bench, engine: InferenceEngine) -> None:
    """Check that prompts of more tokens than max_num_batched_tokens begin over many steps, not all in one.

    A look at the engine may miss steps, so the prompts are asked again until enough steps were seen.
    """
    most, rows = engine.config.max_num_batched_tokens, engine.config.max_num_seqs
    if most is None or rows is None:
        return
    steps: list[int] = []
    while len(steps) < _TRIES:
        steps.append(await _steps_to_begin(engine, bench.prompts(rows, most - 4, engine)))
        if steps[-1] >= _STEPS:
            return
    raise AssertionError(
        f"{rows} prompts of {most - 4} tokens were seen to begin in {steps} steps, in as many trials; "
        f"max_num_batched_tokens={most} allows one prompt in each step"
    )


async def _steps_to_begin(engine: InferenceEngine, prompts: Sequence[list[int]]) -> int:
    """Return in how many steps the prompts were seen to begin, by the engine's stats or by the tokens that come.

    Some engines make no further tokens before all prompts have begun; others make one of each meanwhile.
    """
    params = SamplingParams(max_new_tokens=_LASTING, temperature=0, ignore_eos=engine.supports(Capability.IGNORE_EOS))
    lead = 0

    async def ask() -> None:
        nonlocal lead
        if not engine.supports(Capability.STREAMING):
            await engine.generate(list(prompts), params)
            return
        made: Counter[int] = Counter()
        async with aclosing(engine.generate_stream(list(prompts), params)) as chunks:
            async for chunk in chunks:
                made[chunk.prompt_index] += max(1, len(chunk.token_ids))
                if len(made) == len(prompts):
                    lead = max(made.values())
                    return

    asking = asyncio.create_task(ask())
    running: set[int] = set()
    while not asking.done():
        running.add((await engine.stats()).running)
        await asyncio.sleep(0)
    await asking
    return max(lead, len(running - {0, len(prompts)}))


async def _check_stop_string(bench: Bench, engine: InferenceEngine) -> None:
    """Check that a stop string is looked for in the text of the configuration's tokenizer, not the model's."""
    prompt, ids = bench.prompt(engine=engine), ordinary_ids(engine)
    letter = next((one for one in ids if (text := engine.decode([one])).isascii() and text.isalnum()), None)
    if letter is None or not (engine.supports(Capability.STOP_STRINGS) and engine.supports(Capability.LOGIT_BIAS)):
        return
    stop = engine.decode([letter])
    asked = SamplingParams(max_new_tokens=4, temperature=0, logit_bias={letter: 100.0}, stop=(stop,))
    (completion,) = (await engine.generate(prompt, asked)).completions
    assert completion.matched_stop == stop, (
        f"with tokenizer={engine.config.tokenizer}, the stop string {stop!r} did not end the tokens "
        f"{completion.token_ids}, whose text is {engine.decode(completion.token_ids)!r}"
    )


async def _check_logprobs_mode(bench: Bench, engine: InferenceEngine) -> None:
    """Check that a request that names no logprobs mode has logprobs of the configuration's."""
    mode = engine.config.logprobs_mode
    if not engine.supports(MODE_CAPABILITY[mode]) or not engine.supports(Capability.TOP_K):
        return
    prompt = bench.prompt(engine=engine)
    asked = {"max_new_tokens": 4, "temperature": 0.5, "top_k": 1, "logprobs": 0}
    (unnamed,) = (await engine.generate(prompt, asked)).completions
    (named,) = (await engine.generate(prompt, {**asked, "logprobs_mode": mode})).completions
    assert unnamed.logprobs_mode is mode, (
        f"logprobs_mode={mode.value!r} was configured, and logprobs are {unnamed.logprobs_mode}"
    )
    assert unnamed.logprobs is not None
    assert named.logprobs is not None
    off = np.abs(np.subtract(unnamed.logprobs, named.logprobs)).max()
    assert off <= bench.tolerance(engine), f"a logprob is {off:.3g} nats from that of a request that names the mode"


async def _check_first_version(engine: InferenceEngine, completion: Completion) -> None:
    """Check that the first weights have the configuration's version."""
    spans = (VersionSpan(engine.config.weight_version, 0, len(completion.token_ids)),)
    if engine.supports(Capability.VERSION_SPANS):
        assert completion.weight_versions == spans, f"the first tokens carry {completion.weight_versions}"


async def _check_context_length(bench: Bench, engine: InferenceEngine) -> None:
    """Check that a prompt that leaves room for one token is served whole, and a longer one is refused."""
    length = engine.config.context_length
    if length is None:
        return
    assert engine.model_info.context_length == length, (
        f"context_length={length} was asked for, and it is {engine.model_info.context_length}"
    )
    prompt = bench.prompt(length - 1, engine)
    asked = SamplingParams(
        max_new_tokens=1, temperature=0, prompt_logprobs=0 if engine.supports(Capability.PROMPT_LOGPROBS) else None
    )
    (completion,) = (await engine.generate(prompt, asked)).completions
    assert completion.prompt_token_ids == prompt
    with suppress(NoOracle):
        check_greedy(bench, completion, engine)
        rows = log_softmax(bench.oracle().logits(prompt))
        found = zip((completion.prompt_logprobs or [])[1:], rows, prompt[1:], strict=False)
        worst = max((abs((value or 0.0) - float(row[token])) for value, row, token in found), default=0.0)
        assert worst <= bench.tolerance(engine), f"a logprob of a long prompt is {worst:.3g} nats off"
    with refused(InvalidRequest, field="prompts[0]", naming=f"{length} tokens"):
        await engine.generate(bench.prompt(length, engine))


async def _check_long_prompt(bench: Bench, engine: InferenceEngine) -> None:
    """Check the answer to a prompt of several steps. Without prompt logprobs, engines take other ways through it."""
    prompt = bench.prompt(min(_CONTEXT, engine.model_info.context_length) - 8, engine)
    for completion in await bench.greedy([prompt], 8, engine):
        with suppress(NoOracle):
            check_greedy(bench, completion, engine)


async def _check_requests_at_once(bench: Bench, engine: InferenceEngine, lora: str | None = None) -> None:
    """Check that max_num_seqs requests and no more run at once, by the engine's stats and by when tokens arrive."""
    most = engine.config.max_num_seqs
    if most is None:
        return
    prompts = bench.prompts(most + 3, engine=engine)
    params = SamplingParams(max_new_tokens=_LASTING, temperature=0, ignore_eos=engine.supports(Capability.IGNORE_EOS))
    if engine.supports(Capability.STREAMING):
        asking = asyncio.create_task(_most_that_begin_at_once(engine, prompts, params, lora))
    else:
        asking = asyncio.create_task(_ask_all(engine, prompts, params, lora))
    counts: list[EngineStats] = []
    while not asking.done():
        counts.append(await engine.stats())
        await asyncio.sleep(0.002)
    at_once = asking.result()
    for stats in counts:
        assert stats.running <= most, f"{stats.running} requests ran at once, where max_num_seqs is {most}"
        assert stats.running + stats.waiting <= len(prompts), f"of {len(prompts)} requests it counts {stats}"
    assert at_once <= most, f"{at_once} streams made their first tokens at once, where max_num_seqs is {most}"
    together = await _most_seen_running(engine, prompts[:most], lora)
    assert together == most, f"only {together} of {most} requests ran at once, where max_num_seqs is {most}"


async def _check_priorities_with_an_adapter(bench: Bench, engine: InferenceEngine) -> None:
    """Check that waiting requests which use the adapter ``a`` begin in the order of their priorities, highest first.

    Long requests fill every place of the batch but one, so that the waiting requests run one after another.
    """
    needed = (Capability.PRIORITY, Capability.IGNORE_EOS)
    if engine.config.max_num_seqs is None or not all(map(engine.supports, needed)):
        return
    lasting = SamplingParams(max_new_tokens=6 * _LASTING, temperature=0, ignore_eos=True)
    short = lasting.model_copy(update={"max_new_tokens": 12})
    most, priorities = engine.config.max_num_seqs, (-1, 2, 0, 1)
    for _ in range(_TRIES):
        ended: list[int] = []

        async def ask(priority: int, params: SamplingParams, lora: str | None) -> None:
            await engine.generate(bench.prompt(engine=engine), params, priority=priority, lora=lora)
            ended.append(priority)  # noqa: B023 - awaited before the next round

        others = asyncio.create_task(engine.generate(bench.prompts(most - 1, engine=engine), lasting, priority=9))
        last = asyncio.create_task(ask(9, lasting.model_copy(update={"max_new_tokens": _LASTING}), None))
        asking: list[asyncio.Task[None]] = []
        try:
            while not last.done() and (await engine.stats()).running < most:  # noqa: ASYNC110 - it may be a process
                await asyncio.sleep(0.002)
            asking += [asyncio.create_task(ask(priority, short, "a")) for priority in priorities]
            while not last.done() and (await engine.stats()).waiting < len(priorities):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            waited = not last.done()
            await asyncio.gather(last, *asking)
            waited = waited and not others.done()
        finally:
            await end_requests(engine, others)
            await asyncio.gather(last, *asking)
        if waited:
            assert ended == [9, *sorted(priorities, reverse=True)], (
                f"with an adapter, requests of priorities {priorities} were answered in the order {ended[1:]}"
            )
            return
    raise TooLate("the requests that run ended before others had waited for them")


async def _most_seen_running(engine: InferenceEngine, prompts: Sequence[list[int]], lora: str | None) -> int:
    """Return how many of these requests run at once. They are asked again if they end before all were seen to run."""
    params = SamplingParams(
        max_new_tokens=4 * _LASTING, temperature=0, ignore_eos=engine.supports(Capability.IGNORE_EOS)
    )
    most = tries = 0
    while most < len(prompts) and tries < _TRIES:
        tries += 1
        asking = asyncio.create_task(engine.generate(list(prompts), params, lora=lora))
        try:
            while not asking.done() and most < len(prompts):
                most = max(most, (await engine.stats()).running)
                await asyncio.sleep(0.002)
        finally:
            await end_requests(engine, asking)
    return most


async def _most_that_begin_at_once(
    engine: InferenceEngine, prompts: Sequence[list[int]], params: SamplingParams, lora: str | None
) -> int:
    """Return the largest number of streams that had some, but less than half, of their tokens at one time."""
    made: Counter[int] = Counter()
    most = 0
    async for chunk in engine.generate_stream(list(prompts), params, lora=lora):
        made[chunk.prompt_index] += _LASTING if chunk.completion is not None else len(chunk.token_ids)
        most = max(most, sum(0 < count < _LASTING / 2 for count in made.values()))
    return most


async def _ask_all(
    engine: InferenceEngine, prompts: Sequence[list[int]], params: SamplingParams, lora: str | None
) -> int:
    await engine.generate(list(prompts), params, lora=lora)
    return 0


@case()
async def an_engine_that_was_never_started_can_be_closed(bench: Bench) -> None:
    """Tearing down an engine that was never started raises no error, and closes it."""
    engine = bench.create()
    await engine.teardown()
    _check_state(engine, EngineState.CLOSED)
    await _refused(engine.start(), "closed")


@case()
async def it_describes_itself(bench: Bench) -> None:
    """The description agrees with the engine's properties, and can be written as JSON."""
    engine = bench.engine
    told = engine.describe()
    assert told.backend == engine.config.backend
    assert told.isolation == engine.isolation.value
    assert told.state == "ready"
    assert told.weight_version == engine.get_weight_version()
    assert told.capabilities == tuple(item.value for item in Capability if engine.supports(item))
    assert told.model == engine.model_info
    assert {"drivetrain", "python"} <= set(told.versions)
    assert all(told.versions.values())
    assert told.config["model"] == engine.config.model
    assert json.loads(json.dumps(told.config)) == told.config
    assert engine.model_info.vocab_size > 0
    assert engine.model_info.context_length > 0
    sizes = (engine.tp_size, engine.pp_size, engine.dp_size, engine.ep_size)
    assert all(type(size) is int and size >= 1 for size in sizes)
    assert (engine.host_pid is not None) is bench.is_hosted
    if engine.host_pid is not None:
        assert engine.host_pid != os.getpid()
        assert psutil.pid_exists(engine.host_pid)


@case(own_engine=True, slow=True)
async def off_the_main_thread(bench: Bench) -> None:
    """An engine starts and serves off the main thread, leaving signal handlers and GPU variables unchanged.

    The engine is started with dtype="float16" if it accepts that, and must then compute in it.
    """
    numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    handlers = [signal.getsignal(number) for number in numbers]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")

    async def use() -> int:
        async with bench.open(**_in_float16(bench)) as engine:
            await check_dtype(bench, engine)
            (completion,) = await bench.greedy([bench.prompt(engine=engine)], 4, engine)
            return len(completion.token_ids)

    assert await asyncio.to_thread(lambda: asyncio.run(use())) > 0
    changed = [
        signal.Signals(number).name
        for number, handler in zip(numbers, handlers, strict=True)
        if signal.getsignal(number) != handler
    ]
    assert not changed, f"the handlers of {', '.join(changed)} were replaced"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def _in_float16(bench: Bench) -> dict[str, object]:
    """Return the setting of float16 if the backend accepts it; a given model's activations may overflow in it."""
    setting: dict[str, object] = {"dtype": "float16"}
    if bench.models.is_given(ModelKind.TEXT):
        return {}
    try:
        bench.create(**setting)
    except (InvalidConfig, UnsupportedCapability):
        return {}
    return setting


# Starts that fail -----------------------------------------------------------------------------------------------------


@case(own_engine=True)
async def a_model_that_is_cut_off_is_not_served(bench: Bench) -> None:
    """A start from checkpoint files that are truncated or lack weights fails with EngineStartError, leaving nothing."""
    folders = itertools.cycle([_cut_off(bench), _without_a_weight(bench)])

    async def start() -> None:
        folder = next(folders)
        engine = bench.create(model=folder)
        with suppress(EngineStartError):
            await engine.start()
            parameters = engine.model_info.parameters
            await engine.teardown()
            assert parameters == 0, f"it started from {folder}, with {parameters} parameters though some are missing"
            return
        await _is_failed(engine)

    await _leaves_nothing(bench, start)


@case(own_engine=True)
async def a_folder_without_a_model_is_refused(bench: Bench) -> None:
    """A start from an empty folder fails, naming what is missing, and leaves nothing.

    A model folder that holds a FIFO is refused before the engine reads any of its files.
    """
    empty, endless = bench.folder("empty"), bench.folder("endless")
    os.mkfifo(endless / "config.json")

    async def start() -> None:
        engine = bench.create(model=empty)
        with refused(InvalidConfig, field="tokenizer", naming=str(empty)):
            await engine.start()
        await _is_failed(engine)

    await _leaves_nothing(bench, start)
    with refused(InvalidConfig, otherwise="a model folder with a FIFO is taken"):
        await bench.create(model=endless).start()


@case(own_engine=True)
async def a_start_that_takes_too_long_is_given_up(bench: Bench) -> None:
    """A start that times out raises DeadlineExceeded, saying what was waited for, and leaves nothing."""

    async def start() -> None:
        engine = bench.create(timeouts={"start": 0.001, "close": 1.0})
        late: DeadlineExceeded | None = None
        began = time.monotonic()
        try:
            await engine.start()
        except DeadlineExceeded as error:
            late = error
        took = time.monotonic() - began
        if late is None:
            # An engine that was ready before the event loop looked at the deadline may serve.
            await engine.teardown()
            assert took / slowdown() < QUICK, f"it started after {took:.1f} s, where it had a millisecond"
        else:
            assert "to start" in str(late) or "the tokenizer" in str(late), (
                f"it does not say what was waited for: {late}"
            )
            await _is_failed(engine)

    await _leaves_nothing(bench, start)


@case(own_engine=True)
async def a_start_that_is_cancelled_leaves_nothing(bench: Bench) -> None:
    """Cancelling a start, sooner or later, leaves nothing behind."""
    moments = iter((0.1, 0.0, 0.3))

    async def start() -> None:
        engine = bench.create()
        starting = asyncio.create_task(engine.start())
        await asyncio.wait([starting], timeout=next(moments))
        starting.cancel()
        assert await until_ended(starting), "a start that was cancelled does not end"
        if starting.cancelled():
            await _is_failed(engine)
        else:
            await engine.teardown()

    await _leaves_nothing(bench, start, times=3)


# Ending ---------------------------------------------------------------------------------------------------------------


@case(own_engine=True, slow=True)
async def two_in_a_row_leave_nothing(bench: Bench) -> None:
    """Engines in one process one after another answer alike and leave no process, thread, file, port or memory.

    Large ones show that the weights of an engine without a process of its own are freed.
    A child process that is not the engine's lives on.
    """
    answers: list[list[Completion]] = []
    draws: list[list[Completion]] = []
    prompts: list[list[int]] = []

    async def live() -> None:
        async with bench.open() as engine:
            prompts.extend(() if prompts else bench.prompts(3, engine=engine))
            answers.append(await bench.greedy(prompts, engine=engine))
            draws.append((await engine.generate(prompts, SamplingParams(max_new_tokens=12))).completions)
            if engine.supports(Capability.SAVE_SHARDED):
                await engine.save_sharded_model(str(bench.folder("saved")))

    bystander = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    try:
        await _leaves_nothing(bench, live)
        assert bystander.returncode is None, "the engine ended a process that was not its own"
    finally:
        if bystander.returncode is None:
            bystander.kill()
        await bystander.wait()
    assert [c.token_ids for c in answers[0]] == [c.token_ids for c in answers[1]]
    same = [c.token_ids for c in draws[0]] == [c.token_ids for c in draws[1]]
    assert not same, "two engines drew the same tokens, though neither request nor configuration gives a seed"
    if bench.create().isolation is Isolation.INLINE:
        await _check_weights_are_freed(bench)


async def _check_weights_are_freed(bench: Bench) -> None:
    """Check that this process holds no more memory after a second large engine than after the first."""
    held: list[int] = []
    size = 0
    for _ in range(2):
        async with bench.open(model=bench.model_of(ModelKind.LARGE)) as engine:
            await bench.greedy([bench.prompt(engine=engine)], 2, engine)
            size = parameter_bytes(engine)
        held.append(held_by_this_process())
    more = held[1] - held[0]
    assert more < max(size // 2, 64 * 2**20), (
        f"a closed engine left {more / 1e6:.0f} MB, and its weights were {size / 1e6:.0f} MB"
    )


@case(Capability.ABORT, own_engine=True)
async def closing_returns_requests_in_flight(bench: Bench) -> None:
    """Requests in flight when the engine is closed come back in time, aborted, with their tokens so far."""
    async with bench.open() as engine:
        await engine.abort("an id that no request has")
        params = SamplingParams(
            max_new_tokens=800, temperature=0, ignore_eos=engine.supports(Capability.IGNORE_EOS), n=2
        )
        async with bench.in_flight(bench.prompts(2, engine=engine), params, engine) as task:
            async with within():
                await asyncio.gather(engine.teardown(), engine.teardown())
            completions = (await result_of(task)).completions
    with in_time(*completions):
        assert [completion.finish_reason for completion in completions] == [FinishReason.ABORT] * 4
    lengths = [len(completion.token_ids) for completion in completions]
    assert max(lengths) < 800, f"aborted, and whole: {lengths} of 800 tokens"
    assert any(lengths), "none has a token, though at least one was being generated"  # others may have waited
    await _everything_is_refused(bench, engine, "closed")


@case(own_engine=True, slow=True)
async def closing_never_hangs(bench: Bench) -> None:
    """Closing ends in time whatever was just requested. Every open call ends too, with an answer or a named error.

    Calls without a timeout of their own end by ``timeouts.generate``.
    """
    params = SamplingParams(max_new_tokens=200)
    async with bench.open(timeouts={"generate": 1e-9}) as engine:
        await _check_configured_timeout(bench, engine, params)
        prompts = bench.prompts(6, engine=engine)
        tasks = [asyncio.create_task(engine.generate(prompt, params, timeout=_AMPLE)) for prompt in prompts]
        await asyncio.sleep(0.01)
        async with within():
            await engine.teardown()
            results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(error, EngineError) for error in errors), f"{errors}"
    for task in (Task.EMBED, Task.REWARD):
        await _check_configured_timeout_of_numbers(bench, task)


async def _check_configured_timeout(bench: Bench, engine: InferenceEngine, params: SamplingParams) -> None:
    """Check that every call without a timeout ends by the configured one, which is too short for an answer."""
    prompt = bench.prompt(engine=engine)

    async def streamed(timeout: float | None = None) -> None:
        async with aclosing(engine.generate_stream(prompt, params, timeout=timeout)) as chunks:
            async for _ in chunks:
                pass

    calls: dict[str, Callable[[], Coroutine[object, object, object]]] = {
        "generate()": lambda: engine.generate(prompt, params),
        "generate() of messages": lambda: engine.generate([{"role": "user", "content": "Who rows?"}], params),
    }
    if engine.supports(Capability.STREAMING):
        calls["generate_stream()"] = streamed
    if engine.supports(Capability.SESSIONS):
        session = await engine.open_session(512)
        calls["generate_with_session()"] = lambda: engine.generate_with_session(session, prompt, params)
    if engine.supports(Capability.SCORE_TOKENS) and engine.supports(Capability.SCORE_AT):
        calls["compute_logprobs()"] = lambda: engine.compute_logprobs([prompt])
    for name, call in calls.items():
        with refused(DeadlineExceeded, otherwise=f"a call of {name} that outlasts timeouts.generate is answered"):
            await call()
    assert (await engine.generate(prompt, SHORT, timeout=_AMPLE)).completions[0].token_ids
    if engine.supports(Capability.STREAMING):
        await streamed(timeout=_AMPLE)


async def _check_configured_timeout_of_numbers(bench: Bench, task: Task) -> None:
    """Check the same of encode() or score(), which take no timeout of their own, where the backend has them."""
    needed = Capability.EMBED if task is Task.EMBED else Capability.REWARD_SCORE
    model = bench.model_of(ModelKind.TEXT if task is Task.EMBED else ModelKind.REWARD)
    fields: dict[str, object] = {"task": task, "model": model, "timeouts": {"generate": 1e-9}}
    try:
        engine = bench.create(**fields)
    except (InvalidConfig, UnsupportedCapability):
        return
    if not engine.supports(needed):
        return
    async with engine:
        for count in _INPUTS:
            inputs = bench.prompts(count, SHORT_CONTEXT // 2, engine)
            try:
                await (engine.encode(inputs) if task is Task.EMBED else engine.score(inputs, inputs))
            except DeadlineExceeded:
                break
        else:
            name = "encode()" if task is Task.EMBED else "score()"
            raise AssertionError(f"a call of {name} that outlasts timeouts.generate is answered")
        await until_idle(engine)


# Profile --------------------------------------------------------------------------------------------------------------


@case(Capability.PROFILE)
async def a_profile_is_a_trace_that_a_viewer_opens(bench: Bench) -> None:
    """A profile leaves a trace file with events in the given folder, and can be recorded again.

    A place where no folder can be made is refused at once.
    """
    engine = bench.engine
    with refused(InvalidRequest, field="directory"):
        await engine.start_profile("/dev/null/nowhere")
    prompts = bench.prompts(2)
    before = await bench.greedy(prompts)
    paths: set[Path] = set()
    for _ in range(2):
        folder = bench.folder("profile")
        await engine.start_profile(str(folder))
        during = await bench.greedy(prompts)
        path = Path(await engine.stop_profile())
        events = _trace_events(path, folder)
        assert events > 10, f"the trace holds {events} events of {len(prompts)} requests"
        paths.add(path)
        check_same(bench, during, before)
    assert len(paths) == 2
    check_same(bench, await bench.greedy(prompts), before)


# ----------------------------------------------------------------------------------------------------------------------


def _check_state(engine: InferenceEngine, state: EngineState) -> None:
    assert engine.state is state
    assert engine.status.state is state
    assert engine.describe().state == state.value


async def _refused(asked: Coroutine[object, object, object], state: str) -> None:
    """Require a call to be refused in time, naming the engine's state."""
    done = f"an engine that is {state} did what it was asked to do"
    with refused(EngineStateError, state=state, otherwise=done):
        async with within():
            await asked


async def _everything_is_refused(bench: Bench, engine: InferenceEngine, state: str) -> None:
    """Require every call to be refused for the engine's state, whatever capabilities it claims."""
    folder = bench.folder("refused")
    asked: list[Callable[[], Coroutine[object, object, object]]] = [
        lambda: engine.generate([1, 2, 3], SHORT),
        engine.stats,
        lambda: engine.abort("a"),
        engine.abort_generation,
        engine.pause_generation,
        engine.continue_generation,
        engine.sleep,
        engine.wake_up,
        engine.reset_prefix_cache,
        engine.weight_manifest,
        lambda: engine.load_weights_from_disk("nowhere", "never"),
        engine.validate_weights,
        lambda: engine.update_weight_version("a label"),
        lambda: engine.open_session(100),
        lambda: engine.start_profile(str(folder)),
        lambda: engine.save_sharded_model(str(folder)),
        lambda: engine.save_remote_model(folder.as_uri()),
    ]
    for ask in asked:
        await _refused(ask(), state)


async def _is_failed(engine: InferenceEngine) -> None:
    """Assert that the engine failed to start, reports it, and can be closed."""
    assert engine.state is EngineState.FAILED
    await _refused(engine.generate([1, 2, 3], SHORT), "failed")
    async with within():
        await engine.teardown()


async def _leaves_nothing(bench: Bench, attempt: Callable[[], Coroutine[object, object, None]], times: int = 2) -> None:
    """Run ``attempt`` repeatedly: the first run may leave a cache that later ones reuse; anything more is a leak."""
    with temporary_folder(bench.folder("temporary")):
        await attempt()
        before = Holdings.now()
        for _ in range(times - 1):
            await attempt()
        await check_nothing_left(before, seconds=LIMIT)


def _cut_off(bench: Bench) -> Path:
    """Copy the model with every weight file truncated to a third."""
    folder = _copied(bench, "cut")
    for file in folder.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 3)
    return folder


def _without_a_weight(bench: Bench) -> Path:
    """Copy the model without one of its tensors."""
    folder = _copied(bench, "lacking")
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors[max(tensors)]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _copied(bench: Bench, name: str) -> Path:
    folder = bench.folder(name) / bench.model.name
    shutil.copytree(bench.model, folder, copy_function=shutil.copyfile)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


def _trace_events(path: Path, folder: Path) -> int:
    """Return the number of events in the trace, which is JSON, gzipped or not."""
    assert path.resolve().is_relative_to(folder.resolve()), f"{path} is not in {folder}"
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return len(trace["traceEvents"])
