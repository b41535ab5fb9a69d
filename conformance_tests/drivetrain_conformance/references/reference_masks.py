"""Checks of a sampling mask against the distribution that plain numpy computes."""

from __future__ import annotations

import numpy as np

from drivetrain.types.sampling import SamplingParams
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_conformance.references.reference_sampling import Step


def check_mask(mask: SamplingMask, at: int, step: Step, token: int, params: SamplingParams) -> None:
    """Assert that a position holds the ids that could be drawn.

    Ids at the edge of top-k, top-p or min-p, which rounding of the logits may move across it, may be there or not.

    Args:
        mask: The completion's mask.
        at: The position.
        step: The distribution of its token.
        token: The token that was drawn.
        params: The sampling parameters.
    """
    ids = mask.ids(at)
    assert token in ids, f"token {at} ({token}) is not among the {len(ids)} ids that it was drawn from"
    if params.temperature == 0:
        assert ids == [token], f"a greedy token ({token}) was drawn from {len(ids)} ids"
        return
    left = np.zeros(len(step.scaled), dtype=np.bool_)
    left[ids] = True
    lost = np.flatnonzero(step.surely & ~left).tolist()
    extra = np.flatnonzero(left & ~step.possibly).tolist()
    assert not lost, f"the mask of token {at} lacks {len(lost)} ids that could be drawn, such as {lost[:3]}"
    assert not extra, f"the mask of token {at} holds {len(extra)} ids that could not be drawn, such as {extra[:3]}"
