"""Several processes that answer for one engine: together they are one server, and it outlives each of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from cgroups import freezer
from drivetrain import EngineStartError, InferenceEngine, PauseMode, attach, create_engine
from drivetrain.process.process_tree import runs
from drivetrain_serving import Server, ServerConfig, SessionConfig
from drivetrain_serving.front_ends import supervision
from drivetrain_serving.front_ends.calls import FRONT_END, Caller
from drivetrain_serving.front_ends.places import ANSWERED_BY_ANY
from drivetrain_serving.server import Listening
from engines import HANGING, until, until_idle, until_running
from front_ends import CONTROL, KEY, Running, text_of, two_processes

pytestmark = pytest.mark.asyncio(loop_scope="session")

FOUR: dict[str, object] = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG: dict[str, object] = {"prompt": [5, 6], "max_tokens": 900, "ignore_eos": True}
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}

LARGE = b'{"prompt": "' + b"a" * (12 << 20) + b'"}'
"""A body that is larger than the servers here take, and than sockets hold."""
OF_EACH_PROCESS = ("/v1/completions", "/update_weights", *(f"/sessions/s-{n}/v1/chat/completions" for n in range(4)))
"""Paths that the owner, the front-end that accepted the connection, and either front-end answer."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(served: InferenceEngine) -> AsyncIterator[Running]:
    async with two_processes(served, max_body_bytes=8 << 20) as running:
        yield running


async def test_counts_are_those_of_all_processes(shared: Running, engine: InferenceEngine) -> None:
    before = (await shared.client.get("/status")).json()["generated_tokens"], await shared.answered("/v1/completions")
    answers = [*await shared.in_each("/v1/completions", **FOUR), await shared.client.post("/v1/completions", json=FOUR)]
    assert len({text_of(answer) for answer in answers}) == 1
    assert (await shared.client.get("/status")).json()["generated_tokens"] == before[0] + 12
    assert await shared.answered("/v1/completions") == before[1] + 3


async def test_front_ends_answer_all_routes_that_generate(shared: Running, engine: InferenceEngine) -> None:
    paths = (await shared.client.get("/openapi.json")).json()["paths"]
    posted = {path for path, methods in paths.items() if "post" in methods and methods["post"]["tags"] == ["api"]}
    of_sessions = {path for path in posted if path.startswith("/sessions")}
    assert ANSWERED_BY_ANY == posted - of_sessions - {"/inference/v1/abort_requests"}, "the owner knows every process"


async def test_front_ends_do_without_torch(shared: Running, engine: InferenceEngine) -> None:
    mapped = {Path(one.path).name for front_end in shared.front_ends().values() for one in front_end.memory_maps()}
    assert not {name for name in mapped if "torch" in name}
    assert {name for name in mapped if "tokenizers" in name}, "these are no names of libraries"


async def test_keys_open_the_same_routes_in_every_process(shared: Running, engine: InferenceEngine) -> None:
    answers = {}
    for name, key in (("none", "another-key"), ("api", KEY), ("control", CONTROL)):
        headers = {"Authorization": f"Bearer {key}"}
        for path in ("/v1/completions", "/sessions/keys/v1/chat/completions", "/sessions/keys2/v1/chat/completions"):
            answers[name, path] = (await shared.client.post(path, json={}, headers=headers)).status_code
        for path in ("/health", "/v1/models", "/server_info", "/sessions"):
            answers[name, path] = (await shared.client.get(path, headers=headers)).status_code
    assert {key: status for key, status in answers.items() if status == 401} == {
        **{("none", path): 401 for _, path in answers if path != "/health"},
        ("api", "/server_info"): 401,
        ("api", "/sessions"): 401,
    }


async def test_every_process_refuses_hosts_of_pages_of_other_sites(engine: InferenceEngine) -> None:
    """The process that answers a request checks its host; one that passes it on keeps the host of its target."""
    config = ServerConfig(port=0, processes=2, allowed_hosts=("trainer.internal",))
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        Server(engine, config) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGING, limits=limits) as client,
    ):
        for path in OF_EACH_PROCESS:
            for host, refused in (("localhost", False), ("Trainer.internal:1", False), ("evil.example:8000", True)):
                by_header = await client.post(path, json={}, headers={"host": host})
                by_target = await client.post(path, json={}, extensions={"target": f"http://{host}{path}".encode()})
                assert {by_header.status_code, by_target.status_code} == {403 if refused else 400}, (path, host)


