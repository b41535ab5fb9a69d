"""``prompt_logprob_token_ids`` of ``/inference/v1/generate``: logprobs of given ids at the prompt's last positions."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.token_scores import TokenScores
from drivetrain_serving.vllm.payloads import GenerateRequest

IDS: Final = "prompt_logprob_token_ids"
START: Final = "prompt_logprob_start"


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Ids to score at the last positions of a request's prompt."""

    ids: NDArray[np.int64]
    """Shape (positions, ids); -1 where there is none, whose logprob is minus infinity."""

    @classmethod
    def asked_for(cls, asked: GenerateRequest, vocabulary: int) -> PromptScores | None:
        """Return the scores that a request asks for; None if it asks for none.

        Args:
            asked: The request.
            vocabulary: Number of the model's ids.

        Raises:
            InvalidRequest: the ids are no rectangle of integers with a row for each position from the first one on, or
                the request is streamed.
        """
        given, start = asked.sampling_params.get(IDS), asked.sampling_params.get(START)
        if given is None:
            if start is not None:
                raise InvalidRequest(f"{START}={shown(start)} needs {IDS}; leave it out", field=START)
            return None
        if asked.stream:
            raise InvalidRequest(f"{IDS} comes with whole answers only; leave stream out", field=IDS)
        positions = len(asked.token_ids) - 1
        if start is not None and (type(start) is not int or not 0 <= start < positions):
            raise InvalidRequest(f"{START}={shown(start)}: expected an integer from 0, below {positions}", field=START)
        try:
            ids = np.asarray(given)
        except (ValueError, OverflowError):
            ids = np.zeros(0, dtype=np.int64)
        rows = positions - (start or 0)
        is_table = ids.ndim == 2 and len(ids) == rows and ids.size > 0 and ids.dtype == np.int64
        if not is_table or ids.min() < -1 or ids.max() >= vocabulary:
            raise InvalidRequest(
                f"{IDS}={shown(given)}: expected {rows} equally long lists of token ids below {vocabulary}, one for "
                f"each of the prompt's tokens after the first {positions - rows + 1}; -1 pads",
                field=IDS,
            )
        return cls(ids)

    @property
    def at(self) -> NDArray[np.int64]:
        """The ids, with 0 in place of padding; shape (positions, ids)."""
        return np.maximum(self.ids, 0)

    def encoded(self, scores: TokenScores) -> str:
        """Return the float32 logprobs of the ids, in their shape, as a ``.npy`` file in base64."""
        logprobs = np.where(self.ids < 0, np.float32(-np.inf), scores.at_logprobs)
        with io.BytesIO() as file:
            np.save(file, logprobs, allow_pickle=False)
            return base64.b64encode(file.getbuffer()).decode()
