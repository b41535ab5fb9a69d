"""Tool calls of a completion. Their markers may be special tokens, which the completion's text leaves out."""

from __future__ import annotations

from typing import Final

from drivetrain.openai.payloads import ChatPayload
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.tool_calls import ParsedText, dialects_for, parse_tool_calls
from drivetrain.tool_calls.reasoning import is_open
from drivetrain.types.outputs import Completion

_LAST_OF_PROMPT: Final = 16
"""Number of tokens at a prompt's end that are searched for an opening reasoning tag."""


def read_calls(completion: Completion, asked: ChatPayload, tokenizer: Tokenizer, parser: str | None) -> ParsedText:
    """Return the tool calls of a completion, and its text without them.

    Args:
        completion: A finished completion.
        asked: The request, with its tools.
        tokenizer: The engine's tokenizer.
        parser: The engine's configured ``tool_call_parser``.
    """
    prompt = tokenizer(completion.prompt_token_ids[-_LAST_OF_PROMPT:], skip_special_tokens=False)
    parsed = parse_tool_calls(
        _with_marks(completion, asked, tokenizer),
        asked.tools,
        dialects=dialects_for(parser, tokenizer.chat_template(asked.tools)),
        within_reasoning=is_open(prompt),
    )
    content = parsed.content
    if content is None or asked.skip_special_tokens is False:
        return parsed
    for token in tokenizer.special_tokens:
        if token in content:
            content = content.replace(token, "")
    return ParsedText(content.strip() or None, parsed.calls)


def _with_marks(completion: Completion, asked: ChatPayload, tokenizer: Tokenizer) -> str:
    """Return a completion's text with special tokens, because some syntaxes use them as markers."""
    if asked.skip_special_tokens is False:
        return completion.text
    ids = completion.token_ids
    if isinstance(completion.matched_stop, int):
        ids = ids[:-1]
    whole = tokenizer(ids, skip_special_tokens=False)
    if isinstance(completion.matched_stop, str):
        # The ids may extend beyond the position where the text was cut.
        cut = tokenizer(ids, skip_special_tokens=True)[len(completion.text) :]
        whole = whole.removesuffix(cut) if cut else whole
    return whole
