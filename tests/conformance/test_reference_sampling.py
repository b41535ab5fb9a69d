"""The distribution that the suite expects of a token, where rounding can change it."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain import LogprobsMode, SamplingParams
from drivetrain_conformance.references.reference_sampling import step

LOGITS = np.array([1.0, 1.01, -2.0, -3.0])


@pytest.mark.parametrize(("tolerance", "sure"), [(1e-4, [1]), (1e-2, [])])
def test_the_likeliest_token_is_sure_to_be_kept_if_rounding_cannot_change_it(tolerance: float, sure: list[int]) -> None:
    found = step(LOGITS, SamplingParams(top_p=0.01), (), (), tolerance)
    assert np.flatnonzero(found.surely).tolist() == sure
    assert set(np.flatnonzero(found.possibly)) >= {1}
    assert np.isfinite(found.bounds(LogprobsMode.PROCESSED, 0)).all()
