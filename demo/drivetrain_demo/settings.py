"""Settings of a demo run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from drivetrain.types.config import Isolation

WINDOW: Final = 5
"""Number of first and of last rollouts whose rewards are compared."""
MIN_STEPS_TO_JUDGE: Final = 20
"""Fewest steps of a run in which a rise is judged."""
LOGPROB_TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-3, "float16": 0.2, "bfloat16": 0.5}
"""Engine's dtype to largest allowed |trainer's logprob - engine's logprob| of a token, in nats."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for one kind of policy."""

    steps: int
    prompts_per_step: int
    n: int
    max_new_tokens: int
    learning_rate: float
    minibatches: int
    entropy_weight: float
    max_grad_norm: float


TINY_POLICY: Final = Defaults(
    steps=80,
    prompts_per_step=32,
    n=16,
    max_new_tokens=2,
    learning_rate=5e-4,
    minibatches=8,
    entropy_weight=0.03,
    max_grad_norm=0.3,
)
"""For the tiny policy, which is created with random weights."""
OTHER_POLICY: Final = Defaults(
    steps=20,
    prompts_per_step=8,
    n=8,
    max_new_tokens=32,
    learning_rate=1e-6,
    minibatches=1,
    entropy_weight=0.0,
    max_grad_norm=1.0,
)
"""For a model of the user's: the usual step size when a pretrained model is tuned."""


def tiny_policy(seed: int) -> Path:
    """Create the policy that is trained when the user names no model, and return its folder.

    One layer learns the shipped prompts as well as two, in half the time.
    """
    # Imported here, because it imports torch, which the command's help should not.
    from drivetrain.testing import tiny_model

    return tiny_model("qwen2", seed=seed, num_hidden_layers=1)


@dataclass(frozen=True, slots=True)
class Settings:
    """Complete settings of one run, without any default left to be resolved."""

    backend: str
    isolation: Isolation | None
    engine_fields: Mapping[str, JsonValue]
    """Further fields of the engine's configuration."""
    engines: int
    """Number of engines; more than one are a fleet."""
    model: str | None
    """Folder or hub id; None: a tiny policy with random weights."""
    prompts: Path | None
    """None: the shipped file."""
    chat: bool | None
    """True to send prompts as a user's message in a chat; None: if ``model`` is given and has a chat template."""
    steps: int
    prompts_per_step: int
    n: int
    max_new_tokens: int
    temperature: float
    learning_rate: float
    minibatches: int
    micro_batch: int
    entropy_weight: float
    max_grad_norm: float
    seed: int
    device: str
    """Device of the trainer's model."""
    logprob_tolerance: float | None
    """Largest allowed difference between the engine's and the trainer's logprobs, in nats; None: by the dtype."""
    min_rise: float
    expect_rise: bool
    """True if the run fails unless the reward rises by ``min_rise``."""

    @property
    def judges_rise(self) -> bool:
        """True if the rise is checked in this run."""
        return self.expect_rise and self.steps >= MIN_STEPS_TO_JUDGE
