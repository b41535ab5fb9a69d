"""What lies beside a prompt: its bytes, wherever they are, and its places among the prompt's ids."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

from drivetrain.backend import ReadMedium
from drivetrain.errors import InvalidRequest
from drivetrain.prompts import MediaInput

FETCH_S: Final = 30.0
"""Seconds that a server may be silent."""


def read_bytes(medium: MediaInput) -> bytes:
    """Return the bytes of a medium. Blocks; for backends, in the process that its paths are of.

    Raises:
        InvalidRequest: they cannot be had.
    """
    try:
        if medium.data is not None:
            return medium.data
        if medium.path is not None:
            return Path(medium.path).read_bytes()
        assert medium.url is not None
        if not medium.url.startswith(("http://", "https://", "data:")):
            raise ValueError("expected http://, https:// or data:")
        with urlopen(Request(medium.url, headers={"User-Agent": "drivetrain"}), timeout=FETCH_S) as answer:
            data: bytes = answer.read()
            return data
    except (OSError, ValueError, HTTPException) as error:
        raise unreadable(medium, str(error) or type(error).__name__) from error


def unreadable(medium: MediaInput, why: str) -> InvalidRequest:
    """The error of a medium that is not what it is said to be."""
    kind = type(medium).__name__.removesuffix("Input").lower()
    source = medium.path or medium.url or f"{len(medium.data or b'')} bytes"
    shown = source if len(source) <= 100 else f"{source[:100]}…"
    return InvalidRequest(f"the {kind} {shown!r} beside a prompt cannot be read: {why}", field="prompts")


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
