"""With deterministic=True results are bitwise the same, whatever the engine computes and has computed besides."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from PIL import Image

from drivetrain import (
    Completion,
    ImageInput,
    InferenceEngine,
    InvalidConfig,
    SamplingParams,
    TokenPrompt,
    create_engine,
)
from drivetrain.backend.base import GenerateRequest
from drivetrain.testing import tiny_model
from drivetrain.testing.tiny_model import ConfigValue
from drivetrain.types.sampling import LogprobsMode
from drivetrain_transformers.deterministic import CHUNK
from drivetrain_transformers.engine import TransformersBackend
from drivetrain_transformers.scheduler import Scheduler
from engines import OpenEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DRAW = random.Random(0)
_BASE = [_DRAW.randrange(5, 250) for _ in range(2 * CHUNK + 44)]
PROMPTS = [_BASE[:length] for length in (1, 9, CHUNK, CHUNK + 1, 2 * CHUNK + 1, len(_BASE))] + [[7] * 40, _BASE[50:]]
"""Prompts of less than a chunk, of whole chunks, and of several; some begin alike."""
PARAMS = [
    SamplingParams(
        max_new_tokens=16,
        temperature=index % 2,
        seed=index,
        logprobs=3,
        prompt_logprobs=1 if index == 5 else None,
        return_hidden_states=True,
        ignore_eos=True,
    )
    for index in range(len(PROMPTS))
]
OTHERS = SamplingParams(max_new_tokens=200, ignore_eos=True)
OTHER_IDS = [f"other-{number}" for number in range(len(PROMPTS))]
SHORT = CHUNK + 10
"""Longest sequence for the short factors of the longrope model: rows reach it while they generate."""


def folder_of(name: str) -> Path:
    if name == "longrope":
        rope: dict[str, ConfigValue] = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 32,
            "long_factor": [8.0] * 32,
        }
        return tiny_model(
            "phi3",
            max_position_embeddings=512,
            original_max_position_embeddings=SHORT,
            rope_parameters={**rope, "original_max_position_embeddings": SHORT},
        )
    if name == "bfloat16":
        return tiny_model("qwen2", dtype="bfloat16")
    return tiny_model(name)


def bits(completion: Completion) -> object:
    """Everything that a completion says about its tokens; floats are equal only if their bits are."""
    return (
        completion.token_ids,
        completion.logprobs,
        completion.top_logprobs,
        completion.prompt_logprobs,
        completion.hidden_states,
    )


@asynccontextmanager
async def deterministic(folder: Path, **fields: object) -> AsyncIterator[InferenceEngine]:
    config = {"backend": "transformers", "model": str(folder), "isolation": "inline", "device": "cpu", **fields}
    async with create_engine({**config, "deterministic": True}) as engine:
        yield engine


async def alone(engine: InferenceEngine) -> list[object]:
    return [
        bits((await engine.generate(prompt, params)).completions[0])
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def scheduler_of(engine: InferenceEngine) -> Scheduler:
    backend = engine.parts.backend
    assert isinstance(backend, TransformersBackend)
    return backend.runner.scheduler


Meanwhile = Callable[[Scheduler], None]
"""Called in the scheduler's thread before some of its steps."""


def retract(scheduler: Scheduler) -> None:
    """Free every running row's cache, as ``PauseMode.RETRACT`` and a lack of memory do."""
    assert scheduler.running
    scheduler.retract()


def abort_others(scheduler: Scheduler) -> None:
    """Abort requests that are not compared."""
    running = scheduler.running
    scheduler.abort(OTHER_IDS)
    assert scheduler.running < running


@contextmanager
def before_steps(engine: InferenceEngine, steps: Sequence[int], meanwhile: Meanwhile) -> Iterator[None]:
    """Call ``meanwhile`` before the steps with these numbers, which count from here on."""
    scheduler, numbers = scheduler_of(engine), itertools.count()
    sound, left = scheduler.step, set(steps)

    def step() -> None:
        number = next(numbers)
        if number in left:
            left.remove(number)
            meanwhile(scheduler)
        sound()

    scheduler.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        scheduler.step = sound  # type: ignore[method-assign]
    assert not left, f"there were no steps {left}"


async def check(engine: InferenceEngine, wanted: Sequence[object], order: Sequence[int]) -> None:
    requests = [PROMPTS[index] for index in order], [PARAMS[index] for index in order]
    for index, completion in zip(order, (await engine.generate(*requests)).completions, strict=True):
        assert bits(completion) == wanted[index], f"the answer to prompt {index} differs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "bfloat16", "qwen3_moe", "longrope", "falcon_h1"])
async def test_nothing_else_changes_a_bit(name: str) -> None:
    folder = folder_of(name)
    async with deterministic(folder, enable_prefix_caching=False) as engine:
        wanted = await alone(engine)
    everyone = list(range(len(PROMPTS)))
    async with deterministic(folder) as engine:
        await check(engine, wanted, everyone)
        assert await alone(engine) == wanted, "cached prefixes change bits"
        with before_steps(engine, (18, 42, 63), retract):
            await check(engine, wanted, [*everyone[::-1], *everyone])
        others = asyncio.create_task(engine.generate(PROMPTS, OTHERS, request_ids=OTHER_IDS))
        with before_steps(engine, [30], abort_others):
            await check(engine, wanted, everyone)
        await others
    async with deterministic(folder, max_num_seqs=3) as engine:
        await check(engine, wanted, everyone)