async def test_answers_are_derendered_in_every_process(shared: Running, engine: InferenceEngine) -> None:
    one, other = shared.each

    async def of(client: httpx.AsyncClient, path: str, body: Any) -> Any:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    for path, asked in (("/v1/chat/completions", {**CHAT, "seed": 3}), ("/v1/completions", {**FOUR, "temperature": 0})):
        chat = "messages" in asked
        said = "message" if chat else "text"
        direct = await of(one, path, asked)
        rendered = await of(other, f"{path}/render", asked)
        generated = await of(one, "/inference/v1/generate", rendered if chat else rendered[0])
        whole = {"chat_request": asked, "generate_response": generated} if chat else {"generate_responses": [generated]}
        found = await of(other, f"{path}/derender", whole)
        assert found["choices"][0][said] == direct["choices"][0][said]
        text, state = "", None
        for place, token in enumerate(ids := generated["choices"][0]["token_ids"]):
            end = "length" if place == len(ids) - 1 else None
            chunk = {"request_id": "r", "choices": [{"index": 0, "token_ids": [token], "finish_reason": end}]}
            body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
            answer = await of(
                (one, other)[place % 2], f"{path}/derender", {**body, "chat_request": asked} if chat else body
            )
            state = answer["stream_state"]
            for choice in answer["chunk"]["choices"]:
                text += (choice["delta"].get("content") or "") if chat else choice["text"]
        assert text == (direct["choices"][0]["message"]["content"] if chat else direct["choices"][0]["text"])


async def test_the_processes_keep_one_set_of_sessions(shared: Running, engine: InferenceEngine) -> None:
    names = [f"together-{number}" for number in range(4)]
    for name in names:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            answer = await shared.client.post(
                f"/sessions/{name}/v1/chat/completions", json={**CHAT, "messages": messages}
            )
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    listed = {one["session_id"]: one["turns"] for one in (await shared.client.get("/sessions")).json()["sessions"]}
    assert {name: listed.get(name) for name in names} == dict.fromkeys(names, 3)
    kept = [
        {one["session_id"] for one in (await front_end.get("/sessions")).json()["sessions"]}
        for front_end in shared.each
    ]
    assert all(kept), "one front-end keeps all sessions"
    assert not kept[0] & kept[1]
    for name in names:
        assert (await shared.client.get(f"/sessions/{name}/v1/models")).status_code == 200
        (branch,) = (await shared.client.get(f"/sessions/{name}/trajectory")).json()["branches"]
        assert sum(branch["loss_mask"]) == 12
        assert (await shared.client.delete(f"/sessions/{name}")).status_code == 204
        assert (await shared.client.get(f"/sessions/{name}/trajectory")).status_code == 404


async def test_an_adapter_is_known_in_every_process_while_it_is_loaded(
    shared: Running, engine: InferenceEngine, adapters: Path
) -> None:
    body = {"lora_name": "anew", "lora_path": str(adapters / "one")}
    for _ in range(3):
        for refused in await shared.in_each("/v1/completions", **FOUR, model="anew"):
            assert refused.status_code == 404
            assert refused.json()["error"]["message"].startswith("The model 'anew' does not exist. Served: ")
        assert (await shared.client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        assert len({text_of(answer) for answer in await shared.in_each("/v1/completions", **FOUR, model="anew")}) == 1
        assert (await shared.client.post("/v1/unload_lora_adapter", json=body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(shared: Running, engine: InferenceEngine, stream: bool) -> None:
    chat = {**CHAT, "max_tokens": 900}
    bodies = {
        "/v1/completions": LONG,
        **{f"/sessions/left-{number}/v1/chat/completions": chat for number in range(4)},
    }
    asking = [
        asyncio.create_task(shared.client.post(path, json={**body, "stream": stream})) for path, body in bodies.items()
    ]
    await until_running(engine, 5)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await until_idle(engine)


async def test_requests_are_aborted_by_id_in_every_process(shared: Running, engine: InferenceEngine) -> None:
    long = {**LONG, "n": 2}
    asking = [
        asyncio.create_task(one.post("/v1/completions", json={**long, "request_id": f"of-{number}"}))
        for number, one in enumerate(shared.each)
    ]
    await until_running(engine, 4)
    ids = {"request_ids": ["of-0", "of-1"]}
    assert (await shared.client.post("/abort_requests", json=ids)).json()["aborted"] == 2
    for answer in await asyncio.gather(*asking):
        assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"abort"}


async def test_generations_are_aborted_by_id_in_every_process(shared: Running, engine: InferenceEngine) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 900, "ignore_eos": True}, "request_id": "a"}
    asking = [asyncio.create_task(front_end.post("/inference/v1/generate", json=body)) for front_end in shared.each]
    await until_running(engine, 2)
    await shared.client.post("/inference/v1/abort_requests", json={"request_ids": ["a"]})
    for answer in await asyncio.gather(*asking):
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["abort"]


