"""Handles, with which other processes use an engine that this one owns."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest

_TCP: Final = re.compile(r"t(?:cp|ls)://(\[[^\[\]/]+\]|[^:/\[\]]+):(\d{1,5})")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """An engine's address and key. Small and picklable; any process that has it controls the engine."""

    address: str
    """``unix:/path``, ``tcp://host:port`` or ``tls://host:port``."""
    key: str = field(repr=False)
    ssl_fingerprint: str | None = None
    """For ``tls://``: SHA-256 of the owner's certificate, as hexadecimal digits. No other certificate is accepted, and
    neither its name nor its dates are checked.
    """
    ssl_ca_certs: str | None = None
    """For ``tls://``: the holder's PEM file of trusted authorities; None: those of the system. The certificate must be
    valid and for the address's host.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not (
            self.address.startswith("unix:/") or (_TCP.fullmatch(self.address) and self.tcp[1] < 2**16)
        ):
            raise InvalidRequest(
                f"address={shown(self.address)}: expected unix:/path, tcp://host:port or tls://host:port",
                field="address",
            )
        if not isinstance(self.key, str) or not self.key or not self.key.isascii():
            raise InvalidRequest("key: expected the key of the engine's owner, a string", field="key")
        self._check_tls()

    def _check_tls(self) -> None:
        for name in ("ssl_fingerprint", "ssl_ca_certs"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, str) and given):
                raise InvalidRequest(f"{name}={shown(given)}: expected a string", field=name)
            if given is not None and not self.is_tls:
                raise InvalidRequest(f"{name}={shown(given)}: {self.address} is no tls:// address", field=name)
        if self.ssl_fingerprint is not None:
            digits = self.ssl_fingerprint.replace(":", "").lower()
            if not _SHA256.fullmatch(digits):
                raise InvalidRequest(
                    f"ssl_fingerprint={shown(self.ssl_fingerprint)}: expected the 64 hexadecimal digits of a SHA-256",
                    field="ssl_fingerprint",
                )
            if self.ssl_ca_certs is not None:
                raise InvalidRequest(
                    "ssl_ca_certs: a pinned certificate needs no authority; give it or ssl_fingerprint",
                    field="ssl_ca_certs",
                )
            object.__setattr__(self, "ssl_fingerprint", digits)

    @property
    def is_tls(self) -> bool:
        """True if the connection is encrypted."""
        return self.address.startswith("tls:")

    @property
    def path(self) -> str | None:
        """Path of the Unix socket; None for TCP."""
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    @property
    def tcp(self) -> tuple[str, int]:
        """Host and port of a TCP or TLS address."""
        found = _TCP.fullmatch(self.address)
        assert found is not None
        return found[1].strip("[]"), int(found[2])
