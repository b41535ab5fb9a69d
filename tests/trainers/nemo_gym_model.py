# pyright: reportMissingImports=false
"""NeMo-Gym's model server over ``drivetrain serve``: ``make test-gyms``."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import httpx
from nemo_gym import server_utils  # type: ignore[import-not-found]
from omegaconf import OmegaConf  # type: ignore[import-not-found]
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig  # type: ignore[import-not-found]

from tool_conversation import ANSWER, CALL, QUESTION, Score, require_own_logprobs, text_of

TOOL: Final = {
    "type": "function",
    "name": "add",
    "description": "",
    "parameters": {"type": "object"},
    "strict": False,
}


def asked(url: str, *requests: tuple[str, Any]) -> list[Any]:
    """Send requests of one session to NeMo-Gym's model server, whose engine is ``url``; return the answers."""
    config = VLLMModelConfig(
        host="127.0.0.1",
        port=1,
        entrypoint="",
        name="policy_model",
        base_url=f"{url}/v1",
        api_key="none",
        model="policy",
        return_token_id_information=True,
        uses_reasoning_parser=False,
    )
    head = server_utils.BaseServerConfig(host="127.0.0.1", port=1)
    others = server_utils.ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    app = VLLMModel(config=config, server_client=others).setup_webserver()

    async def send() -> list[Any]:
        session = server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gym", timeout=60) as client:
                answers = [await client.post(path, json=body) for path, body in requests]
        finally:
            await session.close()
            server_utils._GLOBAL_AIOHTTP_CLIENT = None
        assert [answer.status_code for answer in answers] == [200] * len(answers), [one.text for one in answers]
        return [answer.json() for answer in answers]

    return asyncio.run(send())


def require_training_data(item: Any, score: Score) -> None:
    """Require an output item's ids, and the logprobs that transformers computes for them."""
    require_own_logprobs(score, item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"])


def test_a_response_calls_a_tool_and_reads_its_result(url: str, score: Score) -> None:
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    body = {"tools": [TOOL], "temperature": 0, "max_output_tokens": 200}
    (first,) = asked(url, ("/v1/responses", {"input": history, **body}))
    (call,) = first["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1, "b": 2})
    assert text_of(call["generation_token_ids"]) == f"{CALL}\n"
    require_training_data(call, score)
    assert first["usage"]["output_tokens"] == len(call["generation_token_ids"])
    history += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}]
    (second,) = asked(url, ("/v1/responses", {"input": history, **body}))
    (message,) = second["output"]
    assert message["content"][0]["text"] == ANSWER
    require_training_data(message, score)


def test_turns_of_a_chat_are_training_data(url: str, score: Score) -> None:
    chat = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 1.0,
        "max_tokens": 12,
        "top_logprobs": None,
    }
    for answer in asked(url, *[("/v1/chat/completions", chat)] * 2):
        require_training_data(answer["choices"][0]["message"], score)


def test_a_prompt_beyond_the_context_ends_in_length(url: str) -> None:
    (answer,) = asked(url, ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 20_000}]}))
    assert answer["choices"][0]["finish_reason"] == "length"


def test_messages_of_anthropic_are_answered(url: str) -> None:
    body = {"model": "policy", "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    (answer,) = asked(url, ("/v1/messages", body))
    assert answer["role"] == "assistant"
    assert answer["content"]
