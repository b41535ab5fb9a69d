"""Versions of engines: which are installed, and whether a backend was tested with them."""

from __future__ import annotations

import re
import warnings


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
    numbers = [len(release.split(".")) for release in seen]
    oldest, newest = (_release(release, count) for release, count in zip(seen, numbers, strict=True))
    if not oldest <= _release(installed, numbers[0]) or not _release(installed, numbers[1]) <= newest:
        between = seen[0] if seen[0] == seen[1] else f"{seen[0]} to {seen[1]}"
        warnings.warn(
            f"{engine} {installed} is outside the releases that its backend was tested with ({between}); it is used "
            "all the same",
            stacklevel=2,
        )


def _release(version: str, count: int) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:count])


__all__ = ["warn_if_unseen"]
