"""Group relative policy optimisation: pure functions of tensors.

The loss over all T tokens of a minibatch, where the tokens were drawn by the behaviour policy mu (the engine, whose
logprobs came with them) and pi is the policy that is trained:

    ratio_t     = exp(log pi(t) - log mu(t))
    advantage_i = r_i - mean(r)        over the completions i of one prompt; every token of i has advantage_i
    objective_t = min(ratio_t * advantage_i, clip(ratio_t, 1 - clip_low, 1 + clip_high) * advantage_i)
    loss        = -(1/T) * sum_t (objective_t + entropy_weight * H_t)

Sources: the clipped objective is PPO's (Schulman et al. 2017, arXiv 1707.06347, eq. 7), the group-relative advantage
GRPO's (Shao et al. 2024, arXiv 2402.03300, section 4.1) without its division by the group's standard deviation, as in
Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): with a graded reward the division would make the step from
"a number" to "a longer number" count as much as the step to the right one. The mean over tokens rather than over
completions, clip_high > clip_low and the absence of a KL term are DAPO's (Yu et al. 2025, arXiv 2503.14476). H is
the entropy of pi after temperature; its weight decays to zero over the run.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """Return the advantage of each completion over the mean of its prompt's completions.

    Args:
        rewards: Shape (prompts, completions per prompt), floating point.

    Returns:
        Advantages of the same shape. Groups of one, or of equal rewards, get zeros.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


def clipped_objective(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return objective_t of each token, to be maximised.

    Args:
        logprobs: log pi of the tokens, shape (tokens,); gradients flow only through these.
        behaviour: log mu of the same tokens, shape (tokens,).
        advantages: Advantage of each token's completion, shape (tokens,).
        clip_low: Distance below 1 at which a ratio is clipped.
        clip_high: Distance above 1 at which a ratio is clipped.
    """
    ratio = torch.exp(logprobs - behaviour)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def token_loss(objective: Tensor, entropy: Tensor, *, entropy_weight: float, tokens: int) -> Tensor:
    """Return the loss of a part of a minibatch's tokens; the losses of all parts sum to the minibatch's loss.

    Args:
        objective: Result of :func:`clipped_objective`, shape (tokens of this part,).
        entropy: H of each token's distribution in nats, shape (tokens of this part,).
        entropy_weight: Weight of H in the loss.
        tokens: T, the tokens of the whole minibatch.
    """
    return -(objective + entropy_weight * entropy).sum() / tokens
