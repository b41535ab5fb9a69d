"""Measure `drivetrain serve --processes N` beside one process: throughput, streams, and the time of small requests.

    python benchmarks/serving_processes.py BACKEND [--engines 1 2] [--processes 1 2 4 8] [--clients 512] [--gpus 0 1]
        [--size tiny] [--seconds 1.5] [--limit SECONDS] [--json FILE]

BACKEND is `simulated` (each token takes a stated time and no CPU time), `echo`, `transformers`, `sglang` or `vllm`. The
engines start once, with a tiny model; on a CPU, or engine i on the i-th of ``--gpus``, where ``--size`` chooses a
larger model of random weights. The server is in the process that owns them, as in the command, and starts anew for each
number of processes. The clients are processes of their own (``--client-processes``), with a connection for each client,
closed after each measurement. All share the machine's cores: the figures say something about the server only where
there are more cores than processes.

For each number of engines first the Python page (``page``, ``page streams``), called by as many tasks in the owner's
process. Then for each number of processes:

- tokens/s: whole answers of token ids with logprobs (``/inference/v1/generate``); ``--clients`` at once.
- of page: the same, divided by that of the page.
- streams/s: tokens a second of as many streams (``/v1/completions``), an event for each token.
- first p99: milliseconds to the first event of these streams.
- small p50, p99: milliseconds of requests of 16 ids for one token, 16 clients with pauses, nothing else running.
- beside p50, p99: the same beside the streams.
- cores: CPU time by wall time while the streams ran: of the owner, of the busiest and the idlest front-end.

Requests begin for ``--seconds``, and all run to their end; a figure counts all of that time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
from gpu.engine_fields import sglang_fields, vllm_fields
from gpu.models import SIZES, model_folder
from http_load import Job, Outcome
from serving import TimedBackend
from simulated import simulated_engine

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.testing import tiny_model
from drivetrain_fleet import InferenceEngineClient
from drivetrain_serving import Server, ServerConfig

GRAPHS: Final = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
ON_GPU: Final[dict[str, dict[str, Any]]] = {
    "sglang": sglang_fields(GRAPHS, share=0.7, cache_tokens=400_000, load_format="dummy"),
    "vllm": vllm_fields(GRAPHS, share=0.05, cache_bytes=16_000_000_000, load_format="dummy"),
    "transformers": {},
}
GPU: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    "sglang": lambda gpu: {"engine_kwargs": {"base_gpu_id": gpu}},
    "vllm": lambda gpu: {"device": f"cuda:{gpu}"},
    "transformers": lambda gpu: {"device": f"cuda:{gpu}"},
}
BACKENDS: Final = ("simulated", "echo", "transformers", "sglang", "vllm")
SMALL_CLIENTS: Final = 16
SMALL_PAUSE_S: Final = 0.02
SMALL_TOKENS: Final = 16
LEAD_S: Final = 0.4
"""Seconds in which the client processes connect, so that they begin together."""
WARM_UP_S: Final = 0.3


@dataclass(frozen=True)
class Load:
    """The work of clients."""

    clients: int
    prompt: int
    tokens: int
    seconds: float


# The owner of the engines ----------------------------------------------------------------------------------------


def engine_of(given: argparse.Namespace, folder: Path, index: int) -> InferenceEngine:
    if given.backend == "simulated":
        return simulated_engine(TimedBackend, folder, given.ms_per_token / 1000)
    fields: dict[str, Any] = {"backend": given.backend, "model": str(folder)}
    if given.gpus:
        gpu = GPU[given.backend](given.gpus[index % len(given.gpus)])
        fields |= {"dtype": "bfloat16", "max_num_seqs": given.clients + SMALL_CLIENTS, **ON_GPU[given.backend], **gpu}
        fields["engine_kwargs"] = ON_GPU[given.backend].get("engine_kwargs", {}) | gpu.get("engine_kwargs", {})
    elif given.backend != "echo":
        fields |= {"device": "cpu", "dtype": "float32", "max_num_seqs": given.clients + SMALL_CLIENTS}
    if given.isolation:
        fields["isolation"] = given.isolation
    return create_engine(fields)


async def own(given: argparse.Namespace) -> None:
    """Start the engines, and do as standard input says until it ends.

    Lines are JSON: ``{"engines": N}`` chooses one engine or the fleet, ``{"page": LOAD}`` and
    ``{"page_streams": LOAD}`` call it, ``{"processes": N}`` serves it, and ``{"processes": 0}`` stops serving.
    """
    folder = model_folder(given.size) if given.gpus else tiny_model()
    engines = [engine_of(given, folder, index) for index in range(max(given.engines))]
    async with AsyncExitStack() as ends:
        for engine in engines:
            ends.push_async_callback(engine.teardown)
        await asyncio.gather(*(engine.start() for engine in engines))
        gc.collect()
        gc.freeze()
        say({"versions": dict(engines[0].versions)})
        chosen, server = engines[0], None
        while line := await asyncio.to_thread(sys.stdin.readline):
            ((name, value),) = json.loads(line).items()
            if name == "engines":
                chosen = engines[0] if value == 1 else await ends.enter_async_context(InferenceEngineClient(engines))
                say({})
            elif name in ("page", "page_streams"):
                say(await by_page(chosen, Load(**value), streamed=name == "page_streams"))
            elif value:
                server = Server(chosen, ServerConfig(port=0, processes=value, served_model_name=("m",)))
                await server.start()
                say({"port": int(server.url.rpartition(":")[2])})
            else:
                assert server is not None
                await server.close()
                say({})
    gc.unfreeze()  # otherwise their objects are not released at exit, and C++ modules report leaks


async def by_page(engine: InferenceEngine, load: Load, *, streamed: bool) -> dict[str, float]:
    """Return the seconds and the tokens of as many tasks as there are clients."""
    params = SamplingParams(max_new_tokens=load.tokens, ignore_eos=True, logprobs=0)
    begun, made = time.perf_counter(), 0

    async def call(index: int) -> None:
        nonlocal made
        prompt = [97 + (7 * index + place) % 26 for place in range(load.prompt)]
        while time.perf_counter() - begun < load.seconds:
            if streamed:
                async for chunk in engine.generate_stream([prompt], params):
                    made += len(chunk.token_ids)
            else:
                output = await engine.generate([prompt], params)
                made += len(output.completions[0].token_ids)

    await asyncio.gather(*(call(index) for index in range(load.clients)))
    return {"took": time.perf_counter() - begun, "tokens": made}


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


# The owner and the clients, as the measurement sees them ---------------------------------------------------------


class Pipe:
    """A process that answers each line of JSON with one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.psutil = psutil.Process(process.pid)

    def tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # engines may print lines of their own
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}; its messages are above")

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.tell(message)
        return self.answer()


