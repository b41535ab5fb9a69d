"""Test whether tokens were drawn from a given distribution, with a proven bound on false alarms.

The statistic is G, twice the relative entropy of the observed counts O from the expected counts E: 2 Σ O ln(O / E). For
N draws in k bins, the moments of G / 2 are at most those of a Gamma(k - 1) variable (Agrawal, "Finite-sample
concentration of the multinomial in relative entropy", 2020), so

    P(G / 2 ≥ x)  ≤  exp(-x) (e x / (k - 1))^(k - 1)        for x > k - 1.

The bound holds for every N and every distribution, however small an expected count is. The chi-square law holds only in
the limit, and this far out in the tail it is too generous. The bound also holds when each draw has its own distribution
and E is their sum: replacing two distributions by their average only raises the moments, because exp(t O ln(O / E)) is
log-convex in O for each bin.

An engine's logprobs equal those of the reference only up to rounding in the dtype of its weights. If they differ by at
most d nats, then by Hoeffding's inequality and KL ≤ d² / 2 the statistic rises by at most N d² + 2 d √(2 N ln(1 / a))
with probability 1 - a; the critical value allows for this.

Draws are binned in two ways: by probability, which exposes a wrong temperature or filter, and by token id, which
exposes a random number that is not uniform.

A correct engine fails one check with a probability of at most :data:`FALSE_ALARM`. A suite that makes 25 checks raises
a false alarm in at most one of 40,000 runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import lambertw

FALSE_ALARM: Final = 1e-6
"""Upper bound of the probability that :meth:`Tally.check` fails though the draws are right."""
_SHARE: Final = FALSE_ALARM / 4
"""The false-alarm budget of each of four parts: two orders of the tokens, each with chance and rounding."""
_BINS: Final = 16

Probabilities = NDArray[np.float64]


class Tally:
    """Counts of drawn tokens, and the counts that were expected.

    The draws must be independent. Tokens that are close in rank, or in id, share a bin, so that draws from several
    distributions add up.

    Args:
        tolerance: Allowed difference of the engine's logprobs from the reference's, in nats.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._observed = np.zeros((2, _BINS + 1))
        self._expected = np.zeros((2, _BINS + 1))

    def add(self, drawn: Sequence[int], probabilities: Probabilities, marked: Collection[int] = ()) -> None:
        """Count tokens that were drawn from one distribution.

        Args:
            drawn: The tokens.
            probabilities: Shape (vocabulary,). A token of probability zero may not be among ``drawn``.
            marked: Tokens that get a bin of their own: those that the parameter under test makes more or less likely.
        """
        impossible = sorted({token for token in drawn if probabilities[token] == 0})
        assert not impossible, f"tokens {impossible} were drawn, which have probability zero"
        for row, order in enumerate((np.argsort(-probabilities, kind="stable"), np.arange(len(probabilities)))):
            bins = _bins(probabilities, order[~np.isin(order, list(marked))])
            self._observed[row] += np.bincount(bins[list(drawn)], minlength=_BINS + 1)
            self._expected[row] += np.bincount(bins, weights=probabilities, minlength=_BINS + 1) * len(drawn)

    def check(self) -> None:
        """Raise AssertionError if correct draws give such counts with a probability below :data:`FALSE_ALARM`."""
        ways = ("from the likely to the unlikely", "from the lowest id to the highest")
        for way, observed, expected in zip(ways, self._observed, self._expected, strict=True):
            some = observed > 0
            statistic = 2 * float(np.sum(observed[some] * np.log(observed[some] / expected[some])))
            limit = critical_value(int(np.count_nonzero(expected)), int(observed.sum()), self._tolerance)
            assert statistic <= limit, (
                f"the draws do not follow the distribution: G = {statistic:.1f}, and more than {limit:.1f} comes by "
                f"chance in at most {FALSE_ALARM:g} of all runs. Expected counts (marked tokens first, then {way}): "
                f"{expected.round(1).tolist()}; observed: {observed.astype(int).tolist()}"
            )


def critical_value(bins: int, draws: int, tolerance: float = 0.0) -> float:
    """Return the value that G exceeds with a probability of at most half of :data:`FALSE_ALARM`; see the module."""
    rounding = draws * tolerance**2 + 2 * tolerance * math.sqrt(2 * draws * math.log(1 / _SHARE))
    degrees = bins - 1
    if degrees == 0:
        return rounding
    # exp(-x) (e x / m)^m = a has the solution x = -m W(-a^(1/m) / e), on the branch where x > m.
    chance = -degrees * float(lambertw(-(_SHARE ** (1 / degrees)) / math.e, k=-1).real)
    return 2 * chance + rounding


def _bins(probabilities: Probabilities, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return each token's bin: 1 to 16 by the probability of the tokens before it in ``order``, 0 if not in it."""
    mass = probabilities[order]
    above = np.cumsum(mass) - mass
    bins = np.zeros(len(probabilities), dtype=np.intp)
    bins[order] = 1 + np.minimum((above / max(mass.sum(), 1e-300) * _BINS).astype(np.intp), _BINS - 1)
    return bins
