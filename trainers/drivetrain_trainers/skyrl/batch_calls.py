"""A SkyRL batch, translated to a call of the engine. Pure functions over values."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.prompts import (
    AudioInput,
    ChatPrompt,
    ImageInput,
    MediaInput,
    Message,
    Prompt,
    TokenPrompt,
    VideoInput,
)
from drivetrain_trainers.skyrl.batches import InferenceEngineInput
from drivetrain_trainers.skyrl.sampling import SamplingCall, sampling_call

_MEDIA: Final[tuple[tuple[str, type[ImageInput | VideoInput | AudioInput]], ...]] = (
    ("image_data", ImageInput),
    ("video_data", VideoInput),
    ("audio_data", AudioInput),
)
_FIELDS: Final = frozenset(InferenceEngineInput.__annotations__)


@dataclass(frozen=True, slots=True)
class BatchCall:
    """Arguments of ``InferenceEngine.generate``."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingCall


def batch_call(batch: InferenceEngineInput) -> BatchCall:
    """Translate a batch.

    Raises:
        InvalidRequest: A field is unknown, or has a wrong value.
    """
    given: Mapping[str, object] = {name: value for name, value in batch.items() if value is not None}
    for name in given.keys() - _FIELDS:
        if given[name] is not False:
            raise InvalidRequest(
                f"{name}={shown(given[name])}: InferenceEngineInput has no such field here; leave it out", field=name
            )
    prompts = _with_media(_prompts(given), given)
    session_ids = given.get("session_ids")
    if session_ids is not None:
        _per_prompt("session_ids", session_ids, len(prompts))
    params = given.get("sampling_params", {})
    if not isinstance(params, Mapping):
        raise InvalidRequest(
            f"sampling_params={shown(params)}: expected one mapping for the batch", field="sampling_params"
        )
    states = {"return_hidden_states": True} if given.get("return_hidden_states") else {}
    return BatchCall(prompts, sampling_call({**params, **states}))


def _prompts(given: Mapping[str, object]) -> list[Prompt]:
    chats, ids = given.get("prompts"), given.get("prompt_token_ids")
    if (chats is None) is (ids is None):
        raise InvalidRequest("give prompts or prompt_token_ids, and not both", field="prompts")
    field, value = ("prompts", chats) if ids is None else ("prompt_token_ids", ids)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidRequest(f"{field}={shown(value)}: expected a list with an entry per prompt", field=field)
    try:
        if ids is None:
            return [ChatPrompt(messages=tuple(Message.model_validate(one) for one in chat)) for chat in value]
        return [TokenPrompt(token_ids=tuple(one)) for one in value]
    except (TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        kind = "a list of messages" if ids is None else "a list of token ids"
        raise InvalidRequest(f"{field}={shown(value)}: expected {kind} per prompt: {first}", field=field) from None


def _with_media(prompts: list[Prompt], given: Mapping[str, object]) -> tuple[Prompt, ...]:
    media: list[tuple[MediaInput, ...]] = [()] * len(prompts)
    for field, kind in _MEDIA:
        if given.get(field) is None:
            continue
        entries = _per_prompt(field, given[field], len(prompts))
        media = [held + _media(field, kind, entry) for held, entry in zip(media, entries, strict=True)]
    return tuple(
        prompt.model_copy(update={"media": held}) if held else prompt
        for prompt, held in zip(prompts, media, strict=True)
    )


def _per_prompt(field: str, value: object, prompts: int) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != prompts:
        raise InvalidRequest(
            f"{field}={shown(value)}: expected a list of {prompts} entries, one per prompt", field=field
        )
    return value


def _media(field: str, kind: type[ImageInput | VideoInput | AudioInput], entry: object) -> tuple[MediaInput, ...]:
    if entry is None:
        return ()
    entries = entry if isinstance(entry, list | tuple) else (entry,)
    return tuple(_medium(field, kind, one) for one in entries)


def _medium(field: str, kind: type[ImageInput | VideoInput | AudioInput], one: object) -> MediaInput:
    match one:
        case bytes():
            return kind(data=one)
        case str() if one.startswith(("http://", "https://", "data:")):
            return kind(url=one)
        case str():
            data = None if os.path.exists(one) else _from_base64(one)
            return kind(path=one) if data is None else kind(data=data)
        case _ if kind is ImageInput:
            return ImageInput.from_pil(one)  # type: ignore[arg-type]  # it checks the type, and says what it expected
        case _:
            raise InvalidRequest(f"{field}: {shown(one)} is no path, URL, base64 text or bytes", field=field)


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
