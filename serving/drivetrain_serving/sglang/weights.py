"""SGLang's routes that change, name and read the weights, and those that load adapters."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence
from typing import Final

from pydantic import Field, JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability, WeightVerifyFailed
from drivetrain.types.weights import TensorData
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import flag_of, list_of, read_fields, text_of, version_of
from drivetrain_serving.http_layer.error_statuses import described
from drivetrain_serving.http_layer.route_docs import Fields, documented
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang import answer_types as types
from drivetrain_serving.sglang.errors import FailureBody, failure_answer, status_here
from drivetrain_serving.weight_checks import Checksums, WeightChecks, overall
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

_REFUSED_OF_DISK: Final = ("is_async", "keep_pause", "recapture_cuda_graph", "manifest")
"""Fields of ``/update_weights_from_disk`` that are not honoured; null, false and empty values are taken."""
_FORMATS: Final = (None, "auto", "safetensors", "pt")
_CODES: Final = {"float32": "f", "float16": "e", "float64": "d", "bfloat16": "H"}
"""Dtype → its letter in :mod:`struct`; of bfloat16 the bits are read."""
_ROWS: Final = 100
"""Rows of ``/get_weights_by_name`` if no number is asked for."""


_ACTIONS: Final = ("checksum", "snapshot", "reset_tensors", "compare")
"""Actions of ``/weights_checker``."""
_SELECTORS: Final = ("all", "target")
_TEXT: Final[dict[str, JsonValue]] = {"type": "string", "minLength": 1}
_FLAG: Final[dict[str, JsonValue]] = {"type": ["boolean", "null"]}
_ONLY_OFF: Final[dict[str, JsonValue]] = {"enum": [None, False, "", []]}


class FromDiskFields(Fields):
    """A request to ``/update_weights_from_disk``."""

    model_path: object = Field(
        default=None, description="A checkpoint folder that the engine can read.", json_schema_extra=_TEXT
    )
    load_format: object = Field(
        default=None, description="The folder's format is detected.", json_schema_extra={"enum": [*_FORMATS]}
    )
    abort_all_requests: object = Field(default=None, description="Ends all requests first.", json_schema_extra=_FLAG)
    weight_version: object = Field(
        default=None,
        description="Version of the new weights.",
        json_schema_extra={"type": ["string", "integer", "null"]},
    )
    is_async: object = Field(default=None, description="Refused.", json_schema_extra=_ONLY_OFF)
    keep_pause: object = Field(default=None, description="Refused.", json_schema_extra=_ONLY_OFF)
    recapture_cuda_graph: object = Field(default=None, description="Refused.", json_schema_extra=_ONLY_OFF)
    manifest: object = Field(default=None, description="Refused.", json_schema_extra=_ONLY_OFF)


class NewVersionFields(Fields):
    """A request to ``/update_weight_version`` in SGLang's dialect."""

    new_version: object = Field(default=None, description="Name of the weights.", json_schema_extra=_TEXT)
    abort_all_requests: object = Field(
        default=None, description="Ends all requests first; true if not given.", json_schema_extra=_FLAG
    )


class CheckerFields(Fields):
    """A request to ``/weights_checker``."""

    action: object = Field(
        default="checksum",
        description="Answers with checksums, keeps them, serves random weights, or compares with those kept.",
        json_schema_extra={"enum": [*_ACTIONS]},
    )
    allow_quant_error: object = Field(default=None, description="Changes nothing.", json_schema_extra=_FLAG)
    skip_tensor_list: object = Field(
        default=None,
        description="Parts of the names of tensors that are left out.",
        json_schema_extra={"type": ["array", "null"], "items": {"type": "string"}},
    )
    selector: object = Field(default="all", description="Weights.", json_schema_extra={"enum": [*_SELECTORS]})


class TensorFields(Fields):
    """A request to ``/get_weights_by_name``."""

    name: object = Field(default=None, description="Name of the tensor.", json_schema_extra=_TEXT)
    truncate_size: object = Field(
        default=None,
        description="Most rows; 100 if not given.",
        json_schema_extra={"type": ["integer", "null"], "minimum": 0},
    )


class UnloadFields(Fields):
    """A request to ``/unload_lora_adapter``."""

    lora_name: object = Field(default=None, description="Name of the adapter in requests.", json_schema_extra=_TEXT)


