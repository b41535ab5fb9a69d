"""Strikes a process at an exact step of a weight update; see tests/faults.

Python imports this before anything else in every process whose ``PYTHONPATH`` names this folder, in whatever
environment, so that it needs nothing but the standard library. It does nothing without ``DRIVETRAIN_FAULTS``, a folder:

- ``passed`` gets a line for each point that a process passes: its id, its rank, the step, the moment, the bucket;
- ``plan`` says at which of them a signal goes to which process: whoever comes there renames it to ``struck`` first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "DRIVETRAIN_FAULTS"
_now: dict[str, Any] = {"step": "", "bucket": -1}
"""Where this process is; its updates are one after another, in one thread."""


def reached(step: str, moment: str, bucket: int = -1) -> None:
    """This process is at a point; strike if that is where it was planned."""
    where = os.environ.get(FOLDER)
    if where is None:
        return
    folder, rank = Path(where), _rank()
    with (folder / "passed").open("a") as passed:
        passed.write(f"{os.getpid()} {rank} {step} {moment} {bucket}\n")
    try:
        plan = json.loads((folder / "plan").read_text())
        if plan["point"] != [step, moment, bucket, rank]:
            return
        victim = plan["pid"] or os.getpid()
        (folder / "victim").write_text(str(victim))
        (folder / "plan").rename(folder / "struck")
    except FileNotFoundError:
        return  # nothing is planned, or it was struck already
    if not plan["signal"]:
        raise OSError(f"struck at {step}")
    os.kill(victim, plan["signal"])


def _rank() -> int:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed.get_rank() if distributed is not None and distributed.is_initialized() else 0


def _hook_receiver(module: Any) -> None:
    handle, noted, digests = module.Receiver.handle, module.Receiver._noted, module.digests

    def hooked_handle(self: Any, message: Any) -> Any:
        step, bucket = type(message).__name__, getattr(message, "indices", (-1,))[0]
        _now.update(step=step, bucket=bucket)
        reached(step, "before", bucket)
        reply = handle(self, message)
        reached(step, "after", bucket)
        return reply

    def hooked_noted(self: Any, *arguments: Any) -> Iterator[Any]:
        for number, tensor in enumerate(noted(self, *arguments)):
            yield tensor
            if number == 0:  # the first one is in the model
                reached("LoadBuckets", "within", _now["bucket"])

    def hooked_digests(tensors: Any) -> Any:
        if _now["step"] == "VerifyUpdate":
            reached("VerifyUpdate", "within")
        return digests(tensors)

    module.Receiver.handle, module.Receiver._noted, module.digests = hooked_handle, hooked_noted, hooked_digests


def _hook_groups(module: Any) -> None:
    join = module.Groups.join

    def hooked(self: Any, *arguments: Any) -> None:
        reached("Join", "before")
        join(self, *arguments)
        reached("Join", "after")

    module.Groups.join = hooked


def _hook_staging(module: Any) -> None:
    stage = module.stage

    def hooked(*arguments: Any, **named: Any) -> Any:
        reached("Stage", "before")
        staged = stage(*arguments, **named)
        reached("Stage", "after")
        return staged

    module.stage = hooked


_HOOKS: Final[dict[str, Callable[[Any], None]]] = {
    "drivetrain_weight_sync.receiver": _hook_receiver,
    "drivetrain_weight_sync.transports.broadcast": _hook_groups,
    "drivetrain_weight_sync.sync": _hook_staging,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Hooks a module as soon as it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in _HOOKS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _HOOKS[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport())
