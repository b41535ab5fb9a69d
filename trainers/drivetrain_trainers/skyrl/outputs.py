"""The engine's completions, chunks and errors in SkyRL's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import TypedDict

from drivetrain.errors import DrivetrainError
from drivetrain.openai.error_body import error_body
from drivetrain.types.outputs import Completion, CompletionChunk
from drivetrain_trainers.skyrl.batches import InferenceEngineOutput, StreamingChunk


class ErrorInfo(TypedDict):
    """Description of an error."""

    message: str
    type: str
    """Phrase of the status."""
    param: str | None
    """Name of the wrong field."""
    code: int
    """HTTP status, which SkyRL's endpoint answers with."""


class ErrorResponse(TypedDict):
    """An error in the place of an answer."""

    error: ErrorInfo


def error_response(error: DrivetrainError) -> ErrorResponse:
    """Return an error as SkyRL's endpoint reads it."""
    status, body = error_body(error)
    info = ErrorInfo(message=str(error), type=HTTPStatus(status).phrase, param=body["error"]["param"], code=status)
    return ErrorResponse(error=info)


def output_of(completions: Sequence[Completion], n: int) -> InferenceEngineOutput:
    """Return completions as parallel lists."""
    versions = {span.version for one in completions for span in one.weight_versions}
    logprobs = [one.logprobs for one in completions if one.logprobs is not None]
    states = [one.hidden_states for one in completions if one.hidden_states is not None]
    return InferenceEngineOutput(
        responses=[one.text for one in completions],
        response_ids=[one.token_ids for one in completions],
        stop_reasons=[one.finish_reason.value for one in completions],
        response_logprobs=logprobs or None,
        weight_version=versions.pop() if len(versions) == 1 else None,
        n_per_prompt=n if n > 1 else None,
        request_ids=[one.request_id for one in completions],
        hidden_states=states or None,
    )


class StreamedCompletion:
    """Splits the chunks of one completion into tokens, and sums them up."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""
        self._ids: list[int] = []

    def chunks(self, chunk: CompletionChunk) -> Iterator[StreamingChunk]:
        """Yield a chunk per token. The text of several comes with the last of them."""
        ids: list[int | None] = [*chunk.token_ids]
        if not ids and (chunk.text or chunk.completion is not None):
            ids = [None]
        for place, token in enumerate(ids):
            last = place == len(ids) - 1
            text = chunk.text if last else ""
            self._text += text
            if token is not None:
                self._ids.append(token)
            reason = chunk.finish_reason if last else None
            yield StreamingChunk(
                index=self._index,
                delta_text=text,
                delta_token_id=token,
                delta_logprob=None if chunk.logprobs is None or token is None else chunk.logprobs[place],
                is_finished=reason is not None,
                stop_reason=None if reason is None else reason.value,
                cumulative_text=self._text,
                cumulative_token_ids=list(self._ids),
            )
