# pyright: reportMissingImports=false
"""A small training with TRL's own AsyncGRPOTrainer on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from datasets import Dataset
from transformers import AttentionInterface, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from tiny_grpo import PROMPTS, SAMPLES, TOKENS, folder

BUDGET: Final = 300
"""Tokens of a row, which holds the completions of a step."""


def letters(completions: Sequence[Any], **_: object) -> list[float]:
    """Return the share of lower-case letters of each completion. TRL's worker pickles it by name."""
    texts = [messages[0].get("content") or "" for messages in completions]
    return [sum("a" <= letter <= "z" for letter in text) / max(len(text), 1) for text in texts]


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute TRL's tree attention with torch: TRL's own calls a kernel of FlashAttention 3, which needs a GPU.

    Each segment of the queries attends causally to the keys of its path, which end with its own.
    """
    queries, out = query[0], []
    keys, values = key[0].index_select(1, tree_kv_index), value[0].index_select(1, tree_kv_index)
    groups = queries.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    ends_q, ends_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for index in range(len(ends_q) - 1):
        own = queries[:, ends_q[index] : ends_q[index + 1]]
        path = slice(ends_k[index], ends_k[index + 1])
        length, seen = own.shape[1], ends_k[index + 1] - ends_k[index]
        mask = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                own, keys[:, path], values[:, path], attn_mask=mask, scale=scaling
            )
        )
    return torch.cat(out, 1).transpose(0, 1)[None], None


def config(**settings: Any) -> Any:
    """Return an ``AsyncGRPOConfig`` for a CPU."""
    given: dict[str, Any] = {"output_dir": "build/trl", "use_cpu": True, "bf16": False, "save_strategy": "no"}
    given |= {"report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False, "logging_steps": 1}
    given |= {"max_completion_length": TOKENS, "learning_rate": 3e-3, "num_generations": SAMPLES}
    given |= {"per_device_train_batch_size": len(PROMPTS) * SAMPLES, "token_budget": BUDGET, "max_staleness": 1}
    given |= {"max_inflight_tasks": SAMPLES, "queue_maxsize": len(PROMPTS) * SAMPLES}
    return AsyncGRPOConfig(**{**given, **settings})


def tokenizer() -> Any:
    """Return the policy's tokenizer with a chat template that TRL can parse."""
    made = AutoTokenizer.from_pretrained(folder())
    made.chat_template = qwen3_chat_template
    return made


def rows() -> Dataset:
    """Return the prompts."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS * 64])


def trainer(args: Any, processing_class: Any, **more: Any) -> Any:
    """Return the trainer, whose attention is computed by torch, and which does not ask CUDA for a GPU's name."""
    torch.set_num_threads(1)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    made = AsyncGRPOTrainer(model=folder(), args=args, train_dataset=rows(), processing_class=processing_class, **more)
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    made.remove_callback(PrinterCallback)
    return made


class Recorded(TrainerCallback):
    """Keeps the weights of each version that a trainer sends, and the samples that it takes."""

    def __init__(self, training: Any) -> None:
        self._training = training
        self._queue = training.rollout_queue
        self.samples: list[Any] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        training.rollout_queue = self
        training.add_callback(self)

    def get(self, timeout: float) -> Any:
        """Take a sample from the worker."""
        self.samples.append(self._queue.get(timeout=timeout))
        return self.samples[-1]

    def qsize(self) -> int:
        """Return the number of samples that wait."""
        return int(self._queue.qsize())

    def on_train_begin(self, args: object, state: Any, control: object, **_: object) -> None:
        """Keep the weights that training begins with."""
        self._keep(1)

    def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
        """Keep the weights that the step made."""
        self._keep(state.global_step + 1)

    def _keep(self, version: int) -> None:
        state = self._training.model.state_dict()
        self.weights[version] = {name: tensor.detach().clone() for name, tensor in state.items()}

    def largest_gap(self, most_samples: int = 64) -> float:
        """Return the largest difference between a sampled token's logprob and that of the weights that sampled it.

        A completion may have begun with one version and ended with later ones, so the nearest of these counts.
        """
        model = self._training.model
        model.set_attn_implementation("sdpa")
        chosen = self.samples[:: max(1, len(self.samples) // most_samples)]
        nearest: list[list[float]] = [[] for _ in chosen]
        for version, state in self.weights.items():
            model.load_state_dict(state)
            for index, sample in enumerate(chosen):
                if version < sample.model_version:
                    continue
                ids = torch.from_numpy(sample.input_ids)
                with torch.no_grad():
                    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
                gaps = (logprobs - torch.from_numpy(sample.old_log_probs)[1:]).abs()
                gaps = gaps[torch.from_numpy(sample.completion_mask)[1:] == 1].tolist()
                nearest[index] = gaps if not nearest[index] else [*map(min, nearest[index], gaps)]
        assert all(nearest)
        return max(map(max, nearest))

    @property
    def versions(self) -> set[int]:
        """Return the versions with which the samples began."""
        return {sample.model_version for sample in self.samples}
