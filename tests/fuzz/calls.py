"""Call all public entry points with junk and near-misses: each call must raise a typed error, or be right.

    python tests/fuzz/calls.py --calls 10000 --seed 0 --backend transformers --isolation inline process

Every 200 calls, or more often if there are few, a request with a known answer is made. A fault is an error other than
``DrivetrainError``, a ``WireError`` or ``EngineInternalError``, a changed answer, an engine that is no longer ready, or
a call that ends otherwise hosted than inline; if there is one, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from drivetrain import (
    DeadlineExceeded,
    DiskSource,
    DrivetrainError,
    EngineConfig,
    EngineHandle,
    EngineInternalError,
    ImageInput,
    InferenceEngine,
    LoraSource,
    PauseMode,
    SamplingParams,
    WeightUpdateRequest,
    WireError,
    attach,
    create_engine,
    load_backend,
)
from drivetrain.engine.states import EngineState, WeightState
from drivetrain.engine.weight_transfers import WeightTransferHandle
from drivetrain.testing import tiny_model
from drivetrain.types.config import Isolation
from drivetrain_weight_sync import LogprobProbe, LoraSync, WeightSync

KNOWN_EVERY = 200
NOWHERE = "/dev/null/nowhere"
"""A path where nothing is, and where a save can make nothing."""


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


_ITERATOR = object()
"""Stands for a new iterator, which can be read once."""
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.0, float("nan"), float("inf"), 1e-320),
    *("", "a", "\0", "\ud800", "x" * 5000, b"a", bytearray(b"a"), [], {}, (), set(), [[]], [None], {"a": 1}, object),
    *(object(), Path(NOWHERE), Path("a\0b"), "~nobody-has-this-name/x", range(3), [1, 2], [-5], [10**12], ["a"]),
    *({"role": "user", "content": "x"}, [{"role": "user"}], lambda: None, 1j, "continue", "wait", "retract"),
    *(numpy.array([1, 2]), numpy.int64(3), numpy.float64("nan"), torch.tensor([1]), _ITERATOR, _Unprintable()),
]
NAMES: list[Any] = ["missing", "initial", "step-1"]


def deep(levels: int) -> Any:
    """Return a list nested to this depth."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


