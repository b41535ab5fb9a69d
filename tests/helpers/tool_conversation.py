"""The conversation that the model of ``tests/trainers`` is taught: a question, a tool call, its result, an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

QUESTION: Final = "What is 1 + 2?"
CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWER: Final = "It is 3."
TEMPLATE: Final = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS: Final[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of Qwen's models, with ids from 260 on. Trainers find a call by their ids."""
END: Final = 258
"""Id of the token that ends each answer."""

Score = Callable[[Sequence[int]], list[float]]
"""Return the logprob of each token id but the first, as transformers alone computes it."""


def require_own_logprobs(score: Score, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float]) -> None:
    """Compare the logprobs of sampled ids with those that transformers alone computes."""
    expected = score([*prompt, *output])[len(prompt) - 1 :]
    assert len(logprobs) == len(output) > 0
    differ = max(abs(one - other) for one, other in zip(logprobs, expected, strict=True))
    assert differ < 1e-3, differ


def text_of(token_ids: Sequence[int]) -> str:
    """Return the text of sampled ids, in which the end of an answer is a line end."""
    pieces = [MARKS[one - 260].encode() if one >= 260 else b"\n" if one == END else bytes([one]) for one in token_ids]
    return b"".join(pieces).decode()
