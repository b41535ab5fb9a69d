"""Keys, bounds and bad HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator

import httpx
import pytest
from pydantic import ValidationError
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from drivetrain import EngineDied, InferenceEngine, InvalidConfig
from drivetrain_serving import Server, ServerConfig, create_app
from drivetrain_serving.http_layer.answers import EventStream, NamedEventStream, event_stream
from drivetrain_serving.server import Listening
from drivetrain_serving.vllm.errors import body_of
from engines import HANGING

pytestmark = pytest.mark.asyncio(loop_scope="session")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
API, CONTROL = "a-key-for-requests", "a-key-for-weights!"


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "api_key": API},
        {"host": "::", "control_key": CONTROL},
        {"host": "0.0.0.0", "api_key": API, "open_to_all": True},
        {"open_to_all": True, "control_key": CONTROL},
        {"api_key": "short"},
        {"port": 70000},
        {"prot": 8000},
    ],
)
async def test_a_configuration_that_would_let_anyone_in_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ServerConfig.model_validate(fields)


async def test_keys_are_not_shown() -> None:
    shown = repr(ServerConfig(api_key=API, control_key=CONTROL))
    assert API not in shown
    assert CONTROL not in shown


@pytest.mark.parametrize(
    ("config", "key", "opened"),
    [
        ({}, None, {"open", "data", "control"}),
        ({"host": "0.0.0.0", "open_to_all": True}, None, {"open", "data", "control"}),
        ({"api_key": API}, None, {"open"}),
        ({"api_key": API}, API, {"open", "data", "control"}),
        ({"api_key": API, "open_control": True}, None, {"open", "control"}),
        ({"api_key": API, "control_key": CONTROL}, API, {"open", "data"}),
        ({"api_key": API, "control_key": CONTROL}, CONTROL, {"open", "data", "control"}),
        ({"api_key": API, "control_key": CONTROL}, API + "x", {"open"}),
        ({"control_key": CONTROL}, None, {"open", "data"}),
        ({"control_key": CONTROL}, CONTROL, {"open", "data", "control"}),
    ],
)
async def test_which_key_opens_what(
    engine: InferenceEngine, config: dict[str, object], key: str | None, opened: set[str]
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    kinds = {"open": ("GET", "/health"), "data": ("GET", "/v1/models"), "control": ("POST", "/resume")}
    async with Server(engine, ServerConfig.model_validate({"port": 0, **config})) as server:
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=HANGING) as client:
            statuses = {kind: (await client.request(*route)).status_code for kind, route in kinds.items()}
            if "control" not in opened:
                assert (await client.post("/update_weights", json={"weight_dir": "/"})).status_code == 401
            refused = await client.request("GET", "/no-such-route")
    assert {kind for kind, status in statuses.items() if status == 200} == opened
    assert all(status == 401 for kind, status in statuses.items() if kind not in opened)
    assert refused.status_code == (404 if "control" in opened else 401)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {"content-type": "application/json"}, 400),
        (b"[]", {"content-type": "application/json"}, 400),
        (b"\xff\xfe", {"content-type": "application/json"}, 400),
        (b'{"prompt": "\xff"}', {"content-type": "application/json"}, 400),
        (b'{"prompt": [5]}', {"content-type": "text/plain"}, 400),
        (b"[" * 100_000, {"content-type": "application/json"}, 400),
        (b'{"a":' * 100_000, {"content-type": "application/json"}, 400),
        (b" " * (1 << 20) + b"{}", {"content-type": "application/json"}, 413),
        (b"{}", {"content-type": "application/json"}, 400),
        (b'{"prompt": [5], "max_tokens": 1e400}', {"content-type": "application/json"}, 400),
        (b'{"prompt": [5], "n": 100000000000000000000000000}', {"content-type": "application/json"}, 400),
    ],
)
async def test_a_bad_body_is_refused(
    client: httpx.AsyncClient, body: bytes, headers: dict[str, str], status: int
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        response = await client.post(path, content=body, headers=headers)
        assert response.status_code == status, response.text[:200]
        assert response.json()["error"]["code"] == status


async def test_a_body_without_a_length_is_bounded_too(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    sent = 0
    try:
        async with asyncio.timeout(HANGING):
            while sent < 64 << 20 and not reader.at_eof():
                writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                await writer.drain()
                sent += 65536
    except ConnectionError:
        pass  # it was cut off
    writer.close()
    assert sent < 64 << 20, "it was read on"


async def test_a_body_that_does_not_come_is_given_up(engine: InferenceEngine) -> None:
    async with Server(engine, ServerConfig(port=0, body_timeout=0.2)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 100\r\n\r\n{")
        async with asyncio.timeout(HANGING):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_stream_ends_with_a_client_that_leaves() -> None:
    closed, never = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncGenerator[object, None]:
        try:
            while True:
                yield "piece"
        finally:
            closed.set()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    stream = await event_stream(pieces(), lambda error: {"error": str(error)})
    async with asyncio.timeout(HANGING):
        await stream({"type": "http"}, receive, send)
        await closed.wait()


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def pieces() -> AsyncGenerator[object, None]:
        yield "piece"
        raise EngineDied("it ended")

    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    await (await event_stream(pieces(), body_of))({"type": "http"}, receive, send)
    assert [json.loads(body.removeprefix(b"data: ")) for body in sent[1:3]] == [
        "piece",
        body_of(EngineDied("it ended")),
    ]
    assert sent[3] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("kind", [EventStream, NamedEventStream])
def test_an_event_is_one_line_of_data_for_clients_that_read_lines_as_text(kind: type[EventStream]) -> None:
    text = "".join(map(chr, range(0x3000)))
    *_, data = kind.encoded({"text": text}).decode().removesuffix("\n\n").split("\n")
    assert data.splitlines() == [data]
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("GET", "/nowhere", 404)])
async def test_a_wrong_path_or_method(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, status)


async def asked_by_hand(server: Server, target: str, *headers: str, version: str = "1.1") -> bytes:
    """Return the answer to a GET request whose headers, ``Host`` too, are these."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write("\r\n".join((f"GET {target} HTTP/{version}", "connection: close", *headers, "", "")).encode())
    async with asyncio.timeout(HANGING):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("place", ["http://localhost", "HTTP://127.0.0.1:1", "https://[::1]"])
