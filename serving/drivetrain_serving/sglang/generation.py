"""The route ``/generate``, and which of its requests are in flight."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager

from starlette.requests import Request
from starlette.responses import Response

from drivetrain.errors import InvalidRequest
from drivetrain.types.prompts import TokenPrompt
from drivetrain_serving.http_layer.answers import event_stream, json_answer
from drivetrain_serving.http_layer.bodies import read_json, unless_disconnected
from drivetrain_serving.http_layer.error_statuses import PlainErrorBody
from drivetrain_serving.http_layer.route_docs import JSON, OF_ENGINES, STREAM, documented
from drivetrain_serving.routed_experts import PackedExperts, expert_params
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.answer_types import Generated
from drivetrain_serving.sglang.errors import BrokenContract, StreamErrorBody, contract_answer, stream_body
from drivetrain_serving.sglang.generate_answers import GenerateAnswers
from drivetrain_serving.sglang.generate_request import GenerateBody, Generation, read_generate


class GenerateRoute:
    """Generates with the served engine."""

    def __init__(self, served: ServedEngine) -> None:
        self._served = served
        self._experts = PackedExperts(served.engine.config)

    @documented(
        body=GenerateBody,
        statuses=(409, *OF_ENGINES),
        media=(JSON, STREAM),
        answer=Generated | list[Generated],
        event=Generated | StreamErrorBody,
        errors=(PlainErrorBody,),
    )
    async def generate(self, request: Request) -> Response:
        """Answer POST and PUT ``/generate``."""
        body = await read_json(request, self._served.config)
        try:
            return await unless_disconnected(request.receive, self._generate(body))
        except BrokenContract as error:
            return contract_answer(error)

    async def abort(self, request_id: str) -> None:
        """End a request, and all of ``/generate`` whose ids begin with its id; an unknown id ends none."""
        known = {*self._served.generating, *await self._served.others.request_ids()}
        if request_id not in known:
            await self._served.abort(request_id)  # of another route
            return
        for one in [one for one in known if one.startswith(request_id)]:
            await self._served.abort(one)

    async def _generate(self, body: Mapping[str, object]) -> Response:
        engine = self._served.engine
        asked = read_generate(body, engine.model_info.vocab_size)
        lora = await self._adapter(asked.lora)
        with asked.call.refusals():
            prompts = tuple(
                [await self._served.token_prompt(prompt, index) for index, prompt in enumerate(asked.prompts)]
            )
        _check_starts(asked, prompts)
        asked = dataclasses.replace(asked, prompts=prompts, params=_with_experts(asked, prompts), lora=lora)
        answers = GenerateAnswers(asked, engine, [len(prompt.token_ids) for prompt in prompts], self._experts)
        if asked.body.stream:
            return await event_stream(self._events(asked, answers), stream_body)
        with asked.call.refusals(), self._known(asked):
            output = await self._served.generate(asked)
        return json_answer(answers.whole(output.completions))

    async def _events(self, asked: Generation, answers: GenerateAnswers) -> AsyncGenerator[Generated, None]:
        with asked.call.refusals(), self._known(asked):
            async with aclosing(self._served.generate_stream(asked)) as chunks:
                async for chunk in chunks:
                    yield answers.event(chunk)

    @contextmanager
    def _known(self, asked: Generation) -> Iterator[None]:
        """Keep the request's ids where :meth:`abort` finds them."""
        self._served.generating.update(asked.request_ids)
        try:
            yield
        finally:
            self._served.generating -= Counter(asked.request_ids)

    async def _adapter(self, name: str | None) -> str | None:
        try:
            return await self._served.adapter_of(name)
        except InvalidRequest as error:
            if error.field != "model":
                raise
            raise InvalidRequest(f"lora_path: no adapter {name!r} is loaded", field="lora_path") from None


def _check_starts(asked: Generation, prompts: tuple[TokenPrompt, ...]) -> None:
    for one, prompt in zip(asked.asked, prompts, strict=True):
        if one.logprobs and one.logprob_start > len(prompt.token_ids):
            raise InvalidRequest(
                f"logprob_start_len={one.logprob_start} is more than the {len(prompt.token_ids)} tokens of the prompt",
                field="logprob_start_len",
            )


def _with_experts(asked: Generation, prompts: tuple[TokenPrompt, ...]) -> tuple[Mapping[str, object], ...]:
    """Return the sampling parameters of each prompt, which ask for the experts that the request asks for.

    Raises:
        InvalidRequest: ``routed_experts_start_len`` is beyond a prompt.
    """
    if not asked.body.return_routed_experts:
        return asked.params
    start = asked.body.routed_experts_start_len or 0
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    if start > shortest:
        raise InvalidRequest(
            f"routed_experts_start_len={start} is more than the {shortest} tokens of the prompt",
            field="routed_experts_start_len",
        )
    return tuple(
        {**params, **expert_params(start, len(prompt.token_ids))}
        for params, prompt in zip(asked.params, prompts, strict=True)
    )
