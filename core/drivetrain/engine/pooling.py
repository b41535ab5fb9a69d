"""Embeddings and reward scores: calls to models that do not generate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.translation import require_numbers
from drivetrain.engine.controller import Controller
from drivetrain.engine.model import StartedModel
from drivetrain.engine.states import WeightState
from drivetrain.engine.validation import check_prompt_length
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.config import Task
from drivetrain.types.prompts import PromptLike

_T = TypeVar("_T")


class Pooling:
    """Validates prompts, asks the backend for numbers of one weight version, and refuses NaN among them."""

    def __init__(self, controller: Controller, backend: Backend, model: StartedModel) -> None:
        self.controller = controller
        self.backend = backend
        self.model = model
        self._changed = asyncio.Event()
        """Set at the next change of the engine's state, and then replaced."""
        controller.subscribe(self._note_change)

    async def encode(self, prompts: PromptLike | Sequence[PromptLike], dimensions: int | None) -> list[list[float]]:
        """Return one embedding per prompt; see ``InferenceEngine.encode``."""
        self.controller.require("encode()", Capability.EMBED)
        builder = self.model.builder_for(Task.EMBED, "encode()")
        async with deadline(self.controller.config.timeouts.generate, "the embeddings"):
            token_ids = await builder.prompt_token_ids(prompts)
            vectors = await self.embed(token_ids, dimensions)
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
            scores = await self.reward_score(sequences)
        require_numbers(scores, "a score")
        return scores

    # One version of the weights ----------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one embedding per prompt, all of one version of the weights."""
        return await self._of_one_version("encode()", lambda: self.backend.embed(prompts, dimensions))

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return one reward per sequence, all of one version of the weights."""
        return await self._of_one_version("score()", lambda: self.backend.reward_score(sequences))

    async def _of_one_version(self, action: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask while the weights are whole; ask again if they changed before the answer came.

        An engine computes the inputs of a call in several steps, and an update may land between two of them.
        """
        while True:
            await self._weights_are_whole(action)
            updates = self.controller.status.updates
            try:
                numbers = await ask()
            except DrivetrainError:
                if self._has_version(updates):
                    raise
            else:
                if self._has_version(updates):
                    return numbers

    async def _weights_are_whole(self, action: str) -> None:
        """Wait until an update has ended, and until a paused engine that sleeps has been woken up."""
        while True:
            self.controller.require_admission(action)
            status, changed = self.controller.status, self._changed
            if status.weights is WeightState.CLEAN and not status.asleep:
                return
            await changed.wait()

    def _has_version(self, updates: int) -> bool:
        status = self.controller.status
        return status.weights is WeightState.CLEAN and status.updates == updates

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
