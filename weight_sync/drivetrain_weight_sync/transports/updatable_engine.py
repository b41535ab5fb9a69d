"""The part of an engine that weight sync uses."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.weights import CommunicatorSpec, WeightManifest, WeightUpdateRequest


class UpdateUnderWay(Protocol):
    """The part of an update between begin and commit that weight sync uses."""

    @property
    def buckets(self) -> int: ...

    @property
    def paused_seconds(self) -> float: ...

    async def load(self, indices: Sequence[int]) -> None: ...


@runtime_checkable
class UpdatableEngine(Protocol):
    """The part of :class:`~drivetrain.engine.engine.InferenceEngine` that weight sync uses."""

    @property
    def isolation(self) -> Isolation: ...

    @property
    def capabilities(self) -> Set[Capability]: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def gpus(self) -> Sequence[str]: ...

    @property
    def weight_update_ranks(self) -> Sequence[str]: ...

    async def weight_manifest(self) -> WeightManifest: ...

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None: ...

    async def destroy_weight_update_communicator(self, group_name: str) -> None: ...

    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None: ...

    def weight_update(
        self, request: WeightUpdateRequest, *, at_once: bool = False
    ) -> AbstractAsyncContextManager[UpdateUnderWay]: ...

    async def release_weight_sources(self) -> None: ...


@runtime_checkable
class AdaptableEngine(UpdatableEngine, Protocol):
    """The part of :class:`~drivetrain.engine.engine.InferenceEngine` that sync of adapters uses."""

    async def update_named_weights(self, request: WeightUpdateRequest) -> None: ...
