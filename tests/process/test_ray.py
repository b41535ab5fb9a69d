"""An engine in a Ray actor: in a running event loop, off the main thread, where signal handlers cannot be set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from drivetrain.testing import tiny_model

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def actor_class() -> Any:
    # Defined in a function, so that Ray sends it by value: its workers cannot import tests.
    class Rollouts:
        async def life(self, model: str, isolation: str) -> tuple[list[int], list[str], bool]:
            import threading

            import psutil

            from drivetrain import SamplingParams, create_engine

            async with create_engine("transformers", model=model, isolation=isolation) as engine:
                batch = await engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, temperature=0))
            left = [process.name() for process in psutil.Process().children(recursive=True)]
            on_the_main_thread = threading.current_thread() is threading.main_thread()
            return list(batch.completions[0].token_ids), left, on_the_main_thread

    return ray.remote(Rollouts)


def greedy(model: Path, tokens: int) -> list[int]:
    module: Any = AutoModelForCausalLM.from_pretrained(model)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_an_engine_lives_and_ends_in_a_ray_actor(isolation: str) -> None:
    model = tiny_model("qwen2")
    tokens, left, on_the_main_thread = ray.get(actor_class().remote().life.remote(str(model), isolation), timeout=180)
    assert tokens == greedy(model, 4)
    assert left == []
    assert not on_the_main_thread
