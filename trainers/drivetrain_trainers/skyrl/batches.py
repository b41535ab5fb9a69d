"""SkyRL's batches: inputs and outputs as parallel lists, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypedDict

ConversationType = list[dict[str, str]]
"""A chat: messages with ``role`` and ``content``."""


class InferenceEngineInput(TypedDict, total=False):
    """A batch. Every list has an entry per prompt."""

    prompts: list[ConversationType] | None
    """Chats, rendered with the model's template. Give these or ``prompt_token_ids``."""
    prompt_token_ids: list[list[int]] | None
    """Token ids, used as they are."""
    sampling_params: Mapping[str, object] | None
    """One set for the batch, in SGLang's or vLLM's names."""
    session_ids: list[Hashable] | None
    """Trajectories that the prompts belong to. SkyRL's client chooses an engine by them; here they have no effect."""
    return_hidden_states: bool | None
    image_data: Sequence[object] | None
    """Per prompt: a path, URL, base64 text, bytes, a PIL image, a list of those, or None."""
    video_data: Sequence[object] | None
    audio_data: Sequence[object] | None


class InferenceEngineOutput(TypedDict):
    """Completions as parallel lists: prompt by prompt, and sample by sample within a prompt."""

    responses: list[str]
    """Text, cut exactly at a stop."""
    response_ids: list[list[int]]
    """Sampled ids, stop tokens included."""
    stop_reasons: list[str]
    """``stop``, ``length`` or ``abort``."""
    response_logprobs: list[list[float]] | None
    """Logprobs of the sampled ids; None if they were not asked for."""
    weight_version: str | None
    """Version of the weights that sampled every token of the batch; None if there were several."""
    n_per_prompt: int | None
    """Samples per prompt; None for 1."""
    request_ids: list[str] | None
    """Ids by which later turns of a session name these completions."""
    hidden_states: list[list[list[float]]] | None
    """Per completion: the last layer's state of each token, shape (tokens, hidden size)."""


class StreamingChunk(TypedDict):
    """One token of one completion, or the end of it."""

    index: int
    """Index of the completion, as in the lists of :class:`InferenceEngineOutput`."""
    delta_text: str
    delta_token_id: int | None
    """None if the chunk only ends the completion."""
    delta_logprob: float | None
    is_finished: bool
    stop_reason: str | None
    """Set in the last chunk of a completion only."""
    cumulative_text: str | None
    cumulative_token_ids: list[int] | None


def group_outputs_by_prompt(output: InferenceEngineOutput) -> list[InferenceEngineOutput]:
    """Split a batch with several samples per prompt into one output per prompt; otherwise return it alone."""
    n = output["n_per_prompt"] or 1
    if n == 1:
        return [output]
    return [_part(output, slice(start, start + n)) for start in range(0, len(output["responses"]), n)]


def _part(output: InferenceEngineOutput, where: slice) -> InferenceEngineOutput:
    logprobs, ids, states = output["response_logprobs"], output["request_ids"], output["hidden_states"]
    return InferenceEngineOutput(
        responses=output["responses"][where],
        response_ids=output["response_ids"][where],
        stop_reasons=output["stop_reasons"][where],
        response_logprobs=None if logprobs is None else logprobs[where],
        weight_version=output["weight_version"],
        n_per_prompt=output["n_per_prompt"],
        request_ids=None if ids is None else ids[where],
        hidden_states=None if states is None else states[where],
    )