@pytest.mark.parametrize("path", ["/v1/completions", "/sessions/{}/v1/chat/completions"])
async def test_requests_of_several_processes_may_have_one_id(
    shared: Running, engine: InferenceEngine, path: str
) -> None:
    body = {**(LONG if "sessions" not in path else {**CHAT, "max_tokens": 900}), "request_id": "one"}
    asking = [
        asyncio.create_task(front_end.post(path.format(f"alike-{number}"), json=body))
        for number in range(4)
        for front_end in shared.each
    ]
    await until_running(engine, 8)
    await shared.client.post("/abort_requests", json={"request_ids": ["one"]})
    for answer in await asyncio.gather(*asking):
        assert answer.status_code == 200, answer.text
        assert answer.json()["id"].endswith("-one")
        assert answer.json()["choices"][0]["finish_reason"] == "abort"


async def test_an_abort_by_the_beginning_of_an_id_reaches_every_process(
    shared: Running, engine: InferenceEngine
) -> None:
    params = {"max_new_tokens": 900, "ignore_eos": True}
    asking = [
        asyncio.create_task(one.post("/generate", json={"input_ids": [5], "rid": rid, "sampling_params": params}))
        for one, rid in zip(shared.each, ("req-1", "req-10"), strict=True)
    ]
    await until_running(engine, 2)
    await shared.client.post("/abort_request", json={"rid": "req-1"})
    for answer in await asyncio.gather(*asking):
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_body_that_is_too_large_is_refused_wherever_it_goes(shared: Running, engine: InferenceEngine) -> None:
    for path in OF_EACH_PROCESS:
        answer = await shared.client.post(path, content=LARGE, headers={"content-type": "application/json"})
        assert answer.status_code == 413, path
    chunked = await shared.client.post("/update_weights", content=pieces_of(LARGE))
    assert chunked.status_code == 413


async def test_every_process_is_heard_by_clients_that_send_all_before_they_read(
    shared: Running, engine: InferenceEngine
) -> None:
    """urllib closes the connection after each request, and sees a reset in place of an answer that it has not read."""
    for path in OF_EACH_PROCESS:
        for key, status in (("another-key-than-ours", 401), (CONTROL, 413)):
            assert await asyncio.to_thread(sent_by_urllib, str(shared.client.base_url.join(path)), key) == status, path


def sent_by_urllib(url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(url, LARGE, headers), timeout=HANGING)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    raise AssertionError("it was not refused")


async def pieces_of(body: bytes) -> AsyncIterator[bytes]:
    for first in range(0, len(body), 1 << 16):
        yield body[first : first + (1 << 16)]


@pytest.mark.slow
async def test_adapters_of_a_folder_take_turns_in_two_processes(model: Path, adapters: Path) -> None:
    async with (
        create_engine("transformers", model=str(model), enable_lora=True, max_loras=1) as engine,
        two_processes(engine, lora_folder=str(adapters)) as running,
    ):
        alone = {}
        for name in ("one", "two"):
            (alone[name],) = {text_of(one) for one in await running.in_each("/v1/completions", **FOUR, model=name)}
        assert alone["one"] != alone["two"]

        async def ask(client: httpx.AsyncClient, name: str) -> None:
            for _ in range(4):
                assert text_of(await client.post("/v1/completions", json={**FOUR, "model": name})) == alone[name]

        await asyncio.gather(*(ask(client, name) for client in running.each for name in alone for _ in range(6)))


@pytest.mark.slow
async def test_an_engine_that_was_closed_is_still_answered_for(model: Path) -> None:
    async with (
        create_engine("transformers", model=str(model), isolation="inline") as engine,
        two_processes(engine) as running,
    ):
        pids = {process.pid for process in running.front_ends().values()}
        await engine.teardown()
        for answer in await running.in_each("/v1/completions", **FOUR):
            assert answer.status_code == 500, answer.text
        assert (await running.client.get("/health")).status_code == 503
        assert (await running.client.get("/status")).json()["state"] == "closed"
        assert {process.pid for process in running.front_ends().values()} == pids


