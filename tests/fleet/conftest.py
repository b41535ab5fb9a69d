"""The model of the fleets' engines."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def hosts(forked_hosts: None) -> None:
    """Fork the hosts of all tests, but not that of an engine of the whole run."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
