"""Prompts: token ids, text or chat messages, with images, videos and sounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from drivetrain.checks.limits import MOST_MESSAGES
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.sampling import TokenId

if TYPE_CHECKING:
    from PIL.Image import Image


_OF_PNG: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
"""PIL image modes that PNG stores without conversion and every reader supports."""


class _Frozen(BaseModel):
    # Instances are checked again: model_copy(update=…) and model_construct() check nothing.
    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")


class _Media(_Frozen):
    """A media file, given by exactly one of its fields."""

    url: str | None = Field(default=None, description="http(s) URL or data URL.")
    path: str | None = Field(default=None, description="File on the engine's host.")
    data: bytes | None = Field(default=None, description="The file's bytes (PNG, JPEG, MP4, WAV, …).")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("url", "path", "data") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of url, path and data; given: {', '.join(given) or 'none'}")
        return self


class ImageInput(_Media):
    """An image that comes with the prompt."""

    @classmethod
    def from_pil(cls, image: Image) -> Self:
        """Make an input from a PIL image, which is sent to the engine as PNG, without loss.

        Raises:
            InvalidRequest: ``image`` is not a PIL image, or its file cannot be read completely.
        """
        if not callable(getattr(image, "save", None)) or not isinstance(getattr(image, "mode", None), str):
            raise InvalidRequest(f"image={shown(image)}: expected an image of PIL's", field="image")
        file = BytesIO()
        try:
            (image if image.mode in _OF_PNG else image.convert("RGB")).save(file, "PNG")
        except (OSError, ValueError) as error:  # PIL reads the file only when pixels are needed
            raise InvalidRequest(f"image={shown(image)} cannot be read: {error}", field="image") from error
        return cls(data=file.getvalue())


class VideoInput(_Media):
    """A video that comes with the prompt."""


class AudioInput(_Media):
    """A sound that comes with the prompt."""


MediaInput = ImageInput | VideoInput | AudioInput


class TokenPrompt(_Frozen):
    """A prompt as token ids, used exactly as given."""

    token_ids: tuple[TokenId, ...] = Field(
        description="The ids; no special token is added. Each medium has one placeholder, or as many as the model "
        "expects."
    )
    media: tuple[MediaInput, ...] = Field(default=(), description="Images, videos and sounds of the prompt, in order.")


class TextPrompt(_Frozen):
    """A prompt as text, tokenised by the engine's tokenizer."""

    text: str = Field(description="The text.")
    add_special_tokens: bool = Field(default=True, description="Let the tokenizer add special tokens such as BOS.")
    media: tuple[MediaInput, ...] = Field(default=(), description="Images, videos and sounds of the prompt, in order.")


class Message(BaseModel):
    """One chat message. Extra fields (``tool_calls``, ``name``, …) are passed to the chat template unchanged."""

    model_config = ConfigDict(frozen=True, extra="allow", revalidate_instances="always")

    role: str = Field(description="system, user, assistant, tool, or another role of the model's template.")
    content: str | list[dict[str, JsonValue]] | None = Field(default=None, description="Text or content parts.")


class ChatPrompt(_Frozen):
    """A prompt as chat messages, rendered with the tokenizer's chat template."""

    messages: tuple[Message, ...] = Field(
        min_length=1, max_length=MOST_MESSAGES, description="The conversation so far."
    )
    tools: tuple[dict[str, JsonValue], ...] = Field(default=(), description="Tool schemas for the template.")
    add_generation_prompt: bool = Field(default=True, description="End the prompt with the assistant's opening.")
    continue_final_message: bool = Field(
        default=False, description="Continue the last message instead of beginning a new one."
    )
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, description="Additional template variables.")
    media: tuple[MediaInput, ...] = Field(default=(), description="Images, videos and sounds of the prompt, in order.")


Prompt = TokenPrompt | TextPrompt | ChatPrompt
PromptLike = Prompt | str | Sequence[int] | Sequence[Message] | Sequence[Mapping[str, JsonValue]]
"""Types accepted as a prompt: a :data:`Prompt`, text, a list of token ids, or a list of chat messages."""

PromptKind = Literal["tokens", "text", "chat"]
