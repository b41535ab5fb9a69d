"""The demo's trainer: a torch model, its logprobs, and its optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain import InvalidConfig
from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain_demo.grpo import clipped_objective, token_loss

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion for the trainer; ``token_ids`` and ``behaviour`` have the same length, at least 1."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    behaviour: Sequence[float]
    """The engine's logprob of each token."""
    advantage: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of the policy's update."""

    learning_rate: float
    minibatches: int
    """Optimizer steps per batch, each on its own share of the samples."""
    micro_batch: int
    """Most samples in one forward pass; affects memory only."""
    entropy_weight: float
    temperature: float
    max_grad_norm: float
    clip_low: float = 0.2
    clip_high: float = 0.28


class Trainer:
    """A policy in float32 with AdamW, whose forward pass uses the engine's dtype."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, *, compute_dtype: torch.dtype, seed: int) -> None:
        self.model = model
        self.recipe = recipe
        self._compute_dtype = compute_dtype
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        self._shuffle = torch.Generator().manual_seed(seed)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def load(cls, model: str | Path, recipe: Recipe, *, compute_dtype: torch.dtype, device: str, seed: int) -> Trainer:
        """Load the policy from a folder or hub id.

        Raises:
            InvalidConfig: there is no causal language model there.
        """
        try:
            with no_progress_bars():
                policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise InvalidConfig(
                f"no causal language model could be loaded from {str(model)!r}: {error}", field="model"
            ) from error
        # Not .train(): with dropout, the trainer's logprobs could not match the engine's.
        torch.nn.Module.to(policy, device)  # transformers' annotations do not allow a call of its own to()
        return cls(policy.eval(), recipe, compute_dtype=compute_dtype, seed=seed)

    @torch.no_grad()
    def logprob_gap(self, samples: Sequence[Sample]) -> float:
        """Return the largest |trainer's logprob - engine's logprob| over all tokens, in nats; 0 without samples."""
        gaps = [
            (self.score(part)[0] - _flat(part, self.model.device)).abs().max().item()
            for part in _parts(samples, self.recipe.micro_batch)
        ]
        return max(gaps, default=0.0)

    def step(self, samples: Sequence[Sample], *, entropy_scale: float) -> float:
        """Update the policy; return the mean entropy of the tokens in nats, as measured during the update.

        Args:
            samples: At least one.
            entropy_scale: Factor of the recipe's entropy weight.
        """
        order = torch.randperm(len(samples), generator=self._shuffle).tolist()
        share = -(-len(samples) // self.recipe.minibatches)
        entropies = [
            self._update([samples[index] for index in chosen], entropy_scale) for chosen in _parts(order, share)
        ]
        return sum(entropies) / len(entropies)

    def score(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of all tokens of ``samples``, one sample after the other.

        Both are after temperature, float32, of shape (tokens,). Samples of any length go through the model together,
        padded on the right: in a causal model, tokens do not see later ones.
        """
        device = self.model.device
        lengths = [len(sample.prompt_token_ids) + len(sample.token_ids) for sample in samples]
        width = max(lengths)
        ids = torch.zeros((len(samples), width), dtype=torch.long)
        mask = torch.zeros((len(samples), width), dtype=torch.long)
        rows: list[int] = []
        columns: list[int] = []
        for row, sample in enumerate(samples):
            ids[row, : lengths[row]] = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
            mask[row, : lengths[row]] = 1
            rows += [row] * len(sample.token_ids)
            columns += range(len(sample.prompt_token_ids), lengths[row])
        where, at = torch.tensor(rows, device=device), torch.tensor(columns, device=device)
        ids, mask = ids.to(device), mask.to(device)
        first = min(columns) - 1
        keep = {"logits_to_keep": width - first} if self._takes_logits_to_keep else {}
        with self._autocast():
            logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **keep).logits
        # The logits at a position belong to the next token.
        drawn_from = logits[where, at - 1 - (first if keep else 0)].float() / self.recipe.temperature
        distribution = drawn_from.log_softmax(-1)
        logprobs = distribution.gather(-1, ids[where, at][:, None])[:, 0]
        return logprobs, -(distribution.exp() * distribution).sum(-1)

    def _update(self, samples: Sequence[Sample], entropy_scale: float) -> float:
        recipe, device = self.recipe, self.model.device
        tokens = sum(len(sample.token_ids) for sample in samples)
        entropy_sum = 0.0
        self._optimizer.zero_grad()
        for part in _parts(samples, recipe.micro_batch):
            logprobs, entropy = self.score(part)
            advantages = torch.tensor([s.advantage for s in part for _ in s.token_ids], device=device)
            objective = clipped_objective(
                logprobs, _flat(part, device), advantages, clip_low=recipe.clip_low, clip_high=recipe.clip_high
            )
            weight = recipe.entropy_weight * entropy_scale
            loss = token_loss(objective, entropy, entropy_weight=weight, tokens=tokens)
            torch.autograd.backward(loss)
            entropy_sum += entropy.detach().sum().item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm)
        self._optimizer.step()
        return entropy_sum / tokens

    def _autocast(self) -> AbstractContextManager[object]:
        if self._compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self._compute_dtype)


def _flat(samples: Sequence[Sample], device: torch.device) -> Tensor:
    return torch.tensor([value for sample in samples for value in sample.behaviour], device=device)


def _parts(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
