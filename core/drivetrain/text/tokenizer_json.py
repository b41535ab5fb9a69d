"""A tokenizer read from ``tokenizer.json`` and the files beside it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from tokenizers import AddedToken, Tokenizer

from drivetrain.text.jinja_rendering import render_template

_FILE: Final = "tokenizer.json"
_CHAT_TEMPLATES: Final = "additional_chat_templates"
_FILES: Final = (
    _FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    f"{_CHAT_TEMPLATES}/*.jinja",
)
_STANDARD: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerJson:
    """Stands in for transformers' tokenizer: the methods and attributes that drivetrain uses, with the same results.

    Reads ``tokenizer.json`` as it is. Transformers 5 puts the normaliser and pre-tokeniser of a known family, such as
    Qwen2's, in the place of the file's own; the two differ only if the file was not made by that family.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: Mapping[str, Any], chat_template: str | dict[str, str] | None
    ) -> None:
        self.backend_tokenizer = tokenizer
        self.chat_template = chat_template
        named = _named(config)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            named |= {name: _special(token) for name, token in extra.items()}
            extra = []
        special = {token.content: token for token in (*map(_special, extra), *named.values())}
        self.special_tokens_map: dict[str, str] = {name: token.content for name, token in named.items()}
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *special]))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
        known = {token.content: token for token in self.added_tokens_decoder.values()}
        for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if token["content"] not in known:
                known[token["content"]] = AddedToken(**token)
                tokenizer.add_tokens([known[token["content"]]])
        tokenizer.add_special_tokens([known.get(token, special[token]) for token in self.all_special_tokens])

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> TokenizerJson | None:
        """Read the tokenizer of a folder or hub id; None if it has no ``tokenizer.json``, or code of its own.

        Raises:
            OSError: There is no such folder or hub id.
            ValueError: A file cannot be read.
        """
        folder = Path(source).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(_FILES)))
        config = _read(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read(folder / "special_tokens_map.json")
        if not (folder / _FILE).is_file() or "AutoTokenizer" in (config.get("auto_map") or {}):
            return None
        try:
            tokenizer = Tokenizer.from_file(str(folder / _FILE))
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(f"{folder / _FILE} cannot be read: {error}") from error
        return cls(tokenizer, config, _chat_template(folder, config))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of :attr:`all_special_tokens`."""
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token; None if the tokenizer has none."""
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Encode ``text``; the ids are under ``"input_ids"``."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Decode ``token_ids``; no spaces are cleaned up."""
        assert not clean_up_tokenization_spaces
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return the vocabulary's entry of an id; None if there is none."""
        return self.backend_tokenizer.id_to_token(token_id)

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the template that renders messages beside these tools.

        Raises:
            ValueError: There is none, or there are several and none is the default.
        """
        templates = self.chat_template
        if isinstance(templates, str):
            return templates
        for name in ("tool_use", "default") if tools is not None else ("default",):
            if templates and name in templates:
                return templates[name]
        raise ValueError(f"none of the chat templates is the default: {sorted(templates or ())}")

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation. ``tokenize``, a parameter of transformers' tokenizers, must be False."""
        assert not tokenize
        given = {"documents": None, **self.special_tokens_map, **variables}
        given |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return render_template(self.get_chat_template(tools=tools), conversation, continue_final_message, given)


def _named(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Special tokens by name: ``eos_token`` and its like first, then the model's own, such as ``image_token``."""
    own = [key for key in config if key.endswith("_token") and key not in _STANDARD]
    tokens = {key: config.get(key) for key in (*_STANDARD, *own)}
    return {key: _special(token) for key, token in tokens.items() if isinstance(token, str | dict)}


def _special(token: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    fields: dict[str, Any] = {key: value for key, value in token.items() if key != "__type"}
    return AddedToken(**{**fields, "special": True})


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    found = {file.stem: file.read_text(encoding="utf-8") for file in sorted((folder / _CHAT_TEMPLATES).glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    if default.is_file():
        found["default"] = default.read_text(encoding="utf-8")
    if not found:
        named = config.get("chat_template")
        return {one["name"]: one["template"] for one in named} if isinstance(named, list) else named
    return found["default"] if found.keys() == {"default"} else found


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    fields = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds a {type(fields).__name__}; expected an object")
    return fields
