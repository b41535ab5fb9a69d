"""The ASGI application: which route is answered by what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
from drivetrain_serving.http.keys import Keys
from drivetrain_serving.operations import OperationRoutes
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.weight_groups import WeightGroupRoutes
from drivetrain_serving.vllm.control import ControlRoutes
from drivetrain_serving.vllm.errors import error_answer, http_error_answer, unauthorized
from drivetrain_serving.vllm.generation import GenerationRoutes
from drivetrain_serving.vllm.tokens import TokenRoutes
from drivetrain_serving.vllm.weight_transfer import WeightTransferRoutes
from drivetrain_serving.weights.weight_groups import WeightGroups

Answer = Callable[[Request], Awaitable[Response]]

_GONE: Final = 499
"""Status of a request whose client went before the answer, as nginx logs it; nobody receives it."""


def create_app(engine: InferenceEngine, config: ServerConfig | None = None) -> Starlette:
    """Return an ASGI application that serves ``engine``.

    Args:
        engine: A started engine, or a fleet. The application does not end it.
        config: Names, keys and bounds.

    Await ``app.state.weight_groups.close()`` when the application is no longer served: it ends the processes that
    receive weights.
    """
    config = config or ServerConfig()
    served = ServedEngine(engine, config)
    weight_groups = WeightGroups(engine)
    groups, transfer = WeightGroupRoutes(weight_groups, config), WeightTransferRoutes(engine, weight_groups, config)
    operations, control = OperationRoutes(served), ControlRoutes(served, transfer)
    generation, tokens = GenerationRoutes(served), TokenRoutes(served)
    opened: dict[str, Answer] = {
        "/health": control.health,
        "/ready": operations.ready,
        "/version": control.version,
        "/metrics": operations.metrics,
    }
    data: dict[str, Answer] = {
        "/v1/completions": generation.completions,
        "/v1/chat/completions": generation.chat_completions,
        "/inference/v1/generate": generation.generate,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
    }
    described: dict[str, Answer] = {"/v1/models": control.models, "/load": control.load}
    asked: dict[str, Answer] = {
        "/server_info": control.server_info,
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
        "/wake_up": control.wake_up,
        "/reset_prefix_cache": control.reset_prefix_cache,
        "/reset_mm_cache": control.reset_other_cache,
        "/reset_encoder_cache": control.reset_other_cache,
        "/update_weights": control.update_weights,
        "/update_weight_version": control.update_weight_version,
        "/v1/load_lora_adapter": control.load_lora_adapter,
        "/load_lora_adapter": control.reload_lora_adapter,
        "/v1/unload_lora_adapter": control.unload_lora_adapter,
        "/start_draft_weight_update": control.refuse_draft,
        "/init_weight_transfer_engine": transfer.init,
        "/shutdown_weight_transfer_engine": transfer.shutdown,
        "/start_weight_update": transfer.start,
        "/finish_weight_update": transfer.finish,
        "/init_weights_update_group": groups.init_weights_update_group,
        "/destroy_weights_update_group": groups.destroy_weights_update_group,
        "/update_weights_from_distributed": groups.update_weights_from_distributed,
        "/begin_weight_update": groups.begin_weight_update,
        "/end_weight_update": groups.end_weight_update,
    }
    app = Starlette(
        routes=[
            *(Route(path, answer, methods=["GET"]) for path, answer in (opened | described | asked).items()),
            *(Route(path, answer, methods=["POST"]) for path, answer in (data | told).items()),
        ],
        middleware=[Middleware(Keys, config, opened, (data | described).keys(), unauthorized)],
        exception_handlers={HTTPException: _http_error, DrivetrainError: _error, ClientDisconnect: _gone},
    )
    app.state.weight_groups = weight_groups
    return app


def _http_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException)
    return http_error_answer(error)


def _error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, DrivetrainError)
    return error_answer(error)


def _gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=_GONE)
