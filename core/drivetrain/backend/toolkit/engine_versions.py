"""Engine versions: parsing, and a warning about untested ones."""

from __future__ import annotations

import warnings

from packaging.version import InvalidVersion, Version


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers, ``(0, 5, 23)`` for ``"0.5.23.post1"``; an empty tuple if it cannot be parsed."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def warn_if_unseen(engine: str, installed: str, seen: tuple[str, str] | None) -> None:
    """Emit a :class:`UserWarning` if the backend was not tested with the engine's installed version.

    Args:
        engine: Distribution of the engine.
        installed: Its installed version.
        seen: Oldest and newest tested release; None: unknown, no warning. Only as many numbers of ``installed`` are
            compared as these releases have.
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
