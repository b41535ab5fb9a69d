"""What a case says of a call that must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.errors import DrivetrainError, UnsupportedCapability


@contextmanager
def refused(
    kind: type[DrivetrainError], *, field: str = "", naming: str = "", state: str = "", otherwise: str = ""
) -> Iterator[None]:
    """What runs within must raise ``kind``; any other error goes on, UnsupportedCapability always.

    Args:
        kind: The error.
        field: The field that it must name, or the beginning of it.
        naming: What its message must hold.
        state: The engine's state that it must carry and name.
        otherwise: What is wrong when nothing is raised; made up if not given.
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
