"""Requests to ``/generate``, translated to calls of the engine.

As SGLang does, this takes null for absent and ignores unknown fields, but refuses unknown sampling parameters. Known
fields that would change the answer and cannot be honoured are refused by name.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic.config import JsonDict
from starlette.exceptions import HTTPException

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.openai.engine_calls import Call
from drivetrain.types.prompts import Prompt, TextPrompt, TokenPrompt
from drivetrain.types.sampling import LogprobsMode
from drivetrain_serving.sglang.errors import BrokenContract
from drivetrain_serving.sglang.sampling import TOP_P_TOKEN_IDS, Sampling, engine_params

_T = TypeVar("_T")

_REFUSED: Final = (
    *("audio_data", "bootstrap_host", "bootstrap_room", "custom_logit_processor", "image_data", "images_config"),
    *("input_embeds", "kv_hints", "max_thinking_tokens", "mm_hashes", "modalities", "positional_embed_overrides"),
    *("require_reasoning", "return_bytes", "return_entropy", "return_flat_raw_output_top_logprobs"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"),
    *("return_hidden_states", "return_indexer_topk", "return_sampling_mask"),
    *("sampling_logprobs_mode", "session_params", "token_ids_logprob", "video_data", "watermark"),
)
"""Fields that change the answer and are not honoured; null, false and empty values are taken."""
_EMPTY: Final[tuple[object, ...]] = (None, False, "", [], {})
_REMEDIES: Final[Mapping[str, str]] = {
    "custom_logit_processor": "it holds pickled code, which this server does not run",
    "image_data": "send images in messages to /v1/chat/completions",
}


def _with_sampling_params(schema: JsonDict) -> None:
    """Describe the sampling parameters, which :class:`Sampling` reads on their own."""
    params = Sampling.model_json_schema()
    params.pop("$defs", None)
    for name in ("custom_params", "watermark"):
        params["properties"][name] = {"description": params["properties"][name]["description"]}
    properties = schema["properties"]
    assert isinstance(properties, dict)
    properties["sampling_params"] = {
        "description": "Sampling parameters of all prompts, or of each.",
        "anyOf": [params, {"type": "array", "items": params}, {"type": "null"}],
    }


class GenerateBody(BaseModel):
    """A request to ``/generate``."""

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_with_sampling_params)
    other_names: ClassVar[Mapping[str, str]] = {}

    rid: StrictStr | list[StrictStr] | None = Field(default=None, description="Id of the request, or of each prompt.")
    text: StrictStr | list[StrictStr] | None = Field(default=None, description="A prompt, or several.")
    input_ids: list[StrictInt] | list[list[StrictInt]] | None = Field(
        default=None, description="The token ids of a prompt, or of several."
    )
    sampling_params: JsonValue = Field(default=None, description="Sampling parameters of all prompts, or of each.")
    return_logprob: StrictBool | list[StrictBool] | None = Field(default=None, description="Return logprobs.")
    logprob_start_len: StrictInt | list[StrictInt] | None = Field(
        default=None, description="First prompt token whose logprob is returned; -1: none."
    )
    top_logprobs_num: StrictInt | list[StrictInt] | None = Field(
        default=None, description="Return the logprobs of the k most likely tokens too."
    )
    return_text_in_logprobs: StrictBool | None = Field(default=None, description="Write each token's text too.")
    return_prompt_token_ids: StrictBool | None = Field(default=None, description="Return the prompt's ids.")
    return_routed_experts: StrictBool | None = Field(
        default=None, description="Return the experts that each token was routed to."
    )
    routed_experts_start_len: StrictInt | None = Field(
        default=None, ge=0, description="First prompt token whose experts are returned; 0 if not given."
    )
    stream: StrictBool | None = Field(default=None, description="Send the answer as it grows.")
    lora_path: StrictStr | list[StrictStr | None] | None = Field(
        default=None, description="Name of the adapter, for all prompts."
    )
    priority: StrictInt | None = Field(default=None, description="Higher is sooner.")


@dataclass(frozen=True, slots=True)
class Asked:
    """The contents of one prompt's answer, as requested."""

    sampling: Sampling
    logprobs: bool
    logprob_start: int
    """First prompt token whose logprob is returned; -1: none."""
    top_logprobs: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A request to ``/generate``."""

    body: GenerateBody
    prompts: tuple[Prompt, ...]
    asked: tuple[Asked, ...]
    """One per prompt."""
    request_ids: tuple[str, ...]
    """One per prompt."""
    params: tuple[Mapping[str, object], ...]
    """Sampling parameters of each prompt by the engine's names."""
    lora: str | None
    call: Call
    """The engine's names of the fields, for its refusals."""
    single: bool
    """True if the answer is an object, not a list."""

    @property
    def priority(self) -> int:
        """Higher is sooner."""
        return self.call.priority


