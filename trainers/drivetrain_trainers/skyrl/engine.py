"""SkyRL's ``InferenceEngineInterface`` over an engine of drivetrain. It translates, and decides nothing."""

from __future__ import annotations

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidRequest
from drivetrain_trainers.skyrl.control import ControlCalls
from drivetrain_trainers.skyrl.generation import GenerationCalls
from drivetrain_trainers.skyrl.model_calls import ModelCalls
from drivetrain_trainers.skyrl.transfer import WeightTransfers
from drivetrain_trainers.skyrl.weights import WeightCalls


class SkyRLInferenceEngine(GenerationCalls, ControlCalls, WeightCalls, ModelCalls):
    """SkyRL's page of an engine: the names, arguments and results of its ``InferenceEngineInterface``.

    A call that the engine cannot honour is refused with an error of ``drivetrain.errors`` that names why.

    Args:
        engine: A started engine, a fleet, or an engine that was attached by its handle.
        cast: Round the floating-point tensors of weight updates to the engine's dtype; if false, a dtype that would be
            rounded is refused.

    Raises:
        InvalidRequest: ``engine`` is something else.
    """

    def __init__(self, engine: InferenceEngine, *, cast: bool = False) -> None:
        if not isinstance(engine, InferenceEngine):
            raise InvalidRequest(
                f"engine={shown(engine)}: expected an engine; create_engine() makes one, and attach() turns a handle "
                "into one",
                field="engine",
            )
        self.engine = engine
        self.transfers = WeightTransfers(engine, cast=cast)

    def tp_size(self) -> int:
        """Return the tensor parallel size."""
        return self.engine.tp_size

    def pp_size(self) -> int:
        """Return the pipeline parallel size."""
        return self.engine.pp_size

    def dp_size(self) -> int:
        """Return the data parallel size."""
        return self.engine.dp_size

    def ep_size(self) -> int:
        """Return the expert parallel size."""
        return self.engine.ep_size

    async def teardown(self) -> None:
        """Leave all groups, and stop the engine. An attached engine is detached, and goes on."""
        await self.transfers.close()
        await self.engine.teardown()
