"""Requests to derender: answers of ``/inference/v1/generate``, and what they were rendered from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictBool, StrictInt, StrictStr, ValidationError

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.errors import InvalidRequest
from drivetrain.types.sampling import Number
from drivetrain.types.token_ids import TokenId

_A = TypeVar("_A", bound=BaseModel)
_Count = Annotated[StrictInt, Field(ge=0)]
_STATE: Final = "The state that the answer to the chunk before it had; null with the first chunk."


class _Given(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    other_names: ClassVar[Mapping[str, str]] = {}


class GivenToken(_Given):
    """A token and its logprob."""

    token_id: TokenId
    logprob: Number


class GivenSampled(GivenToken):
    """A sampled token and its logprob, with those of the most likely tokens."""

    top_logprobs: tuple[GivenToken, ...] | None = None


class GivenLogprobs(_Given):
    """Logprobs of a choice."""

    content: tuple[GivenSampled, ...] | None = None


class GivenChoice(_Given):
    """One sample, or the new part of one."""

    index: StrictInt = Field(default=0, ge=0)
    token_ids: tuple[TokenId, ...] | None = None
    logprobs: GivenLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: StrictInt | StrictStr | None = None


class GivenUsage(_Given):
    """Token counts of a stream's last chunk."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class GivenAnswer(_Given):
    """An answer of ``/inference/v1/generate``, or a chunk of a streamed one."""

    request_id: StrictStr = Field(min_length=1)
    output_mode: Literal["tokens"] = "tokens"
    choices: tuple[GivenChoice, ...]
    prompt_token_ids: tuple[TokenId, ...] | None = None
    prompt_logprobs: list[JsonValue] | None = None
    usage: GivenUsage | None = None


class GivenState(_Given):
    """State that the client of a stream carries from chunk to chunk. The other fields of vLLM's state are not used."""

    role_sent: StrictBool = False
    logprob_text_offset: StrictInt = Field(default=0, ge=0)
    output_token_ids: tuple[TokenId, ...] = ()
    output_chunk_lens: tuple[StrictInt, ...] = ()


class _Derender(_Given):
    stream: StrictBool = Field(default=False, description="The answer is one chunk of a stream.")
    model: StrictStr | None = Field(default=None, description="Name of the model or of an adapter; null: the model.")
    generate_chunk: GivenAnswer | None = Field(default=None, description="With stream: a chunk of the answer.")
    stream_state: GivenState | None = Field(default=None, description=_STATE)


class DerenderChatRequest(_Derender):
    """A request to ``/v1/chat/completions/derender``."""

    generate_response: GivenAnswer | None = Field(default=None, description="Without stream: the whole answer.")
    prompt_tokens: _Count | None = Field(default=None, description="Number of the prompt's ids, for usage.")
    prompt_token_ids: tuple[TokenId, ...] | None = Field(default=None, description="The prompt's ids.")
    chat_request: dict[str, JsonValue] | None = Field(
        default=None, description="The chat that was rendered; null: the text is the content, and no calls are parsed."
    )


class DerenderCompletionRequest(_Derender):
    """A request to ``/v1/completions/derender``. In a stream, prompts are one number and one list of ids."""

    generate_responses: tuple[GivenAnswer, ...] | None = Field(
        default=None, description="Without stream: the answer of each prompt."
    )
    prompt_tokens: tuple[_Count, ...] | _Count | None = Field(
        default=None, description="Number of each prompt's ids, for usage."
    )
    prompt_token_ids: tuple[tuple[TokenId, ...] | None, ...] | tuple[TokenId, ...] | None = Field(
        default=None, description="The ids of each prompt."
    )
    completion_request: dict[str, JsonValue] | None = Field(default=None, description="What was rendered.")


def read_derender(kind: type[_A], body: Mapping[str, object]) -> _A:
    """Read a request to derender.

    Raises:
        InvalidRequest: A field is wrong.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        field, message = describe_validation_error(error, kind)
        raise InvalidRequest(message, field=field) from None
