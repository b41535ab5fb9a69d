"""Digests of conversations, to recognise an earlier turn's messages in a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from drivetrain.types.prompts import Message

_OF_ANSWERS: Final = ("reasoning", "reasoning_content", "thinking")
"""Fields of an assistant's message that count beside its content and tool calls. Clients add and drop others."""


class Conversation(NamedTuple):
    """Digests of the messages up to one of them."""

    digest: bytes
    """Equal for all forms in which clients send answers back."""
    exact: bytes
    """Equal only if the last message has the same content, spaces around it included."""

    def and_then(self, message: Message) -> Conversation:
        """Return the conversation that goes on with ``message``."""
        digest, content = _digest(self.digest, _described(message)), message.content
        return Conversation(digest, _digest(digest, content if isinstance(content, str) else repr(content)))


def conversations(messages: Sequence[Message], adapter: str | None) -> list[Conversation]:
    """Return the digests of each prefix of ``messages``, from the first message alone to all of them.

    Args:
        messages: Messages in template form, so that arguments of tool calls are objects.
        adapter: The adapter that answers them: a conversation with another one is another conversation.
    """
    none_yet = Conversation(json.dumps(adapter).encode(), b"")
    return list(accumulate(messages, Conversation.and_then, initial=none_yet))[1:]


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.sha256(before + text.encode(errors="surrogatepass")).digest()


def _described(message: Message) -> str:
    """Return a message's text form, the same for all forms in which clients send an answer back."""
    given = message.model_dump(exclude_unset=True)
    if message.role == "assistant":
        content = given.get("content")
        fields: dict[str, object] = {name: given[name] for name in _OF_ANSWERS if given.get(name)}
        fields |= {"role": "assistant", "content": content.strip() if isinstance(content, str) else content or ""}
        calls = given.get("tool_calls")
        fields["calls"] = [_call(call) for call in calls] if isinstance(calls, list) else []
    else:
        fields = {name: value for name, value in given.items() if value is not None}
    return json.dumps(_same_numbers(fields), ensure_ascii=False, sort_keys=True)


def _call(call: object) -> object:
    """Return a call's name and arguments; its id and type are the client's to keep or drop."""
    function = call.get("function") if isinstance(call, dict) else None
    return [function.get("name"), function.get("arguments") or {}] if isinstance(function, dict) else call


def _same_numbers(value: object) -> object:
    """Write 1.0 as 1, as JavaScript does when it serialises arguments again."""
    match value:
        case dict():
            return {str(name): _same_numbers(one) for name, one in value.items()}
        case list() | tuple():
            return [_same_numbers(one) for one in value]
        case float() if value.is_integer():
            return int(value)
    return value
