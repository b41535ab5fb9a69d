# pyright: reportMissingImports=false
"""TRL's loop over tools gets every turn from the engine behind use_vllm: ``make test-trl``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from drivetrain_trainers.trl import generation
from tiny_grpo import BACKENDS, engine_of, folder, letters, policy


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_turn_after_a_tool_comes_from_the_engine_with_its_logprobs(backend: str) -> None:
    """The policy has random weights and calls no tool by itself, so its first turn is given."""
    tokenizer = AutoTokenizer.from_pretrained(folder())
    tokenizer.chat_template = qwen3_chat_template
    question: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call><|im_end|>\n'
    settings = GRPOConfig(
        output_dir="build/trl", use_cpu=True, bf16=False, report_to="none", use_vllm=True, max_completion_length=200,
        per_device_train_batch_size=8, num_generations=4,
    )  # fmt: skip
    with generation(engine_of(backend)):
        training: Any = GRPOTrainer(
            model=policy(),
            reward_funcs=letters,
            tools=[add],
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": question}]),
            args=settings,
        )
        prompts = [question]
        prompt_ids, _, _ = training._tokenize_prompts(prompts)
        training._generate_single_turn(prompt_ids, None, {}, 1)
        training._sync_tool_dicts, training._async_tool_dicts = [{"add": add}], [{}]
        turn = tokenizer(text).input_ids
        first = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        mask, completions, ids, logprobs, calls, failures, _ = training._tool_call_loop(
            prompts, prompt_ids, [list(turn)], [first], [[0.0] * len(turn)], None, {}
        )
    assert (calls, failures) == (1, 0)
    assert {"role": "tool", "name": "add", "content": "2"}.items() <= completions[0][1].items()
    assert len(ids[0]) == len(logprobs[0]) == len(mask[0]) > len(turn)
    generated = [place for place, own in enumerate(mask[0]) if own and place >= len(turn)]
    assert generated
    whole = [*prompt_ids[0], *ids[0]]
    with torch.no_grad():
        logits = policy()(torch.tensor([whole])).logits[0].log_softmax(-1)
    for place in generated:
        at = len(prompt_ids[0]) + place
        assert logprobs[0][place] == pytest.approx(float(logits[at - 1, whole[at]]), abs=1e-4)
