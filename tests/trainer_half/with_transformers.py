"""The trainer's half beside the transformers that a trainer pins; the engine runs in another environment.

Run in such an environment: ``make test-trainer-half``.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from drivetrain import (
    BackendUnavailable,
    Completion,
    EngineConfig,
    LogprobsMode,
    SamplingParams,
    TextPrompt,
    create_engine,
)
from drivetrain.text.tokenizer import Tokenizer
from drivetrain_weight_sync import WeightSync

ModelFolder = Callable[..., Path]
STRATEGIES = ("shared_memory", "disk")
TOLERANCE = 1e-4
"""Nats by which the engine's and the trainer's logprobs may differ in float32."""


def policy_of(folder: Path, **config: object) -> nn.Module:
    policy: nn.Module = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **config)
    return policy.eval()


def train(policy: nn.Module, seed: int) -> None:
    """Move the weights, as a step of an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def logprobs_of(policy: nn.Module, completion: Completion) -> list[float]:
    prompt, tokens = completion.prompt_token_ids, completion.token_ids
    with torch.no_grad():
        logprobs = policy(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    return [float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens)]


def state_of(policy: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from policy.state_dict().items()


@pytest.mark.parametrize(
    ("architecture", "written", "read"),
    [
        ("qwen2", {}, {}),
        ("llama", {"tie_word_embeddings": True}, {}),
        # transformers 5 writes the number of experts under a name that 4 does not read.
        ("qwen3_moe", {"num_experts": 4}, {"num_experts": 4}),
    ],
    ids=["qwen2", "tied weights", "experts"],
)
def test_pushes_make_the_engines_logprobs_those_of_the_policy(
    model_folder: ModelFolder,
    host_python: str,
    architecture: str,
    written: dict[str, object],
    read: dict[str, object],
) -> None:
    folder = model_folder(architecture, **written)
    policy = policy_of(folder, **read)
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=0, logprobs_mode=LogprobsMode.RAW, seed=0)

    async def push_and_compare() -> None:
        async with create_engine("transformers", model=str(folder), dtype="float32", python=host_python) as engine:
            for step, (given, strategy) in enumerate(itertools.product(("module", "generator"), STRATEGIES)):
                sync = WeightSync.connect(
                    policy if given == "module" else lambda: state_of(policy), engine, strategy=strategy
                )
                for version in (f"{step}-first", f"{step}-second"):
                    train(policy, step)
                    await sync.push(version=version)
                    completion = (await engine.generate(["What is 3 + 4?"], sampling)).completions[0]
                    assert completion.weight_version == version
                    assert completion.logprobs == pytest.approx(logprobs_of(policy, completion), abs=TOLERANCE)
                await sync.close()

    asyncio.run(push_and_compare())


def test_text_and_ids_are_those_of_the_tokenizers_file(model_folder: ModelFolder) -> None:
    tokenizer = Tokenizer.load(EngineConfig(backend="transformers", model=str(model_folder())))
    assert tokenizer.encode(TextPrompt(text="Grüße <|im_end|>")) == [*"Grüße ".encode(), 258]


@pytest.mark.skipif(
    int(importlib.metadata.version("transformers").split(".")[0]) >= 5, reason="the backend runs with transformers 5"
)
@pytest.mark.parametrize("python", [None, sys.executable])
def test_an_engine_beside_an_older_transformers_is_refused(tmp_path: Path, python: str | None) -> None:
    with pytest.raises(BackendUnavailable, match=r"needs transformers 5\.4 or later.*python="):
        create_engine("transformers", model=str(tmp_path), python=python)
