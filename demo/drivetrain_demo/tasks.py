"""Prompts with checkable answers: the shipped file, or the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from drivetrain import ChatPrompt, InvalidRequest, Message, Prompt, TextPrompt
from drivetrain.checks.pydantic_errors import describe_validation_error

SHIPPED = "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its answer, an integer."""

    prompt: str
    answer: int

    def as_prompt(self, *, chat: bool) -> Prompt:
        """Return the prompt for the engine: a user's message in a chat, or text to continue."""
        if chat:
            return ChatPrompt(messages=(Message(role="user", content=self.prompt),))
        return TextPrompt(text=self.prompt)


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Annotated[str, Field(strict=True, min_length=1)]
    answer: StrictInt


def load_tasks(path: Path | None = None) -> tuple[Task, ...]:
    """Read a file with a JSON object per line, ``{"prompt": "3 + 4 =", "answer": 7}``; blank lines are skipped.

    Args:
        path: The file, in UTF-8; None: the shipped file, with sums up to 9.

    Raises:
        InvalidRequest: the file cannot be read, is empty, or has an invalid line, whose number is given.
    """
    name = str(path) if path is not None else SHIPPED
    try:
        text = (path if path is not None else files("drivetrain_demo") / SHIPPED).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"cannot read the prompts {name!r}: {error}; give a file of JSON lines", field="prompts"
        ) from error
    tasks = tuple(_parse(name, text))
    if not tasks:
        raise InvalidRequest(
            f'{name!r} holds no prompt; give lines such as {{"prompt": "3 + 4 =", "answer": 7}}',
            field="prompts",
        )
    return tasks


def _parse(name: str, text: str) -> Iterator[Task]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            parsed = _Line.model_validate_json(line)
        except ValidationError as error:
            _, complaint = describe_validation_error(error, _Line)
            raise InvalidRequest(
                f'{name}, line {number}: {complaint}; expected a line such as {{"prompt": "3 + 4 =", "answer": 7}}',
                field=f"prompts:{number}",
            ) from None
        yield Task(parsed.prompt, parsed.answer)
