"""Prompts as token ids, for answers that tell them before the engine does."""

from __future__ import annotations

from typing import Protocol

from drivetrain.backend.base import ModelInfo
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.prompts import Prompt, TokenPrompt


class Engine(Protocol):
    """The parts of an engine that read a prompt."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        ...

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model."""
        ...


async def token_prompt(engine: Engine, prompt: Prompt, index: int) -> TokenPrompt:
    """Return a prompt without media as token ids.

    Args:
        engine: The engine that it is for.
        prompt: The prompt.
        index: Its place in the request.

    Raises:
        InvalidRequest: The chat template rejects its messages, or the text is far too long.
    """
    if isinstance(prompt, TokenPrompt):
        return prompt
    length = engine.model_info.context_length
    ids = await in_prompt_thread(lambda: engine.tokenizer.encode(prompt, length, f"prompts[{index}]"))
    return TokenPrompt.model_construct(token_ids=tuple(ids), media=())
