"""Stops: the end of generation, and the remaining ids and text.

``logit_bias`` forces the model through a chosen text, so that a test knows exactly what is sampled.
"""

from __future__ import annotations

import pytest

from drivetrain import Completion, FinishReason, InferenceEngine, InvalidRequest, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def sample(engine: InferenceEngine, **params: object) -> Completion:
    """Return a sample of 60 tokens that is the same whatever stops are set."""
    base = {"temperature": 1.0, "seed": 7, "max_new_tokens": 60, "ignore_eos": True, "logprobs": 1}
    # Only lower-case letters, so that every id is one character and the tests read as text.
    bias = {token_id: 100.0 for token_id in range(97, 123)}
    output = await engine.generate("stops", {**base, "logit_bias": bias, **params})
    return output.completions[0]


async def test_a_stop_string_ends_generation_at_its_first_match(engine: InferenceEngine) -> None:
    free = await sample(engine)
    stop = free.text[10:13]
    at = free.text.index(stop)
    stopped = await sample(engine, stop=[stop, "0 never"])
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.matched_stop == stop
    assert stopped.text == free.text[:at]
    assert stopped.token_ids == free.token_ids[:at]
    assert stopped.logprobs == pytest.approx(free.logprobs[:at], abs=1e-4)  # type: ignore[index]
    assert stopped.top_logprobs is not None
    assert len(stopped.top_logprobs) == at
    assert stopped.weight_versions[-1].end == at


async def test_the_stop_string_is_kept_if_asked_for(engine: InferenceEngine) -> None:
    free = await sample(engine)
    stop = free.text[20:24]
    at = free.text.index(stop)
    stopped = await sample(engine, stop=stop, include_stop_str_in_output=True)
    assert stopped.text == free.text[: at + 4]
    assert stopped.token_ids == free.token_ids[: at + 4]


async def test_a_stop_regex_ends_generation_at_the_first_text_that_has_a_match(engine: InferenceEngine) -> None:
    free = await sample(engine)
    pattern = f"{free.text[15]}[a-z]{free.text[17]}"
    stopped = await sample(engine, stop_regex=[pattern])
    assert stopped.matched_stop == pattern
    assert free.text.startswith(stopped.text)
    assert stopped.text + free.text[len(stopped.text) :][:3] == free.text[: len(stopped.text) + 3]
    assert len(stopped.text) <= 15
    kept = await sample(engine, stop_regex=[pattern], include_stop_str_in_output=True)
    assert kept.text == free.text[: len(stopped.text) + 3]


async def test_a_match_at_the_very_start_leaves_nothing(engine: InferenceEngine) -> None:
    free = await sample(engine)
    stopped = await sample(engine, stop=free.text[:2])
    assert (stopped.text, stopped.token_ids, stopped.logprobs) == ("", [], [])
    assert stopped.finish_reason is FinishReason.STOP


async def test_no_stop_string_matches_before_min_new_tokens(engine: InferenceEngine) -> None:
    free = await sample(engine)
    early, late = free.text[5:8], free.text[40:43]
    stopped = await sample(engine, stop=[early, late], min_new_tokens=30)
    later = min(i for i in (free.text.find(early, 28), free.text.find(late, 28)) if i >= 0)
    assert stopped.text == free.text[:later]


async def test_a_stop_token_id_stays_in_the_ids_and_out_of_the_text(engine: InferenceEngine) -> None:
    free = await sample(engine)
    stop = free.token_ids[12]
    at = free.token_ids.index(stop)
    stopped = await sample(engine, stop_token_ids=[stop])
    assert stopped.matched_stop == stop
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert len(stopped.logprobs or []) == at + 1
    assert stopped.text == free.text[:at]


async def test_a_stream_never_shows_what_a_stop_string_takes_away(engine: InferenceEngine) -> None:
    free = await sample(engine)
    stop = free.text[30:34]
    bias = {token_id: 100.0 for token_id in range(97, 123)}
    params = SamplingParams(
        seed=7, max_new_tokens=60, ignore_eos=True, logit_bias=bias, stop=(stop, free.text[31:33] + "0"), logprobs=0
    )
    chunks = [chunk async for chunk in engine.generate_stream("stops", params)]
    final = chunks[-1].completion
    assert final is not None
    assert final.text == free.text[: free.text.index(stop)]
    assert "".join(chunk.text for chunk in chunks) == final.text
    assert [i for chunk in chunks for i in chunk.token_ids] == final.token_ids
    assert [p for chunk in chunks for p in chunk.logprobs or []] == pytest.approx(final.logprobs)


async def test_stops_that_could_never_work_are_refused(engine: InferenceEngine) -> None:
    for params, says in (
        ({"stop_regex": "(unclosed"}, "does not compile"),
        ({"stop_regex": "a*"}, "empty string"),
        ({"stop": ""}, "empty stop string"),
        ({"stop": "<|im_end|>"}, "special token"),
        ({"stop_token_ids": [10**6]}, "outside the vocabulary"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            await engine.generate("x", params)
