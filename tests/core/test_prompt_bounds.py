"""Prompts are measured before any work: an overlong one costs nothing, and one that fits is never refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import overload

import pytest
from tokenizers import Tokenizer as Rust
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drivetrain import InvalidRequest, TextPrompt
from drivetrain.checks.limits import MOST_DECODED, MOST_SAMPLES_OF_A_CALL, PROMPT_THREADS
from drivetrain.engine.validation import as_prompts
from drivetrain.testing import byte_tokenizer
from drivetrain.text.call_timeout import bounded
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain.text.tokenizer import LONG_TEXT, Tokenizer


class Long(Sequence[int]):
    """A sequence that counts how many of its items were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.looks = 0

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        self.looks += 1
        return 1

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            self.looks += 1
            yield 1


class Counting(Tokenizer):
    """A tokenizer that counts the characters it is given."""

    characters = 0

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        self.characters += len(text)
        return super()._ids(text, add_special_tokens)


def words(model: models.Model) -> Counting:
    """Return a tokenizer that drops spaces."""
    rust = Rust(model)
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    return Counting(PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]"))


# Token ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_token_ids_are_counted_before_they_are_looked_at(several: bool) -> None:
    prompt = Long(10**9)
    with pytest.raises(InvalidRequest, match="has 1000000000 tokens, more than the context length of 1024"):
        as_prompts([prompt] if several else prompt, 1024)
    assert prompt.looks < 10


def test_prompts_of_a_call_are_bounded() -> None:
    prompts = ["a"] * (MOST_SAMPLES_OF_A_CALL + 1)
    with pytest.raises(InvalidRequest, match="prompts has 1048577 entries; expected at most 1048576"):
        as_prompts(prompts, 1024)


def test_ids_to_decode_are_counted_before_they_are_looked_at() -> None:
    from drivetrain.types.arguments import RULES

    ids = Long(MOST_DECODED + 1)
    with pytest.raises(InvalidRequest, match="expected at most 16777216 token ids"):
        RULES["token_ids"]("token_ids", ids)
    assert ids.looks < 10


# Text ----------------------------------------------------------------------------------------------------------------


def test_a_text_that_is_far_too_long_is_refused_by_a_part_of_it() -> None:
    tokenizer = Counting(byte_tokenizer())
    with pytest.raises(InvalidRequest, match=r"prompts\[3\] is a text of 9000000 characters") as refused:
        tokenizer.encode(TextPrompt(text="a b" * 3_000_000), 1024, "prompts[3]")
    assert refused.value.field == "prompts[3]"
    assert tokenizer.characters == LONG_TEXT


def test_what_a_tokenizer_drops_does_not_count() -> None:
    tokenizer = words(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert tokenizer.encode(TextPrompt(text="a" + " " * 3_000_000 + "a"), 2) == [1, 1]


def test_a_long_word_that_becomes_one_token_counts_as_one() -> None:
    tokenizer = words(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    assert len(tokenizer.encode(TextPrompt(text="a" * 3_000_000), 8)) == 1


def test_a_text_that_is_a_little_too_long_is_counted_exactly() -> None:
    tokenizer = Counting(byte_tokenizer())
    text = "a" * (LONG_TEXT + 1)
    assert len(tokenizer.encode(TextPrompt(text=text), LONG_TEXT)) == len(text)


# Threads -------------------------------------------------------------------------------------------------------------


async def test_threads_whose_callers_gave_up_are_free_again() -> None:
    """Endless code is stopped once nobody waits for it, even when there are as many calls as threads."""
    begun = threading.Semaphore(0)

    def forever() -> None:
        begun.release()
        while True:
            pass

    stuck: Callable[[], None] = partial(bounded, forever, 10_000.0, "it")
    calls = [asyncio.create_task(in_prompt_thread(stuck)) for _ in range(PROMPT_THREADS)]
    for _ in calls:
        await asyncio.to_thread(begun.acquire)
    waiting = asyncio.create_task(in_prompt_thread(lambda: "free"))
    for call in calls:
        call.cancel()
    assert await asyncio.wait_for(waiting, 240) == "free"
    assert [call.cancelled() for call in calls] == [True] * PROMPT_THREADS


async def test_errors_of_a_thread_reach_the_caller() -> None:
    def fail() -> None:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest, match="no"):
        await in_prompt_thread(fail)
