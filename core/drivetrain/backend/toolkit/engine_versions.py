"""Engine versions: parsing, a warning about untested ones, and features found in an engine's source."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

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


def source_mentions(package: str, path: str, words: str) -> bool:
    """Return whether a file of an installed package contains ``words``, without importing the package.

    Args:
        package: Top-level package of the engine, such as ``"vllm"``.
        path: File within the package, such as ``"v1/outputs.py"``.
        words: Text that shows a feature.
    """
    found = importlib.util.find_spec(package)
    files = (Path(root) / path for root in (found.submodule_search_locations if found is not None else None) or ())
    return any(file.is_file() and words in file.read_text(encoding="utf-8") for file in files)
