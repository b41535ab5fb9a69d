"""Prompts that extend the ids of an earlier turn: only the text after its sampled ids is tokenised.

Text that was sampled is never tokenised again, because the same text may have other ids. The chat template renders the
whole conversation, and the part after the earlier answer is cut from it. If the template renders the earlier part
differently than before, the ids cannot be extended, and the prompt is tokenised as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from drivetrain.errors import InvalidRequest
from drivetrain.text.chat_templates import render
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.tool_calls.reasoning import last_ending, tags
from drivetrain.types.prompts import ChatPrompt, Message, TextPrompt

_SENTINEL: Final = "9f1c7a5e drivetrain 4b8d20e6"
"""Content of an answer whose end is looked for in rendered text."""
_PLAIN: Final = Message(role="assistant", content=_SENTINEL)

PROMPT_DIFFERS: Final = "the chat template renders the messages before the answer differently than before the answer"
ANSWER_DIFFERS: Final = "the chat template renders the answer differently once messages follow it"
REASONING_DROPPED: Final = "the chat template leaves the answer's reasoning out"
END_UNKNOWN: Final = "the end of the answer is not found in what the chat template renders"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a turn's prompt, as length and digest."""

    characters: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> RenderedPrompt:
        """Return the length and digest of ``text``."""
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        """Return whether ``text`` begins with this prompt."""
        return len(text) >= self.characters and _digest(text[: self.characters]) == self.digest


class CannotExtend(Exception):
    """The template does not allow the earlier ids to be extended; the message says why."""


def text_after(
    tokenizer: Tokenizer, prompt: ChatPrompt, text: str, earlier: RenderedPrompt, count: int, sampled: Sequence[int]
) -> str:
    """Return the text that follows an earlier turn's sampled ids in a conversation that continues it.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The conversation.
        text: The rendered conversation.
        earlier: The earlier turn's rendered prompt.
        count: Number of messages up to the earlier turn's answer, which is the last of them.
        sampled: The earlier turn's sampled ids.

    Raises:
        CannotExtend: The template now renders the earlier turn differently.
    """
    if not earlier.begins(text):
        raise CannotExtend(PROMPT_DIFFERS)
    answered = tokenizer(sampled, skip_special_tokens=False)
    after = text[earlier.characters :]
    if sampled and after.startswith(answered):
        return after[len(answered) :]
    # The template writes the answer in other characters, such as tool calls with other spaces, or without stop tokens.
    with suppress(CannotExtend):  # templates may refuse results of tools without the calls
        rest = _rest(tokenizer, prompt, count)
        stop = _stop_of(tokenizer, rest, sampled)
        if text.endswith(rest) and _same_characters(after.removesuffix(rest), answered.removesuffix(stop)):
            return rest.removeprefix(stop)
    closed = _rendered(tokenizer, prompt, prompt.messages[:count], opens_answer=False)
    if not (earlier.begins(closed) and text.startswith(closed)):
        raise CannotExtend(ANSWER_DIFFERS)
    if not _has_reasoning_of(answered, closed[earlier.characters :]):
        raise CannotExtend(REASONING_DROPPED)
    end = _end_of_answer(tokenizer, prompt, count)
    if not closed.endswith(end):
        raise CannotExtend(END_UNKNOWN)
    rest = end + text[len(closed) :]
    return rest.removeprefix(_stop_of(tokenizer, rest, sampled))


def text_after_any(
    tokenizer: Tokenizer, prompt: ChatPrompt, earlier: RenderedPrompt, count: int, sampled: Sequence[int]
) -> str:
    """Return the text that follows an earlier turn's sampled ids, however the template renders that turn by now.

    The arguments are those of :func:`text_after`.

    Raises:
        CannotExtend: The earlier turn's prompt would be another today, for example because the tools are others.
    """
    opened = _rendered(tokenizer, prompt, prompt.messages[: count - 1], opens_answer=True)
    if RenderedPrompt.of(opened) != earlier:
        raise CannotExtend(PROMPT_DIFFERS)
    rest = _rest(tokenizer, prompt, count)
    return rest.removeprefix(_stop_of(tokenizer, rest, sampled))


def _rest(tokenizer: Tokenizer, prompt: ChatPrompt, count: int) -> str:
    """Return the text that the template writes after any answer."""
    messages = [*prompt.messages[: count - 1], _PLAIN, *prompt.messages[count:]]
    _, found, rest = _rendered(tokenizer, prompt, messages, opens_answer=True).rpartition(_SENTINEL)
    if not found:
        raise CannotExtend(END_UNKNOWN)
    return rest


def _stop_of(tokenizer: Tokenizer, text: str, sampled: Sequence[int]) -> str:
    """Return the special token at the beginning of a text if it was sampled; else nothing."""
    last = tokenizer(sampled[-1:], skip_special_tokens=False)
    return last if last in tokenizer.special_tokens and text.startswith(last) else ""


def _same_characters(one: str, other: str) -> bool:
    """Return whether two texts have the same characters but for spaces, in any order: clients reorder arguments.

    The messages are known to be the same, so this only tells whether the template left something out or added it.
    """
    return sorted("".join(one.split())) == sorted("".join(other.split()))


def ids_after(tokenizer: Tokenizer, text: str, before: int, context_length: int, where: str) -> list[int]:
    """Tokenise text that follows the id ``before``.

    Tokenizers may write the beginning of a text in another way than its middle. So the text is tokenised behind a
    special token, which splits a text for any tokenizer: behind ``before`` if it is one, else behind any.
    """
    if not text:
        return []
    token = tokenizer([before], skip_special_tokens=False)
    if token in tokenizer.special_tokens:
        ids = _encoded(tokenizer, token + text, context_length, where)
        if ids[:1] == [before]:
            return ids[1:]
    elif tokenizer.special_tokens:
        ids = _encoded(tokenizer, min(tokenizer.special_tokens) + text, context_length, where)
        if (
            tokenizer(ids, skip_special_tokens=False) == min(tokenizer.special_tokens) + text
        ):  # some special tokens absorb spaces
            return ids[1:]
    return _encoded(tokenizer, text, context_length, where)


def _encoded(tokenizer: Tokenizer, text: str, context_length: int, where: str) -> list[int]:
    return tokenizer.encode(TextPrompt(text=text, add_special_tokens=False), context_length, where)


def _rendered(tokenizer: Tokenizer, prompt: ChatPrompt, messages: Sequence[Message], *, opens_answer: bool) -> str:
    """Render messages as ``prompt`` would, with or without the opening of another answer."""
    fields = {"messages": tuple(messages), "add_generation_prompt": opens_answer}
    try:
        return render(tokenizer.inner, prompt.model_copy(update=fields))
    except InvalidRequest as error:
        raise CannotExtend(f"{END_UNKNOWN}: {error}") from None


def _end_of_answer(tokenizer: Tokenizer, prompt: ChatPrompt, count: int) -> str:
    """Return the text that the template writes after an answer, such as ``<|im_end|>`` and a line break."""
    rendered = _rendered(tokenizer, prompt, [*prompt.messages[: count - 1], _PLAIN], opens_answer=False)
    _, found, end = rendered.rpartition(_SENTINEL)
    if not found:
        raise CannotExtend(END_UNKNOWN)
    return end


def _has_reasoning_of(answered: str, rendered: str) -> bool:
    """Return whether rendered text holds an answer's reasoning, if it has any."""
    at = last_ending(answered)
    if at < 0:
        return True
    begun = max((tag.end() for tag in tags(answered) if tag.end() <= at), default=0)
    return answered[begun:at].strip() in rendered


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
