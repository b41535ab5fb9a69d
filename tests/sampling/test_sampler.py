"""The sampler's two forms agree: one gathers the requested logprobs, the other leaves all on the device."""

from __future__ import annotations

import pytest
import torch

from drivetrain import LogprobsMode, SamplingParams
from drivetrain.types.sampling import DisallowedTokens
from drivetrain_sampling import Row, Sampler
from drivetrain_sampling.sampler import weights

VOCABULARY = 16


def rows(mode: LogprobsMode) -> list[Row]:
    wanted = [
        SamplingParams(logprobs=3),
        SamplingParams(logprobs=3, temperature=0),
        SamplingParams(logprobs=3, temperature=0.5, top_k=4, top_p=0.9),
        SamplingParams(logprobs=3, repetition_penalty=1.3, logit_bias={2: 1.0}, min_new_tokens=3),
        SamplingParams(logprobs=3, logit_processors=(DisallowedTokens(token_ids=(1,)),)),
        SamplingParams(),
    ]
    return [Row(params, mode, [1, 2], [5], seed, []) for seed, params in enumerate(wanted)]


@pytest.mark.parametrize("mode", LogprobsMode)
def test_both_faces_agree(mode: LogprobsMode) -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    drawn = Sampler(rows(mode), torch.device("cpu")).draw(logits)
    sampler = Sampler(rows(mode), torch.device("cpu"))
    choice = sampler.choose(logits)
    every = sampler.logprobs(choice)
    assert choice.token_ids.tolist() == drawn.token_ids
    assert drawn.logprobs is not None
    for row in range(5):
        assert every[row, drawn.token_ids[row]].item() == pytest.approx(drawn.logprobs[row], abs=1e-5)
        for token, logprob in drawn.top_logprobs[row]:
            assert every[row, token].item() == pytest.approx(logprob, abs=1e-5)


def test_raw_logits_beneath_a_mask_are_the_models() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    masked = logits.clone()
    masked[0, 3:] = -torch.inf
    sampler = Sampler([Row(SamplingParams(logprobs=0), LogprobsMode.RAW, [1], [], 0)], torch.device("cpu"))
    choice = sampler.choose(masked, logits)
    assert choice.token_ids.item() < 3
    assert torch.allclose(sampler.logprobs(choice), logits.log_softmax(-1))


def test_a_rows_stream_depends_on_its_seed_and_length_alone() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    params, mode = SamplingParams(temperature=2.0), LogprobsMode.RAW
    alone = Sampler([Row(params, mode, [1], [], 7, [4, 4])], torch.device("cpu")).choose(logits)
    others = [Row(params, mode, [2], [], seed, []) for seed in range(3)]
    together = Sampler([*others, Row(params, mode, [9], [], 7, [8, 8])], torch.device("cpu")).choose(
        logits.expand(4, -1)
    )
    assert together.token_ids[3] == alone.token_ids[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 2.0},
        {"min_new_tokens": 4, "logit_bias": {5: 30.0}},
        {"logit_processors": [{"kind": "temperature_schedule", "start": 0.1, "end": 5.0, "steps": 9}]},
    ],
)
def test_resumed_ids_count_as_drawn(fields: dict[str, object]) -> None:
    params, mode, device = SamplingParams.model_validate(fields), LogprobsMode.PROCESSED, torch.device("cpu")
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5))
    unbroken = Sampler([Row(params, mode, [1, 2], [5], 7, [3, 4, 3])], device).choose(logits)
    resumed = Sampler([Row(params, mode, [1, 2, 3, 4], [5], 7, [3], resumed=2)], device).choose(logits)
    assert resumed.token_ids.tolist() == unbroken.token_ids.tolist()
    assert torch.equal(resumed.processed, unbroken.processed)


def test_the_order_in_which_weights_are_added_up_changes_no_cut() -> None:
    logits = torch.randn(4, 9999, generator=torch.Generator().manual_seed(4)) * 3
    forwards, backwards = weights(logits), weights(logits.flip(-1))
    assert torch.equal(forwards.cumsum(-1)[:, -1], backwards.cumsum(-1)[:, -1])
    assert torch.equal(forwards.cumsum(-1) - forwards, (forwards.sum(-1, keepdim=True) - backwards.cumsum(-1).flip(-1)))


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_p": 0.7, "top_k": 300, "min_p": 0.01}])
def test_draws_are_the_same_alone_and_in_a_batch(params: dict[str, float]) -> None:
    logits = torch.randn(1, 999, generator=torch.Generator().manual_seed(4)) * 3
    made = SamplingParams.model_validate(params)
    rows = [Row(made, LogprobsMode.RAW, [1], [], seed) for seed in range(64)]
    together = Sampler(rows, torch.device("cpu")).choose(logits.expand(64, -1)).token_ids
    alone = [Sampler([row], torch.device("cpu")).choose(logits).token_ids.item() for row in rows]
    assert together.tolist() == alone


def test_beside_a_nucleus_nothing_is_cut_of_a_row_that_has_none() -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 60
    rows = [Row(SamplingParams(), LogprobsMode.PROCESSED, [1], [], 0)]
    rows += [Row(SamplingParams(top_p=0.5), LogprobsMode.PROCESSED, [1], [], 0)]
    choice = Sampler(rows, torch.device("cpu")).choose(logits)
    assert torch.equal(choice.processed[0], logits[0])
    assert choice.processed[1].isinf().any()


def test_draws_are_in_the_proportion_of_probabilities() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    rows = [Row(SamplingParams(), LogprobsMode.RAW, [1], [], seed) for seed in range(20000)]
    drawn = Sampler(rows, torch.device("cpu")).choose(probabilities.log().expand(20000, -1)).token_ids
    found = drawn.bincount(minlength=4) / 20000
    assert torch.allclose(found, probabilities[0], atol=0.015)
