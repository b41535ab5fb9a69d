"""How to draw a request, as text that an engine carries from the request to its sampler without reading it."""

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
    | {"logit_bias", "logit_processors", "min_new_tokens", "logprobs"}
)


class _Drawing(msgspec.Struct, array_like=True, frozen=True):
    params: dict[str, object]
    """Fields of :class:`~drivetrain.types.sampling.SamplingParams`; the others do not matter here."""
    mode: LogprobsMode
    seed: int


_drawings: Final = msgspec.msgpack.Decoder(_Drawing)


def carried(request: GenerateRequest) -> str:
    """What :func:`row_of` needs to draw this request; without a seed of its own it gets a random one."""
    params = request.params.model_dump(include=set(_FIELDS))
    seed = request.seed if request.seed is not None else random.getrandbits(63)
    return base64.b64encode(msgspec.msgpack.encode(_Drawing(params, request.logprobs_mode, seed))).decode()


def row_of(text: str, prompt: Sequence[int], stops: Sequence[int], generated: list[int]) -> Row:
    """The sampler's row of a request that carries ``text``."""
    drawing = _drawings.decode(base64.b64decode(text))
    params = SamplingParams.model_validate(drawing.params)
    return Row(params, drawing.mode, prompt, stops, drawing.seed, generated)