@contextmanager
def pipe(*arguments: str) -> Iterator[Pipe]:
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Pipe(process)
        except BaseException:
            process.kill()
            raise
        assert process.stdin is not None
        process.stdin.close()


def cpu_seconds(owner: psutil.Process) -> dict[str, float]:
    """Return the CPU time of the owner and of each front-end."""
    found = {"owner": owner}
    for child in owner.children():
        if "drivetrain_serving.front_ends" in child.cmdline():
            found[f"front-end {child.pid}"] = child
    return {name: sum(process.cpu_times()[:2]) for name, process in found.items()}


# Measurements ----------------------------------------------------------------------------------------------------


class Clients:
    """Client processes, which share each job's connections."""

    def __init__(self, processes: Sequence[Pipe]) -> None:
        self._small, *self._many = processes

    def run(self, *, many: Job | None = None, small: Job | None = None) -> tuple[Outcome, Outcome]:
        """Run both jobs at the same time: one over all processes but the first, the other in the first."""
        at = time.time() + LEAD_S
        asked = []
        if many is not None:
            for index, one in enumerate(self._many):
                count = len(range(index, many.connections, len(self._many)))
                one.tell({**asdict(many), "connections": count, "at": at, "seed": index})
                asked.append(one)
        if small is not None:
            self._small.tell({**asdict(small), "at": at})
        parts = [Outcome(**one.answer()) for one in asked]
        whole = Outcome(
            max((part.took for part in parts), default=0.0),
            [one for part in parts for one in part.whole],
            [one for part in parts for one in part.first],
            max((part.cpu for part in parts), default=0.0),
        )
        return whole, Outcome(**self._small.answer()) if small is not None else Outcome()


def jobs_of(port: int, load: Load) -> tuple[Job, Job, Job]:
    """Return the jobs of whole answers, of streams and of small requests."""
    params: dict[str, object] = {"max_tokens": load.tokens, "logprobs": 0, "ignore_eos": True}
    whole = Job(
        port=port,
        connections=load.clients,
        path="/inference/v1/generate",
        body={"model": "m", "sampling_params": params},
        prompt_field="token_ids",
        prompt_tokens=load.prompt,
        at=0.0,
        seconds=load.seconds,
        must_contain='"finish_reason":"length"',
    )
    completion = {"model": "m", **params}
    streams = replace(
        whole,
        path="/v1/completions",
        body={**completion, "stream": True},
        prompt_field="prompt",
        must_contain="data: [DONE]",
    )
    small = replace(
        streams,
        connections=SMALL_CLIENTS,
        body={**completion, "max_tokens": 1},
        prompt_tokens=SMALL_TOKENS,
        think=SMALL_PAUSE_S,
        must_contain='"finish_reason":"length"',
    )
    return whole, streams, small