class LoadFields(UnloadFields):
    """A request to ``/load_lora_adapter`` in SGLang's dialect."""

    lora_path: object = Field(default=None, description="Folder of the adapter.", json_schema_extra=_TEXT)


Numbers = float | list[JsonValue]
"""A number, or nested lists of them."""


class WeightRoutes:
    """Routes on the served engine's weights and adapters."""

    def __init__(self, served: ServedEngine, weight_groups: WeightGroups, checks: WeightChecks) -> None:
        self._served = served
        self._weight_groups = weight_groups
        self._checks = checks
        self._engine = served.engine

    # Updates -----------------------------------------------------------------------------------------------------

    @documented(body=FromDiskFields, answer=types.UpdatedFromDisk, errors=(FailureBody,))
    async def update_weights_from_disk(self, request: Request) -> Response:
        """Answer POST ``/update_weights_from_disk``: a checkpoint folder that the engine can read."""
        asked = await read_fields(request, self._served.config, FromDiskFields)
        paused = 0
        try:
            folder = text_of(asked.model_path, "model_path")
            _check_update(asked)
            label = version_of(asked.weight_version) or self._served.version_of(folder)
            if flag_of(asked.abort_all_requests, "abort_all_requests"):
                await self._served.abort_all()
            if self._engine.is_paused:
                stats = await self._engine.stats()
                paused = stats.running + stats.waiting
            await self._engine.load_weights_from_disk(folder, label, mode=self._served.update_mode())
            self._weight_groups.drop_open_update()
        except DrivetrainError as error:
            return failure_answer(error, paused)
        message = "Succeeded to update model weights."
        return json_answer(types.UpdatedFromDisk(success=True, message=message, num_paused_requests=paused))

    @documented(body=NewVersionFields, answer=types.VersionRenamed, errors=(FailureBody,))
    async def update_weight_version(self, request: Request) -> Response:
        """Answer POST ``/update_weight_version``, which ends all requests unless ``abort_all_requests`` is false."""
        asked = await read_fields(request, self._served.config, NewVersionFields)
        try:
            version = text_of(asked.new_version, "new_version")
            if flag_of(asked.abort_all_requests, "abort_all_requests", default=True):
                await self._served.abort_all()
            await self._engine.update_weight_version(version)
        except DrivetrainError as error:
            return failure_answer(error)
        message = f"Weight version updated to {version}"
        return json_answer(types.VersionRenamed(success=True, message=message, new_version=version))

    @documented(statuses=(501,), errors=(FailureBody,), media=())
    async def refuse_tensors(self, request: Request) -> Response:
        """Refuse the routes whose bodies hold pickles or handles of memory on the trainer's GPU."""
        del request
        refusal = UnsupportedCapability(
            "this server unpickles nothing and maps no memory of other processes; save a checkpoint and send "
            "POST /update_weights_from_disk, or use drivetrain's own weight sync"
        )
        return json_answer(FailureBody(success=False, message=str(refusal), drivetrain=described(refusal)), 501)

    @documented(body=CheckerFields, answer=types.WeightsChecked, errors=(FailureBody,))
    async def weights_checker(self, request: Request) -> Response:
        """Answer ``/weights_checker``: checksums, a snapshot of them, a comparison with it, or random weights.

        As an update quantises as a load does, the comparison is exact whatever ``allow_quant_error`` says.
        """
        asked = await read_fields(request, self._served.config, CheckerFields)
        try:
            return json_answer(await self._checked(asked))
        except WeightVerifyFailed as error:
            return json_answer(FailureBody(success=False, message=str(error), drivetrain=described(error)), 400)
        except DrivetrainError as error:
            return failure_answer(error)

    async def _checked(self, asked: CheckerFields) -> types.WeightsChecked:
        skipped = [] if asked.skip_tensor_list is None else list_of(asked.skip_tensor_list, "skip_tensor_list")
        leave_out = [text_of(one, "skip_tensor_list") for one in skipped]
        flag_of(asked.allow_quant_error, "allow_quant_error")
        if asked.selector not in _SELECTORS:
            raise InvalidRequest(f"selector={shown(asked.selector)}: there is no draft model", field="selector")
        done = types.WeightsChecked(success=True, message="Success.")
        match asked.action:
            case "checksum":
                checksums = await self._checks.checksums(leave_out)
                done["ranks"] = [_of_engine(one, at, len(checksums)) for at, one in enumerate(checksums)]
                done["per_engine_checksum"] = overall({str(at): overall(one) for at, one in enumerate(checksums)})
            case "snapshot":
                await self._checks.take_snapshot()
            case "reset_tensors":
                await self._checks.reset(leave_out)
            case "compare":
                if changed := await self._checks.changed_since_snapshot(leave_out):
                    message = f"these tensors differ from the snapshot: {', '.join(changed)}"
                    raise WeightVerifyFailed(message, tensors=changed)
            case _:
                raise InvalidRequest(f"action={shown(asked.action)}: expected {', '.join(_ACTIONS)}", field="action")
        return done

    @documented(body=TensorFields, answer=Numbers)
    async def get_weights_by_name(self, request: Request) -> Response:
        """Answer ``/get_weights_by_name`` with the first ``truncate_size`` rows of a tensor."""
        asked = await read_fields(request, self._served.config, TensorFields)
        rows = _ROWS if asked.truncate_size is None else asked.truncate_size
        if type(rows) is not int or rows < 0:
            raise HTTPException(400, f"truncate_size={shown(rows)}: expected 0 or more")
        tensor = await self._engine.get_weights_by_name(text_of(asked.name, "name"))
        return json_answer(_rows(tensor, rows))

    # Adapters ----------------------------------------------------------------------------------------------------

    @documented(body=LoadFields, answer=types.AdaptersChanged, errors=(types.AdaptersUnchanged,))
    async def load_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/load_lora_adapter``; a name that is taken gets the new weights."""
        asked = await read_fields(request, self._served.config, LoadFields)
        try:
            name, path = text_of(asked.lora_name, "lora_name"), text_of(asked.lora_path, "lora_path")
            if not await asyncio.to_thread(os.path.isdir, path):
                raise InvalidRequest(f"lora_path={shown(path)}: there is no such folder", field="lora_path")
            await self._served.load_adapter(name, path, replace=True)
        except DrivetrainError as error:
            return self._adapters_answer(error)
        return self._adapters_answer()

    @documented(body=UnloadFields, answer=types.AdaptersChanged, errors=(types.AdaptersUnchanged,))
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Answer POST ``/unload_lora_adapter``; requests that use the adapter end first."""
        asked = await read_fields(request, self._served.config, UnloadFields)
        try:
            name = text_of(asked.lora_name, "lora_name")
            if name not in self._served.adapters:
                raise InvalidRequest(f"lora_name={shown(name)}: no such adapter is loaded", field="lora_name")
            await self._served.unload_idle_adapter(name)
        except DrivetrainError as error:
            return self._adapters_answer(error)
        return self._adapters_answer()

    def _adapters_answer(self, error: DrivetrainError | None = None) -> Response:
        if error is None:
            loaded = dict(self._served.adapters)
            return json_answer(types.AdaptersChanged(success=True, error_message=None, loaded_adapters=loaded))
        body = types.AdaptersUnchanged(
            success=False, error_message=str(error), loaded_adapters=None, drivetrain=described(error)
        )
        return json_answer(body, status_here(error))


def _of_engine(checksums: Checksums, place: int, engines: int) -> types.EngineChecksums:
    placement = types.Placement(
        role="target",
        tp_rank=0,
        tp_size=1,
        dp_rank=place,
        dp_size=engines,
        pp_rank=0,
        pp_size=1,
        rank=place,
        size=engines,
    )
    return types.EngineChecksums(checksums=checksums, per_gpu_checksum=overall(checksums), parallelism_info=placement)


def _check_update(asked: FromDiskFields) -> None:
    if asked.load_format not in _FORMATS:
        raise InvalidRequest(
            f"load_format={shown(asked.load_format)} is not supported; the folder's format is detected",
            field="load_format",
        )
    for name in _REFUSED_OF_DISK:
        if value := getattr(asked, name):
            raise InvalidRequest(f"{name}={shown(value)} is not supported; leave it out", field=name)


def _rows(tensor: TensorData, rows: int) -> Numbers:
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


def _nested(values: Sequence[float], shape: Sequence[int]) -> Numbers:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return list(values)
    step = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]
