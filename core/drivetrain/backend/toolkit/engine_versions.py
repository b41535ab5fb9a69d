"""Versions of engines: which are installed, and whether a backend was tested with them."""

from __future__ import annotations

import warnings

from packaging.version import InvalidVersion, Version


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, ``(0, 5, 23)`` of ``"0.5.23.post1"``; none if it is no version."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def warn_if_unseen(engine: str, installed: str, seen: tuple[str, str] | None) -> None:
    """Warn, with a :class:`UserWarning`, of an engine's version that its backend was not tested with.

    Args:
        engine: The engine's distribution.
        installed: Its version.
        seen: Oldest and newest release that the backend was tested with; None: it does not say. As many numbers of
            the version are compared as these have.
    """
    if seen is None:
        return
    oldest, newest = map(release, seen)
    numbers = release(installed)
    if not oldest <= numbers[: len(oldest)] or not numbers[: len(newest)] <= newest:
        between = seen[0] if seen[0] == seen[1] else f"{seen[0]} to {seen[1]}"
        warnings.warn(
            f"{engine} {installed} is outside the releases that its backend was tested with ({between}); it is used "
            "all the same",
            stacklevel=2,
        )


__all__ = ["release", "warn_if_unseen"]
