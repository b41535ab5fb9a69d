from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from drivetrain_demo.grpo import clipped_objective, group_advantages, token_loss

LOW, HIGH = 0.2, 0.28


def test_advantages_compare_the_completions_of_one_prompt() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5], [0.2, 0.2, 0.2]])
    assert_close(group_advantages(rewards), torch.tensor([[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]))


def test_advantages_do_not_depend_on_how_generous_a_prompt_is() -> None:
    rewards = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    assert_close(group_advantages(rewards + torch.tensor([[0.0], [1.0], [2.0], [3.0]])), group_advantages(rewards))


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([[0.7]])).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.2),
        (1.5, 2.0, 2.56, 0.0),  # already likelier than 1 + clip_high allows: nothing more to gain
        (0.5, 2.0, 1.0, 1.0),  # the pessimistic side is not clipped
        (1.5, -2.0, -3.0, -3.0),
        (0.9, -2.0, -1.8, -1.8),
        (0.5, -2.0, -1.6, 0.0),  # already less likely than 1 - clip_low allows
    ],
)
def test_objective_and_its_gradient_in_closed_form(
    ratio: float, advantage: float, expected: float, slope: float
) -> None:
    logprob = torch.tensor([ratio], dtype=torch.float64).log().sub(1.0).requires_grad_()
    behaviour = torch.tensor([-1.0], dtype=torch.float64)
    objective = clipped_objective(
        logprob, behaviour, torch.tensor([advantage], dtype=torch.float64), clip_low=LOW, clip_high=HIGH
    )
    (gradient,) = torch.autograd.grad(objective.sum(), logprob)
    assert objective.item() == pytest.approx(expected)
    # d ratio / d logprob = ratio, so the slope is ratio * advantage, or zero where it is clipped.
    assert gradient.item() == pytest.approx(slope)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(11, (5, 1))
    advantages = torch.randn(5, dtype=torch.float64)
    logprobs = logits.log_softmax(-1).gather(-1, ids)[:, 0]
    objective = clipped_objective(logprobs, logprobs.detach(), advantages, clip_low=LOW, clip_high=HIGH)
    loss = token_loss(objective, torch.zeros(5, dtype=torch.float64), entropy_weight=0.0, tokens=5)
    (gradient,) = torch.autograd.grad(loss, logits)
    one_hot = torch.zeros(5, 11, dtype=torch.float64).scatter(-1, ids, 1.0)
    assert_close(gradient, -advantages[:, None] * (one_hot - logits.softmax(-1)).detach() / 5)


def test_the_gradient_of_the_whole_loss_is_that_of_finite_differences() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(7, (6, 1))
    advantages = torch.randn(6, dtype=torch.float64)
    behaviour = logits.detach().log_softmax(-1).gather(-1, ids)[:, 0] + 0.3 * torch.randn(6, dtype=torch.float64)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        distribution = logits.log_softmax(-1)
        objective = clipped_objective(
            distribution.gather(-1, ids)[:, 0], behaviour, advantages, clip_low=LOW, clip_high=HIGH
        )
        entropy = -(distribution.exp() * distribution).sum(-1)
        return token_loss(objective, entropy, entropy_weight=0.1, tokens=6)

    assert torch.autograd.gradcheck(loss, logits)


def test_the_loss_of_a_minibatch_is_the_sum_over_its_parts() -> None:
    objective, entropy = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 1.0, 1.5])
    whole = token_loss(objective, entropy, entropy_weight=0.1, tokens=3)
    parts = token_loss(objective[:1], entropy[:1], entropy_weight=0.1, tokens=3)
    parts = parts + token_loss(objective[1:], entropy[1:], entropy_weight=0.1, tokens=3)
    assert whole.item() == pytest.approx(-(2.0 / 3 + 0.1 * 1.0))
    assert_close(parts, whole)
