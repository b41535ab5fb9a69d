"""Handles and remote engines over TLS: what is verified, and what a wrong certificate or a plain socket is told."""

from __future__ import annotations

import asyncio
import pickle
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import drivetrain.process.tls_server
from drivetrain import (
    ConnectionLost,
    EngineDied,
    EngineHandle,
    InferenceEngine,
    InvalidConfig,
    InvalidRequest,
    SamplingParams,
    TlsError,
    attach,
    create_engine,
)
from drivetrain.attached.connection import attach_message, connect
from drivetrain.process.proof import new_nonce
from drivetrain.process.tls import server_context
from drivetrain.process.wire import Hello, frame, from_host, read
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import WeightSync
from engines import OpenEngine, owner_of, tensors_for, until
from remote_hosts import Wire, host, printed
from warm_python import Program

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=0)
LONG = SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
KEY = "a key of enough characters"
BOUND = 60.0


@dataclass(frozen=True)
class Files:
    """An authority's certificate, and one that it signed with its key."""

    ca: str
    certfile: str
    keyfile: str


def _openssl(*arguments: str) -> None:
    """Run openssl; a machine without it fails these tests."""
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def _key(file: Path) -> str:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(file))
    return str(file)


def _signed(folder: Path, ca: tuple[str, str], name: str, *, names: str, days: str) -> Files:
    cert, request, extensions = (str(folder / f"{name}.{end}") for end in ("pem", "csr", "ext"))
    key = _key(folder / f"{name}.key")
    Path(extensions).write_text(f"subjectAltName={names}\n")
    _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
    signing = ["-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial", "-days", days, "-extfile", extensions]
    _openssl("x509", "-req", "-in", request, *signing, "-out", cert)
    return Files(ca[0], cert, key)


def _authority(folder: Path, name: str) -> tuple[str, str]:
    cert, key = str(folder / f"{name}.pem"), _key(folder / f"{name}.key")
    _openssl("req", "-x509", "-key", key, "-subj", f"/CN={name}", "-days", "2", "-out", cert)
    return cert, key


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="session")
def authority(folder: Path) -> tuple[str, str]:
    return _authority(folder, "authority")


@pytest.fixture(scope="session")
def good(folder: Path, authority: tuple[str, str]) -> Files:
    return _signed(folder, authority, "good", names="IP:127.0.0.1,DNS:localhost", days="2")


@pytest.fixture(scope="session")
def expired(folder: Path, authority: tuple[str, str]) -> Files:
    return _signed(folder, authority, "expired", names="IP:127.0.0.1", days="-1")


@pytest.fixture(scope="session")
def elsewhere(folder: Path, authority: tuple[str, str]) -> Files:
    return _signed(folder, authority, "elsewhere", names="IP:192.0.2.1,DNS:elsewhere.example", days="2")


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_the_page_is_the_same_over_tls(open_engine: OpenEngine, isolation: str, good: Files) -> None:
    async with open_engine(isolation=isolation) as engine:
        expected = await engine.generate(["hello", [5, 6, 7]], GREEDY)
        handle = await engine.handle("127.0.0.1:0", ssl_certfile=good.certfile, ssl_keyfile=good.keyfile)
        pickled = pickle.dumps(handle)
        assert pickle.loads(pickled) == handle
        assert b"PRIVATE" not in pickled
        assert good.keyfile.encode() not in pickled
        assert handle.address.startswith("tls://127.0.0.1:")
        other = await attach(handle)
        try:
            found = await other.generate(["hello", [5, 6, 7]], GREEDY)
            assert [c.token_ids for c in found.completions] == [c.token_ids for c in expected.completions]
            assert [chunk async for chunk in other.generate_stream("hello", GREEDY)]
            tensors = await tensors_for(other)
            async with WeightSync.connect(tensors, other) as sync:
                await sync.push(version="pushed")
            assert engine.get_weight_version() == "pushed"
            name = next(iter(tensors))
            assert (await other.get_weights_by_name(name)).data == tensors[name].numpy().tobytes()
        finally:
            await other.teardown()


