"""Suppression of transformers' progress bars, which would garble a trainer's own output."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Suppress transformers' progress bars on stderr within the context."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