async def test_a_front_end_that_is_killed_is_started_again(
    served: InferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_processes(served, sessions=SessionConfig(most_sessions=9)) as running:
        names = [f"kept-{number}" for number in range(4)]
        for name in names:
            await running.client.post(f"/sessions/{name}/v1/chat/completions", json=CHAT)
        kept = {one["session_id"] for one in (await running.each[0].get("/sessions")).json()["sessions"]}
        assert 0 < len(kept) < 4
        counted = await running.answered("/sessions/{session}/v1/chat/completions")
        path, killed = min(running.front_ends().items())
        asking = asyncio.create_task(running.each[0].post("/v1/completions", json=LONG))
        await until_running(served, 1)
        killed.kill()
        with pytest.raises(httpx.TransportError):
            await asking
        await until_idle(served)
        await until(lambda: running.front_ends().get(path) not in (None, killed))
        assert f"front-end 0 (process {killed.pid}) ended with status -9" in caplog.text
        await running.look()
        for name in names:
            status = (await running.client.get(f"/sessions/{name}/trajectory")).status_code
            assert status == (404 if name in kept else 200), name
        assert {answer.status_code for answer in await running.in_each("/v1/completions", **FOUR)} == {200}
        assert await running.answered("/sessions/{session}/v1/chat/completions") == counted
    assert not running.front_ends()


@pytest.mark.slow
async def test_a_front_end_that_is_stopped_keeps_nobody_waiting(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Until it is killed, the other front-end answers, and others pause, abort and update the engine."""
    fields = {"model": str(model), "isolation": "inline", "timeouts": {"heartbeat": 2.0}}
    async with create_engine("transformers", **fields) as engine, two_processes(engine) as running:
        names = [f"kept-{number}" for number in range(4)]
        for name in names:
            await running.client.post(f"/sessions/{name}/v1/chat/completions", json=CHAT)
        kept = {one["session_id"] for one in (await running.each[0].get("/sessions")).json()["sessions"]}
        path, stopped = min(running.front_ends().items())
        asking = [
            asyncio.create_task(running.each[0].post("/v1/completions", json={**LONG, "stream": stream}))
            for stream in (False, True)
        ]
        await until_running(engine, 2)
        stopped.suspend()
        passed_on = asyncio.create_task(running.client.post(f"/sessions/{min(kept)}/v1/chat/completions", json=CHAT))
        aborting = asyncio.create_task(running.client.post("/abort_requests", json={"request_ids": ["nobody's"]}))
        for _ in range(4):
            assert text_of(await running.client.post("/v1/completions", json=FOUR))
        other = await attach(await engine.handle())
        await other.pause_generation(PauseMode.WAIT)
        await other.load_weights_from_disk(str(model), "pushed")
        await other.continue_generation()
        await other.teardown()
        assert text_of(await running.client.post("/v1/completions", json=FOUR))
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(answer, httpx.TransportError)
        assert (await passed_on).status_code == 503
        assert (await aborting).status_code == 200
        await until(lambda: running.front_ends().get(path) not in (None, stopped))
        assert f"front-end 0 (process {stopped.pid}) has been stopped for 2 s" in caplog.text
        await running.look()
        assert {answer.status_code for answer in await running.in_each("/v1/completions", **FOUR)} == {200}
        await until_idle(engine)
    assert not running.front_ends()


@pytest.mark.slow
async def test_a_front_end_that_cannot_be_looked_at_serves_on(
    served: InferenceEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(process: psutil.Process) -> bool:
        raise ValueError(f"no look at {process.pid}")

    monkeypatch.setattr(supervision, "is_frozen", fails)
    monkeypatch.setattr(supervision, "_END_S", 0.5)
    async with two_processes(served) as running:
        front_ends = running.front_ends()
        path, one = min(front_ends.items())
        await until(lambda: caplog.text.count("is no longer watched") == 2)
        await asyncio.sleep(1)  # longer than a front-end that was killed is given to end
        assert running.front_ends() == front_ends
        assert f"ValueError: no look at {one.pid}" in caplog.text
        one.kill()
        await until(lambda: running.front_ends().get(path) not in (None, one))
        assert f"front-end 0 (process {one.pid}) ended with status -9" in caplog.text
        assert "the kernel keeps it" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
async def test_a_front_end_in_a_frozen_control_group_is_replaced(
    model: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    """Version 2 lets a frozen process be killed; version 1 keeps it until it is thawed."""
    fields = {"model": str(model), "isolation": "inline", "timeouts": {"heartbeat": 1.0}}
    async with create_engine("transformers", **fields) as engine:
        with freezer(version) as group:
            if group is None:
                pytest.skip(f"this process may not make a control group of version {version}")
            async with two_processes(engine) as running:
                path, frozen = min(running.front_ends().items())
                asking = asyncio.create_task(running.each[0].post("/v1/completions", json=LONG))
                await until_running(engine, 1)
                group.freeze(frozen)
                for _ in range(4):
                    assert text_of(await running.client.post("/v1/completions", json=FOUR))
                await until(lambda: running.front_ends().get(path) not in (None, frozen))
                how = "was killed, and the kernel keeps it" if version == 1 else "ended with status -9"
                assert f"front-end 0 (process {frozen.pid}) has been stopped for 1 s" in caplog.text
                assert f"front-end 0 (process {frozen.pid}) {how}" in caplog.text
                await until_idle(engine)
                await running.look()
                assert {answer.status_code for answer in await running.in_each("/v1/completions", **FOUR)} == {200}
                group.thaw()
                with pytest.raises(httpx.TransportError):
                    await asking
            assert not running.front_ends()


@pytest.mark.slow
async def test_a_front_end_that_is_stopped_for_a_moment_goes_on(
    served: InferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_processes(served) as running:
        path, stopped = min(running.front_ends().items())
        asking = asyncio.create_task(running.each[0].post("/v1/completions", json=FOUR))
        stopped.suspend()
        await asyncio.sleep(1.5)
        stopped.resume()
        assert text_of(await asking)
        assert running.front_ends()[path] == stopped
        assert "has been stopped" not in caplog.text


@pytest.mark.slow
async def test_a_server_closes_though_a_front_end_is_stopped(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"model": str(model), "isolation": "inline", "timeouts": {"heartbeat": 1.0}}
    async with create_engine("transformers", **fields) as engine:
        async with two_processes(engine, shutdown_timeout=HANGING) as running:
            _, stopped = min(running.front_ends().items())
            stopped.suspend()
        assert f"front-end 0 (process {stopped.pid}) has been stopped for 1 s" in caplog.text
        assert not running.front_ends()


async def test_front_ends_begin_before_the_engine_and_end_without_it(served: InferenceEngine) -> None:
    others = begun()
    async with Listening(ServerConfig(port=0, processes=2)):
        processes = begun() - others
        assert len(processes) == 2
    assert not [one for one in processes if one.is_running()]


@pytest.mark.slow
async def test_processes_that_the_engine_forks_keep_no_front_end_waiting(served: InferenceEngine) -> None:
    """They hold copies of the sockets on which front-ends are told their part."""
    config = ServerConfig(port=0, processes=2)
    async with Listening(config) as listening:
        forked = os.fork()
        if forked == 0:
            signal.pause()
        try:
            async with Server(served, config, listening=listening) as server, httpx.AsyncClient() as client:
                assert (await client.get(f"{server.url}/health")).status_code == 200
        finally:
            os.kill(forked, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, forked, 0)


async def test_a_front_end_sees_its_owner_leave_though_others_hold_the_socket() -> None:
    here, there = socket.socketpair()
    with here.dup(), there:
        (await Caller.over(here, FRONT_END, "a front-end")).close()
        there.settimeout(HANGING)
        assert await asyncio.to_thread(there.recv, 1) == b""


async def test_a_front_end_that_ended_before_the_engine_had_started_is_named(served: InferenceEngine) -> None:
    others = begun()
    config = ServerConfig(port=0, processes=2)
    async with Listening(config) as listening:
        for process in begun() - others:
            process.kill()
            with pytest.raises(EngineStartError, match=r"front-end [01] did not start: .* its messages are above"):
                async with Server(served, config, listening=listening):
                    pass
            break
    assert begun() == others


def begun() -> set[psutil.Process]:
    """Return the front-ends of all servers in this process, whether they serve by now or not."""
    found = set()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if runs(process) and "drivetrain_serving.front_ends" in process.cmdline():
                found.add(process)
    return found
