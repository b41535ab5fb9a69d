"""The weights that an engine serves: their version, and reading and saving them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.uninterrupted import to_its_end
from drivetrain.engine.controller import Controller
from drivetrain.engine.states import WeightState
from drivetrain.engine.validation import absolute_path, check_seconds, check_url
from drivetrain.engine.weight_transaction import SOURCE_CAPABILITY
from drivetrain.errors import EngineStateError
from drivetrain.types.capability import Capability
from drivetrain.types.weights import TensorData, WeightManifest, WeightReport


class ServedWeights:
    """Publishes the version of the committed weights; reads, validates and saves them."""

    def __init__(self, controller: Controller, backend: Backend) -> None:
        self.controller = controller
        self.backend = backend
        self._version = controller.config.weight_version
        self._update_id = ""
        self.coming: str | None = None
        """A version that the backend may already serve, and that is not published."""

    @property
    def version(self) -> str:
        """The version of the weights that are served."""
        return self._version

    @property
    def update_id(self) -> str:
        """``WeightUpdateRequest.update_id`` of the update that brought the weights; empty: the engine's start did.

        An adapter's update, or another version for the same weights, leaves it as it is.
        """
        return self._update_id

    def publish(self, version: str, update_id: str | None = None) -> None:
        """Name the weights that are served from now on.

        Args:
            version: Their version.
            update_id: Id of the update that brought them; None: they are the same weights as before.
        """
        self._version = version
        if update_id is not None:
            self._update_id = update_id
        self.controller.notify()

    @contextmanager
    def to_come(self, version: str) -> Generator[None, None, None]:
        """Mark a version as one that the backend may serve before it is published, at the end of the block at most."""
        self.coming = version
        try:
            yield
        finally:
            self.coming = None
            self.controller.notify()

    async def relabel(self, version: str) -> None:
        """Give the weights another version; see ``InferenceEngine.update_weight_version``."""
        self.controller.require("update_weight_version()", Capability.VERSION_SPANS)
        async with self.controller.controlling("update_weight_version()"):
            status = self.controller.status
            if status.weights is not WeightState.CLEAN:
                raise EngineStateError(
                    f"update_weight_version() is refused: the engine is {status.describe()}; push a complete "
                    "weight update, which carries its version",
                    state=status.state.value,
                )
            await to_its_end(self._relabel(version))

    async def _relabel(self, version: str) -> None:
        with self.to_come(version):
            await self.label(version)
            self.publish(version)

    async def label(self, version: str) -> None:
        """Let the backend label the tokens that it samples from now on."""
        async with self.controller.bounded("the weight version to be set"):
            await self.backend.set_weight_version(version)

    # Reading -----------------------------------------------------------------------------------------------------

    async def manifest(self) -> WeightManifest:
        """Return every tensor that a complete update must bring."""
        self.controller.status.require_open("weight_manifest()")
        if self.controller.capabilities.isdisjoint(SOURCE_CAPABILITY.values()):
            self.controller.require_claimed("weight_manifest()", Capability.WEIGHTS_DISK)
        async with self.controller.bounded("the engine's weight manifest"):
            return await self.backend.weight_manifest()

    async def read(self, name: str) -> TensorData:
        """Return one tensor by its checkpoint name."""
        self.controller.require("get_weights_by_name()", Capability.READ_WEIGHTS)
        async with self.controller.bounded(f"the tensor {name!r}"):
            return await self.backend.read_weight(name)

    async def validate(self) -> WeightReport:
        """Check every tensor for NaN, infinity and zeros only."""
        self.controller.require("validate_weights()", Capability.READ_WEIGHTS)
        async with deadline(self.controller.config.timeouts.weight_update, "the weights to be validated"):
            return await self.backend.validate_weights()

    # Saving ------------------------------------------------------------------------------------------------------

    async def save_sharded(self, path: object, timeout: float | None) -> None:
        """Save the model to a folder; see ``InferenceEngine.save_sharded_model``."""
        self.controller.require("save_sharded_model()", Capability.SAVE_SHARDED)
        await self.save("save_sharded_model()", absolute_path(path), timeout, self.backend.save_sharded)

    async def save_remote(self, url: object, timeout: float | None) -> None:
        """Save the model to an fsspec URL; see ``InferenceEngine.save_remote_model``."""
        self.controller.require("save_remote_model()", Capability.SAVE_REMOTE)
        await self.save("save_remote_model()", check_url(url), timeout, self.backend.save_remote)

    async def save(
        self, action: str, place: str, timeout: float | None, save: Callable[[str], Awaitable[None]]
    ) -> None:
        """Call ``save`` with ``place`` while nothing may change the weights.

        Raises:
            EngineStateError: the weights are asleep, dirty or being updated.
        """
        seconds = check_seconds(timeout, self.controller.config.timeouts.weight_update)
        self.controller.status.require_weights(action)
        async with deadline(seconds, f"the model to be saved to {place!r}"), self.controller.owning_weights(action):
            self.controller.status.require_weights(action)
            await save(place)
