"""Prompts: token ids, text or chat messages, with images, videos and sounds."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Final, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from drivetrain.checks.limits import MOST_MESSAGES
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.token_ids import TokenIds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


_OF_PNG: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
"""PIL image modes that PNG stores without conversion and every reader supports."""

_IEEE_FLOAT: Final = 3
"""Code of floating-point samples in a WAV file."""


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
    """A sound that comes with the prompt: a WAV, FLAC, MP3 or Ogg file.

    Its channels are averaged, and it is resampled to the model's sampling rate.
    """

    @classmethod
    def from_array(cls, samples: NDArray[np.floating], sampling_rate: int) -> Self:
        """Make an input from samples, which are sent to the engine as a WAV file of float32, without further loss.

        Args:
            samples: One channel, shape (samples,), floating point, usually between -1 and 1.
            sampling_rate: Samples per second, in Hz.

        Raises:
            InvalidRequest: ``samples`` is no such array, holds nothing or a value that is not finite, or
                ``sampling_rate`` is not a positive number of samples.
        """
        import numpy as np

        if not _is_mono(samples):
            raise InvalidRequest(
                f"samples={shown(samples)}: expected an array of floating point of shape (samples,); average several "
                "channels, and divide integers by their largest value",
                field="samples",
            )
        if not _is_rate(sampling_rate):
            raise InvalidRequest(
                f"sampling_rate={shown(sampling_rate)}: expected samples per second, such as 16000",
                field="sampling_rate",
            )
        if not bool(np.isfinite(samples).all()):
            raise InvalidRequest("samples holds values that are not finite; expected numbers", field="samples")
        data = samples.astype("<f4").tobytes()
        form = struct.pack("<HHIIHHH", _IEEE_FLOAT, 1, sampling_rate, 4 * sampling_rate, 4, 32, 0)
        body = (
            b"WAVE" + _chunk(b"fmt ", form) + _chunk(b"fact", struct.pack("<I", samples.size)) + _chunk(b"data", data)
        )
        return cls(data=_chunk(b"RIFF", body))


def _is_mono(samples: object) -> bool:
    is_float = getattr(getattr(samples, "dtype", None), "kind", None) == "f"
    return is_float and getattr(samples, "ndim", None) == 1 and len(samples) > 0  # type: ignore[arg-type]


def _is_rate(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 30


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content


MediaInput = ImageInput | VideoInput | AudioInput


class TokenPrompt(_Frozen):
    """A prompt as token ids, used exactly as given."""

    token_ids: TokenIds = Field(
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
