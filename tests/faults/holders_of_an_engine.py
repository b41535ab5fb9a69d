"""Let several processes use one engine at once, strike some of them at random, and check every answer.

    python tests/faults/holders_of_an_engine.py --backend sglang --lora --rounds 5 --seconds 120 --seed 1

The engine's owner and three holders of its handle ask for completions and scores, abort, pause, update weights and
adapters, reset caches and let the engine sleep. Holders are killed or frozen: while they stream, in the middle of a
pause, of a staged update and of one that is half loaded, and some are thawed when they are long given up. A weight
version's name tells its weights, so each process checks each answer alone. Exit status 1: a rule was broken.

- Every call ends, in a result or in an error of ``drivetrain.errors``.
- The tokens of a completion's first version, and all scores, are those of the weights whose version they carry. Tokens
  of later versions follow what other weights chose and read: of them only the spans are checked.
- After each round the engine serves both weights, is not paused, and holds nothing of a holder that is gone.

After each round it prints bytes, threads, descriptors and tasks, which must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from safetensors.torch import load_file

from drivetrain import (
    Capability,
    Completion,
    DrivetrainError,
    EngineState,
    FinishReason,
    InferenceEngine,
    MemoryTag,
    PauseMode,
    SamplingParams,
    WeightUpdateRequest,
    attach,
    create_engine,
)
from drivetrain.testing import tiny_model
from drivetrain.types.weights import DiskSource, LoraSource
from drivetrain_conformance.assets.made_adapters import make_adapter
from drivetrain_weight_sync import WeightSync

HOLDERS: Final = 3
HEARTBEAT_S: Final = 6.0
TIMEOUTS: Final = {"heartbeat": HEARTBEAT_S, "control": 30.0, "weight_update": 30.0, "generate": 60.0}
SLICES: Final = 400
"""Quarters of a second after which a call counts as one that never ends. A frozen process counts none."""
LENGTH: Final = 96
WEIGHTS: Final = ("a", "b")
EITHER: Final = "x"
"""Begins the version of weights that were only given a name, or an adapter, by somebody who does not know them."""
ADAPTERS: Final = ("one", "two")
CLOSE: Final = 1e-3
MOMENTS: Final = ("streaming", "paused", "staged", "begun", "loaded", "applying", "asleep")
REQUESTS: Final = ("generate", "stream", "score", "pinned", "abort", "left", "adapted")
CHANGES: Final = (
    *("push", "push", "push", "buckets", "buckets", "staged", "forgotten", "memory", "memory"),
    *("pause", "pause", "reset", "read", "validate", "stats", "abort all", "relabel", "sleep"),
    *("load adapter", "unload adapter", "update adapter"),
)
MODES: Final = (PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.ABORT, PauseMode.WAIT)
FORKS: Final = multiprocessing.get_context("forkserver")
PRELOADED: Final = [
    *("torch", "safetensors.torch", "tokenizers", "drivetrain", "drivetrain.attached", "drivetrain.testing"),
    *("drivetrain.text.tokenizer", "drivetrain_conformance.assets.made_adapters", "drivetrain_weight_sync"),
]
LENGTHS: Final = (1, 2, 9, 33, 33, 80, 150, 300)
PROMPTS: Final = [[(7 * i + 3 * j) % 250 for j in range(length)] for i, length in enumerate(LENGTHS)]


# The right answers ----------------------------------------------------------------------------------------------------


class Oracle:
    """Answers to each prompt by each version's weights, with each adapter or without."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers

    @classmethod
    async def of(cls, engine: InferenceEngine, folders: Mapping[str, str], adapters: Mapping[str, str]) -> Oracle:
        """Ask an engine that nobody else uses."""
        answers: dict[str, Any] = {}
        for weights in WEIGHTS:
            await engine.load_weights_from_disk(folders[weights], f"{weights}.oracle")
            for lora in (None, *adapters):
                if lora is not None:
                    await engine.load_lora_adapter(lora, adapters[lora])
                params = SamplingParams(max_new_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=2)
                alone = [await engine.generate([prompt], params, lora=lora) for prompt in PROMPTS]
                completions = [output.completions[0] for output in alone]
                scored = (await engine.compute_logprobs(PROMPTS, lora=lora)).completions
                answers[f"{weights}/{lora}"] = {
                    "tokens": [one.token_ids for one in completions],
                    "logprobs": [one.logprobs for one in completions],
                    "gaps": [[top[0][1] - top[1][1] for top in one.top_logprobs or []] for one in completions],
                    "scores": [one.prompt_logprobs for one in scored],
                }
                if lora is not None:
                    await engine.unload_lora_adapter(lora)
        return cls(answers)

    def fault_of(self, prompt: int, completion: Completion, lora: str | None) -> str | None:
        """Return what is wrong with a greedy completion, or None."""
        spans = completion.weight_versions
        if completion.finish_reason is not FinishReason.ABORT and len(completion.token_ids) == 0:
            return "no tokens"
        at = 0
        for span in spans:
            if span.start != at or span.end <= span.start:
                return f"spans {spans}"
            at = span.end
        if at != len(completion.token_ids):
            return f"spans {spans} of {len(completion.token_ids)} tokens"
        if not spans:
            return None
        first = spans[0]
        found = [self._differs(weights, prompt, completion, first.end, lora) for weights in weights_of(first.version)]
        return None if None in found else f"{spans}, lora {lora}: {found}"

    def _differs(self, weights: str, prompt: int, completion: Completion, end: int, lora: str | None) -> str | None:
        right = [self.answers[f"{weights}/{one}"] for one in ([None] if lora is None else ADAPTERS)]
        found = [_differs(each, prompt, completion, end) for each in right]
        return None if None in found else str(found)

    def fault_of_scores(self, prompt: int, completion: Completion) -> str | None:
        """Return what is wrong with the scores of a prompt, or None."""
        if completion.finish_reason is FinishReason.ABORT:
            return None
        version, scores = completion.weight_version, completion.prompt_logprobs
        if version is None or scores is None or len(scores) != len(PROMPTS[prompt]):
            return f"version {version}, scores {scores}"
        rights = [self.answers[f"{one}/None"]["scores"][prompt] for one in weights_of(version)]
        worst = [max((abs(x - y) for x, y in zip(scores[1:], right[1:], strict=True)), default=0.0) for right in rights]
        return None if min(worst) < CLOSE else f"scores of {version} are {worst} from the right ones"


