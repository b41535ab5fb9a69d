"""Texts and token ids are those of transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import InvalidConfig
from drivetrain.testing import ARCHITECTURES, AUDIO_ARCHITECTURES, VISION_ARCHITECTURES, tiny_model
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import ChatPrompt, TextPrompt

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def inner() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(tiny_model("qwen2")))


@pytest.mark.parametrize("skip", [True, False])
def test_text_is_that_of_transformers(inner: Any, skip: bool) -> None:
    ids = [*inner("Grüße , \t a .  b !").input_ids, *inner.all_special_ids, *range(len(inner)), 10**6]
    wanted = inner.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert Tokenizer(inner)(tuple(ids), skip_special_tokens=skip) == wanted


def test_a_tokenizer_that_decodes_otherwise_is_asked(inner: Any) -> None:
    class Loud(type(inner)):  # type: ignore[misc]
        def _decode(self, token_ids: Any, **options: Any) -> str:
            return str(super()._decode(token_ids, **options)).upper()

    loud = Loud.from_pretrained(str(tiny_model("qwen2")))
    ids = inner("quiet").input_ids
    assert Tokenizer(inner)(ids, skip_special_tokens=True) == "quiet"
    assert Tokenizer(loud)(ids, skip_special_tokens=True) == "QUIET"
    assert Tokenizer(loud).encode(TextPrompt(text="quiet")) == ids


TEXTS = ("", "a <|im_start|> b", "  Grüße \t😀\n\n", "long " * 20_000)


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *VISION_ARCHITECTURES, *AUDIO_ARCHITECTURES}))
def test_ids_are_those_of_transformers(architecture: str) -> None:
    inner = transformers.AutoTokenizer.from_pretrained(str(tiny_model(architecture)))
    tokenizer = Tokenizer(inner)
    for text in TEXTS:
        for special in (True, False):
            prompt = TextPrompt(text=text, add_special_tokens=special)
            assert tokenizer.encode(prompt) == inner(text, add_special_tokens=special).input_ids


def test_a_tokenizer_that_encodes_otherwise_is_asked(inner: Any) -> None:
    class Loud(type(inner)):  # type: ignore[misc]
        def _encode_plus(self, text: Any, **options: Any) -> Any:
            return super()._encode_plus(text.upper(), **options)

    loud = Loud.from_pretrained(str(tiny_model("qwen2")))
    assert Tokenizer(loud).encode(TextPrompt(text="quiet")) == inner("QUIET").input_ids


@pytest.mark.parametrize("set_by_others", [{"truncation": True, "max_length": 3}, {"padding": "max_length"}], ids=str)
def test_settings_of_other_callers_cut_and_pad_nothing(set_by_others: dict[str, Any]) -> None:
    inner = transformers.AutoTokenizer.from_pretrained(str(tiny_model("qwen2")))
    tokenizer = Tokenizer(inner)
    inner("a text of some length", **{"max_length": 100, **set_by_others})
    wanted = [*range(ord("a"), ord("a") + 20)]
    assert inner.convert_ids_to_tokens(tokenizer.encode(TextPrompt(text="".join(map(chr, wanted))))) == [
        chr(one) for one in wanted
    ]


def test_special_tokens_are_split_where_the_tokenizer_says_so(inner: Any) -> None:
    splitting = transformers.AutoTokenizer.from_pretrained(str(tiny_model("qwen2")), split_special_tokens=True)
    text = "<|im_start|>"
    assert Tokenizer(splitting).encode(TextPrompt(text=text)) == splitting(text).input_ids != inner(text).input_ids


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "llama"])
def test_a_folder_without_tokenizer_files_is_refused(tmp_path: Path, architecture: str) -> None:
    shutil.copy(tiny_model(architecture) / "config.json", tmp_path)
    config = EngineConfig(backend="transformers", model=str(tmp_path))
    with pytest.raises(InvalidConfig, match=r"(?s)no tokenizer could be loaded.*set tokenizer=") as refusal:
        Tokenizer.load(config)
    assert refusal.value.field == "tokenizer"


WITHOUT_TORCH = """
import json, sys
from drivetrain.text.tokenizer import Tokenizer, import_libraries_without_torch
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import ChatPrompt

import_libraries_without_torch()
told, text = [], sys.argv[1]
for model in sys.argv[2:]:
    config = EngineConfig(backend="transformers", model=model, trust_remote_code=True)
    tokenizer = Tokenizer.load(config)
    chat = ChatPrompt(messages=[{"role": "user", "content": text}])
    told.append([tokenizer.fingerprint(), tokenizer.encode(chat), "torch" in sys.modules])
print(json.dumps(told))
"""


def test_a_process_that_computes_nothing_tokenises_without_torch(tmp_path: Path) -> None:
    """The second tokenizer is code of the model's folder, which imports torch by itself."""
    plain, coded = str(tiny_model("qwen2")), tmp_path / "coded"
    shutil.copytree(plain, coded)
    (coded / "tokenization_own.py").write_text(
        "import torch\nfrom transformers import PreTrainedTokenizerFast\n\n\n"
        "class Own(PreTrainedTokenizerFast):\n    zero = int(torch.zeros(1))\n"
    )
    settings = json.loads((coded / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}, "tokenizer_class": "Own"}
    (coded / "tokenizer_config.json").write_text(json.dumps(settings | own))
    text = "Grüße , \t a ."
    command = [sys.executable, "-W", "ignore", "-P", "-c", WITHOUT_TORCH, text, plain, str(coded)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "PyTorch" not in ended.stderr
    wanted = []
    for model, imports_torch in ((plain, False), (str(coded), True)):
        here = Tokenizer.load(EngineConfig(backend="transformers", model=model, trust_remote_code=True))
        ids = here.encode(ChatPrompt.model_validate({"messages": [{"role": "user", "content": text}]}))
        wanted.append([here.fingerprint(), ids, imports_torch])
    assert json.loads(ended.stdout) == wanted
