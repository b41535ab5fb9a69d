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
        """Return one embedding per prompt, all of one version of the weights.

        A call waits for a weight update to end. If an update lands while the call is under way, all its prompts are
        embedded again, with the new weights. A pause does not hold it.

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
        """Return a reward model's score of each output after its input, all of one version of the weights.

        Updates are treated as in :meth:`encode`.
        """
        return await self.parts.pooling.score(input_ids, output_ids)
