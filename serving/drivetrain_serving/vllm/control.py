"""Routes that pause, sleep, update weights and load adapters, and those that describe the server."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain_serving.http.answers import json_answer
from drivetrain_serving.http.bodies import query_flag, read_json
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm.errors import error_answer, plain_error_answer
from drivetrain_serving.vllm.weight_transfer import WeightTransferRoutes, can_transfer

_R = TypeVar("_R", bound="ControlRoutes")
_Route = Callable[[_R, Request], Awaitable[Response]]

_PERMISSION: Final = MappingProxyType(
    {
        "object": "model_permission",
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
)
"""An entry that OpenAI's API no longer has, and vLLM writes."""


def _refusals(answer: Callable[[DrivetrainError], Response]) -> Callable[[_Route[_R]], _Route[_R]]:
    """Answer an error by ``answer``."""

    def decorate(route: _Route[_R]) -> _Route[_R]:
        @wraps(route)
        async def call(self: _R, request: Request) -> Response:
            try:
                return await route(self, request)
            except DrivetrainError as error:
                return answer(error)

        return call

    return decorate


class ControlRoutes:
    """Routes that control the served engine or describe it."""

    def __init__(self, served: ServedEngine, transfer: WeightTransferRoutes) -> None:
        self._served = served
        self._transfer = transfer
        self._engine = served.engine
        self._started = int(time.time())

    # Description -------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Answer GET ``/health``: 200 while the engine lives, also paused, asleep or in an update."""
        del request
        return Response(status_code=503 if self._engine.state in (EngineState.FAILED, EngineState.CLOSED) else 200)

    async def version(self, request: Request) -> Response:
        """Answer GET ``/version``."""
        del request
        return json_answer({"version": importlib.metadata.version("drivetrain")})

    async def models(self, request: Request) -> Response:
        """Answer GET ``/v1/models``: the model by each of its names, then the adapters."""
        del request
        served = self._served
        length = self._engine.model_info.context_length
        cards = [self._card(name, self._engine.config.model, None, length) for name in served.names]
        cards += [self._card(name, path, served.name, None) for name, path in served.adapters.items()]
        return json_answer({"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, length: int | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": self._served.config.dialect,
            "root": root,
            "parent": parent,
            "max_model_len": length,
            "permission": [{"id": f"modelperm-{name}", "created": self._started, **_PERMISSION}],
        }

    def server_info(self) -> dict[str, object]:
        """Return vLLM's part of ``/server_info``, the configuration that trainers read, and the engine's own."""
        engine, info = self._engine, self._engine.model_info
        config = engine.config
        lora = {"max_lora_rank": config.max_lora_rank, "max_loras": config.max_loras} if config.enable_lora else None
        described = engine.describe()
        return {
            "vllm_config": {
                "model_config": {
                    "model": config.model,
                    "dtype": f"torch.{info.dtype}",
                    "max_model_len": info.context_length,
                    "logprobs_mode": f"{config.logprobs_mode.value}_logprobs",
                },
                "parallel_config": {
                    "tensor_parallel_size": config.tensor_parallel_size,
                    "pipeline_parallel_size": config.pipeline_parallel_size,
                    "data_parallel_size": config.data_parallel_size,
                },
                "lora_config": lora,
                "weight_transfer_config": {"backend": "nccl"} if can_transfer(engine) else None,
            },
            "vllm_env": {},
            "system_env": {},
            "drivetrain": {
                "backend": described.backend,
                "state": described.state,
                "weight_version": described.weight_version,
                "versions": described.versions,
                "capabilities": described.capabilities,
            },
        }

    async def world_size(self, request: Request) -> Response:
        """Answer GET ``/get_world_size``: the number of processes that receive weights."""
        del request
        return json_answer({"world_size": 1})

    async def load(self, request: Request) -> Response:
        """Answer GET ``/load``: the number of requests in the engine."""
        del request
        stats = await self._engine.stats()
        return json_answer({"server_load": stats.running + stats.waiting})

    # Pause and sleep ---------------------------------------------------------------------------------------------

    @_refusals(plain_error_answer)
    async def pause(self, request: Request) -> Response:
        """Answer POST ``/pause``: ``mode`` abort, wait or keep, and ``clear_cache``, which is true if not given."""
        mode = request.query_params.get("mode", "abort")
        clear = query_flag(request.query_params, "clear_cache", True)
        await self._pause(mode, clear)
        self._served.slept = False
        return json_answer({"status": "paused"})

    async def _pause(self, mode: str, clear: bool) -> None:
        match mode:
            case "abort" | "wait":
                await self._engine.pause_generation(mode)
                if clear and self._engine.supports(Capability.PREFIX_CACHE):
                    await self._engine.reset_prefix_cache()
            case "keep":
                await self._engine.pause_generation(PauseMode.RETRACT if clear else PauseMode.IN_PLACE)
            case _:
                raise InvalidRequest(f"mode={shown(mode)}: expected abort, wait or keep", field="mode")

    @_refusals(plain_error_answer)
    async def resume(self, request: Request) -> Response:
        """Answer POST ``/resume``."""
        del request
        await self._engine.continue_generation()
        self._served.slept = False
        return json_answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Answer GET ``/is_paused``."""
        del request
        return json_answer({"is_paused": self._engine.is_paused})

    @_refusals(plain_error_answer)
    async def abort_requests(self, request: Request) -> Response:
        """Answer POST ``/abort_requests``: those of ``request_ids``, or all."""
        body = await read_json(request, self._served.config)
        ids = body.get("request_ids") or []
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise InvalidRequest(f"request_ids={shown(ids)}: expected a list of strings", field="request_ids")
        if not ids:
            stats = await self._engine.stats()
            await self._engine.abort_generation()
            return json_answer({"status": "aborted", "aborted": stats.running + stats.waiting})
        for one in ids:
            await self._engine.abort(str(one))
        return json_answer({"status": "aborted", "aborted": len(ids)})

    @_refusals(error_answer)
    async def sleep(self, request: Request) -> Response:
        """Answer POST ``/sleep``: level 0 pauses, 1 frees the cache and moves weights away, 2 frees both."""
        query = request.query_params
        level = query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise InvalidRequest(f"level={shown(level)}: expected 0, 1 or 2", field="level")
        if level == "1" and not self._engine.config.sleep_keeps_weights and self._frees(MemoryTag.WEIGHTS):
            dropped = "level=1 keeps the weights, and this engine drops them when it sleeps"
            if not self._engine.supports(Capability.SLEEP_KEEPS_WEIGHTS):
                raise UnsupportedCapability(f"{dropped}; ask for level 2, and push weights after it")
            raise InvalidRequest(
                f"{dropped}; start it with sleep_keeps_weights: true, or ask for level 2", field="level"
            )
        await self._pause(query.get("mode", "abort"), level != "0")
        if level != "0":
            await self._engine.sleep()
        self._served.slept = True
        return json_answer({"status": "sleeping", "level": int(level)})

    def _frees(self, tag: MemoryTag) -> bool:
        return self._engine.supports(f"sleep_{tag.value}")

    @_refusals(error_answer)
    async def wake_up(self, request: Request) -> Response:
        """Answer POST ``/wake_up``: the memory of ``tags``, or all; when all is there, requests go on."""
        tags = request.query_params.getlist("tags")
        memory = [tag for tag in tags if tag != "scheduling"]
        if memory or not tags:
            await self._engine.wake_up(memory or None)
        awake = not self._engine.status.asleep
        if awake and self._served.slept and self._engine.status.state is not EngineState.DIRTY:
            await self._engine.continue_generation()
            self._served.slept = False
        return json_answer({"status": "awake" if awake else "sleeping", "tags": tags or None})

    async def is_sleeping(self, request: Request) -> Response:
        """Answer GET ``/is_sleeping``."""
        del request
        return json_answer({"is_sleeping": self._served.slept or bool(self._engine.status.asleep)})

    @_refusals(error_answer)
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Answer POST ``/reset_prefix_cache``."""
        del request
        if self._engine.supports(Capability.PREFIX_CACHE):
            await self._engine.reset_prefix_cache()
        return json_answer({"success": True})

    async def reset_other_cache(self, request: Request) -> Response:
        """Answer POST ``/reset_mm_cache`` and ``/reset_encoder_cache``: nothing is kept between requests."""
        del request
        return Response()

    # Weights -----------------------------------------------------------------------------------------------------

    @_refusals(error_answer)
    async def update_weights(self, request: Request) -> Response:
        """Answer POST ``/update_weights``: of ``weight_dir``, or of tensors that the trainer broadcasts."""
        body = await read_json(request, self._served.config)
        if body.get("update_info") is not None:
            return json_answer({"message": await self._transfer.receive(request, body)})
        folder = body.get("weight_dir")
        if not isinstance(folder, str) or not folder:
            raise UnsupportedCapability("give weight_dir, a checkpoint folder that the engine can read, or update_info")
        await self._engine.load_weights_from_disk(folder, self._label(body, folder))
        self._transfer.drop_open_update()
        return json_answer({"status": "ok", "weight_version": self._engine.get_weight_version()})

    def _label(self, body: Mapping[str, object], folder: str) -> str:
        given = body.get("weight_version")
        return given if isinstance(given, str) and given else self._served.version_of(folder)

    @_refusals(error_answer)
    async def refuse_draft(self, request: Request) -> Response:
        """Refuse POST ``/start_draft_weight_update``."""
        del request
        raise UnsupportedCapability("weights of draft models cannot be updated")

    @_refusals(error_answer)
    async def update_weight_version(self, request: Request) -> Response:
        """Answer POST ``/update_weight_version``: a new label for the weights that are served.

        ``abort_all_requests: true``, which SGLang's clients send, ends all requests first.
        """
        body = await read_json(request, self._served.config)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise InvalidRequest(f"new_version={shown(version)}: expected a string", field="new_version")
        if body.get("abort_all_requests") is True:
            await self._engine.abort_generation()
        await self._engine.update_weight_version(version)
        return json_answer({"success": True, "new_version": version})

    async def weight_info(self, request: Request) -> Response:
        """Answer GET ``/weight_info``."""
        del request
        return json_answer({"weight_version": self._engine.get_weight_version()})

    # Adapters ----------------------------------------------------------------------------------------------------

    @_refusals(error_answer)
    async def load_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/v1/load_lora_adapter``; a name that is taken needs ``load_inplace``."""
        body = await read_json(request, self._served.config, wants_type=True)
        name = _text(body, "lora_name")
        await self._load_adapter(name, body, replace=body.get("load_inplace") is True)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @_refusals(error_answer)
    async def reload_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/load_lora_adapter``, as prime-rl calls it: a name that is taken gets the new weights."""
        body = await read_json(request, self._served.config)
        await self._load_adapter(_text(body, "lora_name"), body, replace=True)
        return json_answer({"status": "ok"})

    async def _load_adapter(self, name: str, body: Mapping[str, object], *, replace: bool) -> None:
        path = _text(body, "lora_path")
        if not self._engine.supports(Capability.LORA):
            raise HTTPException(404, "adapters are not enabled; start the engine with enable_lora: true")
        if not await asyncio.to_thread(os.path.isdir, path):
            raise HTTPException(404, f"The lora adapter '{name}' cannot be found: there is no folder {shown(path)}.")
        await self._served.load_adapter(name, path, replace=replace)

    @_refusals(error_answer)
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/v1/unload_lora_adapter``; requests that use the adapter end first."""
        name = _text(await read_json(request, self._served.config, wants_type=True), "lora_name")
        if name not in self._served.adapters:
            raise HTTPException(404, f"The lora adapter '{name}' cannot be found.")
        await self._served.unload_idle_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _text(body: Mapping[str, object], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name}={shown(value)}: expected a text that is not empty", field=name)
    return value
