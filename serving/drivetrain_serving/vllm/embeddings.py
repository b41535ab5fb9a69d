"""The route ``/v1/embeddings``."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.openai.engine_calls import Call
from drivetrain.openai.payloads import JsonPrompts, prompts_from_json
from drivetrain.types.capability import Capability
from drivetrain.types.config import Task
from drivetrain.types.prompts import TextPrompt, TokenPrompt
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import read_json, unless_disconnected
from drivetrain_serving.http_layer.route_docs import OF_ENGINES, documented
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm.answer_types import Embeddings
from drivetrain_serving.vllm.payloads import EMPTY, is_one_of

_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("chat_template", "messages", "mm_processor_kwargs", "truncate_prompt_tokens"), EMPTY),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "normalize": (True,),
    "padding": ("do_not_pad",),
    "use_activation": (True,),
}
"""Fields of vLLM that change the vectors and are not honoured, each with the values that change nothing."""


class EmbeddingRequest(BaseModel):
    """A request to ``/v1/embeddings``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    input: Annotated[
        tuple[TextPrompt | TokenPrompt, ...], BeforeValidator(prompts_from_json, json_schema_input_type=JsonPrompts)
    ] = Field(description="One or several texts, or lists of token ids.")
    model: StrictStr | None = Field(default=None, description="Name of the model.")
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="Numbers, or base64 of little-endian float32."
    )
    dimensions: StrictInt | None = Field(default=None, description="Shortens the vectors, for models trained for that.")
    add_special_tokens: StrictBool = Field(default=True, description="Add special tokens to texts.")
    request_id: StrictStr | None = Field(default=None, min_length=1, description="Id of the answer.")


class EmbeddingRoute:
    """Embeds with the served engine.

    Args:
        served: The engine.
        header_ids: True if the header ``X-Request-Id`` gives a request its id, as in vLLM.
    """

    def __init__(self, served: ServedEngine, *, header_ids: bool = True) -> None:
        self._served = served
        self._header_ids = header_ids

    @documented(body=EmbeddingRequest, statuses=(404, *OF_ENGINES), answer=Embeddings)
    async def embeddings(self, request: Request) -> Response:
        """Answer POST ``/v1/embeddings``."""
        body = await read_json(request, self._served.config, wants_type=True, header_ids=self._header_ids)
        return await unless_disconnected(request.receive, self._answer(body))

    async def _answer(self, body: Mapping[str, object]) -> Response:
        asked, call = read_embedding(body)
        engine = self._served.engine
        with call.refusals():
            engine.parts.controller.require("/v1/embeddings", Capability.EMBED)
            if engine.config.task is not Task.EMBED:
                raise UnsupportedCapability(
                    "/v1/embeddings needs an engine that was created with task='embed'; this one has "
                    f"task={engine.config.task.value!r}",
                    capability=Capability.EMBED.value,
                )
            if await self._served.adapter_of(asked.model) is not None:
                raise InvalidRequest(
                    f"model={shown(asked.model)} is an adapter, of which no embeddings are served; name the model "
                    f"{self._served.name!r}",
                    field="model",
                )
            prompts = [await self._served.token_prompt(prompt, index) for index, prompt in enumerate(asked.input)]
            vectors = await engine.encode(prompts, dimensions=asked.dimensions)
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        answer: Embeddings = {
            "id": f"embd-{asked.request_id or uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": asked.model or self._served.name,
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _base64(vector) if asked.encoding_format == "base64" else list(vector),
                }
                for index, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return json_answer(answer)


def read_embedding(body: Mapping[str, object]) -> tuple[EmbeddingRequest, Call]:
    """Read a request to ``/v1/embeddings``; the call names its fields in the engine's refusals.

    Raises:
        InvalidRequest: a field is wrong, or cannot be honoured.
    """
    for name, harmless in _REFUSED.items():
        if not is_one_of(body.get(name), (None, *harmless)):
            raise InvalidRequest(f"{name}={shown(body[name])} is not supported; leave it out", field=name)
    try:
        asked = EmbeddingRequest.model_validate({name: one for name, one in body.items() if one is not None})
    except ValidationError as error:
        field, message = describe_validation_error(error, EmbeddingRequest)
        raise InvalidRequest(message, field=field) from None
    prompts = tuple(
        TextPrompt(text=prompt.text, add_special_tokens=asked.add_special_tokens)
        if isinstance(prompt, TextPrompt)
        else prompt
        for prompt in asked.input
    )
    asked = asked.model_copy(update={"input": prompts})
    names = {"prompts": "input"}
    return asked, Call(id="", prompts=prompts, params={}, lora=None, priority=0, names=names)


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
