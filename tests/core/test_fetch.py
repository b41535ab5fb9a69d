"""Malicious media at URLs and in files, from a server that runs here."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from drivetrain import DeadlineExceeded, EngineConfig, ImageInput, InvalidRequest, UnsupportedCapability, VideoInput
from drivetrain.media.inputs import read_bytes

BODY = bytes(range(256)) * 16
ENDED: list[str] = []
"""Paths whose answers the client broke off."""


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        try:
            getattr(self, path.strip("/"))(query)
        except OSError:
            ENDED.append(path)
        self.close_connection = True

    def _begin(self, status: int = 200, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def good(self, query: str) -> None:
        self._begin(Content_Length=len(BODY))
        self.wfile.write(BODY)

    def headers_back(self, query: str) -> None:
        said = str(self.headers).encode()
        self._begin(Content_Length=len(said))
        self.wfile.write(said)

    def unsized(self, query: str) -> None:
        self._begin()
        self.wfile.write(BODY)

    def endless(self, query: str) -> None:
        self._begin(Transfer_Encoding="chunked")
        while True:
            self.wfile.write(b"1000\r\n" + b"\0" * 4096 + b"\r\n")

    def lying(self, query: str) -> None:
        self._begin(Content_Length=10**12)
        self.wfile.write(BODY)

    def broken(self, query: str) -> None:
        self._begin(Content_Length=len(BODY) + 1)
        self.wfile.write(BODY)

    def slow(self, query: str) -> None:
        """Send one byte now and then, so that no single read takes long."""
        self._begin()
        for _ in range(2400):
            self.wfile.write(b"\0")
            time.sleep(0.05)

    def silent(self, query: str) -> None:
        time.sleep(3)

    def missing(self, query: str) -> None:
        self._begin(404, Content_Length=0)

    def to(self, query: str) -> None:
        self._begin(302, Location=unquote(query), Content_Length=0)

    def around(self, query: str) -> None:
        self._begin(302, Location=f"/around?{int(query or 0) + 1}", Content_Length=0)

    def nonsense(self, query: str) -> None:
        self.wfile.write(b"this is no HTTP\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as serving:
        serving.daemon_threads = True
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()
        thread.join()


def config(seconds: float = 20, **media: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "b", "model": "m", "media": media, "timeouts": {"media": seconds}})


async def refused(url: str, why: str, settings: EngineConfig | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest, match=why) as caught:
        await read_bytes(ImageInput(url=url), settings or config())
    assert caught.value.field == "prompts"
    return caught.value


async def test_a_file_is_fetched_and_redirects_are_followed(server: str) -> None:
    for path in ("good", "unsized", "to?/good", f"to?{server}/to?/good"):
        assert await read_bytes(ImageInput(url=f"{server}/{path}"), config()) == BODY
    assert await read_bytes(ImageInput(url=f"{server.upper()}/good"), config(max_bytes=len(BODY))) == BODY


async def test_a_body_over_the_bound_is_refused(server: str) -> None:
    tracemalloc.start()
    try:
        await refused(f"{server}/lying", r"says that it has 1000000000000 bytes; expected at most 268435456")
        for path in ("good", "unsized", "endless"):
            await refused(f"{server}/{path}", r"media\.max_bytes", config(max_bytes=len(BODY) - 1))
        await refused(f"{server}/endless", "too many bytes; expected at most 1000000 ", config(max_bytes=10**6))
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    for _ in range(1200):
        if ENDED.count("/endless") == 2:
            break
        await asyncio.sleep(0.05)
    assert ENDED.count("/endless") == 2, "a connection that is no longer read goes on"


@pytest.mark.parametrize("path", ["slow", "silent", "to?/slow"])
async def test_the_deadline_is_that_of_the_whole_fetch(server: str, path: str) -> None:
    async with asyncio.timeout(60):  # the slow answer lasts for two minutes
        with pytest.raises(DeadlineExceeded, match=r"for the image .* to be read"):
            await read_bytes(ImageInput(url=f"{server}/{path}"), config(0.4))


async def test_a_caller_that_leaves_ends_the_fetch(server: str) -> None:
    ENDED.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await read_bytes(ImageInput(url=f"{server}/slow"), config())
    for _ in range(1200):
        if "/slow" in ENDED:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the connection is still open")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("to?file:///etc/hostname", "redirects to 'file:///etc/hostname'; expected http"),
        ("to?ftp://127.0.0.1/a", "redirects to 'ftp:"),
        ("to?data:image/png;base64,AP8=", "redirects to 'data:"),
        ("to?gopher://127.0.0.1", "redirects to 'gopher:"),
        ("to?http://", "cannot be read"),
        ("around", "redirects more than 10 times"),
        ("missing", "HTTP 404"),
        ("broken", "cannot be read"),
        ("nonsense", "cannot be read"),
    ],
)
async def test_what_leads_nowhere_is_refused(server: str, path: str, why: str) -> None:
    await refused(f"{server}/{path}", why)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/a", "/etc/hostname", "javascript:1", ""])
async def test_other_schemes_are_refused(url: str) -> None:
    await refused(url, "expected http://, https:// or data:")


async def test_no_error_shows_what_signs_a_url(server: str) -> None:
    host = server.removeprefix("http://")
    for path in ("missing", "lying", "nonsense"):
        error = await refused(f"http://user:pass-word@{host}/{path}?Signature=sig-nature", "cannot be read")
        assert "pass-word" not in str(error)
        assert "sig-nature" not in str(error)
        assert path in str(error)


# Hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "0.0.0.0",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "127.0.0.1.",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
    ],
)
async def test_private_hosts_are_refused_where_they_are_forbidden(server: str, host: str) -> None:
    port = server.rpartition(":")[2]
    await refused(
        f"http://{host}:{port}/good", "public address|canonical|usually written", config(allow_private_hosts=False)
    )


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by host name. Each lookup takes the next address; the last one is repeated."""
    known: dict[str, list[str]] = {}
    original = socket.getaddrinfo

    def resolve(host: Any, port: Any, *more: Any, **fields: Any) -> Any:
        if host in known:
            host = known[host].pop(0) if len(known[host]) > 1 else known[host][0]
        return original(host, port, *more, **fields)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count 127.0.0.1 as public, as no public server can be reached here."""
    original = ipaddress.IPv4Address.is_global
    loopback = ipaddress.IPv4Address("127.0.0.1")
    monkeypatch.setattr(
        ipaddress.IPv4Address,
        "is_global",
        property(lambda address: address == loopback or original.__get__(address)),
    )


@pytest.mark.usefixtures("loopback_is_public")
async def test_redirects_to_private_hosts_are_refused(server: str, names: dict[str, list[str]]) -> None:
    names |= {"inner.test": ["127.0.0.2"], "outer.test": ["127.0.0.1"]}
    outer = f"http://outer.test:{server.rpartition(':')[2]}"
    public = config(allow_private_hosts=False)
    assert await read_bytes(ImageInput(url=f"{outer}/to?/good"), public) == BODY
    for inner in ("127.0.0.2", "inner.test", "[::1]"):
        await refused(f"{outer}/to?{server.replace('127.0.0.1', inner)}/good", "which is no public address", public)


@pytest.mark.usefixtures("loopback_is_public")
async def test_a_name_whose_address_changes_gains_nothing(server: str, names: dict[str, list[str]]) -> None:
    """The checked address is the one connected to, though 127.0.0.2 would answer as well."""
    names["rebound.test"] = ["127.0.0.1", "127.0.0.2"]
    port = server.rpartition(":")[2]
    public = config(allow_private_hosts=False)
    assert await read_bytes(ImageInput(url=f"http://rebound.test:{port}/good"), public) == BODY
    await refused(f"http://rebound.test:{port}/good", r"rebound\.test is 127\.0\.0\.2", public)


async def test_proxies_are_used_only_where_private_hosts_are_allowed(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"{server}/good")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for url in ("http://10.0.0.1/good", "http://nowhere.invalid/good"):
        with pytest.raises(InvalidRequest):
            await read_bytes(ImageInput(url=url), config(allow_private_hosts=False))
    asked: list[str] = []

    def answer(self: Answers) -> None:
        asked.append(self.path)
        self.good("")

    monkeypatch.setattr(Answers, "do_GET", answer)
    assert await read_bytes(ImageInput(url="http://nowhere.invalid/a"), config()) == BODY
    assert asked == ["http://nowhere.invalid/a"]


async def test_a_url_wants_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UnsupportedCapability, match="pip install aiohttp") as caught:
        await read_bytes(VideoInput(url="http://127.0.0.1/a"), config())
    assert caught.value.capability == "video"
    assert await read_bytes(VideoInput(url="data:,a%20b"), config()) == b"a b"


# Files and data URLs ----------------------------------------------------------------------------------------------


async def test_data_urls_are_read_and_bounded() -> None:
    encoded = base64.b64encode(BODY).decode()
    for url in (f"data:image/png;base64,{encoded}", f"DATA:;base64,{encoded[:80]}\n{encoded[80:]}"):
        assert await read_bytes(ImageInput(url=url), config(max_bytes=len(BODY))) == BODY
        await refused(url, r"media\.max_bytes", config(max_bytes=len(BODY) - 1))
    quoted = encoded.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    assert await read_bytes(ImageInput(url=f"data:;base64,{quoted}"), config()) == BODY
    await refused(f"data:;base64,{encoded}", r"expected at most 10 ", config(max_bytes=10))
    await refused(f"data:,{'%00' * 20}", r"20 bytes; expected at most 10", config(max_bytes=10))
    for url, why in (("data:;base64,AP8", "no base64"), ("data:;base64,A*P8=", "no base64"), ("data:x", "comma")):
        await refused(url, why)


async def test_files_are_bounded_and_regular(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(BODY)
    assert await read_bytes(ImageInput(path=str(file)), config(max_bytes=len(BODY))) == BODY
    os.mkfifo(tmp_path / "fifo")
    cases = [(file, r"4096 bytes; expected at most 4095 \(media.max_bytes"), (tmp_path / "fifo", "no regular file")]
    cases += [(Path("/dev/zero"), "no regular file"), (tmp_path, "no regular file"), (tmp_path / "b", "No such file")]
    before = len(os.listdir("/proc/self/fd"))
    for path, why in cases:
        with pytest.raises(InvalidRequest, match=why):
            await read_bytes(ImageInput(path=str(path)), config(max_bytes=len(BODY) - 1))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_file_system_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original: Callable[..., int] = os.open

    def dead(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == "/dead/a.png":
            release.wait(10)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", dead)
    ticks: list[int] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.02)
            ticks.append(0)

    ticking = asyncio.create_task(tick())
    with pytest.raises(DeadlineExceeded, match=r"for the image '/dead/a\.png' beside a prompt to be read"):
        await read_bytes(ImageInput(path="/dead/a.png"), config(0.3))
    ticking.cancel()
    release.set()
    assert len(ticks) > 5, "the event loop stood still"