def ms(seconds: Sequence[float], percent: int) -> float:
    return 1000 * statistics.quantiles(seconds, n=100)[percent - 1] if len(seconds) > 1 else float("nan")


def measure(owner: Pipe, clients: Clients, processes: int, load: Load, page: float) -> dict[str, float]:
    begun = time.perf_counter()
    port = owner.ask({"processes": processes})["port"]
    started = time.perf_counter() - begun
    whole, streams, small = jobs_of(port, load)
    clients.run(small=replace(small, seconds=WARM_UP_S))
    _, quiet = clients.run(small=small)
    answers, _ = clients.run(many=whole)
    before = cpu_seconds(owner.psutil)
    events, beside = clients.run(many=streams, small=small)
    used = {name: after - before[name] for name, after in cpu_seconds(owner.psutil).items()}
    owner.ask({"processes": 0})
    front_ends = [seconds / events.took for name, seconds in used.items() if name != "owner"] or [0.0]
    tokens_per_s = len(answers.whole) * load.tokens / answers.took
    return {
        "processes": processes,
        "tokens/s": tokens_per_s,
        "of page": tokens_per_s / page,
        "streams/s": len(events.whole) * load.tokens / events.took,
        "first p99": ms(events.first, 99),
        "small p50": ms(quiet.whole, 50),
        "small p99": ms(quiet.whole, 99),
        "beside p50": ms(beside.whole, 50),
        "beside p99": ms(beside.whole, 99),
        "owner": used["owner"] / events.took,
        "busiest": max(front_ends),
        "idlest": min(front_ends),
        "client": max(answers.cpu / answers.took, events.cpu / events.took),
        "started s": started,
    }


def tokens_per_s(owner: Pipe, name: str, load: Load) -> float:
    """Return the tokens per second of the Python page: of whole answers (``page``) or of ``page_streams``."""
    answer = owner.ask({name: asdict(load)})
    return answer["tokens"] / answer["took"]


def show(row: dict[str, Any]) -> None:
    parts = [f"{name} {value:,.3g}" if value < 100 else f"{name} {value:,.0f}" for name, value in row.items()]
    print("  " + ", ".join(parts), flush=True)


def run(given: argparse.Namespace, end: float) -> dict[str, Any]:
    load = Load(given.clients, given.prompt, given.tokens, given.seconds)
    found: dict[str, Any] = {
        "arguments": {**vars(given), "json": str(given.json)},
        "cores": len(os.sched_getaffinity(0)),
        "rows": [],
    }
    here = Path(__file__)
    with ExitStack() as ends:
        begun = time.perf_counter()
        owner = ends.enter_context(pipe(str(here), *sys.argv[1:], "--own"))
        many = [ends.enter_context(pipe(str(here.with_name("http_load.py")))) for _ in range(given.client_processes)]
        small = ends.enter_context(pipe(str(here.with_name("http_load.py"))))
        clients = Clients([small, *many])
        found |= owner.answer()
        print(f"{given.backend}: engines started in {time.perf_counter() - begun:.1f} s", found["versions"], flush=True)
        for engines in given.engines:
            owner.ask({"engines": engines})
            owner.ask({"page": {**asdict(load), "seconds": WARM_UP_S}})
            page, streams = (tokens_per_s(owner, name, load) for name in ("page", "page_streams"))
            print(f"{given.backend}, engines {engines}: page {page:,.0f} tokens/s, streams {streams:,.0f}", flush=True)
            for processes in given.processes:
                if time.monotonic() > end:
                    print(f"  processes {processes}: not measured, because --limit has passed", flush=True)
                    continue
                row = {"engines": engines, "page": page, "page streams": streams}
                row |= measure(owner, clients, processes, load, page)
                found["rows"].append(row)
                show(row)
                if given.json:
                    given.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2], help="1, or one other number, or both")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256, help="ids of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--seconds", type=float, default=1.5, help="in which requests of each measurement begin")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no more is begun")
    parser.add_argument("--gpus", type=int, nargs="+", help="of the engines; left out: the CPU")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model on --gpus")
    parser.add_argument("--isolation", choices=("inline", "process"), help="of the engines; left out: the backend's")
    parser.add_argument("--ms-per-token", type=float, default=5.0, help="of a simulated engine")
    default = max(1, min(8, len(os.sched_getaffinity(0)) // 4))
    parser.add_argument("--client-processes", type=int, default=default, help="beside one for small requests")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if len(set(given.engines) - {1}) > 1:
        parser.error(f"--engines {given.engines}: give 1 and at most one other number")
    given.engines = sorted(given.engines)
    if given.own:
        asyncio.run(own(given))
        return
    run(given, time.monotonic() + given.limit)


if __name__ == "__main__":
    main()
