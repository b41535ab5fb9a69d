"""Download of files from untrusted URLs over HTTP."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from aiohttp.abc import AbstractResolver, ResolveResult
    from yarl import URL

MOST_REDIRECTS: Final = 10

_SCHEMES: Final = ("http", "https")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses whose last four bytes are the IPv4 address that a gateway connects to (RFC 6052)."""


async def fetch(url: str, most_bytes: int, *, allow_private_hosts: bool) -> bytes:
    """Download the file at an http or https URL. The caller sets the timeout.

    Args:
        url: The URL. Redirects are followed and checked like the URL itself.
        most_bytes: Maximum size. If the server announces a larger size, nothing is read.
        allow_private_hosts: Allow hosts outside the public internet. If False, every resolved address is checked before
            connecting, and the environment's proxies are not used.

    Raises:
        ImportError: aiohttp is not installed.
        ValueError: The URL, a redirect, its host or the file is refused.
        OSError: The server cannot be reached.
        aiohttp.ClientError: The answer is not HTTP, or breaks off.
    """
    import aiohttp
    from yarl import URL

    connector = aiohttp.TCPConnector(resolver=None if allow_private_hosts else _public_resolver())
    async with aiohttp.ClientSession(
        connector=connector,
        headers={"User-Agent": "drivetrain", "Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=allow_private_hosts,
    ) as session:
        at = URL(url)
        for _ in range(MOST_REDIRECTS + 1):
            _check(at, allow_private_hosts)
            async with _answer(session, at) as answer:
                location = answer.headers.get("Location")
                if answer.status in (301, 302, 303, 307, 308) and location is not None:
                    at = at.join(URL(location))
                    continue
                if not 200 <= answer.status < 300:
                    raise ValueError(f"the server answers with HTTP {answer.status}")
                return await _body(answer, most_bytes)
    raise ValueError(f"it redirects more than {MOST_REDIRECTS} times")


@asynccontextmanager
async def _answer(session: ClientSession, url: URL) -> AsyncIterator[ClientResponse]:
    import aiohttp

    try:
        async with session.get(url, allow_redirects=False) as answer:
            yield answer
    except aiohttp.ClientResponseError as error:  # its message holds the URL, which may contain a signature
        raise ValueError(f"the server's answer is no HTTP: {error.message}") from None


def at_most(most_bytes: int) -> str:
    """Return the expectation and remedy for the error about a file that is too large."""
    return f"expected at most {most_bytes} (media.max_bytes); give a smaller file, or raise the bound"


async def _body(answer: ClientResponse, most_bytes: int) -> bytes:
    said = answer.content_length
    if said is not None and said > most_bytes:
        raise ValueError(f"the server says that it has {said} bytes; {at_most(most_bytes)}")
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise ValueError(f"it has too many bytes; {at_most(most_bytes)}")
    return bytes(body)


def _check(url: URL, allow_private_hosts: bool) -> None:
    if url.scheme not in _SCHEMES:
        raise ValueError(f"it redirects to {str(url)[:100]!r}; expected http:// or https://")
    if not url.host:
        raise ValueError("the URL names no host")
    if not allow_private_hosts:
        try:
            address = ipaddress.ip_address(url.host)
        except ValueError:
            # aiohttp does not resolve hosts of digits and dots, such as 127.1, but the system takes them for addresses.
            if ":" in url.host or url.host.replace(".", "").isdigit():
                raise ValueError(f"{url.host} is neither a name nor an address as it is usually written") from None
            return  # a name; the resolver checks its addresses
        _require_public(url.host, address)


def _public_resolver() -> AbstractResolver:
    """Make a resolver that returns only public addresses.

    The connector connects to the returned address, so the name cannot resolve differently in between. Addresses written
    in the URL do not pass through the resolver.
    """
    from aiohttp.resolver import ThreadedResolver

    class PublicResolver(ThreadedResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            found = await super().resolve(host, port, family)
            for one in found:
                _require_public(host, ipaddress.ip_address(one["host"]))
            return found

    return PublicResolver()


def _require_public(host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    for meant in _meant(address):
        if not meant.is_global or meant.is_multicast:
            raise ValueError(f"{host} is {meant}, which is no public address; media.allow_private_hosts=True allows it")


def _meant(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> Sequence[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses to check: the address itself, or the IPv4 address embedded in it, or both."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address in _NAT64:
        return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
    return (address,) if address.sixtofour is None else (address, address.sixtofour)