async def test_a_target_with_a_host_is_one_without(server: Server, place: str) -> None:
    for host in ("localhost", "evil.example"):
        asked = f"host: {host}"
        assert b'"data"' in await asked_by_hand(server, f"{place}/v1/models?a=b", asked)
        assert (await asked_by_hand(server, place, asked)).startswith(b"HTTP/1.1 200 OK")
        assert (await asked_by_hand(server, f"{place}/nowhere", asked)).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    "place",
    ["http://evil.example", "HTTP://evil.example:1", "https://x%20y", "http://localhost@evil.example", "http://"],
)
async def test_the_host_of_a_target_counts(server: Server, place: str) -> None:
    assert (await asked_by_hand(server, f"{place}/v1/models", "host: localhost")).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost.", "localhost.:80", "policy.localhost", "127.0.0.1:8000"),
        *("127.1.2.3", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]:1", "localhost:"),
        *("0.0.0.0:8000", "[::]:8000"),
    ],
)
async def test_hosts_of_this_machine_need_no_key(server: Server, host: str) -> None:
    for path in ("/v1/models", "/is_paused", "/weight_version", "/sessions"):
        assert (await asked_by_hand(server, path, f"host: {host}")).startswith(b"HTTP/1.1 200 "), path


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "evillocalhost", "localhost:80@evil.example"),
        *("10.0.0.1:8000", "[fe80::1]:8000", "127.0.0.1.evil.example", "localhost..", "[::1", "a b", "", "\N{BULLET}"),
    ],
)
async def test_a_page_whose_name_means_this_machine_gets_nothing_without_a_key(server: Server, host: str) -> None:
    """The browser takes server and page for one site, so that ``Origin`` is that of the server."""
    more = (f"host: {host}", f"origin: http://{host}", "sec-fetch-site: same-origin")
    for path in ("/v1/models", "/is_paused", "/weight_version", "/flush_cache", "/sessions", "/sessions/s/v1/models"):
        refused = await asked_by_hand(server, path, *more)
        assert refused.startswith(b"HTTP/1.1 403 "), path
        assert b"--allowed-host" in refused
    for path in ("/health", "/ready", "/"):
        assert (await asked_by_hand(server, path, *more)).startswith(b"HTTP/1.1 200 "), path


async def test_the_refusal_of_a_host_names_the_option_for_it(server: Server) -> None:
    refused = await asked_by_hand(server, "/v1/models", "host: Trainer.internal:8000")
    words = json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
    assert "'Trainer.internal:8000'" in words
    assert "--allowed-host trainer.internal" in words


