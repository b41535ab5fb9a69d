"""Routes for those who run the server: whether it is ready, and its metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Info, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError
from drivetrain_serving.served_engine import ServedEngine


class OperationRoutes:
    """Readiness and metrics of the served engine."""

    def __init__(self, served: ServedEngine) -> None:
        self._engine = served.engine
        self._registry = CollectorRegistry()
        self._running = self._gauge("requests_running", "Requests in the batch.")
        self._waiting = self._gauge("requests_waiting", "Requests that are not yet in the batch.")
        self._cache = self._gauge("kv_cache_bytes", "Memory held for KV cache.")
        self._weights = self._gauge("weight_bytes", "Memory held for weights.")
        self._state = Gauge("drivetrain_state", "1 for the engine's state.", ["state"], registry=self._registry)
        self._version = Info("drivetrain_weight", "The weights that are served.", registry=self._registry)

    def _gauge(self, name: str, says: str) -> Gauge:
        return Gauge(f"drivetrain_{name}", says, registry=self._registry)

    async def ready(self, request: Request) -> Response:
        """Answer GET ``/ready``: 200 if a request would be served now."""
        del request
        return Response(status_code=200 if self._engine.state is EngineState.READY else 503)

    async def metrics(self, request: Request) -> Response:
        """Answer GET ``/metrics`` in Prometheus' text format."""
        del request
        for state in EngineState:
            self._state.labels(state.value).set(state is self._engine.state)
        self._version.info({"version": self._engine.get_weight_version()})
        try:
            stats = await self._engine.stats()
        except DrivetrainError:  # an engine that cannot say still has a state, which says why
            for gauge in (self._running, self._waiting, self._cache, self._weights):
                gauge.set(float("nan"))
        else:
            self._running.set(stats.running)
            self._waiting.set(stats.waiting)
            self._cache.set(stats.kv_cache_bytes)
            self._weights.set(stats.weight_bytes)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
