"""Calls of a line or two that only combine other calls of an engine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.engine.api.control import ControlCalls
from drivetrain.engine.api.description import DescriptionCalls
from drivetrain.engine.api.generation import GenerationCalls
from drivetrain.engine.api.pooling import PoolingCalls
from drivetrain.engine.api.weights import WeightCalls
from drivetrain.engine.request_builder import CallOptions, ParamsLike
from drivetrain.engine.scoring import ScoringCall
from drivetrain.servers.weight_version import remote_weight_version
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import GenerationOutput
from drivetrain.types.prompts import PromptLike
from drivetrain.types.weights import DiskSource, WeightReport, WeightUpdateRequest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


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
        self,
        sequences: Sequence[Sequence[int]],
        *,
        at: Iterable[ArrayLike] | None = None,
        temperature: float | None = None,
        last_n: int | Sequence[int] | None = None,
        top_k: int = 0,
        sampling_params: ParamsLike | None = None,
        request_ids: Sequence[str] | None = None,
        lora: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> GenerationOutput:
        """Score given token ids. No token is sampled, unless ``sampling_params`` are given.

        With ``at``, ``temperature``, ``last_n`` or ``sampling_params``, each completion holds :class:`TokenScores` of
        its sequence in ``scores``: float32 and int32 arrays. Otherwise it holds ``prompt_logprobs``: raw logprobs, in
        lists.

        Row ``i`` of ``at`` and of the scores belongs to the ``i``-th of the sequence's last tokens, and to the
        distribution over the tokens that could stand in its place. The sequence's first token has none: its row holds
        NaN.

        Each sequence is scored by one version of the weights, which its completion's ``weight_version`` names. If an
        update lands during the call, sequences of one call may have different versions.

        Args:
            sequences: Token ids of each sequence.
            at: For each sequence, token ids to score at each position: integers of shape (tokens, K), or (n, K) with
                ``last_n``. K may differ between sequences. Any array in host memory is taken; numpy's fastest.
            temperature: Divides the logits; from 1e-6. None: 1, the model's own distribution.
            last_n: Score only the last tokens: their number, or one number for each sequence. None: all tokens.
            top_k: Number of most likely tokens to return at each position.
            sampling_params: Also generate after each sequence, which is computed once for both. The first of ``n``
                completions holds the scores. ``prompt_logprobs`` may be asked for beside them.
            request_ids: One id per sequence, by which it can be aborted; made up if not given.
            lora: Name of a loaded LoRA adapter.
            priority: Higher is sooner.
            timeout: Seconds until DeadlineExceeded; ``timeouts.generate`` if not given.

        Raises:
            InvalidRequest: before any work, naming the argument, its value and the remedy.
            UnsupportedCapability: the engine cannot score tokens, or not at given ids, positions and temperatures.
        """
        require = self.parts.controller.require_claimed
        require("compute_logprobs()", Capability.SCORE_TOKENS)
        call = ScoringCall(at, temperature, last_n, top_k)
        by_lists = sampling_params is None and call.is_empty
        params: ParamsLike = {"max_new_tokens": 0} if sampling_params is None else sampling_params
        if by_lists:
            params = {"max_new_tokens": 0, "prompt_logprobs": top_k}
        else:
            require("compute_logprobs() with at, temperature, last_n or sampling_params", Capability.SCORE_AT)
        options = CallOptions(request_ids, lora, priority, timeout=timeout)
        scored = None if by_lists else call
        return await self.parts.generation.generate(sequences, params, options, scored=scored)

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
        """Wake up everything that is asleep."""
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
