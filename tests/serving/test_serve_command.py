"""``drivetrain serve`` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

import warm_python
from drivetrain.errors import InvalidConfig
from drivetrain_demo.settings import tiny_policy
from drivetrain_serving.fleet_file import fleet_of
from engines import HANGING

KEY = "a-key-for-requests"
STARTED_S = 200
"""Longest time in which another process loads torch and trains."""


@contextmanager
def serving(model: Path | None, *more: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server on a free port; yield it and its address. One that has ended must have released all it held."""
    of_model = () if model is None else ("--model", str(model))
    command = [sys.executable, "-W", "ignore", "-m", "drivetrain", "serve", *of_model, "--port", "0", *more]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert server.stdout is not None
    assert server.stderr is not None
    errors: list[str] = []
    reading = threading.Thread(target=lambda: errors.extend(server.stderr or ()), daemon=True)
    reading.start()
    try:
        said = server.stdout.readline()
        found = re.search(r"http://\S+:\d+", said)
        assert found, (said, server.poll(), errors)
        yield server, found[0]
        if server.poll() == 0:
            reading.join(HANGING)
            assert not [line for line in errors if "leaked" in line]
    finally:
        server.kill()
        server.wait(HANGING)


def test_a_server_lets_requests_end_when_it_is_told_to(model: Path) -> None:
    body = {"prompt": [5], "max_tokens": 900, "ignore_eos": True, "return_token_ids": True}
    answers: list[httpx.Response] = []
    with serving(model, "--served-model-name", "policy", DRIVETRAIN_API_KEY=KEY) as (server, url):
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=HANGING)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert client.get("/v1/models").json()["data"][0]["id"] == "policy"
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
        asking.start()
        while not client.get("/load").json()["server_load"]:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        asking.join(HANGING)
        assert server.wait(HANGING) == 0
    (answer,) = answers
    assert len(answer.json()["choices"][0]["token_ids"]) == 900


def front_ends(server: subprocess.Popen[str], count: int = 2) -> list[psutil.Process]:
    found = [one for one in psutil.Process(server.pid).children() if "drivetrain_serving.front_ends" in one.cmdline()]
    assert len(found) == count
    return found


@pytest.mark.slow
def test_all_processes_let_requests_end(model: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 600, "ignore_eos": True}
    paths = ["/v1/chat/completions", *(f"/sessions/s{number}/v1/chat/completions" for number in range(3))]
    answers: list[httpx.Response] = []
    with serving(model, "--processes", "2") as (server, url):
        processes = front_ends(server)
        asking = [
            threading.Thread(
                target=lambda path=path: answers.append(httpx.post(url + path, json=body, timeout=HANGING))
            )
            for path in paths
        ]
        for thread in asking:
            thread.start()
        while httpx.get(f"{url}/load").json()["server_load"] < len(paths):
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(HANGING)
        assert server.wait(HANGING) == 0
        assert not [one for one in processes if one.is_running()]
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [600] * len(paths)


@pytest.mark.slow
def test_no_process_outlives_one_that_is_killed(model: Path) -> None:
    with serving(model, "--processes", "2") as (server, _):
        processes = front_ends(server)
        server.kill()
        psutil.wait_procs(processes, HANGING)
        assert not [one for one in processes if one.is_running()]