class Draw:
    """Draws arguments: mostly right or nearly so, otherwise junk."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def junk(self) -> Any:
        if self.random.random() < 0.01:
            return deep(3000)
        drawn = self.random.choice(JUNK)
        return iter([1]) if drawn is _ITERATOR else drawn

    def of(self, *good: Any) -> Any:
        return self.random.choice(good) if self.random.random() < 0.6 else self.junk()

    def some(self, **named: Any) -> dict[str, Any]:
        return {name: value for name, value in named.items() if self.random.random() < 0.5}

    def prompts(self) -> Any:
        return self.of("hello", [1, 2, 3], [[1], [2]], ["a", "b"], [{"role": "user", "content": "hi"}])

    def params(self) -> Any:
        fields = self.some(
            temperature=self.of(0, 1.0), top_p=self.of(0.9), top_k=self.of(4), min_p=self.of(0.1), n=self.of(1, 2),
            seed=self.of(7), stop=self.of("x", ["a"]), stop_regex=self.of("a+b"), logprobs=self.of(0, 2),
            logit_bias=self.of({5: 1.0}), stop_token_ids=self.of([3]), repetition_penalty=self.of(1.1),
            structured_output=self.of({"kind": "json_schema", "json_schema": "[" * 5000}), ignore_eos=self.of(True),
        )  # fmt: skip
        copied = SamplingParams(max_new_tokens=2).model_copy(update=fields)
        return self.of({"max_new_tokens": 2, **fields}, {"max_new_tokens": self.of(2)}, copied)

    def request(self, model: str) -> Any:
        """Draw a weight update from the served weights or from nowhere."""
        path, mode = (
            self.random.choice([model, NOWHERE]),
            self.random.choice([PauseMode.WAIT, PauseMode.RETRACT, PauseMode.ABORT]),
        )
        source: Any = self.random.choice([DiskSource(path=path), LoraSource(lora_name="missing", path=path)])
        return self.of(WeightUpdateRequest(version="step-1", source=source, mode=mode))

    def payload(self, prompt: str) -> Any:
        fields = self.some(
            model=self.of(None), n=self.of(1), stop=self.of("x"), tools=self.of(()), lora=self.of("missing"),
            logit_bias=self.of({"5": 1}), temperature=self.of(0), response_format=self.of({"type": "text"}),
            request_id=self.of("r"), chat_template_kwargs=self.of({}), priority=self.of(0),
            logprobs_mode=self.of("raw"), metadata=self.of({}), stream_options=self.of(None),
        )  # fmt: skip
        content = [{"role": "user", "content": self.of("hi")}] if prompt == "messages" else self.of("hi", [1])
        return self.of({prompt: self.of(content, content), "max_tokens": self.of(2, 2, 2), **fields})


async def _read(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass


async def _update(engine: InferenceEngine, request: Any, at_once: Any, indices: Any) -> None:
    async with engine.weight_update(request, at_once=at_once) as transaction:
        if indices is not None:
            await transaction.load(indices)


async def _push(sync: Any, version: Any) -> None:
    async with sync:
        await sync.push(version=version)


async def _transfer(starting: Any, *methods: str) -> None:
    """Begin to stage weights, and call methods of the handle."""
    handle = await starting
    assert isinstance(handle, WeightTransferHandle)
    try:
        for method in methods:
            await getattr(handle, method)()
    finally:
        await handle.cancel()


def calls(engine: InferenceEngine, draw: Draw, sessions: list[str]) -> dict[str, Callable[[], Any]]:
    """Return calls of the public entry points with drawn arguments, by name."""
    of, some, model = draw.of, draw.some, engine.config.model
    methods = ("wait", "cancel", "finish")

    def timed() -> dict[str, Any]:
        return some(timeout=of(5, 30.0))

    return {
        "generate": lambda: engine.generate(
            draw.prompts(), draw.params(), **timed(), **some(lora=of("missing"), priority=of(0), request_ids=of(["r"]))
        ),
        "generate_stream": lambda: _read(engine.generate_stream(draw.prompts(), draw.params(), **timed())),
        "generate_with_session": lambda: engine.generate_with_session(
            of(*sessions), draw.prompts(), draw.params(), **some(turn=of("continue"), parent_request_id=of("r"))
        ),
        "compute_logprobs": lambda: engine.compute_logprobs(
            of([[1, 2, 3]]),
            **some(
                top_k=of(2),
                at=of([[[1, 2]] * 3], [[[3]]]),
                temperature=of(0.5),
                last_n=of(1, [3]),
                sampling_params=draw.params(),
                request_ids=of(["r"]),
                priority=of(1),
                lora=of("missing"),
            ),
            **timed(),
        ),
        "chat_completion": lambda: engine.chat_completion(draw.payload("messages"), **timed()),
        "chat_completion_stream": lambda: _read(engine.chat_completion_stream(draw.payload("messages"))),
        "completion": lambda: engine.completion(draw.payload("prompt"), **timed()),
        "completion_stream": lambda: _read(engine.completion_stream(draw.payload("prompt"), **timed())),
        "abort": lambda: engine.abort(of("r")),
        "decode": lambda: engine.decode(of([1, 2]), **some(skip_special_tokens=of(True))),
        "open_session": lambda: engine.open_session(of(64), **some(session_id=of(*NAMES))),
        "close_session": lambda: engine.close_session(of(*NAMES)),
        "pause_generation": lambda: engine.pause_generation(of("abort", "wait", "retract"), **timed()),
        "sleep": lambda: engine.sleep(draw.junk(), **timed(), **some(abort_first=of(True), drain_timeout=of(0))),
        "wake_up": lambda: engine.wake_up(of(None, ["kv_cache"]), **timed()),
        "weight_update": lambda: _update(engine, draw.request(model), of(True, False), of(None, [0])),
        "update_named_weights": lambda: engine.update_named_weights(draw.request(model)),
        "prepare_weight_update": lambda: engine.prepare_weight_update(draw.request(model)),
        "start_weight_transfer": lambda: _transfer(
            engine.start_weight_transfer(draw.request(model)), *draw.random.choices(methods, k=2)
        ),
        "load_weights_from_disk": lambda: engine.load_weights_from_disk(
            of(NOWHERE, Path(NOWHERE), model), of(*NAMES), **some(mode=of("wait"))
        ),
        "update_weight_version": lambda: engine.update_weight_version(of("initial")),
        "get_weights_by_name": lambda: engine.get_weights_by_name(of("lm_head.weight")),
        "check_weight_sync_integrity": lambda: engine.check_weight_sync_integrity(of("initial")),
        "init_weight_update_communicator": lambda: engine.init_weight_update_communicator(draw.junk()),
        "destroy_weight_update_communicator": lambda: engine.destroy_weight_update_communicator(of(*NAMES)),
        "save_sharded_model": lambda: engine.save_sharded_model(of("/dev/null/a"), **timed()),
        "save_remote_model": lambda: engine.save_remote_model(of("nosuch://a/b"), **timed()),
        "load_lora_adapter": lambda: engine.load_lora_adapter(of(*NAMES), of(NOWHERE), **some(pinned=of(True))),
        "unload_lora_adapter": lambda: engine.unload_lora_adapter(of(*NAMES)),
        "encode": lambda: engine.encode(draw.prompts(), **some(dimensions=of(4))),
        "encode_single": lambda: engine.encode_single(draw.prompts(), **some(dimensions=of(4))),
        "compute_similarity": lambda: engine.compute_similarity(draw.prompts(), draw.prompts()),
        "score": lambda: engine.score(of([[1]]), of([[2]])),
        "start": lambda: engine.start(of(print)),
        "handle": lambda: engine.handle(draw.junk(), **some(key=of("k" * 16), announce=of("host"))),
        "attach": lambda: attach(of(EngineHandle("unix:/nowhere", "k" * 16)), timeout=of(5.0)),
        "supports": lambda: engine.supports(of("lora")),
        "get_remote_weight_version": lambda: engine.get_remote_weight_version(of("http://127.0.0.1:1"), **timed()),
        "start_profile": lambda: engine.start_profile(of(NOWHERE)),
        "create_engine": lambda: create_engine(
            of("transformers", {}), **some(model=of("m"), timeouts=of({}, {"start": of(5)}), max_num_seqs=of(4))
        ),
        "load_backend": lambda: load_backend(of("transformers", "missing")),
        "ImageInput.from_pil": lambda: ImageInput.from_pil(draw.junk()),
        "LogprobProbe": lambda: LogprobProbe(of([[1, 2]]), of(list), of(0.1)),
        "LoraSync": lambda: _push(
            LoraSync.connect(draw.junk(), of(engine), of("a"), of("disk"), **some(adapter=of("default"))), "step-1"
        ),
        "WeightSync": lambda: _push(
            WeightSync.connect(
                of({}, {"lm_head.weight": torch.zeros(1)}, [("a", torch.zeros(1))], [("a", draw.junk())]),
                of(engine),
                of("auto", "disk", "delta", "shared_memory"),
                **some(
                    bucket_bytes=of(8192),
                    mode=of("wait"),
                    directory=of(NOWHERE),
                    group_backend=of("gloo"),
                    staging_share=of(0.5),
                    share_tensors=of(False),
                    cast=of(True),
                    probe=of(None),
                ),
            ),
            of("step-1"),
        ),
        "from_mapping": lambda: EngineConfig.from_mapping(draw.junk()),
        "from_yaml": lambda: EngineConfig.from_yaml(draw.junk()),
    }


async def fuzz(
    engine: InferenceEngine, count: int, seed: int, known_every: int = KNOWN_EVERY, endings: list[str] | None = None
) -> dict[str, int]:
    """Make calls, with a known request now and then; return each fault and its count.

    Each call's name and the error that it raised are appended to ``endings``.
    """
    faults: collections.Counter[str] = collections.Counter()
    endings = [] if endings is None else endings
    draw = Draw(seed)
    session = await engine.open_session(512)
    known = (await engine.generate([1, 2, 3], {"max_new_tokens": 4, "temperature": 0})).completions[0].token_ids
    made = calls(engine, draw, [session])
    for number in range(1, count + 1):
        name = draw.random.choice(list(made))
        endings.append(f"{name}: an answer")
        try:
            async with asyncio.timeout(60):
                answer = made[name]()
                if asyncio.iscoroutine(answer):
                    await answer
        except Exception as error:
            endings[-1] = f"{name}: {type(error).__name__} {getattr(error, 'field', '')}"
            # The page refuses junk by name, before it is sent to a host or reaches the engine.
            is_late = isinstance(error, EngineInternalError) or (isinstance(error, WireError) and name != "attach")
            if is_late or not isinstance(error, DrivetrainError):
                faults[f"{name}: {type(error).__name__}: {str(error)[:120]}"] += 1
        if engine.state is not EngineState.READY:
            await engine.wake_up()
            if engine.status.weights is not WeightState.CLEAN:
                await engine.load_weights_from_disk(engine.config.model, "mended")
            await engine.continue_generation()
        if number % known_every == 0 or number == count:
            again = (await engine.generate([1, 2, 3], {"max_new_tokens": 4, "temperature": 0})).completions[0]
            if again.token_ids != known:
                faults[f"after {number} calls the known answer is another"] += 1
    return dict(faults)


def differences(one: list[str], other: list[str]) -> list[str]:
    """Return the calls that ended in two ways, up to the first that a deadline ended, which depends on the machine."""
    found = []
    for number, pair in enumerate(zip(one, other, strict=True), 1):
        if any(DeadlineExceeded.__name__ in ending for ending in pair):
            break
        if pair[0] != pair[1]:
            found.append(f"call {number} ended as {pair[0]}, and as {pair[1]}")
    return found


async def _run(backend: str, isolation: str, count: int, seed: int) -> tuple[int, list[str]]:
    endings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("qwen2", directory=Path(folder) / "model")
        os.chdir(folder)  # the engine saves models, and some junk is a relative path
        config: dict[str, Any] = {"model": str(model), "device": "cpu", "isolation": Isolation(isolation)}
        async with create_engine(backend, **config) as engine:
            faults = await fuzz(engine, count, seed, min(KNOWN_EVERY, max(1, count // 6)), endings)
    print(f"{backend}, {isolation}: {count} calls, seed {seed}: {sum(faults.values())} faults")
    for fault, times in sorted(faults.items(), key=lambda item: -item[1]):
        print(f"  {times} times: {fault}")
    return len(faults), endings


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="transformers")
    parser.add_argument("--isolation", nargs="+", default=["inline", "process"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [asyncio.run(_run(options.backend, where, options.calls, options.seed)) for where in options.isolation]
    differing = [words for _, endings in runs[1:] for words in differences(runs[0][1], endings)]
    if len(runs) > 1:
        print(f"{' and '.join(options.isolation)}: {len(differing)} calls ended in two ways", *differing, sep="\n  ")
    return int(bool(differing) or any(faults for faults, _ in runs))


if __name__ == "__main__":
    sys.exit(main())
