"""Routes that pause, sleep, update weights and load adapters, and those that describe the server."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Final, TypeVar

from pydantic import Field, JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.pause_and_sleep import SLEEP_CAPABILITY
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import flag_of, query_flag, read_fields, text_of, version_of
from drivetrain_serving.http_layer.error_statuses import PlainErrorBody
from drivetrain_serving.http_layer.route_docs import OF_ENGINES, TEXT, Fields, documented
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.vllm import answer_types as types
from drivetrain_serving.vllm.errors import error_answer, plain_error_answer
from drivetrain_serving.vllm.sent_adapters import SentAdapters
from drivetrain_serving.vllm.weight_transfer import UpdateInfo, WeightTransferRoutes, can_transfer

_R = TypeVar("_R", bound="ControlRoutes")
_Route = Callable[[_R, Request], Awaitable[Response]]

_NAME: Final[dict[str, JsonValue]] = {"type": "string", "minLength": 1}
_FLAG: Final[dict[str, JsonValue]] = {"type": ["boolean", "null"]}
_TEXT: Final[dict[str, JsonValue]] = {"type": ["string", "null"]}
_VERSION: Final[dict[str, JsonValue]] = {"type": ["string", "integer", "null"]}
_MODE: Final[dict[str, JsonValue]] = {"enum": ["abort", "wait", "keep"]}


class PauseQuery(Fields):
    """The query of ``/pause``."""

    mode: object = Field(
        default="abort",
        description="Ends requests in flight, waits for them, or keeps them for later.",
        json_schema_extra=_MODE,
    )
    clear_cache: object = Field(
        default=True, description="Discards cached prefixes.", json_schema_extra={"type": "boolean"}
    )


class SleepQuery(Fields):
    """The query of ``/sleep``."""

    level: object = Field(
        default="1",
        description="0 pauses, 1 frees the cache and moves weights away, 2 frees both.",
        json_schema_extra={"enum": ["0", "1", "2"]},
    )
    mode: object = Field(default="abort", description="As of a pause.", json_schema_extra=_MODE)
    tags: object = Field(
        default=None,
        description="Memory to free; all if not given. Level 0 takes none.",
        json_schema_extra={"type": "array", "items": {"enum": [tag.value for tag in MemoryTag]}},
    )


class WakeQuery(Fields):
    """The query of ``/wake_up``."""

    tags: object = Field(
        default=None,
        description="Memory to allocate; all if not given.",
        json_schema_extra={"type": "array", "items": {"enum": [*(tag.value for tag in MemoryTag), "scheduling"]}},
    )


class AbortFields(Fields):
    """A request to ``/abort_requests``."""

    request_ids: object = Field(
        default=None,
        description="Ids of requests; null or empty: all.",
        json_schema_extra={"type": ["array", "null"], "items": {"type": "string"}},
    )


class AbortGenerationsFields(Fields):
    """A request to ``/inference/v1/abort_requests``."""

    request_ids: object = Field(
        default=None,
        description="Ids of requests; empty: none.",
        json_schema_extra={"type": "array", "items": {"type": "string"}},
    )


class UpdateFields(UpdateInfo):
    """A request to ``/update_weights``: of a folder, or of tensors that the trainer broadcasts."""

    weight_dir: object = Field(
        default=None, description="A checkpoint folder that the engine can read.", json_schema_extra=_TEXT
    )
    weight_version: object = Field(
        default=None, description="Version of the weights in the folder.", json_schema_extra=_VERSION
    )


class VersionFields(Fields):
    """A request to ``/update_weight_version``."""

    new_version: object = Field(
        default=None, description="A new name of the weights that are served.", json_schema_extra={"type": "string"}
    )
    abort_all_requests: object = Field(default=None, description="Ends all requests first.", json_schema_extra=_FLAG)


class AdapterFields(Fields):
    """A request to ``/v1/unload_lora_adapter``."""

    lora_name: object = Field(default=None, description="Name of the adapter in requests.", json_schema_extra=_NAME)


class ReloadAdapterFields(AdapterFields):
    """A request to ``/load_lora_adapter``."""

    lora_path: object = Field(default=None, description="A peft folder.", json_schema_extra=_NAME)


class ReloadSentAdapterFields(ReloadAdapterFields):
    """A request to ``/skyrl/v1/load_lora_adapter``: of a folder, or of tensors that came by the weight transfer."""

    in_memory: object = Field(
        default=None, description="Takes the tensors that came, and no folder.", json_schema_extra=_FLAG
    )


class LoadAdapterFields(ReloadAdapterFields):
    """A request to ``/v1/load_lora_adapter``."""

    load_inplace: object = Field(
        default=None, description="Gives a loaded adapter new weights.", json_schema_extra=_FLAG
    )


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

    def __init__(self, served: ServedEngine, transfer: WeightTransferRoutes, adapters: SentAdapters) -> None:
        self._served = served
        self._transfer = transfer
        self._adapters = adapters
        self._engine = served.engine
        self._started = int(time.time())

    # Description -------------------------------------------------------------------------------------------------

    @documented(statuses=(503,), media=(), errors=None)
    async def health(self, request: Request) -> Response:
        """Answer GET ``/health``: 200 while the engine lives, also paused, asleep or in an update."""
        del request
        return Response(status_code=503 if self._engine.state in (EngineState.FAILED, EngineState.CLOSED) else 200)

    @documented(statuses=(), answer=types.Version)
    async def version(self, request: Request) -> Response:
        """Answer GET ``/version``."""
        del request
        return json_answer(types.Version(version=importlib.metadata.version("drivetrain")))

    @documented(statuses=(), answer=types.Models)
    async def models(self, request: Request) -> Response:
        """Answer GET ``/v1/models``: the model by each of its names, then the adapters."""
        del request
        served = self._served
        length = self._engine.model_info.context_length
        cards = [self._card(name, self._engine.config.model, None, length) for name in served.names]
        cards += [self._card(name, path, served.name, None) for name, path in served.adapters.items()]
        return json_answer(types.Models(object="list", data=cards))

    def _card(self, name: str, root: str, parent: str | None, length: int | None) -> types.ModelCard:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": self._served.config.dialect,
            "root": root,
            "parent": parent,
            "max_model_len": length,
            "permission": [self._permission(name)],
        }

    def _permission(self, name: str) -> types.ModelPermission:
        return {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": self._started,
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

    def server_info(self) -> types.VllmServerInfo:
        """Return vLLM's part of ``/server_info``, the configuration that trainers read, and the engine's own."""
        engine, info = self._engine, self._engine.model_info
        config = engine.config
        lora: types.LoraConfigInfo = {"max_lora_rank": config.max_lora_rank, "max_loras": config.max_loras}
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
                "lora_config": lora if config.enable_lora else None,
                "weight_transfer_config": {"backend": "nccl"} if can_transfer(engine) else None,
            },
            "vllm_env": {},
            "system_env": {},
            "drivetrain": {
                "backend": described.backend,
                "state": described.state,
                "weight_version": described.weight_version,
                "versions": described.versions,
                "capabilities": list(described.capabilities),
            },
        }

    @documented(statuses=(), answer=types.WorldSize)
    async def world_size(self, request: Request) -> Response:
        """Answer GET ``/get_world_size``: the number of processes that receive weights."""
        del request
        return json_answer(types.WorldSize(world_size=1))

    @documented(answer=types.ServerLoad)
    async def load(self, request: Request) -> Response:
        """Answer GET ``/load``: the number of requests in the engine."""
        del request
        stats = await self._engine.stats()
        return json_answer(types.ServerLoad(server_load=stats.running + stats.waiting))

    # Pause and sleep ---------------------------------------------------------------------------------------------

    @documented(query=PauseQuery, answer=types.Paused, errors=(PlainErrorBody,))
    @_refusals(plain_error_answer)
    async def pause(self, request: Request) -> Response:
        """Answer POST ``/pause``: ``mode`` abort, wait or keep, and ``clear_cache``, which is true if not given."""
        mode = request.query_params.get("mode", "abort")
        clear = query_flag(request.query_params, "clear_cache", True)
        await self._pause(mode, clear)
        self._served.slept = False
        return json_answer(types.Paused(status="paused"))

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

    @documented(answer=types.Resumed, errors=(PlainErrorBody,))
    @_refusals(plain_error_answer)
    async def resume(self, request: Request) -> Response:
        """Answer POST ``/resume``."""
        del request
        await self._engine.continue_generation()
        self._served.slept = False
        return json_answer(types.Resumed(status="resumed"))

    @documented(statuses=(), answer=types.IsPaused)
    async def is_paused(self, request: Request) -> Response:
        """Answer GET ``/is_paused``."""
        del request
        return json_answer(types.IsPaused(is_paused=self._engine.is_paused))

    @documented(body=AbortFields, answer=types.Aborted, errors=(PlainErrorBody,))
    @_refusals(plain_error_answer)
    async def abort_requests(self, request: Request) -> Response:
        """Answer POST ``/abort_requests``: abort the requests of ``request_ids``, or all."""
        ids = _ids(await read_fields(request, self._served.config, AbortFields))
        if not ids:
            stats = await self._engine.stats()
            await self._served.abort_all()
            return json_answer(types.Aborted(status="aborted", aborted=stats.running + stats.waiting))
        await self._served.abort_each(ids)
        return json_answer(types.Aborted(status="aborted", aborted=len(ids)))

    @documented(body=AbortGenerationsFields, media=())
    async def abort_generations(self, request: Request) -> Response:
        """Answer POST ``/inference/v1/abort_requests``: abort the requests of ``request_ids``, without a body."""
        fields = await read_fields(request, self._served.config, AbortGenerationsFields)
        if fields.request_ids is None:
            raise InvalidRequest("Missing 'request_ids' in request body", field="request_ids")
        await self._served.abort_each(_ids(fields))
        return Response()

    @documented(query=SleepQuery, answer=types.Sleeping)
    @_refusals(error_answer)
    async def sleep(self, request: Request) -> Response:
        """Answer POST ``/sleep``: level 0 pauses, 1 frees the cache and moves weights away, 2 frees both.

        ``tags``, which SkyRL's client may send, limits the memory that is freed.
        """
        query = request.query_params
        level, tags = query.get("level", "1"), query.getlist("tags")
        if level not in ("0", "1", "2"):
            raise InvalidRequest(f"level={shown(level)}: expected 0, 1 or 2", field="level")
        if level == "0" and tags:
            raise InvalidRequest("tags: level 0 frees no memory; ask for level 1 or 2", field="tags")
        freed = self._memory_to_free(tags)
        if level == "1" and MemoryTag.WEIGHTS in freed and not self._engine.config.sleep_keeps_weights:
            dropped = "level=1 keeps the weights, and this engine drops them when it sleeps"
            if not self._engine.supports(Capability.SLEEP_KEEPS_WEIGHTS):
                raise UnsupportedCapability(f"{dropped}; ask for level 2, and push weights after it")
            raise InvalidRequest(
                f"{dropped}; start it with sleep_keeps_weights: true, or ask for level 2", field="level"
            )
        await self._pause(query.get("mode", "abort"), level != "0")
        if level != "0":
            await self._engine.sleep(freed if tags else None)
        self._served.slept = True
        return json_answer(types.Sleeping(status="sleeping", level=int(level)))

    def _memory_to_free(self, tags: list[str]) -> list[MemoryTag]:
        """Return the memory that ``tags`` names, or everything that the engine can free.

        Raises:
            InvalidRequest: A tag names no memory.
            UnsupportedCapability: The engine cannot free the memory of a tag.
        """
        able = [tag for tag, capability in SLEEP_CAPABILITY.items() if self._engine.supports(capability)]
        known = [tag.value for tag in MemoryTag]
        for tag in tags:
            if tag not in known:
                raise InvalidRequest(f"tags={shown(tag)}: expected {', '.join(known)}", field="tags")
            if MemoryTag(tag) not in able:
                raise UnsupportedCapability(f"tags={shown(tag)}: this engine cannot free that memory")
        return [MemoryTag(tag) for tag in tags] or able

    @documented(statuses=(400, *OF_ENGINES), answer=types.CacheReleased)
    @_refusals(error_answer)
    async def release_kv_cache_memory(self, request: Request) -> Response:
        """Answer POST ``/release_kv_cache_memory``: frees the cache in a pause, which ``/wake_up`` ends."""
        del request
        if not self._engine.is_paused:
            raise InvalidRequest("the cache is freed in a pause only; POST /pause first")
        await self._engine.sleep([MemoryTag.KV_CACHE])
        self._served.slept = True
        return json_answer(types.CacheReleased(status="kv_cache_released"))

    @documented(query=WakeQuery, answer=types.Woken)
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
        return json_answer(types.Woken(status="awake" if awake else "sleeping", tags=tags or None))

    @documented(statuses=(), answer=types.IsSleeping)
    async def is_sleeping(self, request: Request) -> Response:
        """Answer GET ``/is_sleeping``."""
        del request
        return json_answer(types.IsSleeping(is_sleeping=self._served.slept or bool(self._engine.status.asleep)))

    @documented(answer=types.Succeeded)
    @_refusals(error_answer)
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Answer POST ``/reset_prefix_cache``."""
        del request
        if self._engine.supports(Capability.PREFIX_CACHE):
            await self._engine.reset_prefix_cache()
        return json_answer(types.Succeeded(success=True))

    @documented(statuses=(), media=())
    async def reset_other_cache(self, request: Request) -> Response:
        """Answer POST ``/reset_mm_cache`` and ``/reset_encoder_cache``: nothing is kept between requests."""
        del request
        return Response()

    # Weights -----------------------------------------------------------------------------------------------------

    @documented(body=UpdateFields, answer=types.Said | types.UpdatedFromFolder)
    @_refusals(error_answer)
    async def update_weights(self, request: Request) -> Response:
        """Answer POST ``/update_weights``: of ``weight_dir``, or of tensors that the trainer broadcasts."""
        asked = await read_fields(request, self._served.config, UpdateFields)
        if asked.update_info is not None:
            return json_answer(types.Said(message=await self._transfer.receive(request, asked)))
        folder = asked.weight_dir
        if not isinstance(folder, str) or not folder:
            raise InvalidRequest(
                f"weight_dir={shown(folder)}: give a checkpoint folder that the engine can read, or update_info",
                field="weight_dir",
            )
        version = version_of(asked.weight_version) or self._served.version_of(folder)
        await self._engine.load_weights_from_disk(folder, version)
        self._transfer.drop_open_update()
        return json_answer(types.UpdatedFromFolder(status="ok", weight_version=self._engine.get_weight_version()))

    @documented(statuses=(501,), media=())
    @_refusals(error_answer)
    async def refuse_draft(self, request: Request) -> Response:
        """Refuse POST ``/start_draft_weight_update``."""
        del request
        raise UnsupportedCapability("weights of draft models cannot be updated")

    @documented(statuses=(501,), media=())
    @_refusals(error_answer)
    async def refuse_deltas(self, request: Request) -> Response:
        """Refuse POST ``/fetch_weights``, by which SkyRL has deltas of a checkpoint applied to a copy of it."""
        del request
        raise UnsupportedCapability(
            "deltas of a checkpoint are not read; set weight_sync_backend: nccl, or send a folder (POST "
            "/update_weights {weight_dir})"
        )

    @documented(body=VersionFields, answer=types.VersionUpdated)
    @_refusals(error_answer)
    async def update_weight_version(self, request: Request) -> Response:
        """Answer POST ``/update_weight_version``: a new label for the weights that are served.

        ``abort_all_requests: true``, which SGLang's clients send, ends all requests first.
        """
        asked = await read_fields(request, self._served.config, VersionFields)
        version = asked.new_version
        if not isinstance(version, str):
            raise InvalidRequest(f"new_version={shown(version)}: expected a string", field="new_version")
        if flag_of(asked.abort_all_requests, "abort_all_requests"):
            await self._served.abort_all()
        await self._engine.update_weight_version(version)
        return json_answer(types.VersionUpdated(success=True, new_version=version))

    @documented(statuses=(), answer=types.WeightInfo)
    async def weight_info(self, request: Request) -> Response:
        """Answer GET ``/weight_info``."""
        del request
        return json_answer(types.WeightInfo(weight_version=self._engine.get_weight_version()))

    # Adapters ----------------------------------------------------------------------------------------------------

    @documented(body=LoadAdapterFields, statuses=(404, *OF_ENGINES), media=(TEXT,))
    @_refusals(error_answer)
    async def load_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/v1/load_lora_adapter``; a name that is taken needs ``load_inplace``."""
        asked = await read_fields(request, self._served.config, LoadAdapterFields, wants_type=True)
        name = text_of(asked.lora_name, "lora_name")
        await self._load_adapter(name, asked, replace=flag_of(asked.load_inplace, "load_inplace"))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @documented(body=ReloadAdapterFields, statuses=(404, *OF_ENGINES), answer=types.AdapterReloaded)
    @_refusals(error_answer)
    async def reload_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/load_lora_adapter``, as prime-rl calls it: a name that is taken gets the new weights."""
        await self._reload(await read_fields(request, self._served.config, ReloadAdapterFields))
        return json_answer(types.AdapterReloaded(status="ok"))

    @documented(body=ReloadSentAdapterFields, statuses=(404, *OF_ENGINES), answer=types.SkyrlAdapterReloaded)
    @_refusals(error_answer)
    async def reload_skyrls_adapter(self, request: Request) -> Response:
        """Answer POST ``/skyrl/v1/load_lora_adapter``: a name that is taken gets the new weights."""
        asked = await read_fields(request, self._served.config, ReloadSentAdapterFields)
        if flag_of(asked.in_memory, "in_memory"):
            name = text_of(asked.lora_name, "lora_name")
            if asked.lora_path:
                raise InvalidRequest("give lora_path or in_memory: true, not both", field="lora_path")
            await self._adapters.load(name)
        else:
            name = await self._reload(asked)
        return json_answer(types.SkyrlAdapterReloaded(status="ok", lora_name=name, lora_int_id=None))

    async def _reload(self, asked: ReloadAdapterFields) -> str:
        name = text_of(asked.lora_name, "lora_name")
        await self._load_adapter(name, asked, replace=True)
        return name

    async def _load_adapter(self, name: str, asked: ReloadAdapterFields, *, replace: bool) -> None:
        path = text_of(asked.lora_path, "lora_path")
        if not self._engine.supports(Capability.LORA):
            raise HTTPException(404, "adapters are not enabled; start the engine with enable_lora: true")
        if not await asyncio.to_thread(os.path.isdir, path):
            raise HTTPException(404, f"The lora adapter '{name}' cannot be found: there is no folder {shown(path)}.")
        await self._served.load_adapter(name, path, replace=replace)

    @documented(body=AdapterFields, statuses=(404, *OF_ENGINES), media=(TEXT,))
    @_refusals(error_answer)
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/v1/unload_lora_adapter``; requests that use the adapter end first."""
        asked = await read_fields(request, self._served.config, AdapterFields, wants_type=True)
        name = text_of(asked.lora_name, "lora_name")
        if name not in self._served.adapters:
            raise HTTPException(404, f"The lora adapter '{name}' cannot be found.")
        await self._served.unload_idle_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _ids(fields: AbortFields | AbortGenerationsFields) -> list[str]:
    """Return the ids of requests to abort.

    Raises:
        InvalidRequest: they are no list of strings.
    """
    ids = [] if fields.request_ids is None else fields.request_ids
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise InvalidRequest(f"request_ids={shown(ids)}: expected a list of strings", field="request_ids")
    return ids
