"""Embeddings, scores, profiles and hidden states, by a fake engine: the transformers backend has none of them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    Capability,
    EngineConfig,
    EngineStateError,
    InferenceEngine,
    InvalidRequest,
    UnsupportedCapability,
)
from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.types.config import Isolation
from drivetrain_trainers.skyrl import SkyRLInferenceEngine
from scripted_backend import ScriptedBackend

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Everything(ScriptedBackend):
    """Embeds a text as its length and a constant, scores a sequence by its sum, and has states of one number."""

    calls: list[str]

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        more = {Capability.EMBED, Capability.REWARD_SCORE, Capability.HIDDEN_STATES, Capability.PROFILE}
        return super().capabilities(config) | more | {Capability.HICACHE_STORAGE}

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return [[float(len(ids)), 3.0, 1.0][:dimensions] for ids in prompts]

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        return [float(sum(ids)) for ids in sequences]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        states = [[float(token_id)] for token_id in result.token_ids]
        return replace(result, hidden_states=states if request.params.return_hidden_states else None)

    async def clear_hicache_storage(self) -> None:
        self.calls.append("clear")

    async def start_profile(self, directory: str) -> None:
        self.calls.append(directory)

    async def stop_profile(self) -> str:
        return f"{self.calls[-1]}/trace.json"


@asynccontextmanager
async def everything(model: Path, **fields: Any) -> AsyncIterator[tuple[SkyRLInferenceEngine, Everything]]:
    config = EngineConfig(backend="scripted", model=str(model), **fields)
    backend = Everything(config)
    backend.calls = []
    claimed = Everything.capabilities(config)
    engine = InferenceEngine(config, backend, capabilities=claimed, isolation=Isolation.INLINE, versions={})
    async with engine:
        yield SkyRLInferenceEngine(engine), backend


async def test_texts_are_embedded_and_compared(model: Path) -> None:
    async with everything(model, task="embed") as (skyrl, _):
        assert skyrl.supports_embeddings() is True
        assert await skyrl.encode(["ab", "abcd"]) == [[2.0, 3.0, 1.0], [4.0, 3.0, 1.0]]
        assert await skyrl.encode(["ab"], dimensions=2) == [[2.0, 3.0]]
        assert await skyrl.encode_single("abcd", dimensions=2) == [4.0, 3.0]
        cosine = (2 * 4 + 3 * 3) / (math.hypot(2, 3) * math.hypot(4, 3))
        assert await skyrl.compute_similarity("ab", "abcd", dimensions=2) == pytest.approx(cosine)


async def test_outputs_are_scored_after_their_inputs(model: Path) -> None:
    async with everything(model, task="reward") as (skyrl, _):
        assert skyrl.supports_scoring() is True
        assert await skyrl.score([[1, 2], [3]], [[4], [5, 6]]) == {"scores": [7.0, 14.0], "hidden_states": None}
        with pytest.raises(UnsupportedCapability, match="return_hidden_states"):
            await skyrl.score([[1]], [[2]], return_hidden_states=True)
        with pytest.raises(InvalidRequest, match="1 inputs and 2 outputs"):
            await skyrl.score([[1]], [[2], [3]])


async def test_hidden_states_come_with_each_completion(model: Path) -> None:
    async with everything(model) as (skyrl, backend):
        backend.says = ["ab…", "c…"]
        output = await skyrl.generate({"prompt_token_ids": [[5], [6]], "return_hidden_states": True})
    assert output["hidden_states"] == [[[97.0], [98.0]], [[99.0]]]


async def test_profiles_and_storage_reach_the_engine(model: Path) -> None:
    async with everything(model) as (skyrl, backend):
        with pytest.raises(EngineStateError, match="start_profile"):
            await skyrl.stop_profile()
        assert await skyrl.start_profile() is True
        profile = await skyrl.stop_profile()
        assert Path(profile["trace"]).parent.is_dir()
        assert profile["duration_seconds"] >= 0
        assert await skyrl.clear_hicache_storage() is True
        assert backend.calls[-1] == "clear"


async def test_what_a_model_cannot_do_is_refused(skyrl: SkyRLInferenceEngine) -> None:
    assert (skyrl.supports_embeddings(), skyrl.supports_scoring()) == (False, False)
    with pytest.raises(InvalidRequest, match="task='embed'"):
        await skyrl.encode(["a"])
    with pytest.raises(InvalidRequest, match="task='reward'"):
        await skyrl.score([[1]], [[2]])


async def test_ids_are_decoded(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    eos = engine.model_info.eos_token_ids[0]
    assert await skyrl.decode([[104, 105, eos], [33]]) == ["hi", "!"]
    (with_special,) = await skyrl.decode([[104, eos]], skip_special_tokens=False)
    assert with_special.startswith("h")
    assert len(with_special) > 1


async def test_teardown_stops_the_engine(model: Path) -> None:
    async with everything(model) as (skyrl, _):
        await skyrl.teardown()
        assert skyrl.engine.state.value == "closed"


async def test_only_an_engine_can_be_behind_the_interface() -> None:
    with pytest.raises(InvalidRequest, match="attach"):
        SkyRLInferenceEngine("handle")  # type: ignore[arg-type]
