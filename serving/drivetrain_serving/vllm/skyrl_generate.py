"""SkyRL's ``/skyrl/v1/generate``: token ids, their experts, and the ids that top-k and top-p left."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field, StrictBool

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.openai.choices import FINISH_REASON
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion
from drivetrain_serving.http_layer.bodies import flag_of
from drivetrain_serving.routed_experts import PackedExperts, expert_params
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm import answer_types as types
from drivetrain_serving.vllm.generate_answers import token_logprobs
from drivetrain_serving.vllm.payloads import GenerateRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PADDING = -1
_START = "routed_experts_prompt_start"


class SkyrlGenerateRequest(GenerateRequest):
    """A request to ``/skyrl/v1/generate``."""

    return_sample_support: StrictBool | None = Field(
        default=None,
        description="Return the ids that were left to draw each token from; needs top_k above 1 and up "
        "to the vocabulary's size.",
    )


class SideChannels:
    """Arrays beside the tokens of one request, in the form of SkyRL's ``generate_wire``.

    SkyRL's client asks for experts by calling this route, so that they are returned if the engine records them.

    Args:
        body: The request.
        served: The engine.
        experts: Packs experts.

    Raises:
        InvalidRequest: A field is wrong.
    """

    def __init__(self, body: Mapping[str, object], served: ServedEngine, experts: PackedExperts) -> None:
        if body.get("stream"):
            raise InvalidRequest("stream=true: this route answers as a whole; leave it out", field="stream")
        params = body.get("sampling_params")
        given = dict(params) if isinstance(params, Mapping) else {}
        start = given.pop(_START, None)
        token_ids = body.get("token_ids")
        length = len(token_ids) if isinstance(token_ids, list) else 0
        if start is not None and not (type(start) is int and 0 <= start <= length):
            raise InvalidRequest(
                f"{_START}={shown(start)}: expected a number up to the prompt's length, {length}",
                field=f"sampling_params.{_START}",
            )
        wanted, top_k = flag_of(body.get("return_sample_support"), "return_sample_support"), given.get("top_k")
        most = served.engine.model_info.vocab_size
        if wanted and not (type(top_k) is int and 1 < top_k <= most):
            raise InvalidRequest(
                f"return_sample_support=true: sampling_params.top_k={shown(top_k)}; expected a number above 1 and up "
                f"to the vocabulary's size, {most}",
                field="sampling_params.top_k",
            )
        self._experts = experts
        self._start = start or 0
        self._length = length
        self._width = top_k if wanted and type(top_k) is int else None
        self._records_experts = served.engine.supports(Capability.ROUTED_EXPERTS)
        self.body: dict[str, object] = {**body, "sampling_params": given} if isinstance(params, Mapping) else {**body}
        """The request in the words of ``/inference/v1/generate``."""

    def params(self, params: Mapping[str, object]) -> dict[str, object]:
        """Return the engine's sampling parameters, which also ask for the arrays."""
        found = dict(params)
        if self._records_experts:
            found.update(expert_params(self._start, self._length))
        if self._width is not None:
            found["return_sampling_mask"] = True
            found.setdefault("logprobs", 0)
        return found

    def answer(self, completions: Sequence[Completion]) -> types.SkyrlGenerateAnswer:
        """Return the answer."""
        return {"choices": [self._choice(completion) for completion in completions]}

    def _choice(self, completion: Completion) -> types.SkyrlGenerateChoice:
        experts = self._experts.array(completion, self._start) if self._records_experts else None
        support = None if self._width is None else _support(completion, self._width)
        return {
            "token_ids": completion.token_ids,
            "finish_reason": FINISH_REASON[completion.finish_reason],
            "logprobs": token_logprobs(completion.token_ids, completion.logprobs, completion.top_logprobs),
            "routed_experts": None if experts is None else _packed(experts.astype(_smallest(experts))),
            "rollout_sample_support": None if support is None else _packed(support),
        }


def _smallest(ids: NDArray[np.integer]) -> str:
    """Return the dtype that SkyRL demands of experts: the smallest of its three."""
    most = int(ids.max(initial=0))
    return "uint8" if most < 1 << 8 else "int16" if most < 1 << 15 else "int32"


def _support(completion: Completion, width: int) -> NDArray[np.int32] | None:
    """Return the ids left at each position, padded with -1 to ``width``."""
    import numpy as np

    mask = completion.sampling_mask
    if mask is None:
        return None
    rows = np.full((len(mask), width), _PADDING, dtype=np.int32)
    for position in range(len(mask)):
        count = mask.count(position)
        if count > width:
            raise InvalidRequest(
                f"top_k={width} leaves {count} ids of equal logits at token {position} of the answer, which have no "
                "place in return_sample_support; leave it out, or give a larger top_k",
                field="sampling_params.top_k",
            )
        rows[position, :count] = mask.ids(position)
    return rows


def _packed(array: NDArray[np.integer]) -> types.PackedArray:
    """Return an array as SkyRL reads it; its client splices ``data``, so that this comes first."""
    return {
        "data": b64encode(array.tobytes()).decode(),
        "shape": list(array.shape),
        "dtype": array.dtype.name,
    }
