"""The dialects of servers."""

from __future__ import annotations

from enum import StrEnum


class Dialect(StrEnum):
    """The routes that a server is expected to have beside OpenAI's."""

    OPENAI = "openai"
    VLLM = "vllm"
    SGLANG = "sglang"
