"""vLLM's sampling parameters are translated or refused, and answers have vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain import Completion, InvalidRequest, SamplingParams
from drivetrain.types.outputs import FinishReason
from drivetrain_trainers.openrlhf.sampling import Logprob, request_output, sampling_params


@dataclass
class Params:
    """Fields of vLLM's class that matter here, with its defaults."""

    temperature: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | None = None
    logprobs: int | None = None
    detokenize: bool = True
    bad_words: list[str] | None = None
    output_kind: int = 0
    logit_bias: dict[int, float] | None = None
    _eos_token_id: int | None = field(default=2, repr=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_new_tokens": 16}),
        ({"top_k": -1}, {"max_new_tokens": 16}),
        ({"top_k": 5, "temperature": 0.5}, {"max_new_tokens": 16, "top_k": 5, "temperature": 0.5}),
        ({"max_tokens": None, "min_tokens": 1}, {"min_new_tokens": 1}),
        ({"stop": ["a", "b"], "logprobs": 1}, {"max_new_tokens": 16, "stop": ("a", "b"), "logprobs": 1}),
        ({"logit_bias": {3: -2.0}, "output_kind": 2}, {"max_new_tokens": 16, "logit_bias": {3: -2.0}}),
    ],
)
def test_fields_are_translated(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert SamplingParams.model_validate(sampling_params(Params(**given))) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (Params(bad_words=["no"]), "bad_words"),
        (Params(detokenize=False), "detokenize"),
        (SimpleNamespace(temperature=1.0, truncate_prompt_tokens=4), "truncate_prompt_tokens"),
        (Params(top_k="5"), "top_k"),  # type: ignore[arg-type]
        (7, "sampling_params=7"),
    ],
)
def test_what_is_not_translated_is_refused_by_name(given: object, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        sampling_params(given)


def test_an_answer_has_the_logprob_of_each_sampled_token() -> None:
    completion = Completion(
        request_id="r",
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=[1, 2],
        token_ids=[7, 8],
        text="hi",
        finish_reason=FinishReason.LENGTH,
        logprobs=[-0.5, -3.0],
        top_logprobs=[[(7, -0.5)], [(9, -0.1)]],
    )
    answer = request_output([completion])
    (output,) = answer.outputs
    assert answer.prompt_token_ids + output.token_ids == [1, 2, 7, 8]
    assert (output.text, output.finish_reason) == ("hi", "length")
    assert output.logprobs == [{7: Logprob(-0.5, 1)}, {8: Logprob(-3.0), 9: Logprob(-0.1, 1)}]
