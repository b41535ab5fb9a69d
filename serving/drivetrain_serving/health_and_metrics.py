"""Routes for those who run the server: whether it is ready, and its metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.engine.states import EngineState
from drivetrain_serving.http_layer.request_counts import RequestCounts
from drivetrain_serving.http_layer.route_docs import TEXT, documented
from drivetrain_serving.metrics import metrics_of
from drivetrain_serving.other_processes import Counted
from drivetrain_serving.served_engine import ServedEngine


class OperationRoutes:
    """Readiness and metrics of the served engine.

    Args:
        served: The engine.
        counts: The server's answers.
    """

    def __init__(self, served: ServedEngine, counts: RequestCounts) -> None:
        self._served = served
        self._engine = served.engine
        self._counts = counts

    @documented(statuses=(503,), media=(), errors=None)
    async def ready(self, request: Request) -> Response:
        """Answer GET ``/ready``: 200 if a request would be served now."""
        del request
        return Response(status_code=200 if self._engine.state is EngineState.READY else 503)

    @documented(statuses=(), media=(TEXT,))
    async def metrics(self, request: Request) -> Response:
        """Answer GET ``/metrics`` in Prometheus' text format."""
        del request
        counted = sum(await self._served.others.counts(), Counted(self._counts.by_route()))
        return Response(await metrics_of(self._engine, counted.answers), media_type=CONTENT_TYPE_LATEST)
