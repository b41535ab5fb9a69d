"""Bounded compilation of the regular expressions in requests."""

from __future__ import annotations

import re
from typing import Final

import regex

from drivetrain.checks.limits import MOST_REPETITIONS

_TOKEN: Final = re.compile(
    r"""(?P<escape>\\.)
    |(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<open>\()
    |(?P<close>\))
    |(?P<count>\{(?P<least>\d+)(?:,\d*)?\})
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_LOOSE: Final = re.compile(r"V1|\(\?[a-zA-Z0-9-]*x|\(\?#")


def compiled(pattern: str) -> regex.Pattern[str]:
    """Compile an expression.

    Raises:
        ValueError: It does not compile, or would use unbounded memory: ``a{1000000000}`` becomes that many nodes.
    """
    count = repetitions(pattern)
    if count > MOST_REPETITIONS:
        raise ValueError(
            f"has {count:g} parts once its counts are written out, which is how it is compiled; expected at most "
            f"{MOST_REPETITIONS}"
        )
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"does not compile: {error}") from None


def repetitions(pattern: str) -> float:
    """Return an upper bound of the parts of an expression after its counts are expanded.

    With flags that allow nested sets, or spaces and comments before a count, the bound is the product of all counts.
    """
    if _LOOSE.search(pattern):
        product = float(len(pattern))
        for found in _TOKEN.finditer(pattern):
            product *= max(1.0, _least(found))
        return product
    groups = [0.0]
    last = 0.0
    for found in _TOKEN.finditer(pattern):
        match found.lastgroup:
            case "open":
                groups.append(0.0)
                last = 0.0
            case "close" if len(groups) > 1:
                last = groups.pop() + 1
                groups[-1] += last
            case "count":
                more = last * max(0.0, _least(found) - 1)
                groups[-1] += more
                last += more
            case _:
                last = 1.0
                groups[-1] += last
    return sum(groups)


def _least(found: re.Match[str]) -> float:
    digits = found["least"]
    return 0.0 if digits is None else float(digits[:400])
