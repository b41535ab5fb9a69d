"""An engine's environment for tests that run in a trainer's: ``make test-trainer-half``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def host_python() -> str:
    """Python of the environment that holds the engine."""
    return os.environ["HOST_PYTHON"]


@pytest.fixture(scope="session")
def model_folder(host_python: str, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Write a tiny model with the transformers of the engine's environment."""

    def write(architecture: str = "qwen2", **config: object) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        arguments: Mapping[str, object] = {"architecture": architecture, "directory": str(folder), **config}
        code = "import json, sys; from drivetrain.testing import tiny_model; tiny_model(**json.loads(sys.argv[1]))"
        subprocess.run([host_python, "-c", code, json.dumps(arguments)], check=True)
        return folder

    return write