async def test_the_pulse_goes_on_over_tls_and_its_end_is_noticed(open_engine: OpenEngine, good: Files) -> None:
    async with open_engine(timeouts={"heartbeat": 2}) as engine:
        handle = await engine.handle("127.0.0.1:0", ssl_certfile=good.certfile, ssl_keyfile=good.keyfile)
        other = await attach(handle)
        owner = owner_of(other)
        await asyncio.sleep(5)
        assert owner.connections == 1, "the pulse has kept the first connection"
        await other.pause_generation("in_place")
        assert engine.is_paused
        pulse = owner.connected.pulse  # type: ignore[union-attr]
        await asyncio.to_thread(pulse.stop)
        await until(lambda: not engine.is_paused)
        await other.teardown()


@pytest.mark.parametrize("encrypted", [False, True], ids=["tcp", "tls"])
async def test_a_beat_that_comes_with_the_attach_is_answered(
    open_engine: OpenEngine, good: Files, encrypted: bool
) -> None:
    """An owner whose event loop was blocked reads both at once."""
    files = {"ssl_certfile": good.certfile, "ssl_keyfile": good.keyfile} if encrypted else {}
    async with open_engine() as engine:
        handle = await engine.handle("127.0.0.1:0", key=KEY, **files)
        connected = await connect(handle, lambda state: None, lambda reason: None, 10.0)
        try:
            context = ssl.create_default_context(cafile=good.ca) if encrypted else None
            reader, writer = await asyncio.open_connection(*handle.tcp, ssl=context)
            length = int.from_bytes(await reader.readexactly(4), "little")
            hello = read(from_host, memoryview(await reader.readexactly(length)))
            assert isinstance(hello, Hello)
            number = connected.connection.attached.result().holder
            writer.write(b"".join(frame(attach_message(KEY, hello.nonce, new_nonce(), number))) + b"\x01")
            async with asyncio.timeout(60):
                assert await reader.read(1) == b"\x01"
            writer.close()
        finally:
            await connected.close()


async def _remote(handle: EngineHandle, **trust: str) -> None:
    """Use an engine through ``create_engine("remote")``."""
    fields = {"endpoint": handle.address, "key": KEY, **trust}
    async with within(seconds=BOUND), await asyncio.to_thread(create_engine, "remote", **fields) as remote:
        await remote.generate([1, 2], GREEDY)


async def test_an_authority_vouches_for_the_engines_host(
    open_engine: OpenEngine, folder: Path, good: Files, expired: Files, elsewhere: Files
) -> None:
    stranger = _authority(folder, "stranger")[0]
    async with open_engine() as engine:

        async def listening(files: Files) -> EngineHandle:
            return await engine.handle("127.0.0.1:0", key=KEY, ssl_certfile=files.certfile, ssl_keyfile=files.keyfile)

        handle = await listening(good)
        await _remote(handle, ssl_ca_certs=good.ca)
        await _remote(replace(handle, address=handle.address.replace("127.0.0.1", "localhost")), ssl_ca_certs=good.ca)
        assert handle.ssl_fingerprint is not None
        await _remote(handle, ssl_fingerprint=handle.ssl_fingerprint.upper())
        for trust in ({}, {"ssl_ca_certs": stranger}):
            with pytest.raises(TlsError, match=r"not trusted.*ssl_ca_certs"):
                await _remote(handle, **trust)
        with pytest.raises(TlsError, match=r"out of date.*renew"):
            await _remote(await listening(expired), ssl_ca_certs=good.ca)
        wrong = await listening(elsewhere)
        with pytest.raises(TlsError, match="for another host"):
            await _remote(wrong, ssl_ca_certs=good.ca)
        with pytest.raises(TlsError, match="pinned"):
            await attach(replace(handle, ssl_fingerprint=wrong.ssl_fingerprint))
        await _remote(wrong, ssl_fingerprint=str(wrong.ssl_fingerprint))  # a pinned certificate needs no name
        await _remote(handle, ssl_ca_certs=good.ca)


async def test_a_certificate_that_changes_ends_the_page(open_engine: OpenEngine, good: Files, expired: Files) -> None:
    """The calls' connection, which the event loop makes, checks the pinned certificate before it sends a proof."""
    async with open_engine() as engine:
        handle = await engine.handle("127.0.0.1:0", ssl_certfile=good.certfile, ssl_keyfile=good.keyfile)
        pinned = replace(handle, ssl_fingerprint=server_context(expired.certfile, expired.keyfile)[1])
        with pytest.raises(TlsError, match="pinned"):
            await connect(pinned, lambda state: None, lambda reason: None, 10.0)
        trusting = replace(handle, ssl_fingerprint=None)
        with pytest.raises(TlsError, match="not trusted"):
            await connect(trusting, lambda state: None, lambda reason: None, 10.0)


