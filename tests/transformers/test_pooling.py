"""Embeddings and rewards: of several architectures and folders, beside updates, pauses and sleep."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from drivetrain import (
    EngineStartError,
    EngineStateError,
    InferenceEngine,
    InvalidConfig,
    MemoryTag,
    PauseMode,
    create_engine,
)
from drivetrain.testing import tiny_model
from engines import HANGING

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEQUENCES = [[5], [9, 8, 7, 6, 5, 4, 3], [70, 71], [259], [11, 12, 259], list(range(60))]
"""Some end with the padding token, id 259, which counts as any other."""


def pooled(folder: Path, pool: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return unit vectors that transformers computes for :data:`SEQUENCES`, one at a time."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        vectors = [pool(model(input_ids=torch.tensor([ids]), use_cache=False)[0][0]) for ids in SEQUENCES]
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


def last(states: torch.Tensor) -> torch.Tensor:
    return states[-1]


def scored(folder: Path) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0]) for ids in SEQUENCES]


def reward_model(architecture: str, folder: Path, seed: int = 0) -> Path:
    text = tiny_model(architecture)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(text, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    shutil.copy(text / "tokenizer.json", folder)
    shutil.copy(text / "tokenizer_config.json", folder)
    return folder


def assert_near(found: object, expected: object) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.as_tensor(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2", "bloom"])
async def test_vectors_are_the_last_tokens_states(architecture: str, isolation: str) -> None:
    folder = tiny_model(architecture)
    config = {"task": "embed", "isolation": isolation, "max_num_batched_tokens": 64}
    async with create_engine("transformers", model=str(folder), **config) as engine:
        vectors = await engine.encode(SEQUENCES)
        assert_near(vectors, pooled(folder, last))
        assert_near(await engine.encode(SEQUENCES[::-1]), pooled(folder, last).flip(0))


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2"])
async def test_scores_are_those_of_the_head_at_the_last_token(
    architecture: str, isolation: str, tmp_path: Path
) -> None:
    folder = reward_model(architecture, tmp_path / "reward")
    config = {"task": "reward", "isolation": isolation, "max_num_batched_tokens": 64}
    async with create_engine("transformers", model=str(folder), **config) as engine:
        assert_near(await engine.score([[] for _ in SEQUENCES], SEQUENCES), scored(folder))


def with_files(folder: Path, files: Mapping[str, object]) -> Path:
    shutil.copytree(tiny_model("qwen2"), folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("named", "pool"),
    [
        ({"pooling_mode_lasttoken": True}, last),
        ({"pooling_mode_mean_tokens": True}, lambda states: states.mean(0)),
        ({"pooling_mode_cls_token": True}, lambda states: states[0]),
        ({"pooling_mode": "mean"}, lambda states: states.mean(0)),
    ],
)
async def test_a_folder_names_its_pooling(
    named: dict[str, object], pool: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    fields = {"pooling_mode_lasttoken": False, "word_embedding_dimension": 128, **named}
    files = {"modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": fields}
    folder = with_files(tmp_path / "model", files)
    async with create_engine("transformers", model=str(folder), task="embed") as engine:
        assert_near(await engine.encode(SEQUENCES), pooled(folder, pool))


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
async def test_a_broken_list_of_modules_is_refused(content: str, tmp_path: Path) -> None:
    folder = with_files(tmp_path / "model", {})
    (folder / "modules.json").write_text(content, encoding="utf-8")
    with pytest.raises(InvalidConfig, match=r"modules\.json is no JSON list"):
        create_engine("transformers", model=str(folder), task="embed")


async def test_a_checkpoint_without_a_head_embeds(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    AutoModel.from_pretrained(model).save_pretrained(tmp_path / "headless")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "headless")
    async with create_engine("transformers", model=str(tmp_path / "headless"), task="embed") as engine:
        assert_near(await engine.encode(SEQUENCES), pooled(model, last))


async def test_a_language_model_is_no_reward_model() -> None:
    with pytest.raises(EngineStartError, match="score"):
        await create_engine("transformers", model=str(tiny_model("qwen2")), task="reward").start()


# Beside updates, pauses and sleep ------------------------------------------------------------------------------------


def embedding_engine(**fields: object) -> InferenceEngine:
    model = str(tiny_model("qwen2"))
    return create_engine({"backend": "transformers", "model": model, "task": "embed", "isolation": "inline", **fields})


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_pause_holds_no_embeddings(mode: PauseMode) -> None:
    async with embedding_engine() as engine:
        await engine.pause_generation(mode)
        assert_near(await asyncio.wait_for(engine.encode(SEQUENCES), HANGING), pooled(tiny_model("qwen2"), last))
        await engine.continue_generation()


async def test_weights_that_are_asleep_embed_nothing() -> None:
    model = tiny_model("qwen2")
    async with embedding_engine() as engine:
        await engine.sleep([MemoryTag.WEIGHTS])
        with pytest.raises(EngineStateError, match="asleep"):
            await engine.encode(SEQUENCES)
        # InferenceEngine refuses the call first; the backend refuses one that was under way.
        with pytest.raises(EngineStateError, match="asleep"):
            await engine.parts.backend.embed(SEQUENCES, None)
        await engine.wake_up()
        await engine.load_weights_from_disk(str(model), "again")
        assert_near(await engine.encode(SEQUENCES), pooled(model, last))
