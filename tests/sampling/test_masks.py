"""Masks of the sampler are the ids whose processed logits are above minus infinity, packed on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import LogprobsMode, SamplingMask, SamplingParams
from drivetrain_sampling import Choice, Row, Sampler
from drivetrain_sampling.packed_masks import joined, pack

CPU = torch.device("cpu")


def mask_of(rows: list[bytes]) -> SamplingMask:
    mask = joined(rows)
    assert mask is not None
    return mask


def chosen(params: list[SamplingParams], vocabulary: int = 300) -> tuple[Choice, dict[int, SamplingMask]]:
    logits = torch.randn(len(params), vocabulary, generator=torch.Generator().manual_seed(1))
    rows = [Row(one, LogprobsMode.RAW, [1, 2], [5], seed, []) for seed, one in enumerate(params)]
    sampler = Sampler(rows, CPU)
    choice = sampler.choose(logits)
    return choice, {row: mask_of([packed]) for row, packed in sampler.masks(choice).items()}


@settings(deadline=None)
@given(st.integers(1, 130), st.lists(st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]), max_size=5), st.integers(0, 99))
def test_rows_of_any_density_are_packed_as_on_the_host(vocabulary: int, densities: list[float], seed: int) -> None:
    random = torch.rand(len(densities), vocabulary, generator=torch.Generator().manual_seed(seed))
    kept = random < torch.tensor(densities).reshape(-1, 1)
    sets = [row.nonzero()[:, 0].tolist() for row in kept]
    assert joined(pack(kept)) == (SamplingMask.of(vocabulary, sets) if sets else None)
    assert [mask_of([row]) for row in pack(kept)] == [SamplingMask.of(vocabulary, [ids]) for ids in sets]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2, "temperature": 0.7},
        {"min_new_tokens": 2},
        {"logit_processors": [{"kind": "action_mask", "allowed_token_ids": [3, 9, 200]}], "top_k": 2},
    ],
)
def test_the_ids_are_those_that_were_left(fields: dict[str, object]) -> None:
    choice, masks = chosen([SamplingParams.model_validate({**fields, "return_sampling_mask": True})])
    assert masks[0].ids(0) == torch.nonzero(choice.processed[0] > -torch.inf)[:, 0].tolist()
    assert int(choice.token_ids[0]) in masks[0].ids(0)


def test_only_rows_that_ask_have_masks_and_greedy_ones_their_token() -> None:
    plain, greedy = SamplingParams(), SamplingParams(temperature=0, top_k=5, return_sampling_mask=True)
    choice, masks = chosen([plain, greedy, SamplingParams(top_k=3, return_sampling_mask=True), greedy])
    assert list(masks) == [1, 2, 3]
    assert [masks[row].ids(0) for row in (1, 3)] == [[int(choice.token_ids[row])] for row in (1, 3)]
    assert masks[2].count(0) == 3
    assert chosen([plain])[1] == {}


def test_a_row_whose_logits_are_nan_harms_no_other() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    logits[0] = torch.nan
    params = SamplingParams(top_k=4, return_sampling_mask=True)
    sampler = Sampler([Row(params, LogprobsMode.RAW, [1], [], seed) for seed in range(2)], CPU)
    drawn = sampler.draw(logits)
    assert drawn.token_ids[0] < 0
    assert mask_of([drawn.masks[1]]).ids(0) == sorted(logits[1].topk(4).indices.tolist())