async def test_only_one_side_speaks_tls(open_engine: OpenEngine, good: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivetrain.process.tls_server, "SILENT_S", 1.0)
    async with open_engine() as engine:
        secure = await engine.handle("127.0.0.1:0", key=KEY, ssl_certfile=good.certfile, ssl_keyfile=good.keyfile)
        plain = await engine.handle("127.0.0.1:0", key=KEY)
        async with within(seconds=BOUND):
            with pytest.raises(TlsError, match=r"listens with TLS; use the tls://"):
                await attach(EngineHandle(secure.address.replace("tls:", "tcp:"), KEY))
            with pytest.raises(TlsError, match=r"does not speak TLS; use tcp://"):
                await attach(replace(secure, address=plain.address.replace("tcp:", "tls:")))
            for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05junk!", b"\x16"):
                reader, writer = await asyncio.open_connection(*secure.tcp)
                writer.write(junk)
                writer.write_eof()
                await reader.read()
                writer.close()
        await _remote(secure, ssl_ca_certs=good.ca)


async def test_old_versions_of_tls_are_refused(open_engine: OpenEngine, good: Files) -> None:
    async with open_engine() as engine:
        handle = await engine.handle("127.0.0.1:0", ssl_certfile=good.certfile, ssl_keyfile=good.keyfile)
        for version, works in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = ssl.create_default_context(cafile=good.ca)
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version
            if works:
                _, writer = await asyncio.open_connection(*handle.tcp, ssl=context)
                writer.close()
            else:
                with pytest.raises(OSError, match=r"(?i)protocol|alert|unsupported"):
                    await asyncio.open_connection(*handle.tcp, ssl=context)


async def test_files_that_cannot_be_used_are_refused(
    open_engine: OpenEngine, tmp_path: Path, good: Files, expired: Files
) -> None:
    encrypted = str(tmp_path / "encrypted.key")
    _openssl("ec", "-in", good.keyfile, "-aes128", "-passout", "pass:word", "-out", encrypted)
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no certificate\n")
    wrong: list[tuple[dict[str, str], str]] = [
        ({"ssl_certfile": "/no/such.pem"}, "ssl_certfile"),
        ({"ssl_certfile": str(nothing)}, "holds no certificate"),
        ({"ssl_certfile": good.certfile}, "own key"),
        ({"ssl_certfile": good.certfile, "ssl_keyfile": "/no/such.key"}, "ssl_keyfile"),
        ({"ssl_certfile": good.certfile, "ssl_keyfile": expired.keyfile}, "own key"),
        ({"ssl_certfile": good.certfile, "ssl_keyfile": encrypted}, "is encrypted"),
        ({"ssl_keyfile": good.keyfile}, "needs ssl_certfile"),
    ]
    async with open_engine() as engine:
        for arguments, words in wrong:
            with pytest.raises(InvalidConfig, match=words):
                await engine.handle("127.0.0.1:0", **arguments)
        with pytest.raises(InvalidConfig, match="Unix socket"):
            await engine.handle(ssl_certfile=good.certfile, ssl_keyfile=good.keyfile)
        handle = await engine.handle("127.0.0.1:0", key=KEY, ssl_certfile=good.certfile, ssl_keyfile=good.keyfile)
        with pytest.raises(InvalidConfig, match="ssl_ca_certs"):
            await _remote(handle, ssl_ca_certs="/no/such.pem")
        with pytest.raises(InvalidConfig, match="64 hexadecimal digits"):
            await _remote(handle, ssl_fingerprint="12:34")
    for trust in ({"ssl_fingerprint": "ab" * 32}, {"ssl_ca_certs": good.ca}):
        with pytest.raises(InvalidRequest, match="no tls:// address"):
            EngineHandle("tcp://host:1", KEY, **trust)


