"""The prompts of a check: short ones, one long one, and a batch of many lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain.types.prompts import TextPrompt

NEW_TOKENS: Final = 16
"""Tokens of each answer."""
SHARED: Final = 0.75
"""Share of the long prompt that begins the prompt with a cached prefix."""
_LENGTHS: Final = (2, 5, 9, 17, 33, 65, 130, 200)
_SHORT: Final = (
    "The capital of France is",
    "def mean(values: list[float]) -> float:\n    return",
    "Question: A train leaves at 9:40 and arrives at 11:05. How long does it take?\nAnswer:",
    "Once upon a time, in a village by the sea,",
)
_WHO: Final = (
    "The baker",
    "A teacher",
    "The old sailor",
    "Her neighbour",
    "The doctor",
    "A young engineer",
    "The judge",
)
_DOES: Final = ("walked to the station", "read a letter", "opened the window", "counted the coins", "asked for help")
_WHY: Final = ("because it had rained all night", "before the shops closed", "although nobody was there")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of all prompts; each leaves room for :data:`NEW_TOKENS`."""

    short: list[list[int]]
    long: list[int]
    extended: list[int]
    """Begins with the first tokens of :attr:`long`, and has another end."""
    mixed: list[list[int]]
    """Several lengths, for one batch."""


def make_prompts(engine: InferenceEngine, long: int) -> Prompts:
    """Tokenise the prompts for a started engine.

    Args:
        engine: The engine.
        long: Most tokens of the long prompt; less if the context is shorter.

    Raises:
        InvalidConfig: the context is too short to check anything in.
    """
    most = engine.model_info.context_length - NEW_TOKENS
    if most < 16:
        raise InvalidConfig(
            f"the context holds {engine.model_info.context_length} tokens; a check needs at least {NEW_TOKENS + 16}",
            field="context_length",
        )

    tokenizer = engine.tokenizer

    def story(number: int, length: int) -> list[int]:
        """Return a text of exactly this many tokens; sentence by sentence, lest the tokenizer warns of its length."""
        sentences = _sentences(number)
        found = tokenizer.encode(TextPrompt(text=next(sentences)))
        while len(found) < length:
            found += tokenizer.encode(TextPrompt(text=f" {next(sentences)}", add_special_tokens=False))
        return found[:length]

    length = min(long, most)
    shared = int(length * SHARED)
    passage = story(0, length)
    return Prompts(
        short=[tokenizer.encode(TextPrompt(text=text))[:most] for text in _SHORT],
        long=passage,
        extended=[*passage[:shared], *story(1, length)[shared : shared + length // 8]],
        mixed=[story(2 + number, count) for number, count in enumerate(_LENGTHS) if count <= most],
    )


def _sentences(number: int) -> Iterator[str]:
    """Yield the sentences of an endless story, another one for each number."""
    for step in itertools.count():
        yield (
            f"{_WHO[(step + number) % len(_WHO)]} {_DOES[(step * 3 + number) % len(_DOES)]} "
            f"{_WHY[(step + 2 * number) % len(_WHY)]}, on day {step * 7 + number}."
        )
