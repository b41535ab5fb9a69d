"""One check of a server's routes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from drivetrain_conformance.routes.dialect import Dialect
from drivetrain_conformance.routes.server_under_test import Target

Body = Callable[[Target], Awaitable[None]]

GROUPS: Final = {
    "openai": tuple(Dialect),
    "vllm_tokens": (Dialect.VLLM,),
    "vllm_control": (Dialect.VLLM,),
    "vllm_lora": (Dialect.VLLM,),
    "vllm_weights": (Dialect.VLLM,),
    "vllm_sleep": (Dialect.VLLM,),
    "sglang_generate": (Dialect.SGLANG,),
    "sglang_control": (Dialect.SGLANG,),
    "sglang_lora": (Dialect.SGLANG,),
    "sglang_weights": (Dialect.SGLANG,),
    "sglang_memory": (Dialect.SGLANG,),
}
"""Every group, in running order, and the dialects that it is for."""


@dataclass(frozen=True, slots=True)
class RouteCase:
    """One check: its body ends normally on a server that trainers can use."""

    group: str
    name: str
    summary: str
    """The body's docstring: what must hold, and who needs it."""
    body: Body

    @property
    def id(self) -> str:
        """``group/name``."""
        return f"{self.group}/{self.name}"


_registry: Final[dict[str, RouteCase]] = {}


def route_case(body: Body) -> Body:
    """Register a coroutine function as a case; its group is its module, its name the function's."""
    group, name = body.__module__.rpartition(".")[2], body.__name__
    summary = " ".join((inspect.getdoc(body) or "").split())
    if not summary:
        raise TypeError(f"{group}/{name} has no docstring; it must say what holds and who needs it")
    made = RouteCase(group, name, summary, body)
    if made.id in _registry:
        raise TypeError(f"there are two cases {made.id}")
    _registry[made.id] = made
    return body


def route_cases(dialect: Dialect | None = None) -> list[RouteCase]:
    """Return the cases of a dialect, or all, in running order."""
    chosen = [group for group, dialects in GROUPS.items() if dialect is None or dialect in dialects]
    for group in chosen:
        importlib.import_module(f"drivetrain_conformance.routes.cases.{group}")
    return [case for group in chosen for case in _registry.values() if case.group == group]
