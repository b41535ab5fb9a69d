"""The part of a transformers tokenizer that drivetrain uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class InnerTokenizer(Protocol):
    """A tokenizer of transformers, or :class:`~drivetrain.text.tokenizer_json.TokenizerJson` in its place."""

    chat_template: Any

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __len__(self) -> int: ...

    def __call__(self, text: str, /, *, add_special_tokens: bool = ...) -> Mapping[str, Any]: ...

    def decode(
        self, token_ids: Any, /, skip_special_tokens: bool = ..., *, clean_up_tokenization_spaces: bool = ...
    ) -> Any: ...

    def convert_ids_to_tokens(self, token_id: int, /) -> Any: ...

    def get_chat_template(self, *, tools: Any = ...) -> str: ...

    @property
    def apply_chat_template(self) -> Any: ...
