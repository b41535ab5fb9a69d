"""What lies beside a prompt: its bytes, wherever they are, and its places among the prompt's ids."""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from drivetrain.backend.base import ReadMedium
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain.media.fetch import at_most, fetch
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import AudioInput, ImageInput, MediaInput, VideoInput

_T = TypeVar("_T")
_CAPABILITIES: Final = {
    ImageInput: Capability.IMAGES,
    VideoInput: Capability.VIDEO,
    AudioInput: Capability.AUDIO,
}


async def read_bytes(medium: MediaInput, config: EngineConfig) -> bytes:
    """Return the bytes of a medium, within the bounds of ``config.media``. For backends.

    Call it in the process that paths are of. It keeps the event loop free. It gives up on a file or a server
    that does not answer when ``config.timeouts.media`` is over, or when the caller is cancelled.

    Raises:
        InvalidRequest: they cannot be had, or are too many.
        DeadlineExceeded: they did not come in time.
        UnsupportedCapability: it is at an http(s) URL, and aiohttp is not installed.
    """
    most = config.media.max_bytes
    try:
        async with deadline(config.timeouts.media, f"{named(medium)} to be read (timeouts.media)"):
            if medium.data is not None:
                return _within(medium.data, most)
            if medium.path is not None:
                path = medium.path
                return await _left_at_will(lambda: _file(path, most))
            assert medium.url is not None
            url = medium.url
            match url[:10].partition(":")[0].lower():
                case "data":
                    return await _left_at_will(lambda: _of_data_url(url, most))
                case "http" | "https":
                    return await fetch(url, most, allow_private_hosts=config.media.allow_private_hosts)
            raise ValueError("expected http://, https:// or data:")
    except DrivetrainError:
        raise
    except ImportError as error:
        capability = _CAPABILITIES[type(medium)].value
        raise UnsupportedCapability(
            f"{named(medium)} is at a URL, which needs aiohttp (pip install aiohttp): {error}", capability=capability
        ) from error
    except Exception as error:  # of the system, of URLs, and all that aiohttp has for wrong answers
        raise unreadable(medium, str(error) or type(error).__name__) from error


def _within(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise ValueError(f"it has {len(data)} bytes; {at_most(most)}")
    return data


def _file(path: str, most: int) -> bytes:
    # Opening a FIFO would wait for somebody who writes to it.
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is no regular file")
        if about.st_size > most:
            raise ValueError(f"it has {about.st_size} bytes; {at_most(most)}")
        with open(opened, "rb", closefd=False) as file:
            return file.read(about.st_size)
    finally:
        os.close(opened)


def _of_data_url(url: str, most: int) -> bytes:
    kind, comma, text = url.partition(",")
    if not comma:
        raise ValueError("a data URL has a comma before its data")
    if not kind.lower().endswith(";base64"):
        return _within(unquote_to_bytes(text), most)
    if len(text) > 4 * most + 4:  # each character may be written as three
        raise ValueError(f"it has too many bytes; {at_most(most)}")
    try:
        encoded = b"".join(unquote_to_bytes(text).split())
        return _within(base64.b64decode(encoded, validate=True), most)
    except binascii.Error as error:
        raise ValueError(f"its data is no base64: {error}") from None


async def _left_at_will(call: Callable[[], _T]) -> _T:
    """Run ``call`` in a daemon thread of its own, so that neither cancelling nor process exit waits for it."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
        else:
            if result.set_running_or_notify_cancel():
                result.set_result(value)

    threading.Thread(target=run, name="drivetrain-reads-file", daemon=True).start()
    return await asyncio.wrap_future(result)


def unreadable(medium: MediaInput, why: str) -> InvalidRequest:
    """The error of a medium that is not what it is said to be."""
    if medium.url:
        why = why.replace(medium.url, _public_part(medium.url) or "")
    return InvalidRequest(f"{named(medium)} cannot be read: {why}", field="prompts")


def named(medium: MediaInput) -> str:
    """Return what errors call a medium."""
    kind = type(medium).__name__.removesuffix("Input").lower()
    source = medium.path or _public_part(medium.url) or f"{len(medium.data or b'')} bytes"
    shown = source if len(source) <= 100 else f"{source[:100]}…"
    return f"the {kind} {shown!r} beside a prompt"


def _public_part(url: str | None) -> str | None:
    """A URL without its user, password and query, which may hold a signature."""
    if url is None or not url[:8].lower().startswith(("http://", "https://")):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{'?…' if parts.query else ''}"


def placed(token_ids: Sequence[int], media: Sequence[ReadMedium], where: str) -> list[int]:
    """Return a prompt's ids in which each medium stands as often as the model takes it.

    Args:
        token_ids: Each medium stands in it once, as a chat template writes it, or already as often.
        media: In their order. Media with one token id do not touch in the prompt.
        where: Names the prompt in errors.

    Raises:
        InvalidRequest: the prompt has more or fewer places than media, or a place where or as long as none can be.
    """
    kinds = {medium.token_id for medium in media}
    runs = [(token_id, len(list(run))) for token_id, run in itertools.groupby(token_ids)]
    places = [(token_id, length) for token_id, length in runs if token_id in kinds]
    if Counter(token_id for token_id, _ in places) != Counter(medium.token_id for medium in media):
        raise InvalidRequest(
            f"{where} has {len(places)} places for the {len(media)} images, videos and sounds beside it; give each "
            f"one place: a content part of its kind in a message, or one token id of {sorted(kinds)}",
            field=where,
        )
    left = {kind: iter([medium for medium in media if medium.token_id == kind]) for kind in kinds}
    whole: list[int] = []
    for token_id, length in runs:
        if token_id in kinds:
            medium = next(left[token_id])
            count = medium.count
            if medium.follows is not None and whole[-1:] != [medium.follows]:
                raise InvalidRequest(
                    f"{where} holds token id {token_id}, a medium's place, where it does not follow token id "
                    f"{medium.follows}, with which the model begins one; put that before it",
                    field=where,
                )
            if length not in (1, count):
                raise InvalidRequest(
                    f"{where} repeats token id {token_id} {length} times where a medium takes it {count} times; give "
                    "it once, or as often",
                    field=where,
                )
            length = count
        whole += [token_id] * length
    return whole
