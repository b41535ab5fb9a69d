"""TRL's GRPOTrainer in server mode on GPU 0, against ``drivetrain serve`` on GPU 1: weights by TRL's own NCCL sender.

    python benchmarks/gpu/trl_server.py transformers sglang vllm [--steps 20] [--limit 150] [--out FOLDER] [--json FILE]
        [--server-path BACKEND=PATH ...] [--trainer-path PATH] [--no-tests]

First runs ``tests/serving/over_nccl.py``; then, for each backend, ``examples/trl_server_mode.py`` in a process that is
given the server's URL and nothing of drivetrain. ``--server-path`` and ``--trainer-path`` are put before PYTHONPATH,
for engines that are unpacked in folders. Each backend ends after ``--limit`` seconds; one that fails stops no other.
FOLDER keeps the logs. Exits with 1 unless on every backend

- the reward rises by 0.3,
- each step's tokens are of the weights that were sent in that step, by the server's own records,
- TRL's own logprob difference stays within the tolerance of the engine's dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any, Final

from engine_fields import sglang_fields, vllm_fields

ROOT: Final = Path(__file__).parents[2]
GRAPHS: Final = [1, 2, 4, 8, 16, 32, 64]
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "transformers": {"dtype": "float32"},
    "sglang": {"dtype": "bfloat16", **sglang_fields(GRAPHS, share=0.7, cache_tokens=100_000)},
    "vllm": {"dtype": "bfloat16", **vllm_fields(GRAPHS, share=0.05, cache_bytes=2_000_000_000)},
}
LOGPROB_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest |trainer's logprob - engine's logprob| of a token, in nats; the trainer computes in float32."""
MIN_RISE: Final = 0.3
PUSH: Final = ("/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache")
"""Routes that give the server its weights, in the order of TRL's calls."""
TESTS_LIMIT_S: Final = 240.0


def say(*words: object) -> None:
    print(f"{time.strftime('%H:%M:%S')}", *words, file=sys.stderr, flush=True)


def environment(path: str, gpu: int) -> dict[str, str]:
    """Return the environment of a process on one GPU, with more folders to import from."""
    found = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    found.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    found.setdefault("VLLM_HOST_IP", "127.0.0.1")  # a machine without a network has no other for TRL's client to find
    found.setdefault("NCCL_NVLS_ENABLE", "0")  # some machines lack multicast; it must be the same on both sides
    return found


