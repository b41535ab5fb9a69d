"""The model of the fleets' engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drivetrain.testing import tiny_model


@pytest.fixture(scope="module", autouse=True)
def hosts(forked_hosts: None) -> None:
    """Fork the hosts of all tests, but not that of an engine of the whole run."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model("qwen2")
