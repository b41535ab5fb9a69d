"""Expect a call to be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.errors import DrivetrainError, UnsupportedCapability


@contextmanager
def refused(
    kind: type[DrivetrainError], *, field: str = "", naming: str = "", state: str = "", otherwise: str = ""
) -> Iterator[None]:
    """Require the block to raise ``kind``. Other errors pass through, and so does UnsupportedCapability in any case.

    Args:
        kind: The expected error.
        field: The field that the error must name, or its beginning.
        naming: Text that the message must contain.
        state: The engine state that the error must carry and its message must name.
        otherwise: Message of the AssertionError if nothing is raised; default: made up from the arguments.
    """
    caught: DrivetrainError | None = None
    try:
        yield
    except UnsupportedCapability:
        raise
    except kind as error:
        caught = error
    if caught is None:
        expected = f"expected {kind.__name__}{f' for {field}' if field else ''}, but nothing was raised"
        raise AssertionError(otherwise or expected)
    named = getattr(caught, "field", "")
    assert named.startswith(field), f"the error names the field {named!r}, not {field!r}: {caught}"
    assert naming in str(caught), f"the error does not name {naming!r}: {caught}"
    if state:
        carried = getattr(caught, "state", "")
        assert carried == state, f"the error carries the state {carried!r}, but the engine is {state}: {caught}"
        assert state in str(caught), f"the error does not name the state {state!r}: {caught}"
