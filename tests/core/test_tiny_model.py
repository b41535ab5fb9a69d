"""Tiny models are real models: transformers loads them, they run forward, and saving preserves them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drivetrain.errors import InvalidConfig
from drivetrain.testing import ARCHITECTURES, byte_tokenizer, tiny_model

TEXT = "Zwölf Boxkämpfer jagen Viktor\n\tquer über den großen Sylter Deich 🥊 <3"
IDS = torch.tensor([list(b"The quick brown fox jumps over the lazy dog, again and again.")])


@pytest.fixture
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(IDS).logits
    assert isinstance(logits, torch.Tensor)
    return logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_loads_forwards_and_reloads_with_equal_logits(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(architecture, directory=tmp_path / "model")
    logits = logits_of(folder)
    assert logits.shape == (1, IDS.shape[1], 260)
    assert torch.isfinite(logits).all()
    assert 0.5 < logits.std() < 3, "neither nearly uniform nor nearly certain"
    torch.testing.assert_close(logits_of(folder), logits, rtol=0, atol=0)

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits_of(tmp_path / "again"), logits, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_parameter_is_left_at_a_constant(architecture: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(architecture))
    constant = [
        name for name, parameter in model.named_parameters() if bool((parameter == parameter.flatten()[0]).all())
    ]
    assert constant == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokenizer_maps_bytes_to_ids_and_back(architecture: str) -> None:
    folder = tiny_model(architecture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert tokenizer("a<|im_end|>b")["input_ids"] == [97, 258, 98]
    assert tokenizer.decode([97, 258, 98], skip_special_tokens=True) == "ab"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (258, 259, 260)
    eos = GenerationConfig.from_pretrained(folder).eos_token_id
    assert eos == [258, 256]


def test_every_byte_has_its_own_id() -> None:
    tokenizer = byte_tokenizer()
    for byte in range(256):
        assert tokenizer.backend_tokenizer.decoder.decode([tokenizer.convert_ids_to_tokens(byte)]) == bytes(
            [byte]
        ).decode(errors="replace")


def test_chat_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rendered = AutoTokenizer.from_pretrained(tiny_model()).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_same_arguments_give_the_same_folder_and_weights_and_leave_the_random_state_alone(
    own_temporary_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = tiny_model("llama", seed=3)
    assert torch.equal(torch.rand(3), expected)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny_model("llama", seed=3) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    other = tiny_model("llama", seed=3, directory=tmp_path_factory.mktemp("other"))
    assert (other / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert not torch.equal(logits_of(tiny_model("llama", seed=4)), logits_of(first))


def test_overrides_reach_the_model() -> None:
    deep = AutoModelForCausalLM.from_pretrained(tiny_model("gemma2", num_hidden_layers=3))
    assert deep.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert AutoModelForCausalLM.from_pretrained(tiny_model("gpt2", hidden_size=32)).config.n_embd == 32
    assert AutoModelForCausalLM.from_pretrained(tiny_model(dtype="bfloat16")).dtype is torch.bfloat16
    tied = AutoModelForCausalLM.from_pretrained(tiny_model(tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_what_only_the_tiny_model_sets_can_be_overridden() -> None:
    folder = tiny_model("qwen3_moe", hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    assert json.loads((folder / "config.json").read_text())["head_dim"] == 64


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text"])
def test_sliding_window_is_narrower_than_the_test_sequence_and_matters(architecture: str) -> None:
    narrow, wide = logits_of(tiny_model(architecture)), logits_of(tiny_model(architecture, sliding_window=512))
    torch.testing.assert_close(narrow[:, :32], wide[:, :32], rtol=1e-4, atol=1e-4)
    assert (narrow[:, 40:] - wide[:, 40:]).abs().max() > 0.05


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"architecture": "qwen"}, "architecture='qwen' is not known; did you mean 'qwen3'?"),
        ({"architecture": "zzz"}, "known: qwen2, qwen3, llama"),
        ({"hiden_size": 64}, "hiden_size=64: Qwen2Config has no such field; did you mean 'hidden_size'?"),
        ({"num_hidden_layers": "two"}, "qwen2 does not work with {'num_hidden_layers': 'two'}"),
        ({"num_key_value_heads": 3}, "qwen2 does not work with {'num_key_value_heads': 3}"),
        ({"vocab_size": 100}, "vocab_size=100 is too small; the byte-level tokenizer needs 260 ids"),
        ({"hidden_act": object()}, "holds a value that a config.json cannot"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(
    arguments: dict[str, Any], expected: str, own_temporary_directory: Path
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        tiny_model(**arguments)
    assert expected in str(caught.value)
    assert [path for root in own_temporary_directory.iterdir() for path in root.iterdir()] == []


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(InvalidConfig, match="not empty"):
        tiny_model(directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.slow
def test_processes_that_race_for_one_model_all_get_it(tmp_path: Path) -> None:
    code = "from drivetrain.testing import tiny_model; print('ready', flush=True); input(); print(tiny_model(seed=11))"
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in racing:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in racing:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    folders = {process.communicate(timeout=120)[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0]
    (folder,) = folders
    assert logits_of(Path(folder)).shape == (1, IDS.shape[1], 260)
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name], "nothing half-written is left"


def test_every_rank_of_a_process_group_writes_a_whole_folder(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        tiny_model(directory=tmp_path / "of a rank")
    finally:
        dist.destroy_process_group()
    tiny_model(directory=tmp_path / "alone")
    written, alone = ({file.name for file in (tmp_path / name).iterdir()} for name in ("of a rank", "alone"))
    assert written == alone
    assert torch.equal(logits_of(tmp_path / "of a rank"), logits_of(tmp_path / "alone"))


def test_a_cached_model_that_lost_a_file_is_written_anew(own_temporary_directory: Path) -> None:
    folder = tiny_model(seed=12)
    before = logits_of(folder)
    (folder / "model.safetensors").unlink()
    assert tiny_model(seed=12) == folder
    assert torch.equal(logits_of(folder), before)


def test_a_folder_that_another_process_wrote_meanwhile_stays_where_it_is(
    own_temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(seed=13)
    inode, before = folder.stat().st_ino, logits_of(folder)
    module = sys.modules["drivetrain.testing.tiny_model"]  # drivetrain.testing has a function of the same name
    monkeypatch.setattr(module, "_complete", lambda folder: False)
    assert tiny_model(seed=13) == folder
    assert folder.stat().st_ino == inode, "a reader of the folder would have lost it"
    assert torch.equal(logits_of(folder), before)


def test_the_cache_is_this_users_alone(own_temporary_directory: Path) -> None:
    root = tiny_model().parent
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert root.is_relative_to(own_temporary_directory)
