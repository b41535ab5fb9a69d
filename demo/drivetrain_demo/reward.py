"""Reward of a completion: a pure function of its text and the right answer.

The reward is graded, so that even a policy that was never right learns in which direction to go: to write a number at
all, then one of the right length, then the right one, and finally nothing else.
"""

from __future__ import annotations

import re
from typing import Final

EXACT: Final = 1.0
"""The right number alone; surrounding white space is ignored."""
RIGHT: Final = 0.7
"""The last number is right, but there is other text."""
SAME_LENGTH: Final = 0.2
"""The last number is wrong, but has as many characters as the right one."""
NUMBER: Final = 0.1
"""There is a number."""
NOTHING: Final = 0.0
"""There is no number."""

_NUMBER: Final = re.compile(r"(?<![0-9.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")


def grade(text: str, answer: int) -> float:
    """Return the reward of ``text``, from 0 to 1; its last number counts as its answer.

    A minus sign and decimals belong to the number, and ``1,000`` is 1000. ``007`` does not count as 7.
    """
    numbers = _NUMBER.findall(text)
    if not numbers:
        return NOTHING
    last, right = numbers[-1].replace(",", ""), str(answer)
    if last == right:
        return EXACT if text.strip() == numbers[-1] else RIGHT
    return SAME_LENGTH if len(last) == len(right) else NUMBER


def is_right(reward: float) -> bool:
    """Return whether a completion with this reward has the right number."""
    return reward >= RIGHT
