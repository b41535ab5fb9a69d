"""Conversion of OpenAI chat messages to the form that chat templates expect."""

from __future__ import annotations

import base64
import binascii

from pydantic import JsonValue

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.tool_calls import strict_json
from drivetrain.types.prompts import AudioInput, ImageInput, MediaInput, Message, VideoInput

Part = dict[str, JsonValue]


def to_template(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[MediaInput, ...]]:
    """Return the messages in template form, and their images, videos and sounds in order.

    Content that has only text parts becomes one text, one part per line. Content with media stays a list of parts, with
    a placeholder for each medium. Content that is null or absent, as beside tool calls, becomes an empty text, as
    in vLLM and SGLang: many templates join it to other text. Arguments of earlier tool calls, JSON text in the API, are
    parsed to objects, which templates expect. All other fields are unchanged.

    Raises:
        InvalidRequest: A part has an unknown type or cannot be read.
    """
    media: list[MediaInput] = []
    rendered = tuple(_message(message, f"messages.{index}", media) for index, message in enumerate(messages))
    return rendered, tuple(media)


def _message(message: Message, where: str, media: list[MediaInput]) -> Message:
    changed: dict[str, object] = {}
    if message.content is None:
        changed["content"] = ""
    if isinstance(message.content, list):
        parts = [_part(part, f"{where}.content.{index}", media) for index, part in enumerate(message.content)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        changed["content"] = "\n".join(map(str, texts)) if len(texts) == len(parts) else parts
    calls = (message.model_extra or {}).get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(calls)]
    return Message.model_validate(message.model_dump(exclude_unset=True) | changed) if changed else message


def _part(part: Part, where: str, media: list[MediaInput]) -> Part:
    kind = str(part.get("type"))
    body = part.get(kind)
    if part.keys() != {"type", kind}:
        raise InvalidRequest(f"{where}={shown(part)}: expected 'type' and a field of that name", field=where)
    match kind, body:
        case "text", str():
            return {"type": "text", "text": body}
        case "image_url", {"url": str(url), **rest} if rest in ({}, {"detail": "auto"}):
            media.append(ImageInput(url=url))
            return {"type": "image"}
        case "video_url", {"url": str(url), **rest} if not rest:
            media.append(VideoInput(url=url))
            return {"type": "video"}
        case "input_audio", {"data": str(data), **rest} if rest.keys() <= {"format"}:
            media.append(AudioInput(data=_decoded(data, f"{where}.input_audio.data")))
            return {"type": "audio"}
    raise InvalidRequest(
        f"{where}={shown(part)} cannot be read; expected {{'type': 'text', 'text': …}}, or image_url and video_url "
        "with a url, or input_audio with data (and no detail)",
        field=where,
    )


def _decoded(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"{where} is no base64: {error}", field=where) from None


def _call(call: JsonValue, where: str) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    text = function.get("arguments")
    if text is not None and not isinstance(text, str):
        return call
    try:
        parsed: Part = {**function, "arguments": strict_json.loads(text) if text and text.strip() else {}}
    except ValueError as error:
        raise InvalidRequest(
            f"{where}.function.arguments={shown(text)} is no JSON: {error}", field=f"{where}.function.arguments"
        ) from None
    return {**call, "function": parsed}
