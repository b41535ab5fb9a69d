"""SGLang's routes that pause, abort, free memory and flush the cache."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import flag_of, read_fields, read_json
from drivetrain_serving.http_layer.route_docs import OF_ENGINES, TEXT, Fields, documented
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.answer_types import Done
from drivetrain_serving.sglang.generation import GenerateRoute
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

_MODES: Final = tuple(mode.value for mode in (PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE))
_POLL_S: Final = 0.05


class PauseFields(Fields):
    """A request to ``/pause_generation``."""

    mode: object = Field(
        default=None, description="How requests in flight are treated.", json_schema_extra={"enum": [*_MODES, None]}
    )


class AbortRequestFields(Fields):
    """A request to ``/abort_request``."""

    rid: object = Field(
        default=None,
        description="Ends the request of this id, and those whose ids begin with it.",
        json_schema_extra={"type": ["string", "null"]},
    )
    abort_all: object = Field(
        default=None, description="Ends all requests.", json_schema_extra={"type": ["boolean", "null"]}
    )


class MemoryFields(Fields):
    """A request to ``/release_memory_occupation`` or ``/resume_memory_occupation``."""

    tags: object = Field(
        default=None,
        description="What is freed or allocated; null: all.",
        json_schema_extra={"type": ["array", "null"], "items": {"type": "string"}},
    )


class FlushQuery(Fields):
    """The query of ``/flush_cache``."""

    timeout: object = Field(
        default=0, description="Seconds to wait for requests to end.", json_schema_extra={"type": "number"}
    )


class ProfileFields(Fields):
    """A request to ``/start_profile``."""

    output_dir: object = Field(
        default=None, description="Folder of the trace.", json_schema_extra={"type": ["string", "null"]}
    )


class NoFields(Fields):
    """A request whose body is read and means nothing."""


class ControlRoutes:
    """Routes that control the served engine."""

    def __init__(self, served: ServedEngine, generation: GenerateRoute, weight_groups: WeightGroups) -> None:
        self._served = served
        self._engine = served.engine
        self._generation = generation
        self._weight_groups = weight_groups

    # Pauses and aborts -------------------------------------------------------------------------------------------

    @documented(body=PauseFields, answer=Done)
    async def pause_generation(self, request: Request) -> Response:
        """Answer POST ``/pause_generation``: ``mode`` abort, retract or in_place. A pause may change its mode."""
        mode = (await read_fields(request, self._served.config, PauseFields)).mode or PauseMode.ABORT.value
        if mode not in _MODES:
            raise HTTPException(400, f"mode={shown(mode)}: expected {', '.join(_MODES)}")
        await self._engine.pause_generation(PauseMode(mode))
        self._served.slept = False
        return json_answer(Done(message="Generation paused successfully.", status="ok"))

    @documented(body=NoFields, answer=Done)
    async def continue_generation(self, request: Request) -> Response:
        """Answer POST ``/continue_generation``, once the weights that a trainer has broadcast are served."""
        await read_json(request, self._served.config)
        await self._weight_groups.commit_open_update()
        await self._engine.continue_generation()
        self._served.slept = False
        return json_answer(Done(message="Generation continued successfully.", status="ok"))

    @documented(body=AbortRequestFields, media=())
    async def abort_request(self, request: Request) -> Response:
        """Answer POST ``/abort_request``: ``rid`` and those whose ids begin with it, or all with ``abort_all``."""
        asked = await read_fields(request, self._served.config, AbortRequestFields)
        rid = asked.rid or ""
        if not isinstance(rid, str):
            raise HTTPException(400, f"rid={shown(rid)}: expected a string")
        if flag_of(asked.abort_all, "abort_all"):
            await self._served.abort_all()
        elif rid:
            await self._generation.abort(rid)
        return Response()

    # Memory ------------------------------------------------------------------------------------------------------

    @documented(body=MemoryFields)
    async def release_memory_occupation(self, request: Request) -> Response:
        """Answer ``/release_memory_occupation``: frees the memory of ``tags``, or all. The answer is ``null``."""
        await self._engine.sleep(_tags(await read_fields(request, self._served.config, MemoryFields)))
        return json_answer(None)

    @documented(body=MemoryFields)
    async def resume_memory_occupation(self, request: Request) -> Response:
        """Answer ``/resume_memory_occupation``: allocates it again. The answer is ``null``."""
        await self._engine.wake_up(_tags(await read_fields(request, self._served.config, MemoryFields)))
        return json_answer(None)

    @documented(query=FlushQuery, media=(TEXT,), errors=(str,))
    async def flush_cache(self, request: Request) -> Response:
        """Answer ``/flush_cache``: discards cached prefixes; 400 if a request runs after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _seconds(request.query_params.get("timeout", "0"))
        while await self._busy():
            if loop.time() >= until:
                return PlainTextResponse("Flush cache failed: requests are running or waiting.\n", 400)
            await asyncio.sleep(_POLL_S)
        if self._engine.supports(Capability.PREFIX_CACHE):
            await self._engine.reset_prefix_cache()
        return PlainTextResponse("Cache flushed.\n")

    async def _busy(self) -> bool:
        stats = await self._engine.stats()
        return stats.running + stats.waiting > 0

    # Profiles ----------------------------------------------------------------------------------------------------

    @documented(body=ProfileFields, media=(TEXT,))
    async def start_profile(self, request: Request) -> Response:
        """Answer ``/start_profile``: records into ``output_dir`` until ``/stop_profile``."""
        body = await read_json(request, self._served.config)
        for name, value in body.items():
            if name not in ProfileFields.model_fields and value not in (None, False):
                raise InvalidRequest(f"{name}={shown(value)} is not supported; leave it out", field=name)
        folder = ProfileFields.model_validate(body).output_dir or str(Path(tempfile.gettempdir(), "drivetrain-profile"))
        if not isinstance(folder, str):
            raise HTTPException(400, f"output_dir={shown(folder)}: expected a string")
        await self._engine.start_profile(folder)
        return PlainTextResponse("Start profiling.\n")

    @documented(statuses=(400, *OF_ENGINES), media=(TEXT,))
    async def stop_profile(self, request: Request) -> Response:
        """Answer ``/stop_profile`` with the path of the trace."""
        del request
        return PlainTextResponse(f"Stop profiling: {await self._engine.stop_profile()}\n")


def _tags(asked: MemoryFields) -> list[str] | None:
    tags = asked.tags
    if tags is None:
        return None
    if not isinstance(tags, list) or not all(isinstance(one, str) for one in tags):
        raise HTTPException(400, f"tags={shown(tags)}: expected a list of strings")
    return tags


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise HTTPException(400, f"timeout={given!r}: expected seconds, 0 or more")
    return seconds
