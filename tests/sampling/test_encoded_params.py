"""Encoding a request's sampling so that an engine carries it along."""

from __future__ import annotations

from dataclasses import replace

from drivetrain import GenerateRequest, LogprobsMode, SamplingParams
from drivetrain.types.sampling import ActionMask
from drivetrain_sampling.encoded_params import encode_params, row_of


def request(params: SamplingParams, seed: int | None) -> GenerateRequest:
    return GenerateRequest("r", [1, 2, 3], params, 8, (9,), LogprobsMode.PROCESSED, seed)


def test_what_is_drawn_by_us_arrives_whole() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        logit_bias={300: -1.5},
        logprobs=2,
        logit_processors=(ActionMask(allowed_token_ids=(1, 300)),),
    )
    row = row_of(encode_params(request(params, seed=2**62 + 1)), [1, 2, 3], [9], [4])
    assert row.params == params
    assert (row.logprobs_mode, row.seed) == (LogprobsMode.PROCESSED, 2**62 + 1)
    assert (list(row.prompt_token_ids), list(row.generated)) == ([1, 2, 3], [4])


def test_the_number_of_resumed_ids_arrives() -> None:
    asked = replace(request(SamplingParams(), seed=1), resumed_tokens=2)
    assert row_of(encode_params(asked), [1, 2, 3], [], [4]).drawn() == [2, 3, 4]


def test_requests_without_a_seed_have_different_ones() -> None:
    asked = request(SamplingParams(top_k=3, top_p=0.5), seed=None)
    assert encode_params(asked) != encode_params(asked)
