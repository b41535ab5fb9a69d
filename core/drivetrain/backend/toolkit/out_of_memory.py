"""Recognise the errors by which torch and engines say that memory ran out."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Final

from drivetrain.errors import DrivetrainError, EngineOutOfMemory

OUT_OF_MEMORY: Final = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
"""Phrases, in lower case, of torch's errors on a CPU and on a GPU."""


def is_out_of_memory(error: BaseException, phrases: Iterable[str] = ()) -> bool:
    """Return True if an error says that memory ran out.

    Args:
        error: An error of torch, of Python or of an engine.
        phrases: More phrases of the engine's own errors, in lower case.
    """
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(known in words for known in (*OUT_OF_MEMORY, *phrases))


@contextmanager
def naming_out_of_memory(action: str, after: str) -> Generator[None, None, None]:
    """Raise :class:`EngineOutOfMemory` for an error within that says that memory ran out.

    Args:
        action: The call that needed memory.
        after: The state of the engine now, and a remedy.
    """
    try:
        yield
    except DrivetrainError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise EngineOutOfMemory(f"{action} ran out of memory: {type(error).__name__}: {error}. {after}") from error
