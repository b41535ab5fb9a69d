"""SGLang's routes that change, name and read the weights, and those that load adapters."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import TensorData
from drivetrain_serving.http.answers import json_answer
from drivetrain_serving.http.bodies import read_json
from drivetrain_serving.http.error_statuses import described
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.control import flag
from drivetrain_serving.sglang.errors import status_here
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

_REFUSED_OF_DISK: Final = ("is_async", "keep_pause", "recapture_cuda_graph", "manifest")
"""Fields of ``/update_weights_from_disk`` that are not honoured; null, false and empty values are taken."""
_FORMATS: Final = (None, "auto", "safetensors", "pt")
_CODES: Final = {"float32": "f", "float16": "e", "float64": "d", "bfloat16": "H"}
"""Dtype → its letter in :mod:`struct`; of bfloat16 the bits are read."""
_ROWS: Final = 100
"""Rows of ``/get_weights_by_name`` if no number is asked for."""


class WeightRoutes:
    """Routes on the served engine's weights and adapters."""

    def __init__(self, served: ServedEngine, weight_groups: WeightGroups) -> None:
        self._served = served
        self._weight_groups = weight_groups
        self._engine = served.engine

    # Updates -----------------------------------------------------------------------------------------------------

    async def update_weights_from_disk(self, request: Request) -> Response:
        """Answer POST ``/update_weights_from_disk``: a checkpoint folder that the engine can read."""
        body = await read_json(request, self._served.config)
        paused = 0
        try:
            folder = _text(body, "model_path")
            _check_update(body)
            if flag(body, "abort_all_requests"):
                await self._engine.abort_generation()
            if self._engine.is_paused:
                stats = await self._engine.stats()
                paused = stats.running + stats.waiting
            version = body.get("weight_version")
            label = version if isinstance(version, str) and version else self._served.version_of(folder)
            await self._engine.load_weights_from_disk(folder, label, mode=self._mode())
            self._weight_groups.drop_open_update()
        except DrivetrainError as error:
            return _failed(error, num_paused_requests=paused)
        message = "Succeeded to update model weights."
        return json_answer({"success": True, "message": message, "num_paused_requests": paused})

    def _mode(self) -> PauseMode:
        """Return how an update treats requests in flight: outside a pause they end first, as in SGLang."""
        waits = not self._engine.is_paused and self._engine.supports(Capability.PAUSE_WAIT)
        return PauseMode.WAIT if waits else PauseMode.RETRACT

    async def update_weight_version(self, request: Request) -> Response:
        """Answer POST ``/update_weight_version``, which ends all requests unless ``abort_all_requests`` is false."""
        body = await read_json(request, self._served.config)
        try:
            version = _text(body, "new_version")
            if flag(body, "abort_all_requests", True):
                await self._engine.abort_generation()
            await self._engine.update_weight_version(version)
        except DrivetrainError as error:
            return _failed(error)
        message = f"Weight version updated to {version}"
        return json_answer({"success": True, "message": message, "new_version": version})

    async def refuse_tensors(self, request: Request) -> Response:
        """Refuse the routes whose bodies hold pickles or handles of memory on the trainer's GPU."""
        del request
        refusal = UnsupportedCapability(
            "this server unpickles nothing and maps no memory of other processes; save a checkpoint and send "
            "POST /update_weights_from_disk, or use drivetrain's own weight sync"
        )
        return json_answer({"success": False, "message": str(refusal), "drivetrain": described(refusal)}, 501)

    async def weights_checker(self, request: Request) -> Response:
        """Refuse ``/weights_checker``: engines keep no snapshot of their weights, and make no checksum on demand."""
        body = await read_json(request, self._served.config)
        action = shown(body.get("action", "checksum"))
        refusal = InvalidRequest(
            f"action={action} is not supported; drivetrain's own weight sync verifies every tensor of an update",
            field="action",
        )
        return _failed(refusal)

    async def get_weights_by_name(self, request: Request) -> Response:
        """Answer ``/get_weights_by_name`` with the first ``truncate_size`` rows of a tensor."""
        body = await read_json(request, self._served.config)
        rows = body.get("truncate_size")
        rows = _ROWS if rows is None else rows
        if type(rows) is not int or rows < 0:
            raise HTTPException(400, f"truncate_size={shown(rows)}: expected 0 or more")
        tensor = await self._engine.get_weights_by_name(_text(body, "name"))
        return json_answer(_rows(tensor, rows))

    # Adapters ----------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/load_lora_adapter``; a name that is taken gets the new weights."""
        body = await read_json(request, self._served.config)
        try:
            name, path = _text(body, "lora_name"), _text(body, "lora_path")
            if not await asyncio.to_thread(os.path.isdir, path):
                raise InvalidRequest(f"lora_path={shown(path)}: there is no such folder", field="lora_path")
            await self._served.load_adapter(name, path, replace=True)
        except DrivetrainError as error:
            return self._adapters_answer(error)
        return self._adapters_answer()

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/unload_lora_adapter``; requests that use the adapter end first."""
        body = await read_json(request, self._served.config)
        try:
            name = _text(body, "lora_name")
            if name not in self._served.adapters:
                raise InvalidRequest(f"lora_name={shown(name)}: no such adapter is loaded", field="lora_name")
            await self._served.unload_idle_adapter(name)
        except DrivetrainError as error:
            return self._adapters_answer(error)
        return self._adapters_answer()

    def _adapters_answer(self, error: DrivetrainError | None = None) -> Response:
        body: dict[str, object] = {
            "success": error is None,
            "error_message": None if error is None else str(error),
            "loaded_adapters": dict(self._served.adapters) if error is None else None,
        }
        if error is None:
            return json_answer(body)
        return json_answer({**body, "drivetrain": described(error)}, status_here(error))


def _failed(error: DrivetrainError, **more: object) -> Response:
    body = {"success": False, "message": str(error), **more, "drivetrain": described(error)}
    return json_answer(body, status_here(error))


def _text(body: Mapping[str, object], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name}={shown(value)}: expected a text that is not empty", field=name)
    return value


def _check_update(body: Mapping[str, object]) -> None:
    if body.get("load_format") not in _FORMATS:
        raise InvalidRequest(
            f"load_format={shown(body['load_format'])} is not supported; the folder's format is detected",
            field="load_format",
        )
    for name in _REFUSED_OF_DISK:
        if body.get(name):
            raise InvalidRequest(f"{name}={shown(body[name])} is not supported; leave it out", field=name)


def _rows(tensor: TensorData, rows: int) -> object:
    """Return the first ``rows`` rows as nested lists of numbers."""
    spec = tensor.spec
    code = _CODES.get(spec.dtype)
    if code is None:
        raise InvalidRequest(f"the tensor's dtype {spec.dtype} cannot be written as numbers", field="name")
    shape = list(spec.shape)
    if shape:
        shape[0] = min(shape[0], rows)
    count = 1
    for size in shape:
        count *= size
    values: Sequence[float] = struct.unpack_from(f"<{count}{code}", tensor.data)
    if code == "H":
        values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(int(bits) << 16 for bits in values)))
    return _nested(values, shape)


def _nested(values: Sequence[float], shape: Sequence[int]) -> object:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return list(values)
    step = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]
