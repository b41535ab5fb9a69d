"""Fault injection: signals a process at an exact step of a weight update; see tests/faults.

Python imports this module first in every process whose ``PYTHONPATH`` contains this folder, in any environment, so it
uses only the standard library. It does nothing unless ``DRIVETRAIN_FAULTS`` names a folder:

- ``passed`` gets a line for each point that a process passes: pid, rank, step, moment, bucket;
- ``plan`` says at which point to send which signal to which process. The process that gets there first renames it to
  ``struck``.
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
_now: dict[str, Any] = {"step": ""}
"""Current step of this process; its updates run one after another, in one thread."""


def reached(step: str, moment: str, bucket: int = -1) -> None:
    """Record that this process reached a point, and strike if the plan names it."""
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
        return  # no plan, or struck already
    if not plan["signal"]:
        raise OSError(f"struck at {step}")
    os.kill(victim, plan["signal"])


def _rank() -> int:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed.get_rank() if distributed is not None and distributed.is_initialized() else 0


def _hook_receiver(module: Any) -> None:
    receiver = module.Receiver
    handle, prepare, prepared = receiver.handle, receiver.prepare, receiver.prepared

    def hooked_handle(self: Any, message: Any) -> Any:
        step = type(message).__name__
        if step in ("PrepareUpdate", "LoadBuckets"):  # these steps are hooked elsewhere
            return handle(self, message)
        _now.update(step=step)
        reached(step, "before")
        reply = handle(self, message)
        reached(step, "after")
        return reply

    def hooked_prepare(self: Any, message: Any) -> None:
        reached("PrepareUpdate", "before")
        prepare(self, message)

    def hooked_prepared(self: Any) -> Any:
        waited = self.phase is not module.Phase.PREPARED
        reply = prepared(self)
        if reply is not None and waited:
            _hook_reader(self.update.reader)
            reached("PrepareUpdate", "after")
        return reply

    receiver.handle, receiver.prepare, receiver.prepared = hooked_handle, hooked_prepare, hooked_prepared


def _hook_update(module: Any) -> None:
    digests = module.digests

    def hooked(tensors: Any) -> Any:
        if _now["step"] == "VerifyUpdate":
            reached("VerifyUpdate", "within")
        return digests(tensors)

    module.digests = hooked


def _hook_reader(reader: Any) -> None:
    """Hook each bucket of a reader, since one message may load several."""
    if "tensors" in vars(reader):
        return
    tensors = reader.tensors

    def hooked(index: int) -> Iterator[Any]:
        reached("LoadBuckets", "before", index)
        for number, tensor in enumerate(tensors(index)):
            yield tensor
            if number == 0:  # the first tensor is now in the model
                reached("LoadBuckets", "within", index)
        reached("LoadBuckets", "after", index)

    reader.tensors = hooked


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
    "drivetrain_weight_sync.receiver.receiver": _hook_receiver,
    "drivetrain_weight_sync.receiver.update": _hook_update,
    "drivetrain_weight_sync.transports.process_groups": _hook_groups,
    "drivetrain_weight_sync.trainer.engine_push": _hook_staging,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that patches a module right after its import."""

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
