"""``drivetrain serve`` in the project's environment, for clients that run in another: ``make test-trainers``."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tool_conversation import Score


@contextmanager
def _in_the_project(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python of the project's environment until the context ends; its errors go to ours."""
    command = [os.environ["PROJECT_PYTHON"], "-W", "ignore", *arguments]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


ENGINE = ["--backend", "transformers"]
if "ENGINE_PYTHON" in os.environ:
    ENGINE = ["--backend", os.environ["BACKEND"], "--set", f"python={os.environ['ENGINE_PYTHON']}"]


@pytest.fixture(scope="session")
def in_the_project() -> Callable[..., AbstractContextManager[subprocess.Popen[str]]]:
    """Run Python of the project's environment with these arguments, until the context ends."""
    return _in_the_project


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the taught model."""
    return tmp_path_factory.mktemp("taught")


@pytest.fixture(scope="session")
def score(model: Path) -> Iterator[Score]:
    with _in_the_project(str(Path(__file__).parent.with_name("helpers") / "taught_model.py"), str(model)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reads, writes = process.stdout, process.stdin
        assert reads.readline() == "taught\n", process.poll()

        def ask(token_ids: Sequence[int]) -> list[float]:
            writes.write(json.dumps([*token_ids]) + "\n")
            logprobs: list[float] = json.loads(reads.readline())
            return logprobs

        yield ask


@pytest.fixture(scope="session")
def serve(model: Path, score: Score) -> Callable[..., AbstractContextManager[str]]:
    """Serve the taught model as ``policy``, with further options, until the context ends; the address of the server."""

    @contextmanager
    def served(*options: str) -> Iterator[str]:
        arguments = ["-m", "drivetrain", "serve", *ENGINE, "--model", str(model), *options]
        with _in_the_project(*arguments, "--served-model-name", "policy", "--port", "0") as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://\S+:\d+", said)
            assert found, (said, process.poll())
            yield found[0]

    return served


@pytest.fixture(scope="session")
def url(serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """Address of the server. The model is called ``policy``."""
    with serve() as address:
        yield address
