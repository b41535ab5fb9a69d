"""Models that are not given positions, and count padding as tokens, are refused when the engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drivetrain import EngineStartError, create_engine
from drivetrain.testing import tiny_model
from drivetrain.testing.byte_tokenizer import byte_tokenizer


async def test_a_model_that_counts_padding_as_tokens_is_refused(tmp_path: Path) -> None:
    width = {"d_model": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 512}
    config = AutoConfig.for_model(
        "trocr", vocab_size=260, decoder_layers=2, decoder_attention_heads=2, init_std=0.1, pad_token_id=259, **width
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer(model_max_length=512).save_pretrained(tmp_path)
    engine = create_engine("transformers", model=str(tmp_path), device="cpu", isolation="inline")
    with pytest.raises(EngineStartError, match="counts padding as tokens"):
        await engine.start()
    await engine.teardown()


async def test_a_model_that_finds_positions_by_itself_is_served() -> None:
    async with create_engine("transformers", model=str(tiny_model("bloom")), device="cpu") as engine:
        assert (await engine.generate([5, 6], {"max_new_tokens": 2, "ignore_eos": True})).completions[0].token_ids
