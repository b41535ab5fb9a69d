from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drivetrain import InvalidConfig
from drivetrain.testing import tiny_model
from drivetrain_demo.trainer import Recipe, Sample, Trainer
from oracle import load, logits_of

LENGTHS = ((3, 5), (17, 1), (1, 9), (8, 2), (30, 4))
"""Lengths of prompt and completion, in tokens."""


def make_trainer(model: Path, *, micro_batch: int = 64, temperature: float = 1.0, minibatches: int = 1) -> Trainer:
    recipe = Recipe(
        learning_rate=1e-2,
        minibatches=minibatches,
        micro_batch=micro_batch,
        entropy_weight=0.0,
        temperature=temperature,
        max_grad_norm=1.0,
    )
    return Trainer.load(model, recipe, compute_dtype=torch.float32, device="cpu", seed=0)


def make_samples(behaviour: float = -3.0) -> list[Sample]:
    ids = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(250, (count,), generator=ids).tolist()

    return [
        Sample(draw(prompt), draw(output), [behaviour] * output, advantage=(-1.0) ** index)
        for index, (prompt, output) in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_padded_samples_are_those_of_each_sample_alone(architecture: str, temperature: float) -> None:
    model = tiny_model(architecture)
    samples = make_samples()
    with torch.no_grad():
        logprobs, entropy = make_trainer(model, temperature=temperature).score(samples)
    at = 0
    for sample in samples:
        logits = logits_of(load(model), list(sample.prompt_token_ids), list(sample.token_ids)) / temperature
        distribution = logits.log_softmax(-1)
        expected = distribution.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        end = at + len(sample.token_ids)
        torch.testing.assert_close(logprobs[at:end], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(entropy[at:end], -(distribution.exp() * distribution).sum(-1), atol=1e-4, rtol=0)
        at = end
    assert at == len(logprobs) == len(entropy)


@pytest.mark.parametrize("micro_batch", [1, 2, 64])
def test_the_gap_is_the_largest_over_all_tokens(micro_batch: int) -> None:
    trainer = make_trainer(tiny_model(), micro_batch=micro_batch)
    samples = make_samples()
    exact = []
    for sample in samples:
        with torch.no_grad():
            exact.append(Sample(sample.prompt_token_ids, sample.token_ids, trainer.score([sample])[0].tolist(), 0.0))
    assert trainer.logprob_gap(exact) < 1e-4
    wrong = [*exact[3].behaviour]
    wrong[1] += 0.25
    exact[3] = Sample(exact[3].prompt_token_ids, exact[3].token_ids, wrong, 0.0)
    assert trainer.logprob_gap(exact) == pytest.approx(0.25, abs=1e-4)
    assert trainer.logprob_gap([]) == 0.0


def test_a_step_makes_good_completions_likelier_and_bad_ones_less_likely() -> None:
    trainer = make_trainer(tiny_model())
    samples = make_samples()
    with torch.no_grad():
        samples = [
            Sample(s.prompt_token_ids, s.token_ids, trainer.score([s])[0].tolist(), s.advantage) for s in samples
        ]
    trainer.step(samples, entropy_scale=0.0)
    with torch.no_grad():
        changes = [(trainer.score([s])[0] - torch.tensor(s.behaviour)).sum().item() * s.advantage for s in samples]
    assert sum(changes) > 0
    assert all(change > 0 for change in changes)


def test_the_size_of_the_forward_pass_does_not_change_the_update() -> None:
    updated = []
    for micro_batch in (1, 2, 64):
        trainer = make_trainer(tiny_model(), micro_batch=micro_batch, minibatches=2)
        trainer.step(make_samples(behaviour=-5.5), entropy_scale=0.0)
        updated.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    before = torch.cat([p.detach().flatten() for p in make_trainer(tiny_model()).model.parameters()])
    assert not torch.equal(before, updated[0])
    # AdamW divides by the gradient's size, so parameters with almost no gradient move by rounding noise.
    for other in updated[1:]:
        assert ((other - updated[0]).abs() < 1e-4).float().mean() > 0.99


def test_entropy_weight_keeps_the_policy_open() -> None:
    samples = [Sample(s.prompt_token_ids, s.token_ids, s.behaviour, 0.0) for s in make_samples()]
    recipe = Recipe(
        learning_rate=1e-3, minibatches=1, micro_batch=64, entropy_weight=1.0, temperature=1.0, max_grad_norm=1.0
    )
    trainer = Trainer.load(tiny_model(), recipe, compute_dtype=torch.float32, device="cpu", seed=0)
    entropies = [trainer.step(samples, entropy_scale=1.0) for _ in range(3)]
    assert entropies == sorted(set(entropies))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no causal language model"):
        make_trainer(tmp_path)
