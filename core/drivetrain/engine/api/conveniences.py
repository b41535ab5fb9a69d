"""Calls of a line or two that only combine other calls of the page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.engine.api.control import ControlCalls
from drivetrain.engine.api.description import DescriptionCalls
from drivetrain.engine.api.generation import GenerationCalls
from drivetrain.engine.api.pooling import PoolingCalls
from drivetrain.engine.api.weights import WeightCalls
from drivetrain.engine.request_builder import ParamsLike
from drivetrain.servers.weight_version import remote_weight_version
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import GenerationOutput
from drivetrain.types.prompts import PromptLike
from drivetrain.types.weights import DiskSource, WeightReport, WeightUpdateRequest


@dataclass(frozen=True, slots=True)
class WeightIntegrity:
    """Result of ``InferenceEngine.check_weight_sync_integrity``."""

    expected_version: str
    actual_version: str
    report: WeightReport

    @property
    def ok(self) -> bool:
        """True if the version is the expected one, and no tensor holds a NaN or an infinity."""
        return self.expected_version == self.actual_version and self.report.ok


class Conveniences(DescriptionCalls, GenerationCalls, ControlCalls, WeightCalls, PoolingCalls):
    """Shorthands for common uses of the other calls."""

    # Configuration -----------------------------------------------------------------------------------------------

    @property
    def tp_size(self) -> int:
        """Tensor parallel size."""
        return self.config.tensor_parallel_size

    @property
    def pp_size(self) -> int:
        """Pipeline parallel size."""
        return self.config.pipeline_parallel_size

    @property
    def dp_size(self) -> int:
        """Data parallel size."""
        return self.config.data_parallel_size

    @property
    def ep_size(self) -> int:
        """Expert parallel size."""
        return self.config.expert_parallel_size

    # Text and logprobs -------------------------------------------------------------------------------------------

    @checked
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        return self.tokenizer(token_ids, skip_special_tokens=skip_special_tokens)

    @checked
    async def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], *, top_k: int = 0, timeout: float | None = None
    ) -> GenerationOutput:
        """Score given token ids without sampling any: each completion holds ``prompt_logprobs`` of its sequence."""
        self.parts.controller.require_claimed("compute_logprobs()", Capability.SCORE_TOKENS)
        params: ParamsLike = {"max_new_tokens": 0, "prompt_logprobs": top_k}
        return await self.generate(sequences, params, timeout=timeout)

    # Sleep -------------------------------------------------------------------------------------------------------

    async def sleep_weights_only(self) -> None:
        """Give back the weights' memory."""
        await self.sleep([MemoryTag.WEIGHTS])

    async def wake_up_weights_only(self) -> None:
        """Take the weights' memory again."""
        await self.wake_up([MemoryTag.WEIGHTS])

    async def sleep_all(self) -> None:
        """Give back all memory that this engine can give back."""
        await self.sleep()

    async def wake_up_all(self) -> None:
        """Take all of it again."""
        await self.wake_up()

    # Weights -----------------------------------------------------------------------------------------------------

    @checked
    async def load_weights_from_disk(
        self, path: str | os.PathLike[str], version: str, *, mode: PauseMode | str = PauseMode.RETRACT
    ) -> None:
        """Update the weights from a checkpoint folder that the engine can read; its format is detected."""
        source = DiskSource(path=os.fspath(path))
        request = WeightUpdateRequest(version=version, source=source, mode=PauseMode(mode))
        await self.update_named_weights(request)

    @checked
    async def check_weight_sync_integrity(self, expected_version: str) -> WeightIntegrity:
        """Compare the served version with ``expected_version`` and check every tensor."""
        return WeightIntegrity(expected_version, self.get_weight_version(), await self.validate_weights())

    @staticmethod
    @checked
    async def get_remote_weight_version(endpoint: str, *, timeout: float = 5.0) -> str:
        """Ask the server at ``endpoint`` (``http://host:port``) which weight version it serves."""
        return await remote_weight_version(endpoint, timeout)

    # Embeddings --------------------------------------------------------------------------------------------------

    @checked
    async def encode_single(self, prompt: PromptLike, *, dimensions: int | None = None) -> list[float]:
        """Return the embedding of one prompt."""
        (vector,) = await self.encode([prompt], dimensions=dimensions)
        return vector

    @checked
    async def compute_similarity(self, first: PromptLike, second: PromptLike) -> float:
        """Return the cosine of the angle between two prompts' embeddings."""
        a, b = await self.encode([first, second])
        return _dot(a, b) / math.sqrt(_dot(a, a) * _dot(b, b))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
