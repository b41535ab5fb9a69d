"""The conformance cases: each group is a module, or a package of several modules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Final

from drivetrain_conformance.harness.case import Case, registered

GROUPS: Final = (
    "generate",
    "stop",
    "logprob",
    "scoring",
    "streaming",
    "sampling",
    "sampling_mask",
    "structured_output",
    "abort",
    "pause",
    "sleep",
    "weight_sync",
    "sessions",
    "lora",
    "embeddings",
    "score",
    "hidden_states",
    "multimodal",
    "openai",
    "errors",
    "growth",
    "lifecycle",
    "parallel",
    "faults",
    "histories",
)
"""Every group, in running order."""


def all_cases(groups: Sequence[str] = GROUPS) -> list[Case]:
    """Return the cases of these groups: those that can share an engine together, those with their own engines last."""
    for group in groups:
        module = importlib.import_module(f"{__name__}.{group}")
        for part in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}."):
            importlib.import_module(part.name)
    chosen = [case for group in groups for case in registered().values() if case.group == group]
    order: dict[str, int] = {}
    for case in chosen:
        order.setdefault(_engine(case), len(order))
    return sorted(chosen, key=lambda case: (case.own_engine, order[_engine(case)]))


def _engine(case: Case) -> str:
    return repr((case.model, sorted(case.config.items())))