async def test_clients_of_http_1_0_need_no_host(server: Server) -> None:
    assert b" 200 " in (await asked_by_hand(server, "/is_paused", version="1.0")).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        (
            {"allowed_hosts": ["Trainer.internal."]},
            ["trainer.internal:1", "TRAINER.internal", "localhost"],
            ["internal"],
        ),
        ({"allowed_hosts": ["*.Internal"]}, ["a.internal", "b.a.internal:8000"], ["internal", "internal.evil.example"]),
        ({"allowed_hosts": ["10.0.0.1", "FE80::1"]}, ["10.0.0.1:1", "[fe80:0::1]"], ["10.0.0.2", "[fe80::2]"]),
        ({"allowed_hosts": ["*"]}, ["evil.example", "10.0.0.1", ""], []),
        ({"api_key": API}, ["evil.example", ""], []),
        ({"control_key": CONTROL}, ["localhost"], ["evil.example"]),
        ({"open_to_all": True}, ["evil.example"], []),
        ({"open_to_all": True, "host": "0.0.0.0"}, ["evil.example"], []),
        ({"open_to_all": True, "host": "10.0.0.9", "allowed_hosts": ["a"]}, ["a", "10.0.0.9:1"], ["evil.example"]),
        ({"api_key": API, "open_control": True, "host": "0.0.0.0"}, ["evil.example"], []),
    ],
)
async def test_which_hosts_a_configuration_allows(
    engine: InferenceEngine, fields: dict[str, object], allowed: list[str], refused: list[str]
) -> None:
    config = ServerConfig.model_validate(fields)
    app = create_app(engine, config)
    key = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", headers=key
    ) as client:
        statuses = {
            host: (await client.get("/v1/models", headers={"Host": host})).status_code for host in allowed + refused
        }
    await app.state.sessions.close()
    assert statuses == dict.fromkeys(allowed, 200) | dict.fromkeys(refused, 403)


@pytest.mark.parametrize("name", ["", "http://a", "a:8000", "a/b", "*a", "a.*", "*.*", "[::1]", "a b", "a@b"])
async def test_a_wrong_allowed_host_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="without scheme and port"):
        ServerConfig(allowed_hosts=(name,))


@pytest.mark.parametrize(
    ("headers", "is_of_another_site"),
    [
        ({"Origin": "https://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"}, True),
        ({"Origin": "http://localhost"}, False),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
    ],
)
async def test_pages_of_other_sites_get_nothing_without_a_key(
    engine: InferenceEngine, headers: dict[str, str], is_of_another_site: bool
) -> None:
    async def statuses(config: dict[str, object]) -> set[int]:
        app = create_app(engine, ServerConfig.model_validate(config))
        key = {"Authorization": f"Bearer {CONTROL}"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers | key) as client:
            assert (await client.get("/health")).status_code == 200
            asked = [await client.post("/resume"), await client.get("/flush_cache"), await client.get("/v1/models")]
        await app.state.sessions.close()
        return {one.status_code for one in asked}

    assert await statuses({}) == {403 if is_of_another_site else 200}
    assert await statuses({"api_key": API, "control_key": CONTROL}) == {200}


async def test_a_fault_of_the_server_has_the_form_of_an_error(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "get_weight_version", broken)
    app = create_app(engine)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/weight_info")
    await app.state.sessions.close()
    assert answer.status_code == 500
    assert answer.headers["connection"] == "close"
    assert answer.json()["error"]["code"] == 500
    assert "ZeroDivisionError" in answer.json()["error"]["message"]


async def test_a_port_that_is_taken_is_named(engine: InferenceEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"port={port}") as caught:
            async with Server(engine, ServerConfig(port=port)):
                pass
    assert caught.value.field == "port"


async def test_an_address_of_another_machine_is_named() -> None:
    """The address is one of those for documentation (RFC 5737)."""
    with pytest.raises(InvalidConfig, match=r"host='203\.0\.113\.1'.*an address of this machine") as caught:
        Listening(ServerConfig(host="203.0.113.1", port=0, open_to_all=True))
    assert caught.value.field == "host"


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_port_that_another_server_began_to_use_meanwhile_is_named(
    engine: InferenceEngine, processes: int
) -> None:
    """Both may bind it while neither listens, and only one can listen."""
    async with Listening(ServerConfig(port=0)) as first:
        config = ServerConfig(port=first.port.getsockname()[1], processes=processes)
        async with Listening(config) as second:
            first.port.listen()
            with pytest.raises(InvalidConfig, match=f"port={config.port}") as caught:
                async with Server(engine, config, listening=second):
                    pass
    assert caught.value.field == "port"


async def test_answers_do_not_wait_for_the_acknowledgement_of_their_headers(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_delay: list[int] = []
    made = H11Protocol.connection_made

    def connection_made(protocol: H11Protocol, transport: asyncio.Transport) -> None:
        no_delay.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(protocol, transport)

    monkeypatch.setattr(H11Protocol, "connection_made", connection_made)
    async with Server(engine, ServerConfig(port=0)) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200
    assert no_delay == [1]
