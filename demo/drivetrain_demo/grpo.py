"""Group relative policy optimisation: pure functions of tensors.

The loss over all T tokens of a minibatch, with behaviour policy μ (the engine, whose logprobs came with the tokens)
and policy π_θ (the trainer):

    ρ_t  = exp(log π_θ(t) − log μ(t))
    A_i  = r_i − mean(r)                    over the completions i of one prompt; every token of i has A_i
    loss = −(1/T) Σ_t [ min(ρ_t A_i, clip(ρ_t, 1 − ε_low, 1 + ε_high) A_i) + β H_t ]

Sources: the clipped objective is PPO's (Schulman et al. 2017, arXiv 1707.06347, eq. 7), the group-relative advantage
GRPO's (Shao et al. 2024, arXiv 2402.03300, section 4.1) without its division by the group's standard deviation, as in
Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): with a graded reward the division would make the step from
"a number" to "a longer number" count as much as the step to the right one. The mean over tokens rather than over
completions, ε_high > ε_low and the absence of a KL term are DAPO's (Yu et al. 2025, arXiv 2503.14476). H is
the entropy of π_θ at temperature; β decays to zero over the run.
"""

from __future__ import annotations

import torch
from torch import Tensor

def group_advantages(rewards: Tensor) -> Tensor:
    """Return how much better each completion is than the others of its prompt.

    Args:
        rewards: Shape (prompts, completions per prompt), floating point.

    Returns:
        Advantages of the same shape. Groups of one, or of equal rewards, get zeros.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


def clipped_objective(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return min(ρA, clip(ρ)A) of each token, to be maximised.

    Args:
        logprobs: log π_θ of the tokens, shape (tokens,); gradients flow through this alone.
        behaviour: log μ of the same tokens, shape (tokens,).
        advantages: A of the completion that each token is of, shape (tokens,).
        clip_low: ε_low.
        clip_high: ε_high.
    """
    ratio = torch.exp(logprobs - behaviour)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def token_loss(objective: Tensor, entropy: Tensor, *, entropy_weight: float, tokens: int) -> Tensor:
    """Return the loss of some of a minibatch's tokens; over all of its parts it sums to the minibatch's loss.

    Args:
        objective: Of :func:`clipped_objective`, shape (tokens of this part,).
        entropy: H of each token's distribution in nats, shape (tokens of this part,).
        entropy_weight: β.
        tokens: T, the tokens of the whole minibatch.
    """
    return -(objective + entropy_weight * entropy).sum() / tokens
