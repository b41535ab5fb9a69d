"""Setup of every test run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import warm_python


def pytest_configure() -> None:
    # No verdict depends on how busy the machine is: no example has a time limit, nor the drawing of examples.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")
    # A shell starts background jobs with SIGINT ignored. Programs that the tests start and interrupt inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def forked_hosts() -> Iterator[None]:
    """Engines' host processes are forked, as those of the conformance suite: spawned ones import for seconds."""
    with warm_python.forked_hosts():
        yield


@pytest.fixture(scope="session")
def model() -> Path:
    from drivetrain.testing import tiny_model  # imports torch, which most tests do without

    return tiny_model("qwen2")


@pytest.fixture(scope="session")
def other_model() -> Path:
    from drivetrain.testing import tiny_model

    return tiny_model("qwen2", seed=1)
