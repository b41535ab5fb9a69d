"""Embeddings, scores, decoding and profiles, as SkyRL calls them."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from typing import TypedDict

from drivetrain.errors import EngineStateError, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import Task
from drivetrain_trainers.skyrl.page import Page


class Scores(TypedDict):
    """Result of ``score``."""

    scores: list[float]
    hidden_states: None
    """SkyRL's field; no engine returns states with scores."""


class Profile(TypedDict):
    """Result of ``stop_profile``; times are in seconds since the epoch."""

    trace: str
    """Path of the trace file."""
    start_time: float
    end_time: float
    duration_seconds: float


class ModelCalls(Page):
    """SkyRL's calls to models that embed or score, and small services."""

    _profile_begun: float | None = None

    async def encode(self, texts: Sequence[str], dimensions: int | None = None) -> list[list[float]]:
        """Return one embedding per text; ``dimensions`` shortens it, for models trained for that."""
        return await self.engine.encode(list(texts), dimensions=dimensions)

    async def encode_single(self, text: str, dimensions: int | None = None) -> list[float]:
        """Return the embedding of one text."""
        return await self.engine.encode_single(text, dimensions=dimensions)

    async def compute_similarity(self, text1: str, text2: str, dimensions: int | None = None) -> float:
        """Return the cosine of the angle between two texts' embeddings."""
        first, second = await self.encode([text1, text2], dimensions)
        lengths = math.hypot(*first) * math.hypot(*second)
        return math.fsum(a * b for a, b in zip(first, second, strict=True)) / lengths

    def supports_embeddings(self) -> bool:
        """Return whether the engine embeds texts."""
        return self.engine.supports(Capability.EMBED) and self.engine.config.task is Task.EMBED

    async def score(
        self,
        input_ids: Sequence[Sequence[int]],
        output_ids: Sequence[Sequence[int]],
        return_hidden_states: bool = False,
    ) -> Scores:
        """Return a reward model's score of each output after its input.

        Raises:
            UnsupportedCapability: The engine serves no reward model, or hidden states are asked for.
        """
        if return_hidden_states:
            raise UnsupportedCapability("return_hidden_states=True: scores come without hidden states; leave it out")
        return Scores(scores=await self.engine.score(input_ids, output_ids), hidden_states=None)

    def supports_scoring(self) -> bool:
        """Return whether the engine serves a reward model."""
        return self.engine.supports(Capability.REWARD_SCORE) and self.engine.config.task is Task.REWARD

    async def decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Turn sequences of token ids into texts."""
        return [self.engine.decode(ids, skip_special_tokens=skip_special_tokens) for ids in token_ids]

    async def start_profile(self) -> bool:
        """Start recording a profile into a new temporary folder; return True."""
        await self.engine.start_profile(tempfile.mkdtemp(prefix="drivetrain-profile-"))
        self._profile_begun = time.time()
        return True

    async def stop_profile(self) -> Profile:
        """Stop recording, and say where the trace is.

        Raises:
            EngineStateError: None is being recorded.
        """
        if self._profile_begun is None:
            raise EngineStateError("stop_profile(): no profile is being recorded; call start_profile() first")
        trace = await self.engine.stop_profile()
        begun, self._profile_begun = self._profile_begun, None
        ended = time.time()
        return Profile(trace=trace, start_time=begun, end_time=ended, duration_seconds=ended - begun)
