"""Models that take images, found by the files of their folders: hybrid ones, and images in several parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from drivetrain import Capability, ImageInput, SamplingParams, TokenPrompt, create_engine
from drivetrain.testing import byte_tokenizer, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

START, END, PLACE = 260, 261, 262
SIZES = ((64, 64), (140, 60), (50, 120))

TEXT: dict[str, object] = {
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 128,
    "intermediate_size": 128,
    "projection_dim": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "initializer_factor": 5.0,
}
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
LLAVA: dict[str, object] = {
    "image_token_id": PLACE,
    "tie_word_embeddings": False,
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": CLIP,
}
FAMILIES: Mapping[str, dict[str, object]] = {
    "qwen3_5": {
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "image_token_id": PLACE,
        "video_token_id": PLACE + 1,
        "tie_word_embeddings": False,
        "text_config": {
            **TEXT,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
                "partial_rotary_factor": 1.0,
            },
        },
        "vision_config": {
            "depth": 2,
            "num_heads": 2,
            "hidden_size": 128,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "patch_size": 14,
            "num_position_embeddings": 64,
            "initializer_range": 0.1,
        },
    },
    "llava_next": {**LLAVA, "image_grid_pinpoints": PINPOINTS},
    "vipllava": {**LLAVA, "vision_feature_layers": [-2, -3]},
}


def files_of(family: str) -> dict[str, dict[str, object]]:
    """Return the processor's files: those of a tiny model of the same form, changed."""
    like = tiny_model("qwen3_vl" if family == "qwen3_5" else "llava")
    files = {file.name: json.loads(file.read_text()) for file in like.glob("*processor_config.json")}
    if family == "llava_next":
        files["preprocessor_config.json"] |= {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": PINPOINTS,
        }
        files["processor_config.json"]["processor_class"] = "LlavaNextProcessor"
    return files


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    try:
        config = AutoConfig.for_model(family, **FAMILIES[family])
    except ValueError:
        pytest.skip(f"this release of transformers has no {family}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    byte_tokenizer(vision=True).save_pretrained(tmp_path)
    for name, fields in files_of(family).items():
        (tmp_path / name).write_text(json.dumps(fields))
    return tmp_path


def inputs_of(folder: Path, ids: list[int], images: list[Image.Image]) -> dict[str, Any]:
    tokens = torch.tensor([ids])
    processor: Any
    if not images:
        return {"input_ids": tokens}
    if (folder / "processor_config.json").exists():
        processor = AutoProcessor.from_pretrained(folder)
        made = processor(text=["<|image_pad|>" * len(images)], images=images, return_tensors="pt")
        pixels = {name: made[name] for name in ("pixel_values", "image_sizes") if name in made}
        return {"input_ids": tokens, **pixels}
    processor = AutoImageProcessor.from_pretrained(folder)
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == PLACE).int(),
        **processor(images=images, return_tensors="pt"),
    }


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_of_a_family_are_seen_as_alone(family: str, folder: Path) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    images = [Image.effect_noise(size, 80).convert("RGB") for size in SIZES]
    place = (START, PLACE, END)
    asked = [
        ((1, *place, 2), images[:1]),
        ((5,) * 60, []),
        ((7, *place, *place), images[1:]),
        ((7, *place, 9, 9), images[2:]),
    ]
    prompts = [TokenPrompt(token_ids=ids, media=tuple(map(ImageInput.from_pil, own))) for ids, own in asked]
    params = SamplingParams(max_new_tokens=10, temperature=0, logprobs=0, ignore_eos=True)
    async with create_engine("transformers", model=str(folder), isolation="inline") as engine:
        assert engine.supports(Capability.IMAGES)
        for _ in range(2):  # the second time from the prefix cache
            completions = (await engine.generate(prompts, params)).completions
            for completion, (_, own) in zip(completions, asked, strict=True):
                ids, drawn = completion.prompt_token_ids, completion.token_ids
                known = drawn[: next((at for at, token in enumerate(drawn) if token == PLACE), len(drawn)) + 1]
                with torch.no_grad():
                    logits = model(**inputs_of(folder, [*ids, *known[:-1]], own)).logits[0, len(ids) - 1 :]
                expected = logits.log_softmax(-1).gather(-1, torch.tensor(known)[:, None])[:, 0]
                assert completion.logprobs is not None
                assert completion.logprobs[: len(known)] == pytest.approx(expected.tolist(), abs=1e-4)
