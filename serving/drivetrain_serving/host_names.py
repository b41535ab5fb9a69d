"""Hosts that a server without keys answers to.

A page of another site can have its own name resolved to 127.0.0.1 (DNS rebinding). Its browser then takes this server
for the page's own site, and the header ``Host`` alone still tells the name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/?#@\[\]]+))(?::[0-9]*)?", re.IGNORECASE)
"""``Host``: an IPv6 address in brackets, or a name or an IPv4 address; then a port or none."""
ANY: Final = "*"


class AllowedHosts:
    """The hosts that a server answers to: this machine, the address that it listens on, and some names.

    Args:
        listens_on: Address that the server listens on.
        names: Names and addresses. ``*.DOMAIN`` allows all names below a domain, ``*`` all hosts.
    """

    def __init__(self, listens_on: str, names: Sequence[str]) -> None:
        self._any = ANY in names
        self._names = {_normal(name) for name in (listens_on, *names)}

    def allow(self, header: str) -> bool:
        """Return whether the value of a ``Host`` header is allowed, whatever its port."""
        if self._any:
            return True
        host = host_in(header)
        return host is not None and (_is_this_machine(host) or not self._names.isdisjoint(_patterns(host)))


def host_in(header: str) -> str | None:
    """Return the name or address in the value of a ``Host`` header; None if it has none."""
    found = _HOST.fullmatch(header)
    return None if found is None else _normal(found[1] or found[2])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to ``host``."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def require_host(name: str) -> str:
    """Return a name that :class:`AllowedHosts` takes.

    Raises:
        ValueError: It is none.
    """
    found = _HOST.fullmatch(name.removeprefix("*."))
    if name == ANY or _address(name) is not None or (found and found[2] == found[0] and ANY not in found[0]):
        return name
    raise ValueError(f"{name!r}: expected a name or an address without scheme and port, *.DOMAIN, or *")


def _patterns(host: str) -> list[str]:
    """Return a host, and each ``*.DOMAIN`` that it is below."""
    labels = host.split(".")
    return [host, *("*." + ".".join(labels[place:]) for place in range(1, len(labels)))]


def _is_this_machine(host: str) -> bool:
    address = _address(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")  # no name server is asked: RFC 6761, 6.3
    return address.is_loopback or address.is_unspecified  # clients of 0.0.0.0 reach their own machine


def _normal(host: str) -> str:
    address = _address(host)
    return host.lower().removesuffix(".") if address is None else str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.removesuffix("."))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