async def test_prefixes_are_cached_in_whole_chunks() -> None:
    async with deterministic(tiny_model("qwen2")) as engine:
        cached = [
            (await engine.generate(prompt, SamplingParams(max_new_tokens=2))).completions[0].cached_tokens
            for prompt in (_BASE, _BASE, _BASE[: CHUNK + 1], _BASE[:CHUNK])
        ]
    assert cached == [0, 2 * CHUNK, CHUNK, 0]


async def test_streams_and_hosts_give_the_same_bits() -> None:
    async with deterministic(tiny_model("qwen2")) as engine:
        wanted = await alone(engine)
        for prompt, params, bits_alone in list(zip(PROMPTS, PARAMS, wanted, strict=True))[2:6]:
            chunks = [chunk async for chunk in engine.generate_stream(prompt, params)]
            assert chunks[-1].completion is not None
            assert bits(chunks[-1].completion) == bits_alone
    async with deterministic(tiny_model("qwen2"), isolation="process") as engine:  # with one thread, as here
        assert await alone(engine) == wanted


async def test_a_resumed_request_goes_on_with_the_same_bits(open_engine: OpenEngine) -> None:
    params = SamplingParams(max_new_tokens=16, seed=3, logprobs=2, ignore_eos=True)
    async with open_engine(device="cpu", deterministic=True) as engine:
        (whole,) = (await engine.generate(_BASE, params)).completions
        backend = engine.parts.backend
        request = GenerateRequest(
            request_id="resumed",
            prompt_token_ids=[*_BASE, *whole.token_ids[:6]],
            params=params,
            max_new_tokens=10,
            stop_token_ids=(),
            seed=3,
            logprobs_mode=LogprobsMode.TEMPERATURE,
            resumed_tokens=6,
        )
        rest = await backend.generate(request)
    assert rest.token_ids == whole.token_ids[6:]
    assert whole.logprobs is not None
    assert rest.logprobs == whole.logprobs[6:]
    assert rest.top_logprobs == (whole.top_logprobs or [])[6:]


async def test_a_failing_pass_ends_its_own_row_alone(open_engine: OpenEngine) -> None:
    params = [params.model_copy(update={"max_new_tokens": 12}) for params in PARAMS[:4]]
    async with open_engine(device="cpu", deterministic=True) as engine:
        wanted = [bits(one) for one in (await engine.generate(PROMPTS[:4], params)).completions]
        scheduler = scheduler_of(engine)
        sound, bad = scheduler.model.decode, PROMPTS[6]

        def decode(last_ids, adapters, cache, **others):  # type: ignore[no-untyped-def]
            if cache.lengths == [len(bad) + 3]:
                raise RuntimeError("a pass of this row fails")
            return sound(last_ids, adapters, cache, **others)

        scheduler.model.decode = decode  # type: ignore[method-assign]
        failing = asyncio.create_task(engine.generate(bad, SamplingParams(max_new_tokens=12, ignore_eos=True)))
        answers = await engine.generate(PROMPTS[:4], params)
        with pytest.raises(Exception, match="a pass of this row fails"):
            await failing
    assert [bits(one) for one in answers.completions] == wanted


async def test_embeddings_are_computed_alone() -> None:
    async with deterministic(tiny_model("qwen2"), task="embed") as engine:
        apart = [(await engine.encode([prompt]))[0] for prompt in PROMPTS]
        assert await engine.encode(PROMPTS) == apart
        assert await engine.encode(PROMPTS[::-1]) == apart[::-1]


async def test_images_are_computed_alone() -> None:
    image = ImageInput.from_pil(Image.frombytes("RGB", (112, 84), random.Random(1).randbytes(112 * 84 * 3)))
    seen = [TokenPrompt(token_ids=(*ids, 260, 262, 261, 7, 8), media=(image,)) for ids in (_BASE[:CHUNK], [5])]
    prompts, params = [seen[0], TokenPrompt(token_ids=tuple(_BASE)), seen[1]], PARAMS[1:4]
    async with deterministic(tiny_model("qwen2_vl")) as engine:
        wanted = [bits((await engine.generate(*one)).completions[0]) for one in zip(prompts, params, strict=True)]
        with before_steps(engine, (5, 14), retract):
            output = await engine.generate([*prompts[::-1], *prompts], [*params[::-1], *params])
    assert [bits(completion) for completion in output.completions] == [*wanted[::-1], *wanted]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_backend": "flex_attention"}, "flex_attention"),
        ({"engine_kwargs": {"attn_implementation": "flash_attention_2"}}, "flash_attention_2"),
        ({"engine_kwargs": {"device_map": "auto"}}, "device_map"),
        ({"model": "dynamic"}, "rope_type"),
    ],
)
async def test_what_may_depend_on_earlier_requests_is_refused(fields: dict[str, object], named: str) -> None:
    dynamic: dict[str, ConfigValue] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = tiny_model("llama", rope_parameters=dynamic) if "model" in fields else tiny_model("qwen2")
    others = {name: value for name, value in fields.items() if name != "model"}
    with pytest.raises(InvalidConfig, match=named):
        async with deterministic(folder, **others):
            pass
