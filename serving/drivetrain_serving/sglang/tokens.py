"""SGLang's ``/tokenize`` and ``/detokenize``: one text or several."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import flag_of, read_fields, read_json
from drivetrain_serving.http_layer.route_docs import Fields, documented
from drivetrain_serving.prompt_of_body import PromptFields, prompt_of_body
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.answer_types import Texts, TextsTokens, TextTokens


class TextsFields(PromptFields):
    """A request to ``/v1/tokenize``."""

    prompt: object = Field(
        default=None,
        description="A text, or several.",
        json_schema_extra={"type": ["string", "array", "null"], "items": {"type": "string"}},
    )


class IdsFields(Fields):
    """A request to ``/v1/detokenize``."""

    tokens: object = Field(
        default=None,
        description="The token ids of a text, or of several.",
        json_schema_extra={
            "type": "array",
            "items": {"type": ["integer", "array"], "minimum": 0, "items": {"type": "integer", "minimum": 0}},
        },
    )
    skip_special_tokens: object = Field(
        default=None,
        description="Leave special tokens out of the text; true if not given.",
        json_schema_extra={"type": ["boolean", "null"]},
    )


class TokenRoutes:
    """Routes of the served engine's tokenizer."""

    def __init__(self, served: ServedEngine) -> None:
        self._served = served

    @documented(body=TextsFields, answer=TextTokens | TextsTokens)
    async def tokenize(self, request: Request) -> Response:
        """Answer POST ``/tokenize``: a prompt, several, or messages."""
        body = await read_json(request, self._served.config, wants_type=True)
        given = body.get("prompt")
        several = given if isinstance(given, list) else None
        bodies = [body] if several is None else [{**body, "prompt": one} for one in several]
        ids = [await self._encode(one) for one in bodies]
        counts = [len(one) for one in ids]
        length = self._served.engine.model_info.context_length
        if several is None:
            return json_answer(TextTokens(tokens=ids[0], count=counts[0], max_model_len=length))
        return json_answer(TextsTokens(tokens=ids, count=counts, max_model_len=length))

    async def _encode(self, body: Mapping[str, object]) -> list[int]:
        prompt = prompt_of_body(body)
        return await in_prompt_thread(lambda: self._served.engine.tokenizer.encode(prompt))

    @documented(body=IdsFields, answer=Texts)
    async def detokenize(self, request: Request) -> Response:
        """Answer POST ``/detokenize``: the ids of a text, or of several."""
        asked = await read_fields(request, self._served.config, IdsFields, wants_type=True)
        given, skip = asked.tokens, flag_of(asked.skip_special_tokens, "skip_special_tokens", default=True)
        several = isinstance(given, list) and bool(given) and isinstance(given[0], list)
        batch: list[object] = given if several and isinstance(given, list) else [given]
        for ids in batch:
            if not isinstance(ids, list) or not all(type(one) is int for one in ids):
                raise InvalidRequest(f"tokens={shown(ids)}: expected a list of token ids", field="tokens")
        texts = [await self._decode(ids, skip) for ids in batch if isinstance(ids, list)]
        return json_answer(Texts(text=texts if several else texts[0]))

    async def _decode(self, ids: list[int], skip: bool) -> str:
        return await in_prompt_thread(lambda: self._served.engine.decode(ids, skip_special_tokens=skip))
