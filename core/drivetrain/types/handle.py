"""A handle: what another process needs to use an engine that this one owns."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest

_TCP: Final = re.compile(r"tcp://(\[[^\]/]+\]|[^:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """Where an engine listens, and the key to it. Small and picklable; whoever has it controls the engine."""

    address: str
    """``unix:/path`` or ``tcp://host:port``."""
    key: str = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not (
            self.address.startswith("unix:/") or (_TCP.fullmatch(self.address) and self.tcp[1] < 2**16)
        ):
            raise InvalidRequest(
                f"address={shown(self.address)}: expected unix:/path or tcp://host:port", field="address"
            )
        if not isinstance(self.key, str) or not self.key or not self.key.isascii():
            raise InvalidRequest("key: expected the key of the engine's owner, a string", field="key")

    @property
    def path(self) -> str | None:
        """Path of the Unix socket; None for TCP."""
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    @property
    def tcp(self) -> tuple[str, int]:
        """Host and port of a TCP address."""
        found = _TCP.fullmatch(self.address)
        assert found is not None
        return found[1].strip("[]"), int(found[2])


__all__ = ["EngineHandle"]
