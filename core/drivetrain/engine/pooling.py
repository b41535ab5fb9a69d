"""Embeddings and reward scores: calls to models that do not generate."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.translation import require_numbers
from drivetrain.engine.controller import Controller
from drivetrain.engine.model import StartedModel
from drivetrain.engine.validation import check_prompt_length
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.config import Task
from drivetrain.types.prompts import PromptLike


class Pooling:
    """Validates prompts, asks the backend for numbers, and refuses NaN among them. It keeps no state."""

    def __init__(self, controller: Controller, backend: Backend, model: StartedModel) -> None:
        self.controller = controller
        self.backend = backend
        self.model = model

    async def encode(self, prompts: PromptLike | Sequence[PromptLike], dimensions: int | None) -> list[list[float]]:
        """Return one embedding per prompt; see ``InferenceEngine.encode``."""
        self.controller.require("encode()", Capability.EMBED)
        builder = self.model.builder_for(Task.EMBED, "encode()")
        async with deadline(self.controller.config.timeouts.generate, "the embeddings"):
            token_ids = await builder.prompt_token_ids(prompts)
            vectors = await self.backend.embed(token_ids, dimensions)
        require_numbers((sum(vector) for vector in vectors), "an embedding")
        return vectors

    async def score(self, input_ids: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one reward per pair; see ``InferenceEngine.score``."""
        self.controller.require("score()", Capability.REWARD_SCORE)
        if len(input_ids) != len(output_ids):
            raise InvalidRequest(
                f"{len(input_ids)} inputs and {len(output_ids)} outputs; expected as many", field="output_ids"
            )
        builder = self.model.builder_for(Task.REWARD, "score()")
        pairs = list(zip(input_ids, output_ids, strict=True))
        for index, (one, other) in enumerate(pairs):
            check_prompt_length(len(one) + len(other), f"input_ids[{index}]", self.model.info.context_length)
        async with deadline(self.controller.config.timeouts.generate, f"{len(pairs)} scores"):
            sequences = await builder.prompt_token_ids([[*one, *other] for one, other in pairs])
            scores = await self.backend.reward_score(sequences)
        require_numbers(scores, "a score")
        return scores
