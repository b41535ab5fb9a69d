"""The tokenizer behind an engine: text and chat to ids, ids to text, also a few at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, Protocol

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
"""What a decoder shows for bytes that are not, or not yet, a whole UTF-8 character."""

LONG_TEXT: Final = 1 << 16
"""Characters that are tokenised at once, however short the context is."""


class Decoder(Protocol):
    """Turns token ids into text."""

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ``token_ids``."""
        ...


class Tokenizer:
    """A model's tokenizer, from its folder or hub id, loaded with transformers' ``AutoTokenizer``.

    Where transformers is not installed, or older than 5, a ``tokenizer.json`` is read without it.
    """

    def __init__(self, inner: InnerTokenizer) -> None:
        self.inner = inner
        self.special_tokens: frozenset[str] = frozenset(inner.all_special_tokens) | frozenset(
            token.content for token in inner.added_tokens_decoder.values() if token.special
        )
        self._rust = _rust_of(inner)

    @classmethod
    def load(cls, config: EngineConfig) -> Tokenizer:
        """Load the tokenizer that ``config`` names.

        Raises:
            InvalidConfig: there is none, or it cannot be read.
            MissingDependency: it is no ``tokenizer.json``, which needs transformers, and that is not installed.
        """
        source = config.tokenizer or config.model
        try:
            inner = None if _has_transformers_5() else _without_transformers(source, config.revision)
            if inner is None:
                inner = _with_transformers(source, config)
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

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ``token_ids`` to text."""
        ids = list(token_ids)
        if self._rust is not None:
            return str(self._rust.decode(ids, skip_special_tokens=skip_special_tokens))
        text = self.inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode(self, prompt: Prompt, context_length: int | None = None, where: str = "prompts") -> list[int]:
        """Turn any prompt into the ids that the model will see.

        Args:
            prompt: The prompt.
            context_length: Most ids that are of use. A text that has far more is refused by a part of it, where all
                of it would take seconds and gigabytes.
            where: The prompt's name in errors.

        Raises:
            InvalidRequest: chat messages were given and there is no chat template, or it refuses them; or the text
                is not Unicode, or far too long.
            DeadlineExceeded: the chat template did not end in time.
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
        """Raise if a beginning of the text has more than twice as many tokens as the context holds.

        No number of characters would tell: tokenizers drop spaces, and make one token of long words. The end of a
        part is tokenised otherwise beside what follows it, which changes few of its tokens.
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
        return list(self.inner(text, add_special_tokens=add_special_tokens)["input_ids"])

    def chat_template(self, tools: Sequence[Mapping[str, JsonValue]]) -> str | None:
        """Return the template that renders chat messages beside these tools; None if there is none."""
        return template_of(self.inner, tools)


def _has_transformers_5() -> bool:
    """Earlier ones cannot read the files that later ones write."""
    try:
        return Version(version("transformers")).major >= 5
    except PackageNotFoundError:
        return False


def _without_transformers(source: str, revision: str | None) -> InnerTokenizer | None:
    from drivetrain.text.tokenizer_json import TokenizerJson

    return TokenizerJson.load(source, revision)


def _with_transformers(source: str, config: EngineConfig) -> InnerTokenizer:
    with from_extra("transformers", f"the tokenizer of {source!r}, which is not a tokenizer.json alone,"):
        from transformers import AutoTokenizer

    inner: InnerTokenizer = AutoTokenizer.from_pretrained(
        source, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    return inner


def _rust_of(inner: InnerTokenizer) -> Any:
    """What decodes for a tokenizer of transformers, if nothing is done there but to look at each id before.

    That look takes longer than to decode.
    """
    from drivetrain.text.tokenizer_json import TokenizerJson

    if isinstance(inner, TokenizerJson):
        return inner.backend_tokenizer
    from transformers import PreTrainedTokenizerFast as Fast

    if not isinstance(inner, Fast) or (type(inner).decode, type(inner)._decode) != (Fast.decode, Fast._decode):
        return None
    return inner.backend_tokenizer


class IncrementalDecoder:
    """Decodes a growing list of ids a few at a time.

    ``text`` only ever grows, and is a prefix of the decoding of all ids pushed so far: a character whose
    bytes have not all arrived is held back. Decoding starts a few ids back because many tokenizers decode an
    id differently at the start of a text.
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
        """Add one id; return what became sure of the text, possibly nothing."""
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
        """Return the rest, held-back characters included."""
        known = len(self.text)
        self.text = self._decode(self._ids, skip_special_tokens=self._skip)
        return self.text[known:]
