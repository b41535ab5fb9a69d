"""Models of the hub: making an engine uses no network, starting it ends in time, and a revision is that revision."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from drivetrain import DeadlineExceeded, EngineStartError, InvalidConfig, create_engine
from drivetrain.testing import tiny_model

IN_LOOP = pytest.mark.asyncio(loop_scope="session")
NOBODY = "nobody/no-such-model"


class Hub(ThreadingHTTPServer):
    """A hub that has no model; it answers only while ``answers`` is set."""

    daemon_threads = True

    def __init__(self, *, answers: bool) -> None:
        self.answers = threading.Event()
        if answers:
            self.answers.set()
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), NoModel)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class NoModel(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Hub)
        self.server.asked.append(self.path)
        self.server.answers.wait()
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(params=["silent", "empty"])
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(answers=request.param == "empty") as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        point_at(hub.url, monkeypatch)
        try:
            yield hub
        finally:
            hub.answers.set()
            for left in threading.enumerate():  # threads that a deadline left go on asking
                if left.name in ("drivetrain-fetches", "drivetrain-tokenizer"):
                    left.join(60)
            hub.shutdown()
            thread.join()


@IN_LOOP
@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("field", ["model", "tokenizer"])
async def test_a_model_that_the_hub_does_not_have_is_named_in_time(hub: Hub, field: str, isolation: str) -> None:
    name = f"nobody/{field}-{isolation}-{hub.server_port}"  # threads of other tests may still ask for theirs
    fields = {"model": str(tiny_model("qwen2")), field: name}
    engine = create_engine("transformers", isolation=isolation, timeouts={"start": 3}, **fields)
    assert not any(name in path for path in hub.asked), "making an engine asked the hub, in the caller's event loop"
    turns = asyncio.create_task(asyncio.sleep(0.1))
    with pytest.raises(InvalidConfig if hub.answers.is_set() else DeadlineExceeded, match=name) as error:
        await engine.start()
    assert turns.done() or hub.answers.is_set(), "the event loop stood still"
    if isinstance(error.value, InvalidConfig):
        assert error.value.field == field


@IN_LOOP
async def test_a_hub_that_cannot_be_reached_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    point_at(f"http://127.0.0.1:{port}", monkeypatch)
    engine = create_engine("transformers", model=NOBODY, isolation="inline")
    with pytest.raises(EngineStartError, match=f"{NOBODY}'.* the hub did not send"):
        await engine.start()


@IN_LOOP
async def test_an_offline_hub_without_the_model_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    engine = create_engine("transformers", model=NOBODY, isolation="inline")
    with pytest.raises(InvalidConfig, match=f"{NOBODY}'.*HF_HUB_OFFLINE") as error:
        await engine.start()
    assert error.value.field == "model"


def test_a_folder_has_no_revision() -> None:
    with pytest.raises(InvalidConfig, match=r"revision='old': .* is a folder") as error:
        create_engine("transformers", model=str(tiny_model("qwen2")), revision="old")
    assert error.value.field == "revision"


SCRIPT = """
import asyncio, hashlib, json, sys
from drivetrain import create_engine

async def main():
    revision, isolation = json.loads(sys.argv[1])
    engine = create_engine("transformers", model="some/model", revision=revision, isolation=isolation)
    async with engine:
        name = (await engine.weight_manifest()).tensors[0].name
        tensor = await engine.get_weights_by_name(name)
        print(json.dumps({
            "weights": hashlib.sha256(tensor.data).hexdigest(),
            "ends": engine.model_info.eos_token_ids,
            "context": engine.model_info.context_length,
            "text": engine.decode([engine.tokenizer.encode(__import__("drivetrain").TextPrompt(text="a b"))[0]]),
            "padding": engine.tokenizer.inner.pad_token,
        }))

asyncio.run(main())
"""


def served(cache: Path, revision: str | None, isolation: str) -> dict[str, object]:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    script = [sys.executable, "-c", SCRIPT, json.dumps([revision, isolation])]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_a_revision_is_that_revision_in_all_files(tmp_path: Path, isolation: str) -> None:
    model = tmp_path / "models--some--model"
    for seed, (name, commit) in enumerate((("main", "a" * 40), ("old", "b" * 40))):
        folder = model / "snapshots" / commit
        shutil.copytree(tiny_model("qwen2", seed=seed), folder)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / name).write_text(commit)
        edit(folder / "config.json", max_position_embeddings=512 + seed, eos_token_id=40 + seed)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [50 + seed]}))
        edit(folder / "tokenizer_config.json", pad_token="ab"[seed])
    (main, old) = (served(tmp_path, revision, isolation) for revision in (None, "old"))
    assert (main["context"], old["context"]) == (512, 513)
    for ends, of_folder in ((main["ends"], 50), (old["ends"], 51)):
        assert isinstance(ends, list)
        assert {50, 51}.intersection(ends) == {of_folder}
    assert (main["padding"], old["padding"]) == ("a", "b")
    assert main["weights"] != old["weights"]
    assert served(tmp_path, "b" * 40, isolation) == old
