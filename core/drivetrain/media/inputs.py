"""Media of prompts: reading their bytes from any source, and expanding their placeholders in the prompt's ids."""

from __future__ import annotations

import base64
import binascii
import itertools
import os
import stat
from collections import Counter
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from drivetrain.backend.base import ReadMedium
from drivetrain.backend.toolkit.daemon_thread import in_daemon_thread
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain.media.fetch import at_most, fetch
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import AudioInput, ImageInput, MediaInput, VideoInput

_READS: Final = "drivetrain-reads-file"
"""Name of threads that read a medium."""
_CAPABILITIES: Final = {
    ImageInput: Capability.IMAGES,
    VideoInput: Capability.VIDEO,
    AudioInput: Capability.AUDIO,
}


async def read_bytes(medium: MediaInput, config: EngineConfig) -> bytes:
    """Return the bytes of a medium, within the limits of ``config.media``. For backends.

    Call it in the process whose file system the paths refer to. It does not block the event loop. A file or server that
    does not answer is given up after ``config.timeouts.media``, or when the caller is cancelled.

    Raises:
        InvalidRequest: The bytes cannot be read, or are too many.
        DeadlineExceeded: Reading took too long.
        UnsupportedCapability: The medium is at an http(s) URL, and aiohttp is not installed.
    """
    most = config.media.max_bytes
    try:
        async with deadline(config.timeouts.media, f"{named(medium)} to be read (timeouts.media)"):
            if medium.data is not None:
                return _within(medium.data, most)
            if medium.path is not None:
                path = medium.path
                return await in_daemon_thread(lambda: _file(path, most), _READS)
            assert medium.url is not None
            url = medium.url
            match url[:10].partition(":")[0].lower():
                case "data":
                    return await in_daemon_thread(lambda: _of_data_url(url, most), _READS)
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
    except Exception as error:  # system errors, malformed URLs, and aiohttp's errors for malformed answers
        raise unreadable(medium, str(error) or type(error).__name__) from error


def _within(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise ValueError(f"it has {len(data)} bytes; {at_most(most)}")
    return data


def _file(path: str, most: int) -> bytes:
    # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
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
    if len(text) > 4 * most + 4:  # each character may be percent-encoded as three
        raise ValueError(f"it has too many bytes; {at_most(most)}")
    try:
        encoded = b"".join(unquote_to_bytes(text).split())
        return _within(base64.b64decode(encoded, validate=True), most)
    except binascii.Error as error:
        raise ValueError(f"its data is no base64: {error}") from None


def unreadable(medium: MediaInput, why: str) -> InvalidRequest:
    """Make the error for a medium that cannot be read."""
    if medium.url:
        why = why.replace(medium.url, _public_part(medium.url) or "")
    return InvalidRequest(f"{named(medium)} cannot be read: {why}", field="prompts")


def named(medium: MediaInput) -> str:
    """Return the description of a medium for error messages."""
    kind = type(medium).__name__.removesuffix("Input").lower()
    source = medium.path or _public_part(medium.url) or f"{len(medium.data or b'')} bytes"
    shown = source if len(source) <= 100 else f"{source[:100]}…"
    return f"the {kind} {shown!r} beside a prompt"


def _public_part(url: str | None) -> str | None:
    """Return a URL without user, password and query, which may hold secrets such as a signature."""
    if url is None or not url[:8].lower().startswith(("http://", "https://")):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{'?…' if parts.query else ''}"


def placed(token_ids: Sequence[int], media: Sequence[ReadMedium], where: str) -> list[int]:
    """Return the prompt's ids with each medium's placeholder repeated as often as the model expects.

    Args:
        token_ids: The prompt's ids, with one placeholder per medium, as a chat template writes it, or the full number
            of placeholders.
        media: The media, in order. Media with the same token id must not be adjacent in the prompt.
        where: The prompt's name in errors.

    Raises:
        InvalidRequest: The number of placeholders does not match the media, or a placeholder's position or length is
            wrong.
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
