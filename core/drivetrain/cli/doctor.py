"""``drivetrain doctor``: finds problems that would keep engines from running on this machine."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import psutil
import typer
from rich.table import Table
from rich.text import Text

from drivetrain.backend.registry import DISABLE_VARIABLE, BackendInfo, BackendStatus, disabled_plugins, list_backends
from drivetrain.cli.output import out, print_json, progress
from drivetrain.create import create_engine
from drivetrain.errors import DrivetrainError, InvalidConfig

GIB = 1024**3
PROBE_SECONDS = 120
# Run in a separate process: a broken driver may crash the process that imports torch, and core does not import it.
PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
torch.ones(2, 2) @ torch.ones(2, 2)
print(json.dumps({"version": torch.__version__, "gpus": gpus, "threads": torch.get_num_threads()}))
"""


class Verdict(Enum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    """Something that was not asked for will not work here."""
    FAILED = "failed"


COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    verdict: Verdict
    detail: str


def doctor(
    run: Annotated[
        bool, typer.Option("--run", help="Also generate with a tiny model on each available backend.")
    ] = False,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Fail unless this backend can run here; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")] = False,
) -> None:
    """Check this machine and each backend; exit 1 if a check fails.

    An engine or a package that is not installed is a warning, unless --run or --backend asks for it.
    """
    with progress("doctor") as report:
        report("looking at this machine")
        checks = [
            Check("python", Verdict.OK, f"{platform.python_version()} at {sys.executable}"),
            Check("drivetrain", Verdict.OK, importlib.metadata.version("drivetrain")),
            *(*_torch(), _transformers(), _memory(), _shared_memory(), _temporary_space()),
        ]
        report("loading the backends")
        infos, wanted = list_backends(), set(backend or ())
        checks += [_backend(info, wanted) for info in infos]
        for name in sorted(wanted - {info.name for info in infos}):
            lacking = "no installed package provides it; 'drivetrain backends' lists all"
            checks.append(Check(f"backend {name}", Verdict.FAILED, lacking))
        checks += _disabled(infos)
        available = [info.name for info in infos if info.status is BackendStatus.AVAILABLE]
        if not available:
            checks.append(_none_available(infos, run))
        if run:
            checks += [_generation(name, report) for name in available if not wanted or name in wanted]
    failed = any(check.verdict is Verdict.FAILED for check in checks)
    if as_json:
        rows = [{"name": check.name, "verdict": check.verdict.value, "detail": check.detail} for check in checks]
        print_json({"ok": not failed, "checks": [*rows]})
    else:
        table = Table("", "check", "found", box=None, pad_edge=False, header_style="bold")
        for check in checks:
            table.add_row(Text(check.verdict.value, COLOURS[check.verdict]), Text(check.name), Text(check.detail))
        out.print(table)
    if failed:
        raise typer.Exit(1)


def _torch() -> list[Check]:
    if importlib.util.find_spec("torch") is None:
        detail = "not installed; to push weights from here: pip install 'drivetrain[weight-sync]'"
        return [Check("torch", Verdict.WARNING, detail)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Check("torch", Verdict.FAILED, f"did not import within {PROBE_SECONDS} s")]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [Check("torch", Verdict.FAILED, f"does not run (exit {done.returncode}): {last}")]
    found = json.loads(done.stdout.splitlines()[-1])
    device = ", ".join(found["gpus"]) or f"no GPU; CPU with {found['threads']} threads"
    return [Check("torch", Verdict.OK, found["version"]), Check("device", Verdict.OK, device)]


def _transformers() -> Check:
    try:
        return Check("transformers", Verdict.OK, importlib.metadata.version("transformers"))
    except importlib.metadata.PackageNotFoundError:
        detail = (
            "not installed; tokenizers are read from tokenizer.json alone. For others, and for the backend of that "
            "name: pip install 'drivetrain[transformers]'"
        )
        return Check("transformers", Verdict.WARNING, detail)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    return Check("memory", Verdict.OK if memory.available > GIB else Verdict.WARNING, detail)


def _shared_memory() -> Check:
    try:
        handle = os.memfd_create("drivetrain-doctor")
    except (AttributeError, OSError) as error:
        return Check("shared memory", Verdict.WARNING, f"no memfd ({error}); weights cannot go through shared memory")
    try:
        os.ftruncate(handle, 4096)
        with open(f"/proc/{os.getpid()}/fd/{handle}", "r+b") as again:
            again.write(b"drivetrain")
        if os.pread(handle, 10, 0) != b"drivetrain":
            return Check("shared memory", Verdict.WARNING, "a memfd does not hold what was written to it through /proc")
    except OSError as error:
        return Check("shared memory", Verdict.WARNING, f"a memfd cannot be opened through /proc: {error}")
    finally:
        os.close(handle)
    return Check("shared memory", Verdict.OK, "memfd, opened through /proc")


def _temporary_space() -> Check:
    import tempfile

    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    verdict = Verdict.OK if free > GIB else Verdict.WARNING
    return Check("temporary space", verdict, f"{free / GIB:.1f} GiB free in {folder}")


def _backend(info: BackendInfo, wanted: Collection[str]) -> Check:
    name = f"backend {info.name}"
    if info.status is BackendStatus.AVAILABLE:
        return Check(name, Verdict.OK, f"{info.engine_distribution} {info.engine_version}")
    failed = info.status is BackendStatus.BROKEN or info.name in wanted
    return Check(name, Verdict.FAILED if failed else Verdict.WARNING, f"{info.status.value}: {info.reason}")


def _none_available(infos: list[BackendInfo], run: bool) -> Check:
    """Judge an environment without an engine: a light install is fine, unless the user asked for an engine here."""
    if run:
        return Check("backends", Verdict.FAILED, "none is available for --run; see the reasons above")
    if any(info.status is not BackendStatus.ENGINE_MISSING for info in infos):
        return Check("backends", Verdict.FAILED, "none is available; see the reasons above")
    detail = "no engine is installed here; use one in another environment: create_engine(NAME, python=PATH, …)"
    return Check("backends", Verdict.OK, detail)


def _disabled(infos: list[BackendInfo]) -> list[Check]:
    known = {info.name for info in infos} | {info.distribution for info in infos}
    unknown = sorted(disabled_plugins() - known)
    if not unknown:
        return []
    return [Check(DISABLE_VARIABLE, Verdict.WARNING, f"names nothing that is installed: {', '.join(unknown)}")]


def _generation(name: str, report: Callable[[str], None]) -> Check:
    from drivetrain.testing import tiny_model

    async def generate() -> int:
        async with create_engine(name, model=str(tiny_model())) as engine:
            output = await engine.generate("Hello", {"max_new_tokens": 8, "ignore_eos": True})
            return len(output.completions[0].token_ids)

    report(f"generating with {name}")
    begin = time.perf_counter()
    try:
        tokens = asyncio.run(generate())
    except InvalidConfig as error:
        if error.field != "endpoint":
            return Check(f"run {name}", Verdict.FAILED, str(error))
        return Check(f"run {name}", Verdict.OK, "not tried: it connects to a server that you run")
    except DrivetrainError as error:
        return Check(f"run {name}", Verdict.FAILED, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    return Check(f"run {name}", Verdict.OK, f"{tokens} tokens of a tiny model, start and end in {seconds:.1f} s")
