"""The ASGI application: its routes, and the objects that answer them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.gateway.routes import AGENT_PATHS, SessionRoutes
from drivetrain_serving.health_and_metrics import OperationRoutes
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.keys import Keys
from drivetrain_serving.http_layer.request_counts import CountsRequests, RequestCounts
from drivetrain_serving.http_layer.request_records import RECORD, RequestRecord, RequestRecords, log_record
from drivetrain_serving.http_layer.route_docs import documented
from drivetrain_serving.openapi.document import KeyName, document_of
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang import errors as sglang_errors
from drivetrain_serving.sglang import openai_fields
from drivetrain_serving.sglang.answer_types import SGLangServerInfo
from drivetrain_serving.sglang.routes import SGLangRoutes
from drivetrain_serving.status.routes import StatusRoutes
from drivetrain_serving.vllm import errors as vllm_errors
from drivetrain_serving.vllm.answer_types import VllmServerInfo
from drivetrain_serving.vllm.collective_rpc import CollectiveRpcRoute
from drivetrain_serving.vllm.control import ControlRoutes
from drivetrain_serving.vllm.derender import DerenderRoutes
from drivetrain_serving.vllm.embeddings import EmbeddingRoute
from drivetrain_serving.vllm.generation import GenerationRoutes
from drivetrain_serving.vllm.render import RenderRoutes
from drivetrain_serving.vllm.sent_adapters import SentAdapters
from drivetrain_serving.vllm.tokens import TokenRoutes
from drivetrain_serving.vllm.weight_checker import WeightCheckerRoute
from drivetrain_serving.vllm.weight_transfer import WeightTransferRoutes
from drivetrain_serving.weight_checks import WeightChecks
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

Answer = Callable[[Request], Awaitable[Response]]

OPENAI_ROUTES: Final = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
"""Routes whose error bodies follow the server's dialect."""
_GONE: Final = 499
"""Logged status of a request whose client disconnected before the answer, as in nginx; it is never sent."""


def create_app(engine: InferenceEngine, config: ServerConfig | None = None) -> Starlette:
    """Return an ASGI application that serves ``engine``.

    Await ``app.state.sessions.close()`` at its end, which deletes recorded sessions; :class:`Server` does. Under
    another ASGI server, that server decides what happens to the rest of a body that is refused before its end.

    Args:
        engine: A started engine, or a fleet. The application does not end it.
        config: Names, keys and bounds.

    When the application is no longer served, await ``app.state.weight_groups.close()``, which ends the processes that
    receive weights, and ``app.state.sent_adapters.close()``, which frees the memory of adapters that came by them.
    """
    return application(ServedEngine(engine, config or ServerConfig()))


