"""Environment variables by which torchrun and other launchers tell a process its place among a trainer's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

_NAMES: Final = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
    | {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
)
_PREFIX: Final = "TORCHELASTIC_"


def without_launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for an engine's processes, which are no ranks of the trainer that starts them.

    With ``TORCHELASTIC_USE_AGENT_STORE``, torch before 2.14 takes the store of any ``tcp://`` group for one that
    torchrun serves. An engine's only rank then waits for a server that does not exist, and SGLang ends with SIGQUIT.
    """
    return {name: value for name, value in environment.items() if not _is_launchers(name)}


@contextmanager
def outside_the_trainers_group() -> Iterator[None]:
    """Start an engine's processes from the trainer's own: within the context, no launcher's variable is set."""
    removed = {name: os.environ.pop(name) for name in [*os.environ] if _is_launchers(name)}
    try:
        yield
    finally:
        for name, value in removed.items():
            os.environ.setdefault(name, value)


def _is_launchers(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIX)
