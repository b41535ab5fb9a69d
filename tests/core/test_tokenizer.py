"""Text of token ids equals that of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import InvalidConfig
from drivetrain.testing import tiny_model
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import EngineConfig

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


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "llama"])
def test_a_folder_without_tokenizer_files_is_refused(tmp_path: Path, architecture: str) -> None:
    shutil.copy(tiny_model(architecture) / "config.json", tmp_path)
    config = EngineConfig(backend="transformers", model=str(tmp_path))
    with pytest.raises(InvalidConfig, match=r"(?s)no tokenizer could be loaded.*set tokenizer=") as refusal:
        Tokenizer.load(config)
    assert refusal.value.field == "tokenizer"