def read_generate(given: Mapping[str, object], vocab_size: int) -> Generation:
    """Read a request.

    Args:
        given: The JSON object.
        vocab_size: Size of the model's vocabulary: a ``top_k`` as large as it is off.

    Raises:
        HTTPException: a field has the wrong type.
        BrokenContract: a sampling parameter has the wrong type, or is unknown.
        InvalidRequest: a value is wrong, or cannot be honoured.
    """
    for name in _REFUSED:
        if given.get(name) not in _EMPTY:
            remedy = _REMEDIES.get(name, "leave it out")
            raise InvalidRequest(f"{name}={shown(given[name])} is not supported: {remedy}", field=name)
    try:
        body = GenerateBody.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise HTTPException(400, describe_validation_error(error, GenerateBody)[1]) from None
    prompts, of_prompts, batch = _prompts(body)
    count = len(prompts)
    samplings = _samplings(body.sampling_params, count)
    if len({one.n or 1 for one in samplings}) > 1:
        raise InvalidRequest("sampling_params: n differs between the prompts; expected one for all", field="n")
    asked = tuple(
        Asked(sampling, logprobs, start, top)
        for sampling, logprobs, start, top in zip(
            samplings,
            _each(body.return_logprob, count, "return_logprob", False),
            _each(body.logprob_start_len, count, "logprob_start_len", -1),
            _each(body.top_logprobs_num, count, "top_logprobs_num", 0),
            strict=True,
        )
    )
    ids = _request_ids(body.rid, count, batch=batch)
    names = {
        "prompts": of_prompts,
        "request_ids": "rid",
        "seed": "sampling_seed",
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "logprob_start_len",
        "return_sampling_mask": f"custom_params.{TOP_P_TOKEN_IDS}",
        "return_prompt_routed_experts": "return_routed_experts",
    }
    return Generation(
        body=body,
        prompts=prompts,
        asked=asked,
        request_ids=ids,
        params=tuple(_params(one, vocab_size) for one in asked),
        lora=_lora(body.lora_path, count),
        call=Call(id=ids[0], prompts=prompts, params={}, lora=None, priority=body.priority or 0, names=names),
        single=not batch and (samplings[0].n or 1) == 1,
    )


def _prompts(body: GenerateBody) -> tuple[tuple[Prompt, ...], str, bool]:
    """Return the prompts, the field that holds them, and whether it is a list of them."""
    match body.text, body.input_ids:
        case str() as text, None:
            return (TextPrompt(text=text),), "text", False
        case [_, *_] as texts, None:
            return tuple(TextPrompt(text=text) for text in texts), "text", True
        case None, [list(), *_] as batch:
            return tuple(_tokens(ids, index) for index, ids in enumerate(batch)), "input_ids", True
        case None, [_, *_] as ids:
            return (_tokens(ids, None),), "input_ids", False
        case None, None:
            raise InvalidRequest("Either text or input_ids should be provided.", field="text")
        case _, None:
            raise InvalidRequest("text cannot be empty.", field="text")
        case None, _:
            raise InvalidRequest("input_ids cannot be empty.", field="input_ids")
    raise InvalidRequest("text and input_ids are both given; give one of them", field="text")


def _samplings(given: object, count: int) -> list[Sampling]:
    if isinstance(given, list):
        named = [(f"sampling_params.{index}.", one) for index, one in enumerate(given)]
        return _each([_sampling(one, where) for where, one in named], count, "sampling_params", Sampling())
    return [_sampling(given, "sampling_params.")] * count


def _sampling(given: object, where: str) -> Sampling:
    if given is not None and not isinstance(given, Mapping):
        raise BrokenContract(f"{where.rstrip('.')} is a {type(given).__name__}; expected an object")
    try:
        return Sampling.model_validate(given or {})
    except ValidationError as error:
        raise BrokenContract(describe_validation_error(error, Sampling, where)[1]) from None


def _tokens(ids: object, index: int | None) -> TokenPrompt:
    where = "input_ids" if index is None else f"input_ids[{index}]"
    if not ids:
        raise InvalidRequest(f"{where} cannot be empty.", field="input_ids")
    try:
        return TokenPrompt.model_validate({"token_ids": ids})
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {describe_validation_error(error, TokenPrompt)[1]}", field=where) from None


def _each(value: _T | Sequence[_T] | None, count: int, name: str, default: _T) -> list[_T]:
    """Return one value per prompt."""
    if not isinstance(value, list):
        return [default if value is None else value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one for each", field=name)
    return list(value)


def _request_ids(rid: str | list[str] | None, count: int, *, batch: bool) -> tuple[str, ...]:
    match rid:
        case None:
            return tuple(uuid.uuid4().hex for _ in range(count))
        case str():
            return tuple(f"{rid}_{index}" for index in range(count)) if batch else (rid,)
    if len(rid) != count:
        raise InvalidRequest(
            f"The specified rids length mismatch with the batch_size: {len(rid)} for {count} prompts", field="rid"
        )
    return tuple(rid)


def _lora(given: str | list[str | None] | None, count: int) -> str | None:
    names = set(_each(given, count, "lora_path", None))
    if len(names) > 1:
        raise InvalidRequest(
            "lora_path names several adapters; send the prompts of each in a request of their own", field="lora_path"
        )
    return names.pop() or None


def _params(asked: Asked, vocab_size: int) -> Mapping[str, object]:
    params = engine_params(asked.sampling, vocab_size)
    if asked.top_logprobs < 0:
        raise InvalidRequest(f"top_logprobs_num={asked.top_logprobs}: expected 0 or more", field="top_logprobs_num")
    if asked.logprob_start < -1:
        raise InvalidRequest(f"logprob_start_len={asked.logprob_start}: expected -1 or more", field="logprob_start_len")
    if asked.logprobs:
        params["logprobs"] = asked.top_logprobs
        if asked.sampling.top_p_token_ids:  # with them, slime's SGLang returns the logprobs of what was drawn from
            params["logprobs_mode"] = LogprobsMode.PROCESSED.value
        if asked.logprob_start >= 0:
            params["prompt_logprobs"] = asked.top_logprobs
    return params
