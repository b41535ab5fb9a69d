"""An engine's tokenizer: text and chat messages to ids, ids to text, also incrementally."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from packaging.version import Version

from drivetrain.checks.extras import from_extra
from drivetrain.errors import InvalidConfig, InvalidRequest, MissingDependency
from drivetrain.text.chat_templates import render, template_of
from drivetrain.text.inner_tokenizer import InnerTokenizer
from drivetrain.types.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

if TYPE_CHECKING:
    from pydantic import JsonValue

    from drivetrain.types.config import EngineConfig

REPLACEMENT = "�"
"""Replacement character, which decoders emit for bytes that are not, or not yet, a whole UTF-8 character."""

LONG_TEXT: Final = 1 << 16
"""Minimum number of characters that are tokenised in one piece, however short the context is."""


class Decoder(Protocol):
    """A function that decodes token ids to text."""

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ``token_ids``."""
        ...


class Tokenizer:
    """A model's tokenizer, from its folder or hub id, loaded with transformers' ``AutoTokenizer``.

    If transformers is not installed, or older than 5, a ``tokenizer.json`` is read without it.
    """

    def __init__(self, inner: InnerTokenizer) -> None:
        self.inner = inner
        self.special_tokens: frozenset[str] = frozenset(inner.all_special_tokens) | frozenset(
            token.content for token in inner.added_tokens_decoder.values() if token.special
        )
        self._rust = _rust_of(inner)
        self._encoder = _encoder_of(inner)

    @classmethod
    def load(cls, config: EngineConfig) -> Tokenizer:
        """Load the tokenizer that ``config`` names.

        Raises:
            InvalidConfig: There is no tokenizer, or it cannot be read.
            MissingDependency: The tokenizer is not a plain ``tokenizer.json``, and transformers is not installed.
        """
        source = config.tokenizer or config.model
        revision = config.revision if source == config.model else None  # it is one of the model's
        try:
            inner = None if _has_transformers_5() else _without_transformers(source, revision)
            if inner is None:
                inner = _with_transformers(source, revision, trust_remote_code=config.trust_remote_code)
        except MissingDependency:
            raise
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InvalidConfig(
                f"no tokenizer could be loaded from {source!r}: {error}; "
                "set tokenizer= to a folder or hub id that has one",
                field="tokenizer",
            ) from error
        return cls(inner)

    def __len__(self) -> int:
        return len(self.inner)

    def fingerprint(self) -> str:
        """Return a digest of vocabulary, merges, normalisation and added tokens, which decide the ids of a text.

        Two tokenizers with one fingerprint give the same ids; takes up to a second for a large vocabulary.
        """
        if self._rust is not None:
            described = json.loads(self._rust.to_str())
            settings = {name: part for name, part in described.items() if name not in ("padding", "truncation")}
        else:
            ids = range(len(self.inner))
            settings = {
                "class": type(self.inner).__qualname__,
                "vocabulary": [str(self.inner.convert_ids_to_tokens(token_id)) for token_id in ids],
            }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ``token_ids`` to text."""
        ids = list(token_ids)
        if self._rust is not None:
            return str(self._rust.decode(ids, skip_special_tokens=skip_special_tokens))
        text = self.inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode(self, prompt: Prompt, context_length: int | None = None, where: str = "prompts") -> list[int]:
        """Encode any prompt to the ids that the model will see.

        Args:
            prompt: The prompt.
            context_length: Maximum useful number of ids. Far longer texts are refused after tokenising only their
                beginning, since all of it would take seconds and gigabytes.
            where: The prompt's name in errors.

        Raises:
            InvalidRequest: The chat template is missing or rejects the messages; or the text is not valid Unicode, or
                far too long.
            DeadlineExceeded: The chat template took too long.
        """
        match prompt:
            case TokenPrompt():
                return list(prompt.token_ids)
            case TextPrompt():
                text, add_special_tokens = prompt.text, prompt.add_special_tokens
            case ChatPrompt():
                text, add_special_tokens = render(self.inner, prompt), False
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{where}: the text holds {text[error.start]!r}, half of a surrogate pair, which is no character",
                field=where,
            ) from None
        if context_length is not None:
            self._refuse_far_too_long(text, context_length, where)
        return self._ids(text, add_special_tokens)

    def _refuse_far_too_long(self, text: str, context_length: int, where: str) -> None:
        """Raise if a prefix of the text already has more than twice as many tokens as the context holds.

        A limit on characters would not work: tokenizers drop spaces, and make one token of long words. A prefix's end
        may be tokenised differently than in the whole text, which changes only a few tokens.
        """
        characters = max(LONG_TEXT, 16 * context_length)
        while len(text) > characters:
            tokens = len(self._ids(text[:characters], add_special_tokens=False))
            if tokens > 2 * context_length:
                raise InvalidRequest(
                    f"{where} is a text of {len(text)} characters, of which the first {characters} alone have {tokens} "
                    f"tokens, more than the context length of {context_length}; shorten it",
                    field=where,
                )
            characters *= 4

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        rust = self._encoder
        # Another caller of the tokenizer may have set these; transformers' wrapper sets them back.
        if rust is not None and rust.truncation is None and rust.padding is None:
            (encoding,) = rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        return list(self.inner(text, add_special_tokens=add_special_tokens)["input_ids"])

    def chat_template(self, tools: Sequence[Mapping[str, JsonValue]]) -> str | None:
        """Return the chat template for messages with these tools; None if there is none."""
        return template_of(self.inner, tools)


def import_libraries_without_torch() -> None:
    """Import ahead what :meth:`Tokenizer.load` imports, in a process that computes nothing.

    transformers imports torch wherever it is installed, also for a tokenizer: 2 s of CPU time and 180 MB. It does
    without from now on. A tokenizer's own code can still import torch.
    """
    if "torch" in sys.modules or not _has_transformers_5():
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # one is that there is no torch
    sys.modules["torch"] = cast("ModuleType", None)  # so that an import fails
    try:
        with suppress(ImportError):  # load() raises an error that names the missing file
            from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    finally:
        del sys.modules["torch"]


def _has_transformers_5() -> bool:
    """Return whether transformers 5 or later is installed; version 4 cannot read the files that 5 writes."""
    try:
        return Version(version("transformers")).major >= 5
    except PackageNotFoundError:
        return False


def _without_transformers(source: str, revision: str | None) -> InnerTokenizer | None:
    from drivetrain.text.tokenizer_json import TokenizerJson

    return TokenizerJson.load(source, revision)


def _with_transformers(source: str, revision: str | None, *, trust_remote_code: bool) -> InnerTokenizer:
    with from_extra("transformers", f"the tokenizer of {source!r}, which is not a tokenizer.json alone,"):
        from transformers import AutoTokenizer

    inner: InnerTokenizer = AutoTokenizer.from_pretrained(
        source, revision=revision, trust_remote_code=trust_remote_code
    )
    if len(inner) <= len(inner.added_tokens_decoder):  # made of the model's type alone, where no file is there
        raise ValueError("it has no vocabulary")
    return inner


def _rust_of(inner: InnerTokenizer) -> Any:
    """Return the Rust tokenizer that decodes for a fast tokenizer; None if a subclass overrides decoding in Python.

    transformers' Python wrapper adds only a check of each id, which takes longer than decoding.
    """
    from drivetrain.text.tokenizer_json import TokenizerJson

    if isinstance(inner, TokenizerJson):
        return inner.backend_tokenizer
    from transformers import PreTrainedTokenizerFast as Fast

    if not isinstance(inner, Fast) or (type(inner).decode, type(inner)._decode) != (Fast.decode, Fast._decode):
        return None
    return inner.backend_tokenizer


def _encoder_of(inner: InnerTokenizer) -> Any:
    """Return the Rust tokenizer that encodes for a fast tokenizer; None if a subclass overrides encoding in Python.

    ``encode_batch_fast`` keeps no offsets, which makes it a third faster, and lets other threads run meanwhile.
    """
    from drivetrain.text.tokenizer_json import TokenizerJson

    if isinstance(inner, TokenizerJson):
        return inner.backend_tokenizer
    from transformers import PreTrainedTokenizerFast as Fast

    own = (type(inner).__call__, getattr(type(inner), "_encode_plus", None))
    if not isinstance(inner, Fast) or own != (Fast.__call__, Fast._encode_plus) or inner.split_special_tokens:
        return None
    return inner.backend_tokenizer


class IncrementalDecoder:
    """Decodes a growing list of ids incrementally.

    ``text`` only ever grows, and is a prefix of the decoding of all ids so far: a character whose bytes are incomplete
    is held back. Decoding starts a few ids back, because many tokenizers decode an id differently at the start of a
    text.
    """

    def __init__(self, decode: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0
        self._read = 0
        self._settled = ""
        self.text = ""

    def push(self, token_id: int) -> str:
        """Add one id and return the text that it adds, possibly empty."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._read], skip_special_tokens=self._skip)
        after = self._decode(self._ids[self._context :], skip_special_tokens=self._skip)
        tail = after[len(before) :]
        sure = tail.rstrip(REPLACEMENT)
        known = len(self.text)
        if len(self._settled) + len(sure) > known:
            self.text = self._settled + sure
        if tail and sure == tail:
            self._settled = self.text
            self._context, self._read = self._read, len(self._ids)
        return self.text[known:]

    def finish(self) -> str:
        """Return the remaining text, including held-back characters."""
        known = len(self.text)
        self.text = self._decode(self._ids, skip_special_tokens=self._skip)
        return self.text[known:]