def weights_of(version: str) -> Sequence[str]:
    """Return which weights a version may have."""
    kind = version.partition(".")[0]
    return WEIGHTS if kind == EITHER else (kind,)


def _differs(right: Mapping[str, Any], prompt: int, completion: Completion, end: int) -> str | None:
    for index, (token, wanted) in enumerate(zip(completion.token_ids[:end], right["tokens"][prompt], strict=False)):
        if token != wanted:
            gap = right["gaps"][prompt][index]
            return None if gap < CLOSE else f"token {index} is {token}, not {wanted} (by {gap:.3f})"
        logprob = None if completion.logprobs is None else completion.logprobs[index]
        if logprob is not None and abs(logprob - right["logprobs"][prompt][index]) > CLOSE:
            return f"logprob {index} is {logprob:.4f}, not {right['logprobs'][prompt][index]:.4f}"
    return None


# A process that uses the engine ---------------------------------------------------------------------------------------


class User:
    """Uses an engine's page at random.

    Args:
        tell: Called with each thing that happened.
    """

    def __init__(
        self,
        name: str,
        engine: InferenceEngine,
        oracle: Oracle,
        folders: Mapping[str, str],
        adapters: Mapping[str, str],
        seed: int,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.name = name
        self.engine = engine
        self.oracle = oracle
        self.folders = folders
        self.adapters = adapters
        self.rng = random.Random(seed)
        self.tell = tell
        self.over = False
        self.numbers = iter(range(10**9))
        self.pushed = 0
        self.syncs: dict[str, WeightSync] = {}

    def version(self, weights: str) -> str:
        """Name a new version."""
        return f"{weights}.{self.name}.{next(self.numbers)}"

    async def use(self, requesters: int) -> None:
        """Work until the end is set."""
        async with asyncio.TaskGroup() as group:
            for _ in range(requesters):
                group.create_task(self._loop(REQUESTS, self._request, 0.05))
            group.create_task(self._loop(CHANGES, self._change, 0.4))
        for sync in self.syncs.values():
            with contextlib.suppress(DrivetrainError):
                await sync.close()

    async def _loop(self, kinds: Sequence[str], do: Callable[[str], Coroutine[Any, Any, None]], pause: float) -> None:
        while not self.over:
            kind = self.rng.choice(kinds)
            await self._ends(kind, do(kind))
            if self.engine.state in (EngineState.FAILED, EngineState.CLOSED):
                return
            await asyncio.sleep(self.rng.random() * pause)

    async def _ends(self, kind: str, work: Coroutine[Any, Any, None]) -> None:
        """Await the work, which must end in a result or a typed error."""
        task = asyncio.create_task(work)
        for _ in range(SLICES):
            await asyncio.wait([task], timeout=0.25)
            if task.done():
                break
        else:
            self.tell({"bad": f"{kind} does not end; {self.engine.state}", "stack": str(task.get_stack())})
            task.cancel()
            await asyncio.wait([task])
            return
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self.tell({"bad": f"{kind} was cancelled"})
        elif error is None:
            self.tell({"did": kind, "ended": "well"})
        elif isinstance(error, DrivetrainError):
            self.tell({"did": kind, "ended": type(error).__name__, "words": str(error)[:400]})
        else:
            self.tell({"bad": f"{kind}: {error!r}"})

    # Requests ---------------------------------------------------------------------------------------------------------

    async def _request(self, kind: str) -> None:
        rng, engine = self.rng, self.engine
        chosen = [rng.randrange(len(PROMPTS)) for _ in range(rng.choice([1, 1, 2, 4]))]
        prompts = [PROMPTS[i] for i in chosen]
        params = SamplingParams(
            max_new_tokens=rng.choice([2, 8, 32, LENGTH]), temperature=0.0, ignore_eos=True, logprobs=0
        )
        match kind:
            case "generate":
                self._check(chosen, (await engine.generate(prompts, params)).completions)
            case "stream" | "left":
                await self._stream(chosen, prompts, params, left=kind == "left")
            case "score":
                for index, one in zip(chosen, (await engine.compute_logprobs(prompts)).completions, strict=True):
                    if fault := self.oracle.fault_of_scores(index, one):
                        self.tell({"bad": f"score: {fault}"})
            case "pinned":
                version = engine.get_weight_version()
                completions = (await engine.generate(prompts, params, weight_version=version)).completions
                for one in completions:
                    if {span.version for span in one.weight_versions} - {version}:
                        self.tell({"bad": f"pinned to {version}: {one.weight_versions}"})
                self._check(chosen, completions)
            case "abort":
                name = f"{self.name}-{next(self.numbers)}"
                task = asyncio.create_task(engine.generate(prompts[:1], params, request_ids=[name]))
                await asyncio.sleep(rng.random() * 0.2)
                try:
                    await engine.abort(name)
                finally:
                    completions = (await task).completions
                self._check(chosen[:1], completions)
            case "adapted":
                if self.adapters:
                    lora = rng.choice(ADAPTERS)
                    self._check(chosen, (await engine.generate(prompts, params, lora=lora)).completions, lora)

    def _check(self, chosen: Sequence[int], completions: Sequence[Completion], lora: str | None = None) -> None:
        if len(chosen) != len(completions):
            self.tell({"bad": f"{len(completions)} completions of {len(chosen)} prompts"})
        for index, completion in zip(chosen, completions, strict=False):
            if fault := self.oracle.fault_of(index, completion, lora):
                self.tell({"bad": f"prompt {index}: {fault}; {completion.finish_reason}"})

    async def _stream(
        self, chosen: Sequence[int], prompts: list[list[int]], params: SamplingParams, left: bool
    ) -> None:
        ids: list[list[int]] = [[] for _ in prompts]
        ended: dict[int, Completion] = {}
        stream = self.engine.generate_stream(prompts, params)
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                ids[chunk.prompt_index] += chunk.token_ids
                if chunk.completion is not None:
                    ended[chunk.prompt_index] = chunk.completion
                self.tell({"at": "streaming"})
                if left and self.rng.random() < 0.1:
                    return
        for place in range(len(prompts)):
            if place not in ended or ended[place].token_ids != ids[place]:
                self.tell({"bad": f"stream: chunks {ids[place]} of {ended.get(place)}"})
        self._check(chosen, [ended[place] for place in sorted(ended)])

    # Changes ----------------------------------------------------------------------------------------------------------

    def _update(self) -> WeightUpdateRequest:
        weights = self.rng.choice(WEIGHTS)
        mode = self.rng.choice(MODES)
        return WeightUpdateRequest(
            version=self.version(weights), source=DiskSource(path=self.folders[weights]), mode=mode
        )

    async def _waits(self, moment: str) -> None:
        self.tell({"at": moment})
        await asyncio.sleep(self.rng.random() * 0.3)

    async def _change(self, kind: str) -> None:
        rng, engine, able = self.rng, self.engine, self.engine.capabilities
        match kind:
            case "push":
                self.tell({"at": "applying"})
                await engine.update_named_weights(self._update())
            case "buckets":
                async with engine.weight_update(self._update()) as update:
                    await self._waits("begun")
                    for index in range(update.buckets):
                        await update.load([index])
                        await self._waits("loaded")
            case "staged" | "forgotten":
                transfer = await engine.start_weight_transfer(self._update())
                await self._waits("staged")
                await (transfer.finish() if kind == "staged" else transfer.cancel())
            case "memory":
                await self._push_from_memory(rng.choice(WEIGHTS))
            case "pause":
                await self._pause(rng.choice(MODES))
            case "sleep":
                if rng.random() < 0.3 and Capability.SLEEP_KV_CACHE in able:
                    await self._sleep()
            case "reset":
                await engine.reset_prefix_cache()
            case "read":
                await engine.get_weights_by_name("model.embed_tokens.weight")
            case "validate":
                assert (await engine.validate_weights()).ok
            case "stats":
                await engine.stats()
            case "abort all":
                if rng.random() < 0.3:
                    await engine.abort_generation()
            case "relabel":
                await engine.update_weight_version(self.version(EITHER))
            case _ if self.adapters:
                await self._change_adapter(kind, rng.choice(ADAPTERS))

    async def _change_adapter(self, kind: str, name: str) -> None:
        engine = self.engine
        if kind == "load adapter":
            await engine.load_lora_adapter(name, self.adapters[name])
        elif kind == "unload adapter":
            await engine.unload_lora_adapter(name)
        else:
            source = LoraSource(path=self.adapters[self.rng.choice(ADAPTERS)], lora_name=name)
            mode = self.rng.choice([PauseMode.ABORT, PauseMode.WAIT])
            await engine.update_named_weights(
                WeightUpdateRequest(version=self.version(EITHER), source=source, mode=mode)
            )

    async def _push_from_memory(self, weights: str) -> None:
        sync = self.syncs.get(weights)
        if sync is None:
            tensors = load_file(Path(self.folders[weights]) / "model.safetensors")
            sync = WeightSync.connect(tensors, self.engine, mode=self.rng.choice(MODES))
            self.syncs[weights] = sync
        self.tell({"at": "applying"})
        try:
            await sync.push(version=self.version(weights))
        except DrivetrainError:
            if self.rng.random() < 0.5:
                del self.syncs[weights]
                await sync.close()
            raise

    async def _pause(self, mode: PauseMode) -> None:
        await self.engine.pause_generation(mode, timeout=self.rng.choice([None, 0.2]))
        await self._waits("paused")
        await self._until_done(self.engine.continue_generation)

    async def _sleep(self) -> None:
        await self.engine.sleep([MemoryTag.KV_CACHE], abort_first=True)
        await self._waits("asleep")
        await self._until_done(self.engine.wake_up)

    async def _until_done(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call until it is not refused because of others' updates. Push where only that would help."""
        while True:
            try:
                await call()
            except DrivetrainError:
                if self.engine.state in (EngineState.FAILED, EngineState.CLOSED):
                    raise
                await asyncio.sleep(0.2)
                if self.engine.state is EngineState.DIRTY:
                    with contextlib.suppress(DrivetrainError):
                        await self.engine.update_named_weights(self._update())
            else:
                return


def hold(name: str, socket: str, order: Path) -> None:
    """In a process of its own: attach to the engine and use it until the owner says that it is over."""
    torch.set_num_threads(1)
    os.setpgrp()
    asyncio.run(_hold(name, socket, json.loads(order.read_text())))


async def _hold(name: str, socket: str, order: Mapping[str, Any]) -> None:
    from_owner, to_owner = await asyncio.open_unix_connection(socket)

    def tell(what: dict[str, Any]) -> None:
        to_owner.write(json.dumps(what).encode() + b"\n")

    tell({"name": name})
    seed = int(await from_owner.readline())
    engine = await attach(pickle.loads(base64.b64decode(order["handle"])))
    user = User(name, engine, Oracle(order["oracle"]), order["folders"], order["adapters"], seed, tell)

    async def end() -> None:
        await from_owner.readline()
        user.over = True

    ending = asyncio.create_task(end())
    tell({"at": "attached"})
    try:
        await user.use(3)
    finally:
        await engine.teardown()
    tell({"over": engine.state.value})
    ending.cancel()
    to_owner.close()
    await to_owner.wait_closed()


# The owner ------------------------------------------------------------------------------------------------------------


class Holder:
    """A process with a handle, which is struck at a moment that is drawn beforehand."""

    def __init__(self, process: BaseProcess, name: str, rng: random.Random, run: Run) -> None:
        self.process = process
        self.name = name
        self.seed = rng.randrange(10**6)
        self.run = run
        self.moment = rng.choice(MOMENTS)
        self.blow = rng.choice(["kill", "kill", "freeze", "thaw", "thaw late", "spare"])
        self.after = time.monotonic() + rng.uniform(3, 15)
        self.struck = False
        self.tasks: list[asyncio.Task[None]] = []
        self.to_holder: asyncio.StreamWriter | None = None
        self.up = asyncio.Event()
        self.ended = asyncio.Event()

    async def hear(self, from_holder: asyncio.StreamReader, to_holder: asyncio.StreamWriter) -> None:
        """Talk to the process until its end."""
        self.to_holder = to_holder
        self.up.set()
        to_holder.write(f"{self.seed}\n".encode())
        over = False
        with contextlib.suppress(ConnectionError):
            async for line in from_holder:
                if not line.endswith(b"\n"):
                    break  # of one that was killed
                told = json.loads(line)
                if told.get("at") == self.moment and not self.struck and time.monotonic() > self.after:
                    self.strike()
                over |= "over" in told
                self.run.hear(self.name, told)
        await asyncio.to_thread(self.process.join, 60)
        if self.process.exitcode not in (0 if over else None, -signal.SIGKILL):
            self.run.hear(self.name, {"bad": f"the holder's process ended with {self.process.exitcode}"})
        to_holder.close()
        self.ended.set()

    def _send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def strike(self) -> None:
        """Deal the blow."""
        self.struck = True
        self.run.blows[f"{self.blow} while {self.moment}"] += 1
        if self.blow == "kill":
            self._send(signal.SIGKILL)
        elif self.blow != "spare":
            self._send(signal.SIGSTOP)
            seconds = 0.5 if self.blow == "thaw" else HEARTBEAT_S + 2
            self.tasks.append(asyncio.create_task(self._relent(seconds)))

    async def _relent(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.blow == "freeze":
            self._send(signal.SIGKILL)
        else:
            self._send(signal.SIGCONT)

    async def stop(self) -> None:
        """Let the holder end."""
        self.struck = True
        await asyncio.gather(*self.tasks)
        await self.up.wait()
        assert self.to_holder is not None
        with contextlib.suppress(ConnectionError):
            self.to_holder.write(b"end\n")
            await self.to_holder.drain()
        try:
            async with asyncio.timeout(SLICES / 4 + 30):
                await self.ended.wait()
        except TimeoutError:
            self.run.hear(self.name, {"bad": "the holder does not end"})
            self._send(signal.SIGKILL)


class Run:
    """Rounds of one engine, and what was heard."""

    def __init__(self, engine: InferenceEngine, seed: int, folder: Path, log: Path) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.folder = folder
        self.log = log.open("w")
        self.ended: Counter[tuple[str, str, str]] = Counter()
        self.blows: Counter[str] = Counter()
        self.bad: list[str] = []
        self.holders: dict[str, Holder] = {}
        self.socket = str(folder / "holders")
        self.numbers = iter(range(10**9))

    async def accept(self, from_holder: asyncio.StreamReader, to_holder: asyncio.StreamWriter) -> None:
        """Talk to a holder that has come up."""
        name = json.loads(await from_holder.readline())["name"]
        await self.holders.pop(name).hear(from_holder, to_holder)

    def hear(self, name: str, told: dict[str, Any]) -> None:
        """Keep what a process tells."""
        print(f"{time.monotonic():.3f}", name, json.dumps(told), file=self.log, flush="bad" in told)
        if "bad" in told:
            self.bad.append(f"{name}: {told['bad']}")
            print("BAD", name, told, flush=True)
        elif "did" in told:
            words = re.sub(r"'[^']*'|\d+", "_", told.get("words", ""))[:150]
            self.ended[told["did"], told["ended"], words] += 1

    async def round(
        self, seconds: float, oracle: Oracle, folders: Mapping[str, str], adapters: Mapping[str, str]
    ) -> None:
        """Let holders come and go for some time, and end them."""
        ends = time.monotonic() + seconds
        handle = base64.b64encode(pickle.dumps(await self.engine.handle())).decode()
        order = self.folder / "order.json"
        given = {"handle": handle, "oracle": oracle.answers, "folders": folders, "adapters": adapters}
        order.write_text(json.dumps(given))
        owner = User(
            f"owner{next(self.numbers)}",
            self.engine,
            oracle,
            folders,
            adapters,
            self.rng.randrange(10**6),
            lambda told: self.hear("owner", told),
        )
        using = asyncio.create_task(owner.use(2))
        holders: list[Holder] = []
        while time.monotonic() < ends:
            holders = [one for one in holders if not one.ended.is_set()]
            while len(holders) < HOLDERS:
                name = f"h{next(self.numbers)}"
                process = FORKS.Process(target=hold, args=(name, self.socket, order), daemon=True)
                holder = self.holders[name] = Holder(process, name, self.rng, self)
                await asyncio.to_thread(process.start)
                holders.append(holder)
            await asyncio.sleep(0.5)
            if self.engine.state is EngineState.ASLEEP:
                await self._woken()
        owner.over = True
        await asyncio.gather(*(one.stop() for one in holders))
        await using

    async def _woken(self) -> None:
        """Wake up an engine whose holder died while it slept: that is the owner's to do."""
        for _ in range(20):
            await asyncio.sleep(0.1)
            if self.engine.state is not EngineState.ASLEEP:
                return
        with contextlib.suppress(DrivetrainError):
            await self.engine.wake_up()

    async def check(self, oracle: Oracle, folders: Mapping[str, str]) -> None:
        """The engine serves, and holds nothing of its holders."""
        engine = self.engine
        deadline = time.monotonic() + HEARTBEAT_S + 20
        flight = engine.parts.in_flight
        while (
            flight.running
            or flight.waiting
            or engine.is_paused
            or engine.state
            not in (
                EngineState.READY,
                EngineState.DIRTY,
            )
        ):
            if engine.state is EngineState.ASLEEP:
                await self._woken()
            await asyncio.sleep(0.1)
            if time.monotonic() > deadline:
                left = f"{flight.running} run, {flight.waiting} wait, paused: {engine.is_paused}"
                self.hear("check", {"bad": f"{engine.state}, {left}"})
                break
        params = SamplingParams(max_new_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=0)
        for weights in WEIGHTS:
            version = f"{weights}.check.{next(self.numbers)}"
            async with asyncio.timeout(60):
                await engine.load_weights_from_disk(folders[weights], version)
                if engine.is_paused:
                    await engine.continue_generation()
                completions = (await engine.generate(PROMPTS, params)).completions
                scored = (await engine.compute_logprobs(PROMPTS)).completions
            for index, (one, score) in enumerate(zip(completions, scored, strict=True)):
                for fault in (oracle.fault_of(index, one, None), oracle.fault_of_scores(index, score)):
                    if fault is not None or one.weight_version != version:
                        self.hear("check", {"bad": f"{version}: {one.weight_version} {fault}"})
        for name in engine.parts.loaded_adapters.names:
            await engine.unload_lora_adapter(name)

    def held(self) -> dict[str, float]:
        """Measure the engine's processes and this one."""
        gc.collect()
        me = psutil.Process()
        trees = {"host": me.children(recursive=True), "owner": [me]}
        found: dict[str, float] = {"owner tasks": len(asyncio.all_tasks())}
        for name, processes in trees.items():
            found[f"{name} MiB"] = round(sum(one.memory_full_info().uss for one in processes) / 2**20, 1)
            found[f"{name} threads"] = sum(one.num_threads() for one in processes)
            found[f"{name} descriptors"] = sum(one.num_fds() for one in processes)
            found[f"{name} processes"] = len(processes)
        return found


@asynccontextmanager
async def opened(backend: str, model: Path, lora: bool, fields: str | None) -> AsyncIterator[InferenceEngine]:
    """Start the engine."""
    config: dict[str, Any] = {"backend": backend, "model": str(model), "isolation": "process", "timeouts": TIMEOUTS}
    config |= json.loads(fields) if fields else {}
    if lora:
        config |= {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    async with create_engine(config) as engine:
        yield engine


async def main_(given: argparse.Namespace) -> int:
    folders = {"a": tiny_model("qwen2"), "b": tiny_model("qwen2", seed=1)}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await stack.enter_async_context(opened(given.backend, folders["a"], given.lora, given.set))
        adapters: dict[str, str] = {}
        if given.lora:
            for seed, name in enumerate(ADAPTERS):
                (folder / name).mkdir()
                adapters[name] = str(make_adapter(folders["a"], folder / name, seed=seed).path)
        names = {weights: str(path) for weights, path in folders.items()}
        oracle = await Oracle.of(engine, names, adapters)
        run = Run(engine, given.seed, folder, given.log)
        server = await asyncio.start_unix_server(run.accept, run.socket, limit=2**24)
        stack.callback(server.close)
        for number in range(given.rounds):
            await run.round(given.seconds, oracle, names, adapters)
            await run.check(oracle, names)
            await asyncio.sleep(1)
            print(f"round {number}:", run.held(), f"load {os.getloadavg()[0]:.1f}", f"bad {len(run.bad)}", flush=True)
    for (did, how, words), count in sorted(run.ended.items()):
        print(f"{count:6} {did}: {how} {words}")
    for blow, count in sorted(run.blows.items()):
        print(f"{count:6} {blow}")
    print(f"{sum(run.ended.values())} calls, {sum(run.blows.values())} blows, {len(run.bad)} faults")
    return int(bool(run.bad))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="transformers")
    parser.add_argument("--set", help="fields of the engine's configuration, as JSON")
    parser.add_argument("--lora", action="store_true", help="with adapters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for everything that was told")
    given = parser.parse_args()
    torch.set_num_threads(1)
    FORKS.set_forkserver_preload(PRELOADED)
    return asyncio.run(main_(given))


if __name__ == "__main__":
    sys.exit(main())
