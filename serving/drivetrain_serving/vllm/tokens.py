"""Routes that turn text to token ids and back: ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import flag_of, read_fields, read_json
from drivetrain_serving.http_layer.route_docs import Fields, documented
from drivetrain_serving.prompt_of_body import PromptFields, prompt_of_body
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm.answer_types import Detokenized, Tokenized
from drivetrain_serving.vllm.errors import error_answer


class TokenizeFields(PromptFields):
    """A request to ``/tokenize``."""

    return_token_strs: object = Field(
        default=None, description="Return each token's text.", json_schema_extra={"type": ["boolean", "null"]}
    )


class DetokenizeFields(Fields):
    """A request to ``/detokenize``."""

    tokens: object = Field(
        default=None,
        description="Token ids.",
        json_schema_extra={"type": "array", "items": {"type": "integer", "minimum": 0}},
    )


class TokenRoutes:
    """Routes of the served engine's tokenizer."""

    def __init__(self, served: ServedEngine) -> None:
        self._served = served

    @documented(body=TokenizeFields, answer=Tokenized)
    async def tokenize(self, request: Request) -> Response:
        """Answer POST ``/tokenize``: a prompt, or messages."""
        body = await read_json(request, self._served.config, wants_type=True)
        try:
            return json_answer(await self._tokenize(body))
        except DrivetrainError as error:
            return error_answer(error)

    async def _tokenize(self, body: Mapping[str, object]) -> Tokenized:
        prompt = prompt_of_body(body)
        with_texts = flag_of(body.get("return_token_strs"), "return_token_strs")
        tokenizer, length = self._served.engine.tokenizer, self._served.engine.model_info.context_length
        ids = await in_prompt_thread(lambda: tokenizer.encode(prompt))
        texts = None
        if with_texts:
            texts = [str(tokenizer.inner.convert_ids_to_tokens(token_id)) for token_id in ids]
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts}

    @documented(body=DetokenizeFields, answer=Detokenized)
    async def detokenize(self, request: Request) -> Response:
        """Answer POST ``/detokenize``."""
        ids = (await read_fields(request, self._served.config, DetokenizeFields, wants_type=True)).tokens
        try:
            if not isinstance(ids, list) or not all(type(one) is int for one in ids):
                raise InvalidRequest(f"tokens={shown(ids)}: expected a list of token ids", field="tokens")
            text = await in_prompt_thread(lambda: self._served.engine.decode(ids, skip_special_tokens=False))
        except DrivetrainError as error:
            return error_answer(error)
        return json_answer(Detokenized(prompt=text))
