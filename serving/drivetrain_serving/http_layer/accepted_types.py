"""The media types that a client accepts (RFC 9110, 12.5.1)."""

from __future__ import annotations

from collections.abc import Iterable


def prefers(header: str, kinds: Iterable[str], other: str) -> bool:
    """Return whether a client names one of ``kinds`` in ``Accept``, and likes it no less than ``other``.

    Args:
        header: The value of ``Accept``. Wildcards count for none of the types.
        kinds: Names of one media type.
        other: Another media type.
    """
    weights = dict(map(_weighed, header.split(",")))
    named = max((weights.get(kind, 0.0) for kind in kinds), default=0.0)
    return named > 0 and named >= weights.get(other, 0.0)


def _weighed(accepted: str) -> tuple[str, float]:
    """Return a media range and its weight; a weight that cannot be read is 0."""
    kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return kind, float(value)
            except ValueError:
                return kind, 0.0
    return kind, 1.0
