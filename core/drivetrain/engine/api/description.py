"""Description of an engine: its model, its capabilities and its state."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.backend.base import EngineStats, ModelInfo
from drivetrain.engine.api.page import Page
from drivetrain.engine.states import EngineState, EngineStatus, WeightState
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Everything that is known of an engine without asking it. Made by ``InferenceEngine.describe``."""

    backend: str
    isolation: str
    state: str
    weight_version: str
    versions: dict[str, str]
    capabilities: tuple[str, ...]
    model: ModelInfo | None
    config: dict[str, object]


class DescriptionCalls(Page):
    """State, model, tokenizer and statistics."""

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        return self.status.state

    @property
    def status(self) -> EngineStatus:
        """The state in full: how it is paused, which memory is asleep, whether the weights may be served."""
        return self.parts.controller.status

    @property
    def is_paused(self) -> bool:
        """True while arriving requests wait, for ``pause_generation`` or for a weight update that has not committed."""
        return self.status.paused is not None or self.status.weights is not WeightState.CLEAN

    @property
    def model_info(self) -> ModelInfo:
        """Vocabulary, context length, EOS ids and dtype of the model.

        Raises:
            EngineStateError: the engine was not started.
        """
        return self.parts.model.info

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that hold the weights, by rank; empty before start, on a CPU, or if they are unknown."""
        info = self.parts.model.info_if_started
        return () if info is None else info.gpus

    @property
    def weight_update_ranks(self) -> tuple[str, ...]:
        """Names of the workers that a broadcast of weights reaches, by rank; a fleet's change with its engines."""
        config = self.parts.controller.config
        return tuple(f"rank {rank}" for rank in range(config.tensor_parallel_size * config.pipeline_parallel_size))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            EngineStateError: the engine was not started.
        """
        return self.parts.model.tokenizer

    @property
    def host_pid(self) -> int | None:
        """Process id of the host process; None when the engine runs in this one."""
        return self.parts.backend.pid

    @checked
    def supports(self, capability: Capability | str) -> bool:
        """Return True if ``capability`` is claimed; its name, such as ``"lora"``, is accepted too."""
        return capability in self.capabilities

    def describe(self) -> EngineDescription:
        """Return everything that is known without asking the engine."""
        return EngineDescription(
            backend=self.config.backend,
            isolation=self.isolation.value,
            state=self.status.describe(),
            weight_version=self.parts.weights.version,
            versions=dict(self.versions),
            capabilities=tuple(capability.value for capability in Capability if capability in self.capabilities),
            model=self.parts.model.info_if_started,
            config=self.config.described(),
        )

    async def stats(self) -> EngineStats:
        """Return how many requests run and wait, and how much memory is held."""
        return await self.parts.diagnostics.stats()