@contextmanager
def running(
    command: Sequence[str], log: Path, env: Mapping[str, str], seconds: float
) -> Iterator[subprocess.Popen[str]]:
    """Run a command, with its output in a pipe and its errors in ``log``; kill it and its children at the end.

    The end is that of the context, or ``seconds`` from now.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1, env=env, start_new_session=True
        )
    timer = threading.Timer(max(seconds, 0.0), killed, [process, log.name])
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=15)
        killed(process)
        process.communicate()


def killed(process: subprocess.Popen[str], late: str = "") -> None:
    if late:
        say(f"{late}: out of time, killed")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


def url_of(server: subprocess.Popen[str]) -> str:
    """Return the address that the server prints once its engine is ready."""
    for line in lines_of(server):
        if found := re.search(r"http://\S+", line):
            return found[0]
    raise RuntimeError("the server ended before it was ready")


def settings_of(backend: str, dtype: str | None) -> list[str]:
    fields = ENGINES[backend] | ({"dtype": dtype} if dtype else {})
    return [word for name, value in fields.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def records_of(log: Path) -> list[dict[str, Any]]:
    """Return the requests that the server has logged."""
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"time"')]
    return [record for record in found if "path" in record]


def trained(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the server, train, and return what both said."""
    ends = time.monotonic() + args.limit
    folder = subprocess.run(
        [sys.executable, "-c", "from drivetrain_demo.settings import tiny_policy; print(tiny_policy(0))"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split()[-1]
    server_log, trainer_log = args.out / f"{backend}-server.log", args.out / f"{backend}-trainer.log"
    serve = [*args.serve.split(), "serve", "--backend", backend, "--model", folder, "--port", "0", "--log-requests"]
    train = [*args.train.split(), str(ROOT / "examples/trl_server_mode.py"), "--model", folder]
    lines: list[dict[str, Any]] = []
    path = args.server_path.get(backend, "")
    with running([*serve, *settings_of(backend, args.dtype)], server_log, environment(path, 1), args.limit) as server:
        url = url_of(server)
        say(backend, "serves at", url)
        command = [*train, "--url", url, "--steps", str(args.steps)]
        path = args.trainer_path
        with running(command, trainer_log, environment(path, 0), ends - time.monotonic()) as trainer:
            for line in lines_of(trainer):
                if line.startswith('{"'):  # others are transformers' own
                    say(backend, line.strip())
                    lines.append(json.loads(line))
            status = trainer.wait()
    versions, steps = (lines[0], lines[1:]) if lines else ({}, [])
    return {"versions": versions, "trainer_exit": status, "steps": steps, "requests": records_of(server_log)}


def summary(result: Mapping[str, Any], steps: int, dtype: str) -> dict[str, Any]:
    """Return the figures of a run, and why it fails, if it does."""
    taken: dict[str, list[float]] = {}
    served: list[list[str]] = []
    refused = []
    for record in result["requests"]:
        taken.setdefault(record["path"], []).append(record["seconds"])
        if record["path"] == "/v1/completions":
            served.append(record.get("weight_versions", []))
        if record["status"] != 200:
            refused.append({name: record[name] for name in ("path", "status", "error")})
    rewards = [step["reward"] for step in result["steps"]]
    figures: dict[str, Any] = {
        "rewards": rewards,
        "seconds_per_step": statistics.median([step["seconds"] for step in result["steps"]] or [0.0]),
        "logprob_difference_mean": _largest(result, "sampling/sampling_logp_difference/mean"),
        "logprob_difference_max": _largest(result, "sampling/sampling_logp_difference/max"),
        "importance_ratio_max": _largest(result, "sampling/importance_sampling_ratio/max"),
        "importance_ratio_min": -_largest(result, "sampling/importance_sampling_ratio/min", -1),
        "versions_of_generations": served,
        "requests": {path: {"count": len(all_), "median_s": statistics.median(all_)} for path, all_ in taken.items()},
        "push_median_s": sum(statistics.median(taken[path]) for path in PUSH if path in taken),
        "refused": refused,
    }
    tolerance = LOGPROB_TOLERANCE[dtype]
    faults = {
        "the trainer failed": result["trainer_exit"] != 0,
        f"{len(rewards)} of {steps} steps": len(rewards) != steps,
        f"the reward did not rise by {MIN_RISE}": not rewards or rewards[-1] < rewards[0] + MIN_RISE,
        f"logprobs differ by more than {tolerance}": not figures["logprob_difference_max"] <= tolerance,
        "a step's tokens are of other weights": served != [[str(number)] for number in range(1, steps + 1)],
        "the server refused a request": bool(refused),
    }
    return figures | {"faults": [fault for fault, is_so in faults.items() if is_so]}


def _largest(result: Mapping[str, Any], name: str, sign: int = 1) -> float:
    return max((sign * step[name] for step in result["steps"] if name in step), default=float("nan"))


def tested(args: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of both NCCL groups; return how they ended."""
    log = args.out / "over_nccl.log"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "tests/serving/over_nccl.py"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0"}
    with log.open("w") as out:
        try:
            status: int | str = subprocess.run(
                command, cwd=ROOT, stdout=out, stderr=out, env=env, timeout=TESTS_LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not through within {TESTS_LIMIT_S} s"
    last = log.read_text().strip().splitlines()[-1:]
    say("over_nccl:", status, *last)
    return {"status": status, "last_line": last}


def devices() -> list[str]:
    """Return the names of the GPUs, without a CUDA context of our own."""
    code = "import torch; print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep='\\n')"
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return printed.stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="+", choices=sorted(ENGINES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each backend")
    parser.add_argument("--dtype", choices=sorted(LOGPROB_TOLERANCE), help="of every engine")
    parser.add_argument("--out", type=Path, default=Path("trl-server"), help="folder of the logs")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--server-path", action="append", default=[], metavar="BACKEND=PATH")
    parser.add_argument("--trainer-path", default="")
    parser.add_argument("--serve", default=f"{sys.executable} -m drivetrain", help="command of drivetrain")
    parser.add_argument("--train", default=sys.executable, help="command that runs the trainer's script")
    parser.add_argument("--no-tests", action="store_true", help="leave out tests/serving/over_nccl.py")
    args = parser.parse_args()
    args.server_path = dict(given.split("=", 1) for given in args.server_path)
    args.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"date": date.today().isoformat(), "device": devices()}
    if not args.no_tests:
        document["over_nccl"] = tested(args)
    for backend in args.backends:
        dtype = args.dtype or ENGINES[backend]["dtype"]
        try:
            result = trained(backend, args)
            found = {"dtype": dtype, "versions": result["versions"]} | summary(result, args.steps, dtype)
        except Exception as error:
            found = {"dtype": dtype, "faults": [f"{type(error).__name__}: {error}"]}
        document[backend] = found
        say(backend, json.dumps({name: value for name, value in found.items() if name not in ("rewards", "requests")}))
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    failed = [backend for backend in args.backends if document[backend]["faults"]]
    say("failed:", ", ".join(failed) or "nothing")
    raise SystemExit(bool(failed) or document.get("over_nccl", {}).get("status", 0) != 0)


if __name__ == "__main__":
    main()
