"""The calls that the holder of a handle makes to the engine's owner.

They are calls of ``InferenceEngine``, not of a backend: the owner decides on states, gates and versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from drivetrain.backend.base import EngineStats, GenerateRequest, GenerateResult, ReadMedium, TokenDelta
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.prompts import MediaInput
from drivetrain.types.weights import CommunicatorSpec, TensorData, WeightManifest, WeightReport, WeightUpdateRequest


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """Bytes and pause of a committed weight update."""

    nbytes: int
    paused_seconds: float


class SharedEngine(ABC):
    """One engine, as one of its holders calls it. Methods are named after those of ``InferenceEngine``."""

    # Tokenizer ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def tokenizer_files(self) -> dict[str, bytes]:
        """Return the contents of the tokenizer's files by name, for a holder that does not have them."""

    # Generation --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Take one sample through the engine's gate to its result."""

    @abstractmethod
    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Take one sample through the engine's gate and yield the backend's steps."""

    @abstractmethod
    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        """Fetch and measure a prompt's images, videos and sounds."""

    @abstractmethod
    async def abort_samples(self, request_ids: list[str]) -> None:
        """End samples of this holder."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request, whoever made it."""

    @abstractmethod
    async def abort_generation(self) -> None:
        """End every request, whoever made it."""

    # Pause and memory --------------------------------------------------------------------------------------------

    @abstractmethod
    async def pause_generation(self, mode: PauseMode, timeout: float | None) -> None:
        """Pause; lifted when this holder is gone, unless another has paused or resumed since."""

    @abstractmethod
    async def continue_generation(self) -> None:
        """Let requests continue."""

    @abstractmethod
    async def sleep(
        self, tags: frozenset[MemoryTag] | None, timeout: float | None, abort_first: bool, drain_timeout: float
    ) -> None:
        """Free memory."""

    @abstractmethod
    async def wake_up(self, tags: frozenset[MemoryTag] | None, timeout: float | None) -> None:
        """Allocate memory again."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Discard every cached prefix."""

    @abstractmethod
    async def clear_hicache_storage(self) -> None:
        """Clear the storage tier of a hierarchical cache."""

    # Weights -----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def weight_manifest(self) -> WeightManifest:
        """Return every tensor that a complete update must bring."""

    @abstractmethod
    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        """Check and stage an update; :meth:`apply_update` and :meth:`begin_update` without a request take it."""

    @abstractmethod
    async def forget_weight_update(self) -> None:
        """Drop the prepared update."""

    @abstractmethod
    async def apply_update(self, request: WeightUpdateRequest | None) -> AppliedUpdate:
        """Run a whole update whose buckets are all available."""

    @abstractmethod
    async def begin_update(self, request: WeightUpdateRequest | None) -> int:
        """Begin an update that is loaded bucket by bucket; return the number of buckets."""

    @abstractmethod
    async def load_buckets(self, indices: list[int]) -> int:
        """Load buckets of the update that was begun; return the bytes loaded so far."""

    @abstractmethod
    async def commit_update(self) -> AppliedUpdate:
        """Verify and commit the update that was begun."""

    @abstractmethod
    async def break_off_update(self, reason: str) -> None:
        """End the update that was begun without committing; the engine is dirty."""

    @abstractmethod
    async def release_weight_sources(self) -> None:
        """Unmap the memory that trainers share with the engine."""

    @abstractmethod
    async def update_adapter(self, request: WeightUpdateRequest) -> None:
        """Update one LoRA adapter."""

    @abstractmethod
    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        """Join a torch.distributed group."""

    @abstractmethod
    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        """Leave that group."""

    @abstractmethod
    async def update_weight_version(self, version: str) -> None:
        """Relabel the weights."""

    @abstractmethod
    async def get_weights_by_name(self, name: str) -> TensorData:
        """Return one tensor."""

    @abstractmethod
    async def validate_weights(self) -> WeightReport:
        """Check every tensor for NaN, infinity and zeros only."""

    @abstractmethod
    async def save_sharded_model(self, path: str, timeout: float | None) -> None:
        """Save the model to a folder of the engine's machine."""

    @abstractmethod
    async def save_remote_model(self, url: str, timeout: float | None) -> None:
        """Save the model to an fsspec URL."""

    # Adapters ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter."""

    @abstractmethod
    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""

    # Models that do not generate ---------------------------------------------------------------------------------

    @abstractmethod
    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one embedding per prompt."""

    @abstractmethod
    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return a reward per sequence."""

    # Diagnostics -------------------------------------------------------------------------------------------------

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Return counts and memory sizes."""

    @abstractmethod
    async def start_profile(self, directory: str) -> None:
        """Start recording a profile."""

    @abstractmethod
    async def stop_profile(self) -> str:
        """Stop recording; return the path of the trace."""
