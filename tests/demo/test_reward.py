from __future__ import annotations

import pytest

from drivetrain_demo.reward import EXACT, NOTHING, NUMBER, RIGHT, SAME_LENGTH, grade, is_right


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("7", 7, EXACT),
        (" 7\n", 7, EXACT),
        ("-3", -3, EXACT),
        ("1,000", 1000, EXACT),
        ("3 + 4 = 7", 7, RIGHT),
        ("7.", 7, RIGHT),
        ("The answer is 7, I think", 7, RIGHT),
        ("7 or 8", 7, SAME_LENGTH),
        ("8", 7, SAME_LENGTH),
        ("-3", 3, NUMBER),
        ("77", 7, NUMBER),
        ("07", 7, NUMBER),
        ("7.5", 7, NUMBER),
        ("7.0", 0, NUMBER),
        ("1.2.7", 7, NUMBER),
        ("10-7", 7, RIGHT),
        ("", 7, NOTHING),
        ("seven", 7, NOTHING),
        ("\u0667", 7, NOTHING),
    ],
)
def test_the_last_number_decides(text: str, answer: int, expected: float) -> None:
    assert grade(text, answer) == expected


def test_only_a_completion_with_the_right_number_is_right() -> None:
    assert is_right(grade("7", 7))
    assert is_right(grade("it is 7", 7))
    assert not is_right(grade("8", 7))
    assert not is_right(grade("", 7))


def test_each_step_towards_the_answer_is_worth_more_than_the_last() -> None:
    rewards = [grade(text, 7) for text in ("??", "77", "8", "it is 7", "7")]
    assert rewards == sorted(set(rewards))
    assert 0.0 <= rewards[0] < rewards[-1] <= 1.0
