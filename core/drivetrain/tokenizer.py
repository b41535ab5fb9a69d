"""The tokenizer behind an engine: text and chat to ids, ids to text, also a few at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain.errors import InvalidConfig, InvalidRequest
from drivetrain.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drivetrain.config import EngineConfig

REPLACEMENT = "�"
"""What a decoder shows for bytes that are not, or not yet, a whole UTF-8 character."""


class Decoder(Protocol):
    """Turns token ids into text."""

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ``token_ids``."""
        ...


class Tokenizer:
    """A model's tokenizer, from its folder or hub id, loaded with transformers' ``AutoTokenizer``."""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
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
        """
        from transformers import AutoTokenizer

        source = config.tokenizer or config.model
        try:
            inner = AutoTokenizer.from_pretrained(
                source, revision=config.revision, trust_remote_code=config.trust_remote_code
            )
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

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn any prompt into the ids that the model will see.

        Raises:
            InvalidRequest: chat messages were given and there is no chat template, or it refuses them; or the text
                is not Unicode.
        """
        match prompt:
            case TokenPrompt():
                return list(prompt.token_ids)
            case TextPrompt():
                return self._ids(prompt.text, prompt.add_special_tokens)
            case ChatPrompt():
                return self._encode_chat(prompt)

    def _encode_chat(self, prompt: ChatPrompt) -> list[int]:
        from jinja2 import TemplateError

        if not self.inner.chat_template:
            raise InvalidRequest(
                "chat messages were given, but this model's tokenizer has no chat template; send text or token ids",
                field="prompts",
            )
        variables: dict[str, Any] = prompt.template_kwargs
        messages = [message.model_dump(exclude_unset=True) for message in prompt.messages]
        try:
            text = self.inner.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in prompt.tools] or None,
                add_generation_prompt=prompt.add_generation_prompt and not prompt.continue_final_message,
                continue_final_message=prompt.continue_final_message,
                tokenize=False,
                **variables,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", field="prompts") from error
        assert isinstance(text, str)
        self._check_template_reads(prompt)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text of a prompt holds {text[error.start]!r}, half of a surrogate pair, which is no character",
                field="prompts",
            ) from None
        return list(self.inner(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _check_template_reads(self, prompt: ChatPrompt) -> None:
        """A template says nothing about variables that it does not read; they would be dropped in silence."""
        template = self.inner.get_chat_template(tools=[dict(tool) for tool in prompt.tools] or None)
        given = [("tools", "tools")] if prompt.tools else []
        for field, name in [*given, *(("template_kwargs", name) for name in prompt.template_kwargs)]:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise InvalidRequest(f"this model's chat template does not read {name!r}; leave it out", field=field)


def _rust_of(inner: PreTrainedTokenizerBase) -> Any:
    """What decodes for a tokenizer of transformers, if nothing is done there but to look at each id before.

    That look takes longer than to decode.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    own = isinstance(inner, Fast) and (type(inner).decode, type(inner)._decode) == (Fast.decode, Fast._decode)
    return inner.backend_tokenizer if own else None


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
