# pyright: reportMissingImports=false
"""Anthropic's own package against a recorded session of ``drivetrain serve``: ``make test-trainers``."""

from __future__ import annotations

from typing import Any, Final

import anthropic
import httpx
import pytest

from tool_conversation import ANSWER, CALL, QUESTION, Score, require_own_logprobs, text_of

TOOL: Final[Any] = {"name": "add", "description": "", "input_schema": {"type": "object"}}
ASKED: Final[Any] = {"model": "policy", "max_tokens": 200, "extra_body": {"temperature": 0}}


def require_one_branch(url: str, session: str, score: Score) -> None:
    """Read the trajectory: the call and the answer were sampled, and have their own logprobs."""
    trajectory = httpx.get(f"{url}/sessions/{session}/trajectory", timeout=60).json()
    (branch,) = trajectory["branches"]
    ids, mask, logprobs = branch["token_ids"], branch["loss_mask"], branch["logprobs"]
    assert len(ids) == len(mask) == len(logprobs)
    assert [logprob is not None for logprob in logprobs] == [one == 1 for one in mask]
    assert text_of([token_id for token_id, one in zip(ids, mask, strict=True) if one]) == f"{CALL}\n{ANSWER}\n"
    start = mask.index(1)
    expected = score(ids)[start - 1 :]
    own = [one if one is not None else other for one, other in zip(logprobs[start:], expected, strict=True)]
    require_own_logprobs(score, ids[:start], ids[start:], own)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(url: str, score: Score, stream: bool) -> None:
    session = f"anthropic-{stream}"
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    text, answer = "", None
    with anthropic.Anthropic(base_url=f"{url}/sessions/{session}", api_key="none", max_retries=0) as api:
        for _ in range(2):
            if stream:
                with api.messages.stream(**ASKED, messages=messages, tools=[TOOL]) as events:
                    text = "".join(events.text_stream)
                    answer = events.get_final_message()
            else:
                answer = api.messages.create(**ASKED, messages=messages, tools=[TOOL])
                text = "".join(block.text for block in answer.content if block.type == "text")
            messages.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason == "tool_use":
                (call,) = answer.content
                assert call.type == "tool_use"
                assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
                result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
                messages.append({"role": "user", "content": [result]})
        counted = api.messages.count_tokens(model="policy", messages=messages[:-1], tools=[TOOL])
    assert answer is not None
    assert (text, answer.stop_reason) == (ANSWER, "end_turn")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    require_one_branch(url, session, score)


def test_the_tool_runner_runs_the_loop(url: str, score: Score) -> None:
    asked: list[tuple[int, int]] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        asked.append((a, b))
        return str(a + b)

    with anthropic.Anthropic(base_url=f"{url}/sessions/runner", api_key="none", max_retries=0) as api:
        runner = api.beta.messages.tool_runner(**ASKED, messages=[{"role": "user", "content": QUESTION}], tools=[add])
        answer = runner.until_done()
    assert asked == [(1, 2)]
    assert [block.text for block in answer.content if block.type == "text"] == [ANSWER]
    require_one_branch(url, "runner", score)


def test_errors_are_of_their_kind(url: str) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": ""}
    image: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
    with anthropic.Anthropic(base_url=f"{url}/sessions/errors", api_key="none", max_retries=0) as api:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            api.messages.create(model="another", max_tokens=8, messages=[{"role": "user", "content": "a"}])
        with pytest.raises(anthropic.BadRequestError, match="image"):
            api.messages.create(**ASKED, messages=[image])