def application(served: ServedEngine) -> Starlette:
    """Return the application of :func:`create_app`."""
    engine, config = served.engine, served.config
    sglang = config.dialect == "sglang"
    weight_groups = WeightGroups(engine, cast=config.cast_weights)
    adapters = SentAdapters(served)
    transfer = WeightTransferRoutes(engine, weight_groups, adapters, config)
    counts = RequestCounts()
    operations, control = OperationRoutes(served, counts), ControlRoutes(served, transfer, adapters)
    checks = WeightChecks(engine, weight_groups)
    sglang_routes = SGLangRoutes(served, weight_groups, checks)
    generation = (
        GenerationRoutes(served, sglang_errors.flat_body, openai_fields.translated, header_ids=False)
        if sglang
        else GenerationRoutes(served)
    )
    render = RenderRoutes(served, header_ids=not sglang)
    derender = DerenderRoutes(served)
    tokens = TokenRoutes(served)
    status = StatusRoutes(served)
    more = sglang_routes.always()

    @documented(statuses=(), answer=ServerInfo)
    async def server_info(request: Request) -> Response:
        """Answer GET ``/server_info`` with what either dialect's clients read."""
        del request
        return json_answer(ServerInfo(**sglang_routes.description.server_info(), **control.server_info()))

    @documented(statuses=(), answer=dict[str, object])
    async def openapi(request: Request) -> Response:
        """Answer GET ``/openapi.json`` with the document of all routes."""
        del request
        return json_answer(document)

    opened: dict[str, Answer] = {
        "/": status.page,
        "/openapi.json": openapi,
        "/health": control.health,
        "/health_generate": control.health,
        "/ready": operations.ready,
        "/version": control.version,
        "/metrics": operations.metrics,
    }
    data: dict[str, Answer] = {
        "/v1/completions": generation.completions,
        "/v1/chat/completions": generation.chat_completions,
        "/v1/embeddings": EmbeddingRoute(served, header_ids=not sglang).embeddings,
        "/v1/chat/completions/render": render.chat_completions,
        "/v1/completions/render": render.completions,
        "/v1/chat/completions/derender": derender.chat_completions,
        "/v1/completions/derender": derender.completions,
        "/inference/v1/generate": generation.generate,
        "/skyrl/v1/generate": generation.skyrl_generate,
        "/inference/v1/abort_requests": control.abort_generations,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
    }
    described: dict[str, Answer] = {"/v1/models": control.models, "/load": control.load, "/status": status.status}
    asked: dict[str, Answer] = {
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/get_world_size": control.world_size,
        "/is_paused": control.is_paused,
        "/is_sleeping": control.is_sleeping,
        "/weight_info": control.weight_info,
    }
    told: dict[str, Answer] = {
        "/pause": control.pause,
        "/resume": control.resume,
        "/abort_requests": control.abort_requests,
        "/sleep": control.sleep,
        "/release_kv_cache_memory": control.release_kv_cache_memory,
        "/wake_up": control.wake_up,
        "/reset_prefix_cache": control.reset_prefix_cache,
        "/reset_mm_cache": control.reset_other_cache,
        "/reset_encoder_cache": control.reset_other_cache,
        "/update_weights": control.update_weights,
        "/update_weight_version": control.update_weight_version,
        "/weight_checker": WeightCheckerRoute(checks, config).weight_checker,
        "/v1/load_lora_adapter": control.load_lora_adapter,
        "/load_lora_adapter": control.reload_lora_adapter,
        "/v1/unload_lora_adapter": control.unload_lora_adapter,
        "/skyrl/v1/load_lora_adapter": control.reload_skyrls_adapter,
        "/start_draft_weight_update": control.refuse_draft,
        "/fetch_weights": control.refuse_deltas,
        "/init_weight_transfer_engine": transfer.init,
        "/shutdown_weight_transfer_engine": transfer.shutdown,
        "/start_weight_update": transfer.start,
        "/finish_weight_update": transfer.finish,
        "/collective_rpc": CollectiveRpcRoute(engine, transfer, adapters, config).collective_rpc,
    }
    posted: dict[str, Answer] = {**data, **told, **(sglang_routes.of_the_dialect() if sglang else {})}
    of_data = {*data, *described, *(one.path for one in more if one.is_data)}
    own = {one.path for one in more} | (sglang_routes.of_the_dialect().keys() if sglang else set())
    errors = _Errors(own, flat=sglang)
    sessions = SessionRoutes(served, openai_fields.translated, header_ids=False) if sglang else SessionRoutes(served)
    observers: list[Callable[[RequestRecord], None]] = [log_record] if config.log_requests else []
    if config.trace_requests:
        from drivetrain_serving.http_layer.request_spans import span_maker  # OpenTelemetry is optional

        observers.append(span_maker())
    routes = [
        *sessions.routes(control.models),
        *(Route(path, answer, methods=["GET"]) for path, answer in (opened | described | asked).items()),
        *(Route(path, answer, methods=["POST"]) for path, answer in posted.items()),
        *(Route(one.path, one.answer, methods=list(one.methods)) for one in more),
    ]
    counts.know(routes)
    document = document_of(routes, lambda path: _key_of(path, opened, of_data), errors.types_of)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(CountsRequests, counts),
            *([Middleware(RequestRecords, observers)] if observers else []),
            Middleware(Keys, config, opened, of_data, vllm_errors.unauthorized, vllm_errors.forbidden, AGENT_PATHS),
        ],
        exception_handlers={
            HTTPException: errors.of_http,
            DrivetrainError: errors.of_engine,
            ClientDisconnect: _gone,
            Exception: errors.of_fault,
        },
    )
    app.state.served = served
    app.state.counts = counts
    app.state.sessions = sessions
    app.state.weight_groups = weight_groups
    app.state.sent_adapters = adapters
    return app


def _key_of(path: str, opened: Collection[str], of_data: Collection[str]) -> KeyName:
    """Return the key that :class:`Keys` asks for."""
    if path in opened:
        return "none"
    return "api" if path in of_data or AGENT_PATHS.fullmatch(path) else "control"


class ServerInfo(SGLangServerInfo, VllmServerInfo):
    """Answer of ``/server_info``: the fields of both dialects."""


class _Errors:
    """Answers to requests that fail, in the form of the route's dialect.

    Args:
        sglang_paths: Paths that SGLang's routes answer.
        flat: Answer OpenAI's routes with SGLang's flat bodies.
    """

    def __init__(self, sglang_paths: Collection[str], *, flat: bool) -> None:
        self._flat = flat
        self._sglang_paths = sglang_paths

    def types_of(self, path: str) -> Sequence[object]:
        """Return the types of bodies of errors that a path can have from here."""
        if path in self._sglang_paths:
            return (sglang_errors.NestedErrorBody, sglang_errors.FlatErrorBody)
        if not self._flat:
            return (vllm_errors.ErrorBody,)
        flat = sglang_errors.FlatErrorBody
        return (flat,) if path in OPENAI_ROUTES else (flat, vllm_errors.ErrorBody)

    def of_http(self, request: Request, error: Exception) -> Response:
        """Answer a request that HTTP itself refuses."""
        assert isinstance(error, HTTPException)
        if self._flat or request.url.path in self._sglang_paths:
            return sglang_errors.http_error_answer(error)
        return vllm_errors.http_error_answer(error)

    def of_fault(self, request: Request, error: Exception) -> Response:
        """Answer a request that a fault of the server broke; the error is logged, and not told."""
        words = f"a fault of the server: {type(error).__name__}; see its log"
        answer = self.of_http(request, HTTPException(500, words))
        answer.headers["connection"] = "close"  # uvicorn closes it, and the client's next request would fail
        return answer

    def of_engine(self, request: Request, error: Exception) -> Response:
        """Answer a request that the engine or its route refuses, or that failed."""
        assert isinstance(error, DrivetrainError)
        if (record := RECORD.get()) is not None:
            record.failed(error)
        path = request.url.path
        if path in self._sglang_paths:
            return sglang_errors.error_answer(error)
        if self._flat and path in OPENAI_ROUTES:
            return sglang_errors.flat_error_answer(error)
        return vllm_errors.error_answer(error)


def _gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=_GONE)
