"""Routes that turn OpenAI's requests to those of ``/inference/v1/generate``: the prompt's ids, and sampling parameters.

Clients that keep a conversation as token ids send their messages here, and generate from the ids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from drivetrain.engine.validation import check_prompt_ids, check_sampling_params, resolve_max_new_tokens
from drivetrain.errors import InvalidRequest
from drivetrain.openai.engine_calls import Call, chat_call, completion_call
from drivetrain.types.sampling import (
    ActionMask,
    EbnfGrammar,
    JsonSchema,
    RegexGrammar,
    SamplingParams,
    StructuredOutput,
)
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import read_json, unless_disconnected
from drivetrain_serving.http_layer.route_docs import documented
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm.answer_types import Rendered, RenderedStreamOptions
from drivetrain_serving.vllm.payloads import ChatRequest, CompletionRequest, read_chat, read_completion

_SAME: Final = (
    *("n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("skip_special_tokens", "logprobs", "prompt_logprobs"),
)
"""Sampling parameters of the same name and meaning in vLLM and here."""
_NOT_OF_GENERATE: Final = ("stop_regex", "logprobs_mode")
"""Fields that ``/inference/v1/generate`` does not have."""


class RenderRoutes:
    """Routes that read prompts and do not generate.

    Args:
        served: The engine.
        header_ids: True if the header ``X-Request-Id`` gives a request its id, as in vLLM.
    """

    def __init__(self, served: ServedEngine, *, header_ids: bool = True) -> None:
        self._served = served
        self._header_ids = header_ids

    @documented(body=ChatRequest, statuses=(404,), answer=Rendered)
    async def chat_completions(self, request: Request) -> Response:
        """Answer POST ``/v1/chat/completions/render``."""
        body = await self._read(request)
        return await unless_disconnected(request.receive, self._chat(body))

    @documented(body=CompletionRequest, statuses=(404,), answer=list[Rendered])
    async def completions(self, request: Request) -> Response:
        """Answer POST ``/v1/completions/render``: a request for each prompt."""
        body = await self._read(request)
        return await unless_disconnected(request.receive, self._completions(body))

    async def _read(self, request: Request) -> dict[str, object]:
        return await read_json(request, self._served.config, wants_type=True, header_ids=self._header_ids)

    async def _chat(self, body: Mapping[str, object]) -> Response:
        template = self._served.engine.tokenizer.chat_template(()) or ""
        asked = read_chat(body, template, stream=body.get("stream") is True)
        (rendered,) = await self._rendered(asked, chat_call(asked), f"chatcmpl-{asked.request_id}")
        return json_answer(rendered)

    async def _completions(self, body: Mapping[str, object]) -> Response:
        asked = read_completion(body, stream=body.get("stream") is True)
        return json_answer(await self._rendered(asked, completion_call(asked), f"cmpl-{asked.request_id}"))

    async def _rendered(self, asked: ChatRequest | CompletionRequest, call: Call, answer_id: str) -> list[Rendered]:
        for name in _NOT_OF_GENERATE:
            if getattr(asked, name):
                raise InvalidRequest(
                    f"{name} is no sampling parameter of /inference/v1/generate; leave it out", field=name
                )
        call = dataclasses.replace(call, id=answer_id, lora=await self._served.adapter_of(asked.model) or call.lora)
        with call.refusals():
            return [await self._of_prompt(asked, call, index) for index in range(len(call.prompts))]

    async def _of_prompt(self, asked: ChatRequest | CompletionRequest, call: Call, index: int) -> Rendered:
        where, model, prompt = f"prompts[{index}]", self._served.engine.model_info, call.prompts[index]
        params = check_sampling_params(self._served.with_logprobs(call.params))
        if prompt.media:
            raise InvalidRequest(
                "messages hold images, videos or sounds, whose tensors only vLLM's own server renders; send them to "
                "/v1/chat/completions",
                field="messages",
            )
        ids = list((await self._served.token_prompt(prompt, index)).token_ids)
        check_prompt_ids(ids, where, model)
        most = resolve_max_new_tokens(params, len(ids), where, model)
        options = RenderedStreamOptions(
            include_usage=asked.include_usage, continuous_usage_stats=asked.continuous_usage
        )
        return {
            "request_id": call.request_ids[index],
            "token_ids": ids,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": {**_by_vllms_names(asked, call.params, params), "max_tokens": most},
            "model": call.lora or asked.model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": asked.stream is True,
            "stream_options": options if asked.stream and asked.stream_options else None,
            "cache_salt": None,
            "priority": -call.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }


def _by_vllms_names(
    asked: ChatRequest | CompletionRequest, given: Mapping[str, object], params: SamplingParams
) -> dict[str, object]:
    """Return the sampling parameters that a request gives, without ``max_tokens``.

    Args:
        asked: The request.
        given: The same by the engine's names.
        params: The same, validated.
    """
    found = {name: given[name] for name in _SAME if given.get(name) is not None}
    if "min_new_tokens" in given:
        found["min_tokens"] = given["min_new_tokens"]
    if asked.prompt_logprobs is not None:
        found["prompt_logprobs"] = asked.prompt_logprobs
    match params.logit_processors:
        case ():
            pass
        case (ActionMask() as mask,):
            found["allowed_token_ids"] = mask.allowed_token_ids
        case others:
            found["logit_processors"] = [one.model_dump(mode="json") for one in others]
    if params.structured_output is not None:
        found["structured_outputs"] = _grammar(params.structured_output)
    return found


def _grammar(given: StructuredOutput) -> dict[str, object]:
    """Return a grammar as vLLM's ``structured_outputs``."""
    match given:
        case JsonSchema():
            return {"json": json.loads(given.json_schema)}
        case RegexGrammar():
            return {"regex": given.regex}
        case EbnfGrammar():
            return {"grammar": given.ebnf}