async def test_a_host_refuses_a_certificate_before_the_engine_starts(model: Path, good: Files) -> None:
    from drivetrain.cli.host import host

    with pytest.raises(InvalidConfig, match="ssl_keyfile"):
        await asyncio.to_thread(
            host,
            listen="127.0.0.1:0",
            model=str(model),
            ssl_certfile=Path(good.certfile),
            ssl_keyfile=Path("/no/such.key"),
        )


# The command ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _hosted(model: Path, files: Files, key: str = KEY) -> AsyncIterator[tuple[int, str, Program]]:
    """Run ``drivetrain host`` over TLS; yields its port, its fingerprint and its process."""
    arguments = ["--model", str(model), "--listen", "127.0.0.1:0", "--ssl-certfile", files.certfile]
    async with within(seconds=BOUND), host(*arguments, "--ssl-keyfile", files.keyfile, key=KEY) as process:
        endpoint = await printed(process, "endpoint")
        assert endpoint.startswith("tls://127.0.0.1:")
        yield int(endpoint.rpartition(":")[2]), await printed(process, "fingerprint"), process


@asynccontextmanager
async def _over_a_wire(port: int, fingerprint: str) -> AsyncIterator[tuple[Wire, InferenceEngine]]:
    """Use the engine at a port through ``create_engine("remote")``, over a wire."""
    wire = Wire()
    wire.target = port
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    endpoint = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    fields = {"endpoint": endpoint, "key": KEY, "ssl_fingerprint": fingerprint}
    try:
        async with await asyncio.to_thread(create_engine, "remote", **fields) as remote:
            yield wire, remote
    finally:
        server.close()
        wire.cut()


async def test_a_host_serves_over_tls_until_it_is_told_to_end(model: Path, good: Files, expired: Files) -> None:
    async with _hosted(model, good) as (port, fingerprint, process):
        fields = {"endpoint": f"tls://127.0.0.1:{port}", "key": KEY}
        other = server_context(expired.certfile, expired.keyfile)[1]
        with pytest.raises(TlsError, match="pinned"):
            await asyncio.to_thread(create_engine, "remote", **fields, ssl_fingerprint=other)
        async with await asyncio.to_thread(create_engine, "remote", **fields, ssl_fingerprint=fingerprint) as remote:
            assert (await remote.generate([1, 2], GREEDY)).completions[0].token_ids
            async with WeightSync.connect(await tensors_for(remote), remote) as sync:
                await sync.push(version="pushed")
            assert (await remote.generate([1, 2], GREEDY)).completions[0].weight_versions[0].version == "pushed"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            await until(lambda: remote.state.value == "failed")


async def test_a_connection_to_a_host_that_breaks_is_made_again_over_tls(model: Path, good: Files) -> None:
    async with _hosted(model, good) as (port, fingerprint, _), _over_a_wire(port, fingerprint) as (wire, remote):
        owner = remote.parts.backend.owner  # type: ignore[attr-defined]
        for connections in (2, 3):
            generating = asyncio.create_task(remote.generate([1, 2], LONG))
            while not (await remote.stats()).running:  # noqa: ASYNC110 - another process has them
                await asyncio.sleep(0.01)
            wire.cut()
            with pytest.raises(ConnectionLost, match="may have taken effect"):
                await generating
            assert (await remote.generate([1, 2], GREEDY)).completions[0].token_ids
            assert owner.connections == connections
            assert remote.state.value == "ready"


async def test_another_certificate_after_a_break_ends_the_page(
    open_engine: OpenEngine, model: Path, good: Files, expired: Files
) -> None:
    async with open_engine() as engine, _hosted(model, good) as (port, fingerprint, process):
        stranger = await engine.handle(
            "127.0.0.1:0", key=KEY, ssl_certfile=expired.certfile, ssl_keyfile=expired.keyfile
        )
        async with _over_a_wire(port, fingerprint) as (wire, remote):
            wire.target = stranger.tcp[1]
            wire.cut()
            with pytest.raises(EngineDied, match="pinned"):
                await remote.generate([1, 2], GREEDY)
            assert remote.state.value == "failed"
            assert not engine.parts.in_flight.running, "nothing reached the other engine"
        assert process.returncode is None
        await _remote(EngineHandle(f"tls://127.0.0.1:{port}", KEY), ssl_fingerprint=fingerprint)
