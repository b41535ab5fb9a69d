from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain import ChatPrompt, InvalidRequest, TextPrompt
from drivetrain_demo.tasks import Task, load_tasks


def test_the_shipped_prompts_are_sums_with_their_answers() -> None:
    tasks = load_tasks()
    assert len(set(tasks)) == len(tasks) >= 100
    for task in tasks:
        left, right = task.prompt.removesuffix("=").split("+")
        assert int(left) + int(right) == task.answer


def test_a_file_of_the_users_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Zähle:\\u2028 1 + 1", "answer": 2}\n\n{"prompt": "2 - 5", "answer": -3}\n', "utf-8")
    assert load_tasks(file) == (Task("Zähle:\u2028 1 + 1", 2), Task("2 - 5", -3))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("3 + 4 = 7", "Invalid JSON"),
        ("[1, 2]", "object"),
        ('{"prompt": "3 + 4"}', "answer is missing"),
        ('{"prompt": "3 + 4", "answer": "7"}', "answer='7'"),
        ('{"prompt": "3 + 4", "answer": 7.5}', "answer=7.5"),
        ('{"prompt": "3 + 4", "answer": true}', "answer=True"),
        ('{"prompt": "", "answer": 7}', "prompt=''"),
        ('{"prompt": 34, "answer": 7}', "prompt=34"),
        ('{"prompt": "3 + 4", "answer": 7, "anwser": 8}', "did you mean 'answer'"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "answer": 2}\n\n' + line + "\n", "utf-8")
    with pytest.raises(InvalidRequest) as refused:
        load_tasks(file)
    assert complaint in str(refused.value)
    assert "line 3" in str(refused.value)
    assert refused.value.field == "prompts:3"


def test_a_file_that_is_missing_empty_or_not_text_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n  \n", "utf-8")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for file, complaint in ((tmp_path / "missing", "cannot read"), (empty, "no prompt"), (binary, "cannot read")):
        with pytest.raises(InvalidRequest, match=complaint):
            load_tasks(file)


def test_a_prompt_is_sent_as_chat_or_as_text() -> None:
    task = Task("3 + 4 =", 7)
    assert task.as_prompt(chat=False) == TextPrompt(text="3 + 4 =")
    chat = task.as_prompt(chat=True)
    assert isinstance(chat, ChatPrompt)
    assert [(message.role, message.content) for message in chat.messages] == [("user", "3 + 4 =")]
