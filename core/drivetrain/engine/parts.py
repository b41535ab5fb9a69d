"""The parts of an engine, and the classes that they are made of.

Each part owns its state and is used through its public methods only. A part is given those below it::

    Generation   Adapters   Pooling   Diagnostics   Communicators
        │            │
        │      WeightUpdates
        │       │
        │  PauseAndSleep
        │       │
    RequestsInFlight ── Sessions, LoadedAdapters, StartedModel, ServedWeights
        │
    Controller   Backend
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.backend.base import Backend
from drivetrain.engine.adapters import Adapters
from drivetrain.engine.communicators import Communicators
from drivetrain.engine.controller import Controller
from drivetrain.engine.diagnostics import Diagnostics
from drivetrain.engine.generation import Generation
from drivetrain.engine.loaded_adapters import LoadedAdapters
from drivetrain.engine.model import StartedModel
from drivetrain.engine.pause_and_sleep import PauseAndSleep
from drivetrain.engine.pooling import Pooling
from drivetrain.engine.requests_in_flight import RequestsInFlight
from drivetrain.engine.served_weights import ServedWeights
from drivetrain.engine.sessions import Sessions
from drivetrain.engine.sharing import Sharing
from drivetrain.engine.weight_updates import WeightUpdates
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one engine, and the backend below them."""

    backend: Backend
    controller: Controller
    model: StartedModel
    loaded_adapters: LoadedAdapters
    in_flight: RequestsInFlight
    pauses: PauseAndSleep
    weights: ServedWeights
    updates: WeightUpdates
    communicators: Communicators
    adapters: Adapters
    sessions: Sessions
    generation: Generation
    pooling: Pooling
    diagnostics: Diagnostics
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class PartKinds:
    """The class of each part.

    To change one thing that an engine does, replace a class by a subclass of it, and the engine's parts before it
    starts::

        kinds = PartKinds(pauses=MyPauseAndSleep)
        engine.parts = kinds.build(engine.config, engine.parts.backend, engine.capabilities)
    """

    controller: type[Controller] = Controller
    model: type[StartedModel] = StartedModel
    loaded_adapters: type[LoadedAdapters] = LoadedAdapters
    in_flight: type[RequestsInFlight] = RequestsInFlight
    pauses: type[PauseAndSleep] = PauseAndSleep
    weights: type[ServedWeights] = ServedWeights
    updates: type[WeightUpdates] = WeightUpdates
    communicators: type[Communicators] = Communicators
    adapters: type[Adapters] = Adapters
    sessions: type[Sessions] = Sessions
    generation: type[Generation] = Generation
    pooling: type[Pooling] = Pooling
    diagnostics: type[Diagnostics] = Diagnostics
    sharing: type[Sharing] = Sharing

    def build(self, config: EngineConfig, backend: Backend, capabilities: frozenset[Capability]) -> Parts:
        """Make the parts of one engine."""
        controller = self.controller(config, capabilities)
        model = self.model(controller, backend)
        loaded = self.loaded_adapters(controller)
        sessions = self.sessions(controller)
        weights = self.weights(controller, backend)
        in_flight = self.in_flight(controller, backend, model, loaded, weights)
        pauses = self.pauses(controller, backend, in_flight)
        updates = self.updates(controller, backend, in_flight, pauses, weights)
        return Parts(
            backend=backend,
            controller=controller,
            model=model,
            loaded_adapters=loaded,
            in_flight=in_flight,
            pauses=pauses,
            weights=weights,
            updates=updates,
            communicators=self.communicators(controller, backend),
            adapters=self.adapters(controller, backend, loaded, in_flight, pauses, weights, updates),
            sessions=sessions,
            generation=self.generation(controller, backend, model, in_flight, loaded, sessions),
            pooling=self.pooling(controller, backend, model),
            diagnostics=self.diagnostics(controller, backend),
            sharing=self.sharing(controller),
        )
