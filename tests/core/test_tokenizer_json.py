"""Without transformers, text, ids and rendered messages are those that transformers gives."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Rust
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from drivetrain import ChatPrompt, EngineConfig, InvalidConfig, InvalidRequest, MissingDependency, TextPrompt
from drivetrain.testing import ARCHITECTURES, VISION_ARCHITECTURES, tiny_model
from drivetrain.text import chat_templates, tokenizer
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.text.tokenizer_json import TokenizerJson

TEXTS = [
    "Grüße , \t a .  b !",
    "",
    " two  spaces ",
    "<|im_start|>user\nhi<|im_end|>",
    "<|pad|> <s>x</s> <image>",
    "中文 🙂\n",
]


def both(folder: Path) -> tuple[TokenizerJson, Any]:
    """The tokenizer read without transformers, and with it."""
    own = TokenizerJson.load(str(folder))
    assert own is not None
    return own, AutoTokenizer.from_pretrained(str(folder))


def edited(tmp_path: Path, config: Mapping[str, object] = {}, files: Mapping[str, str] = {}) -> Path:
    """A folder of a tokenizer alone, some fields of whose configuration are replaced."""
    source, folder = tiny_model("gpt_neox"), tmp_path / "tokenizer"
    folder.mkdir()
    for file in source.glob("*token*.json"):
        shutil.copy(file, folder)
    shutil.copy(source / "chat_template.jinja", folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields = {key: value for key, value in {**fields, **config}.items() if value is not ...}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def check_same(folder: Path) -> None:
    own, theirs = both(folder)
    assert len(own) == len(theirs)
    assert own.eos_token_id == theirs.eos_token_id
    assert set(own.all_special_tokens) == set(theirs.all_special_tokens)
    assert set(own.all_special_ids) == set(theirs.all_special_ids)
    # The class of Qwen's family has an unknown token of its own.
    assert {"unk_token": theirs.unk_token, **own.special_tokens_map} == {
        "unk_token": theirs.unk_token,
        **theirs.special_tokens_map,
    }
    assert {key: str(value) for key, value in own.added_tokens_decoder.items()} == {
        key: str(value) for key, value in theirs.added_tokens_decoder.items()
    }
    assert Tokenizer(own).special_tokens == Tokenizer(theirs).special_tokens
    assert [own.convert_ids_to_tokens(i) for i in range(len(own))] == [
        theirs.convert_ids_to_tokens(i) for i in range(len(own))
    ]
    for text in TEXTS:
        for special in (True, False):
            ids = own(text, add_special_tokens=special)["input_ids"]
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            prompt = TextPrompt(text=text, add_special_tokens=special)
            assert ids == Tokenizer(own).encode(prompt) == Tokenizer(theirs).encode(prompt)
        for skip in (True, False):
            everything = [*ids, *range(len(own)), 10**6]
            assert Tokenizer(own)(everything, skip_special_tokens=skip) == Tokenizer(theirs)(
                everything, skip_special_tokens=skip
            )


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *VISION_ARCHITECTURES}))
def test_tiny_models(architecture: str) -> None:
    check_same(tiny_model(architecture))


@pytest.mark.parametrize("of_transformers", [False, True])
def test_other_threads_run_while_a_long_text_is_tokenised(of_transformers: bool) -> None:
    tokenizer = Tokenizer(both(tiny_model())[of_transformers])
    begin, ran = threading.Lock(), []

    def other() -> None:
        with begin:
            ran.append(True)

    begin.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread keeps the interpreter's lock until it gives it up
    try:
        begin.release()
        tokenizer.encode(TextPrompt(text="abc " * 250_000))
        assert ran
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_special_tokens_as_transformers_4_writes_them(tmp_path: Path) -> None:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    token = {"content": "<s>", **plain}
    check_same(
        edited(
            tmp_path,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": {"__type": "AddedToken", **token},
                "image_token": "<image>",
                "extra_special_tokens": ...,
                "additional_special_tokens": ["<|im_start|>", "<new>"],
                "add_bos_token": True,
                "added_tokens_decoder": {
                    "261": {**token, "content": "<image>", "special": True},
                    "260": {**token, "special": True},
                },
            },
        )
    )


def test_special_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    named = {"bos_token": {"content": "<s>", "lstrip": True, "rstrip": False, "normalized": False}, "unk_token": "<u>"}
    check_same(edited(tmp_path, {"eos_token": ...}, {"special_tokens_map.json": json.dumps(named)}))


def test_named_special_tokens_of_the_model(tmp_path: Path) -> None:
    check_same(edited(tmp_path, {"extra_special_tokens": {"audio_token": "<audio>"}}))


def test_what_the_file_puts_around_text(tmp_path: Path) -> None:
    folder = edited(tmp_path, {"split_special_tokens": True})
    rust = Rust.from_file(str(folder / "tokenizer.json"))
    rust.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 256), ("<|im_end|>", 258)]
    )
    rust.enable_truncation(3)
    rust.enable_padding(length=7)
    rust.save(str(folder / "tokenizer.json"))
    check_same(folder)


# Chat templates ------------------------------------------------------------------------------------------------------

MESSAGES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "  hi <b>é"}, {"role": "assistant", "content": "  so  "}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": " b "}, {"type": "image"}]},
    ],
    "calls": [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": "y", "reasoning": "because", "tool_calls": [{"function": {"name": "f"}}]},
    ],
    "empty": [{"role": "assistant", "content": None, "tool_calls": [{"a": 1}]}],
}
TEMPLATES = {
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ documents is none }}{{ bos_token }}"
    "{{ eos_token }}",
    "trimmed": "{% for m in messages %}\n  {{ m.role }}: {{ m.content | string | trim }}\n{% endfor %}",
    "kept": "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}go{% endif %}",
    "blocks": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "names": "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ dict(b=2) | tojson }}",
    "internal": "{% set ns = namespace(_a=1) %}content",
    "internal later": "{% set ns = namespace() %}{% set ns._a = 1 %}content",
    "refusal": "{{ raise_exception('no content') }}",
    "changed": "{{ messages.append(1) }}",
    "python": "{{ messages.__class__.__mro__ }}content",
    "reasons": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}{% endfor %}",
    "time": "{{ strftime_now('%Y') }}",
    "variable": "{{ thinking }}{{ bos_token }}",
    "drops": "{{ messages[0].role }}{# content #}",
    "role alone": "{{ messages[0].role }}",
}


@pytest.mark.parametrize("messages", sorted(MESSAGES))
@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("continued", [False, True])
def test_messages_are_rendered_as_transformers_does(messages: str, template: str, continued: bool) -> None:
    own, theirs = both(tiny_model("gpt_neox"))
    fields: dict[str, Any] = {"messages": MESSAGES[messages], "continue_final_message": continued}
    if template == "json":
        fields["tools"] = [{"type": "function", "function": {"name": "f<"}}]
    if template == "variable":
        fields["template_kwargs"] = {"thinking": [1, None], "bos_token": "<mine>"}
    prompt = ChatPrompt.model_validate(fields)
    answers: list[str | None] = []
    for inner in (own, theirs):
        inner.chat_template = TEMPLATES[template]
        try:
            answers.append(chat_templates.render(inner, prompt))
        except InvalidRequest:
            answers.append(None)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {"chat_template.jinja": "a"}),
        ({"chat_template": "c"}, {}),
        ({}, {"additional_chat_templates/tool_use.jinja": "tools b", "additional_chat_templates/rag.jinja": "r"}),
        ({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "tools"}]}, None),
        ({"chat_template": [{"name": "one", "template": "d"}, {"name": "two", "template": "e"}]}, None),
        ({"chat_template": ...}, None),
    ],
)
def test_the_template_is_the_one_that_transformers_takes(
    tmp_path: Path, config: dict[str, object], files: dict[str, str] | None
) -> None:
    folder = edited(tmp_path, config, files or {})
    if files is None:
        (folder / "chat_template.jinja").unlink()
    own, theirs = both(folder)
    assert own.chat_template == theirs.chat_template
    for tools in ((), ({"type": "function"},)):
        found: list[str | None] = []
        for inner in (own, theirs):
            try:
                found.append(chat_templates.template_of(inner, tools))
            except InvalidRequest:
                found.append("refused")
        assert found[0] == found[1]


# Which one is used ---------------------------------------------------------------------------------------------------


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(backend="transformers", model=str(folder))


@pytest.mark.parametrize("installed", ["4.57.6", None])
def test_an_old_transformers_or_none_is_not_asked(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    def version(_: str) -> str:
        if installed is None:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr(tokenizer, "version", version)
    assert isinstance(Tokenizer.load(config_of(tiny_model("qwen2"))).inner, TokenizerJson)


def test_transformers_5_is_asked() -> None:
    assert not isinstance(Tokenizer.load(config_of(tiny_model("qwen2"))).inner, TokenizerJson)


@pytest.mark.parametrize("spoiled", ["missing", "code"])
def test_a_tokenizer_of_another_kind_needs_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    folder = edited(tmp_path, {"auto_map": {"AutoTokenizer": ["code.Own", None]}} if spoiled == "code" else {})
    if spoiled == "missing":
        (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(tokenizer, "_has_transformers_5", lambda: False)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingDependency, match=r"the tokenizer of .* pip install 'drivetrain\[transformers\]'"):
        Tokenizer.load(config_of(folder))


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}'])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str
) -> None:
    folder = edited(tmp_path, files={file: content})
    monkeypatch.setattr(tokenizer, "_has_transformers_5", lambda: False)
    if (file, content) == ("tokenizer_config.json", '{"version": "1.0"}'):
        assert Tokenizer.load(config_of(folder)).inner.all_special_tokens == []
        return
    with pytest.raises(InvalidConfig, match="no tokenizer could be loaded") as refusal:
        Tokenizer.load(config_of(folder))
    assert refusal.value.field == "tokenizer"
