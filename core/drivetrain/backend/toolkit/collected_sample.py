"""One sample, put together from an engine's outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from drivetrain.backend.base import GenerateRequest
from drivetrain.backend.toolkit.translation import version_spans
from drivetrain.types.outputs import TopLogprobs, VersionSpan
from drivetrain.types.sampling_mask import SamplingMask

Added = tuple[list[int], list[float] | None, list[TopLogprobs] | None]
"""Token ids that one output added, their logprobs and their top logprobs; None: not asked for."""


class CollectedSample:
    """Tokens of one sample so far, their logprobs, and the weight versions that made them.

    Derive from it, and translate each output of the engine into a call of :meth:`extend`.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.params = request.params
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._masks: list[SamplingMask] = []
        self.added_mask: SamplingMask | None = None
        """Ids that the tokens of the last :meth:`extend` were drawn from; None: not asked for."""
        self._replaced: list[tuple[str, float]] = []

    def extend(
        self,
        token_ids: list[int],
        logprobs: list[float] | None,
        top: list[TopLogprobs] | None,
        mask: SamplingMask | None = None,
    ) -> Added:
        """Append tokens, and return them for a :class:`drivetrain.TokenDelta`."""
        self.added_mask = mask
        if mask is not None:
            self._masks.append(mask)
        self.token_ids += token_ids
        self._logprobs += logprobs or ()
        self._top_logprobs += top or ()
        return token_ids, logprobs, top

    @property
    def logprobs(self) -> list[float] | None:
        """The tokens' logprobs; None if the request asks for none."""
        return self._logprobs if self.params.logprobs is not None else None

    @property
    def top_logprobs(self) -> list[TopLogprobs] | None:
        """The tokens' top logprobs; None if the request asks for none."""
        return self._top_logprobs if self.params.logprobs else None

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """Ids that the tokens were drawn from; None if the request does not ask for them, or no token was drawn."""
        return SamplingMask.join(self._masks[0].vocab_size, self._masks) if self._masks else None

    def replaced(self, version: str, tokens: float) -> None:
        """Record that weights other than ``version`` follow this many tokens; infinity: every token was sampled before.

        For engines that do not report the weight version of each token.
        """
        self._replaced.append((version, tokens))

    def weight_versions(self, reported: Iterable[tuple[str, float]] | None, version: str) -> list[VersionSpan]:
        """Return the version spans of the tokens.

        Args:
            reported: Each version that the engine reports, in order, with the end of its tokens; None: it reports none,
                so that :meth:`replaced` tells.
            version: Version of the weights that are served now.
        """
        ends = [*self._replaced, (version, math.inf)] if reported is None else reported
        return version_spans(ends, len(self.token_ids))
