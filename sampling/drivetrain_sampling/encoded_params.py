"""Sampling parameters encoded as text, which an engine passes unread from a request to its sampler."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from typing import Final

import msgspec

from drivetrain.backend.base import GenerateRequest
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_sampling.sampler import Row

_FIELDS: Final = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
    | {"logit_bias", "logit_processors", "min_new_tokens", "logprobs", "return_sampling_mask"}
)


class _Drawing(msgspec.Struct, array_like=True, frozen=True):
    params: dict[str, object]
    """Fields of :class:`~drivetrain.types.sampling.SamplingParams` that affect sampling."""
    mode: LogprobsMode
    seed: int
    resumed: int


_drawings: Final = msgspec.msgpack.Decoder(_Drawing)


def encode_params(request: GenerateRequest) -> str:
    """Encode a request for :func:`row_of`; a request without a seed gets a random one."""
    params = request.params.model_dump(include=set(_FIELDS))
    seed = request.seed if request.seed is not None else random.getrandbits(63)
    drawing = _Drawing(params, request.logprobs_mode, seed, request.resumed_tokens)
    return base64.b64encode(msgspec.msgpack.encode(drawing)).decode()


def row_of(text: str, prompt: Sequence[int], stops: Sequence[int], generated: list[int]) -> Row:
    """Decode ``text`` into the sampler's row of a request."""
    drawing = _drawings.decode(base64.b64decode(text))
    params = SamplingParams.model_validate(drawing.params)
    return Row(params, drawing.mode, prompt, stops, drawing.seed, generated, drawing.resumed)
