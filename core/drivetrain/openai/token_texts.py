"""Text, bytes and offsets of single tokens, for logprobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from drivetrain.text.tokenizer import REPLACEMENT, IncrementalDecoder, Tokenizer

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_PIECE: Final = "▁"
"""SentencePiece's space marker, which decoders drop at the start of a text."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text and bytes of one token."""

    text: str
    r"""The token's text; part of a character is written as ``bytes:\xe2\x82``."""
    data: list[int] | None
    """The token's UTF-8 bytes, which concatenate to the bytes of the whole text; None if the tokenizer does not tell
    them."""


class TokenTexts:
    """Texts of single tokens, special tokens included, independent of their position."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __call__(self, token_id: int) -> TokenText:
        """Return the text and bytes of ``token_id``."""
        if token_id not in self._known:
            self._known[token_id] = self._write(token_id)
        return self._known[token_id]

    def _write(self, token_id: int) -> TokenText:
        text = self._tokenizer([token_id], skip_special_tokens=False)
        piece = self._tokenizer.inner.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return TokenText(text or f"token_id:{token_id}", list(text.encode()) or None)
        if piece.startswith(_SPACE_PIECE) and not text.startswith(" "):
            text = f" {text}"
        if REPLACEMENT not in text:
            return TokenText(text, list(text.encode()))
        data = _bytes_of(piece)
        if data is None:
            return TokenText(f"token_id:{token_id}", None)
        try:
            return TokenText(data.decode(), list(data))
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data))


def _bytes_of(piece: str) -> bytes | None:
    """Return the bytes of a vocabulary entry, in SentencePiece's notation (``<0xE2>``) or byte-level BPE's alphabet."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    alphabet = _byte_level_alphabet()
    return bytes(alphabet[character] for character in piece) if all(c in alphabet for c in piece) else None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable bytes map to themselves, the others to U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class TextOffsets:
    """Tracks where each token of one choice begins in its text.

    If a character consists of several tokens, all but the first begin where the preceding text ends.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._start = start

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """Add ids and return the character offset of each."""
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._start + len(self._decoder.text))
            self._decoder.push(token_id)
        return offsets
