"""Calls to models that do not generate: embeddings and reward scores."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.engine.api.page import Page
from drivetrain.types.arguments import checked
from drivetrain.types.prompts import PromptLike


class PoolingCalls(Page):
    """Embed prompts, score answers."""

    @checked
    async def encode(
        self, prompts: PromptLike | Sequence[PromptLike], *, dimensions: int | None = None
    ) -> list[list[float]]:
        """Return one embedding per prompt.

        Args:
            prompts: As for :meth:`generate`.
            dimensions: Numbers to shorten each vector to, which is then scaled to length 1: for models trained for
                that.

        Returns:
            The vectors. If the model's folder names no pooling, each has the direction of the last layer's state at
            the last token.
        """
        return await self.parts.pooling.encode(prompts, dimensions)

    @checked
    async def score(self, input_ids: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return a reward model's score of each output after its input."""
        return await self.parts.pooling.score(input_ids, output_ids)