@pytest.mark.slow
def test_no_process_outlives_one_that_is_killed_while_the_engine_starts(model: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "drivetrain", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen([*command, "--processes", "2"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        while len(processes := psutil.Process(server.pid).children()) < 2:
            time.sleep(0.01)
        server.kill()
        psutil.wait_procs(processes, HANGING)
        assert not [one for one in processes if one.is_running()]


FORKS = """
import asyncio, multiprocessing, signal, sys, time
from drivetrain import create_engine
from drivetrain_serving import Server, ServerConfig
from drivetrain_serving.server import Listening

forking = multiprocessing.get_context("fork")

def fork():
    forked = forking.Process(target=time.sleep, args=(3600,), daemon=True)
    forked.start()
    print(forked.pid, flush=True)

async def serve(model, processes):
    config = ServerConfig(port=0, processes=processes)
    async with Listening(config) as listening:
        fork()  # as an engine that starts, in this process
        async with create_engine("transformers", model=model) as engine:
            async with Server(engine, config, listening=listening) as server:
                print(server.url.rpartition(":")[2], flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                fork()  # as one that is in use
                await asyncio.sleep(3600)

asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_nothing_of_a_killed_server_is_left_to_processes_that_were_forked_from_it(model: Path, processes: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(model), processes]
    with ExitStack() as stack:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.enter_context(server)
        stack.callback(server.kill)
        assert server.stdin is not None
        assert server.stdout is not None
        stack.callback(psutil.Process(int(server.stdout.readline())).kill)
        port = int(server.stdout.readline())
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), HANGING))
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        server.stdin.write("\n")
        server.stdin.flush()
        stack.callback(psutil.Process(int(server.stdout.readline())).kill)
        others = front_ends(server, 0 if processes == "1" else 2)
        server.kill()
        server.wait(HANGING)
        assert client.recv(1) == b""
        _, alive = psutil.wait_procs(others, HANGING)
        assert not alive
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.slow
def test_no_front_end_waits_for_a_server_that_was_killed_after_its_engine_had_forked(model: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(model), "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        forked = psutil.Process(int(server.stdout.readline()))
        others = front_ends(server)
        server.kill()
        _, alive = psutil.wait_procs(others, HANGING)
        forked.kill()
        assert not alive


def test_a_port_that_is_taken_is_told_before_the_engine_starts(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = warm_python.run("-m", "drivetrain", "serve", "--model", str(model), "--port", port)
    assert ended.returncode != 0
    assert f"port={port}" in ended.stderr
    assert "starting" not in ended.stderr


FLEET = """
engines:
  short: {{backend: transformers, model: "{model}", context_length: 64}}
  long: {{backend: transformers, model: "{model}", context_length: 128}}
resume: true
"""


def test_the_engines_of_a_file_serve_behind_one_port(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.format(model=model))
    with serving(None, "--fleet", str(file), "--served-model-name", "policy") as (server, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [[5], [6]], "max_tokens": 4}, timeout=HANGING)
        assert len(answer.json()["choices"]) == 2
        engines = httpx.get(f"{url}/status", timeout=HANGING).json()["engines"]
        assert [one["name"] for one in engines] == ["short", "long"]
        server.send_signal(signal.SIGINT)
        assert server.wait(HANGING) == 0


@pytest.mark.parametrize(
    ("fields", "more", "field"),
    [
        ("nonsense: 1", "", "engines.a.nonsense"),
        ("context_length: none", "", "engines.a.context_length"),
        ("context_length: 64", "min_engines: 5", "min_engines"),
        ("context_length: 64", "max_waiting: 0", "max_waiting"),
    ],
)
def test_a_fault_of_a_fleets_file_names_the_file_and_the_engine(
    model: Path, tmp_path: Path, fields: str, more: str, field: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f'engines: {{a: {{backend: transformers, model: "{model}", {fields}}}}}\n{more}\n')
    with pytest.raises(InvalidConfig) as refused:
        fleet_of(file)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{file}: {field}")


def test_an_absent_file_of_a_fleet_is_called_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"cannot read '.*absent\.yaml'"):
        fleet_of(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("written", "more", "says"),
    [
        ("engines: {}", [], "engines"),
        ("engines: {a: {backend: transformers, model: /nowhere}}", [], "/nowhere"),
        ("engines: {a: {backend: transformers, model: /nowhere, nonsense: 1}}", [], "nonsense"),
        ("engines: {a: {backend: transformers, model: x}}\nnonsense: 1", [], "nonsense"),
        ("engines: {a: {backend: transformers, model: x}}\nmin_engines: null", [], "min_engines"),
        ("engines: {a: {backend: transformers, model: x}}\nmax_staleness: true", [], "max_staleness"),
        ("engines: {a: {backend: transformers, model: x}}\nresume: 1", [], "resume"),
        ("engines: {a: {backend: transformers, model: x}}", ["--model", "x"], "--model"),
        ("- a", [], "mapping"),
    ],
)
def test_a_wrong_file_of_a_fleet_is_refused(tmp_path: Path, written: str, more: list[str], says: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(written)
    ended = warm_python.run("-m", "drivetrain", "serve", "--port", "0", "--fleet", str(file), *more)
    assert ended.returncode != 0
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


SERVER = """
served_model_name: [of-the-file]
dialect: sglang
max_body_bytes: 300
allowed_hosts: [of.the.file]
sessions: {most_sessions: 1, timeout: 900}
"""


def test_options_override_the_file_of_the_server(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(SERVER)
    with serving(
        model, "--server-config", str(file), "--dialect", "vllm", "--keep-answers", "--allowed-host", "a.b"
    ) as (server, url):
        for host, status in (("a.b", 200), ("of.the.file", 403)):
            assert httpx.get(f"{url}/v1/models", headers={"host": host}, timeout=HANGING).status_code == status
        models = httpx.get(f"{url}/v1/models", timeout=HANGING).json()["data"]
        assert [(one["id"], one["owned_by"]) for one in models] == [("of-the-file", "vllm")]
        body = {"prompt": [5] * 200, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=HANGING).status_code == 413
        turn = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        paths = [f"{url}/sessions/{name}/v1/chat/completions" for name in "ab"]
        made = [httpx.post(path, json=turn, timeout=HANGING) for path in paths]
        assert [one.status_code for one in made] == [200, 503], made[1].text
        server.send_signal(signal.SIGINT)
        assert server.wait(HANGING) == 0


@pytest.mark.parametrize(
    ("written", "more", "says"),
    [
        ("nonsense: 1", [], "nonsense"),
        ("port: 99999", [], "port"),
        ("sessions: {most_turns: 0}", [], "most_turns"),
        ("sessions: 3", ["--keep-answers"], "sessions"),
        ("host: 0.0.0.0", [], "api_key"),
        ("port: 0", ["--allowed-host", "http://trainer:8000"], "allowed_hosts"),
        ("- a", [], "mapping"),
    ],
)
def test_a_wrong_file_of_the_server_is_refused(
    model: Path, tmp_path: Path, written: str, more: list[str], says: str
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(written)
    ended = warm_python.run("-m", "drivetrain", "serve", "--model", str(model), "--server-config", str(file), *more)
    assert ended.returncode != 0
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_several_engines_serve_behind_one_port(model: Path) -> None:
    with serving(model, "--engines", "2", "--isolation", "process", "--dialect", "sglang") as (server, url):
        body = {"prompt": [[5], [6], [7], [8]], "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANGING)
        assert len(answer.json()["choices"]) == 4
        info = httpx.get(f"{url}/server_info", timeout=HANGING).json()
        assert info["drivetrain"]["state"] == "ready"
        assert httpx.get(f"{url}/v1/models", timeout=HANGING).json()["data"][0]["owned_by"] == "sglang"
        asked = {"input_ids": body["prompt"], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        generated = httpx.post(f"{url}/generate", json=asked, timeout=HANGING).json()
        assert [one["text"] for one in generated] == [one["text"] for one in answer.json()["choices"]]
        for path in ("/v1/loads", "/model_info", "/flush_cache"):
            assert httpx.get(url + path, timeout=HANGING).status_code == 200, path
        server.send_signal(signal.SIGINT)
        assert server.wait(HANGING) == 0


@pytest.mark.slow
def test_the_example_trains_over_http() -> None:
    policy = tiny_policy(0)
    with serving(policy) as (_, url):
        example = Path(__file__).parents[2] / "examples/train_over_http.py"
        done = subprocess.run(
            [sys.executable, str(example), "--url", url, "--model", str(policy)],
            capture_output=True,
            text=True,
            timeout=STARTED_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 29" in done.stdout


@pytest.mark.slow
def test_requests_are_logged_to_stderr_as_bare_lines(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "drivetrain", "serve", "--model", str(model), "--port", "0"]
    with (tmp_path / "errors").open("w+") as errors:
        server = subprocess.Popen([*command, "--log-requests"], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+:\d+", server.stdout.readline())
            assert found
            answer = httpx.post(
                f"{found[0]}/v1/completions", json={"prompt": "hello", "max_tokens": 2}, timeout=HANGING
            )
            assert answer.status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(HANGING) == 0
        finally:
            server.kill()
        errors.seek(0)
        lines = [json.loads(line) for line in errors if line.startswith("{")]
    assert [(line["path"], line["status"]) for line in lines] == [("/v1/completions", 200)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "api_key"),
        (["--host", "0.0.0.0", "--api-key", KEY], "control_key"),
        (["--api-key", "short"], "api_key"),
        (["--dialect", "other"], "sglang"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_engine_starts(
    model: Path, arguments: list[str], says: str
) -> None:
    ended = warm_python.run("-m", "drivetrain", "serve", "--model", str(model), "--port", "0", *arguments)
    assert ended.returncode != 0
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
