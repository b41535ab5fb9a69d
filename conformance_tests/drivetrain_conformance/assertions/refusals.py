"""Expect a call to be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from drivetrain.errors import DrivetrainError, UnsupportedCapability

_E = TypeVar("_E", bound=BaseException)


@dataclass(slots=True)
class Caught(Generic[_E]):
    """Holds the error that :func:`raises` caught."""

    caught: _E | None = None

    @property
    def error(self) -> _E:
        """The error; available after the block only."""
        assert self.caught is not None
        return self.caught


@contextmanager
def raises(kind: type[_E] | tuple[type[_E], ...], what: str, *, otherwise: str = "") -> Iterator[Caught[_E]]:
    """Require the block to raise ``kind``. Other errors pass through; UnsupportedCapability always does.

    If nothing is raised, the AssertionError says ``otherwise``; by default, that ``what`` was accepted.
    """
    found: Caught[_E] = Caught()
    try:
        yield found
    except UnsupportedCapability:
        raise
    except kind as error:
        found.caught = error
    else:
        raise AssertionError(otherwise or f"{what} was accepted")


@contextmanager
def refused(
    kind: type[DrivetrainError], *, field: str = "", naming: str = "", state: str = "", otherwise: str = ""
) -> Iterator[None]:
    """Require the block to raise ``kind``, as :func:`raises` does, with an error that says what is wrong.

    Args:
        kind: The expected error.
        field: The field that the error must name, or its beginning.
        naming: Text that the message must contain.
        state: The engine state that the error must carry and its message must name.
        otherwise: Message of the AssertionError if nothing is raised; default: made up from the arguments.
    """
    expected = f"expected {kind.__name__}{f' for {field}' if field else ''}, but nothing was raised"
    with raises(kind, "it", otherwise=otherwise or expected) as refusal:
        yield
    error = refusal.error
    named = getattr(error, "field", "")
    assert named.startswith(field), f"the error names the field {named!r}, not {field!r}: {error}"
    assert naming in str(error), f"the error does not name {naming!r}: {error}"
    if state:
        found = getattr(error, "state", "")
        assert found == state, f"the error carries the state {found!r}, but the engine is {state}: {error}"
        assert state in str(error), f"the error does not name the state {state!r}: {error}"
