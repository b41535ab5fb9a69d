"""SGLang's routes that describe the server: its model, its load and its weight version."""

from __future__ import annotations

import importlib.metadata
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from drivetrain.types.capability import Capability
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.route_docs import documented
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.answer_types import Load, Loads, SGLangModelInfo, SGLangServerInfo
from drivetrain_serving.vllm.answer_types import WeightInfo


class DescriptionRoutes:
    """Routes that describe the served engine."""

    def __init__(self, served: ServedEngine) -> None:
        self._served = served
        self._engine = served.engine

    @documented(statuses=(), answer=SGLangModelInfo)
    async def model_info(self, request: Request) -> Response:
        """Answer GET ``/model_info`` and ``/get_model_info``."""
        del request
        engine, info = self._engine, self._engine.model_info
        answer: SGLangModelInfo = {
            "model_path": engine.config.model,
            "served_model_name": self._served.name,
            "tokenizer_path": engine.config.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.get_weight_version(),
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": engine.config.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": engine.supports(Capability.IMAGES),
            "has_audio_understanding": engine.supports(Capability.AUDIO),
            "model_type": None,
            "architectures": [info.architecture],
        }
        return json_answer(answer)

    def server_info(self) -> SGLangServerInfo:
        """Return SGLang's part of ``/server_info``: the server arguments that trainers and routers read.

        The parallel sizes are 1, as is vLLM's ``/get_world_size``: one process receives the weights for all.
        """
        config, info = self._engine.config, self._engine.model_info
        return {
            "model_path": config.model,
            "tokenizer_path": config.model,
            "served_model_name": self._served.name,
            "dtype": info.dtype,
            "context_length": info.context_length,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "ep_size": 1,
            "moe_dp_size": 1,
            "num_gpus": 1,
            "disaggregation_mode": "null",
            "encoder_only": False,
            "enable_memory_saver": False,
            "enable_return_routed_experts": False,
            "enable_lora": config.enable_lora,
            "max_lora_rank": config.max_lora_rank,
            "max_loras_per_batch": config.max_loras,
            "max_running_requests": config.max_num_seqs,
            "weight_version": self._engine.get_weight_version(),
            "internal_states": [{"weight_version": self._engine.get_weight_version()}],
            "version": _version(),
        }

    @documented(statuses=(), answer=WeightInfo)
    async def weight_version(self, request: Request) -> Response:
        """Answer GET ``/weight_version`` and ``/get_weight_version``."""
        del request
        return json_answer(WeightInfo(weight_version=self._engine.get_weight_version()))

    @documented(answer=Loads)
    async def loads(self, request: Request) -> Response:
        """Answer GET ``/v1/loads``: the requests in the engine."""
        del request
        stats = await self._engine.stats()
        load: Load = {
            "dp_rank": 0,
            "timestamp": datetime.now(UTC).timestamp(),
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.running + stats.waiting,
            "max_running_requests": self._engine.config.max_num_seqs,
        }
        answer: Loads = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": _version(),
            "accelerator": self._engine.model_info.device,
            "num_accelerators": len(self._engine.gpus),
            "loads": [load],
        }
        return json_answer(answer)


def _version() -> str:
    return importlib.metadata.version("drivetrain")
