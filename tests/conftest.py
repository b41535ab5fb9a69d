"""Setup of every test run."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored. Programs that the tests start and interrupt inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
