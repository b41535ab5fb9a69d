"""SGLang's routes: their paths, the methods that answer them, and their keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.control import ControlRoutes
from drivetrain_serving.sglang.description import DescriptionRoutes
from drivetrain_serving.sglang.generation import GenerateRoute
from drivetrain_serving.sglang.tokens import TokenRoutes
from drivetrain_serving.sglang.weight_groups import WeightGroupRoutes
from drivetrain_serving.sglang.weights import WeightRoutes
from drivetrain_serving.weight_checks import WeightChecks
from drivetrain_weight_sync.trainer_groups.weight_groups import WeightGroups

Answer = Callable[[Request], Awaitable[Response]]

_GET, _POST, _EITHER = ("GET",), ("POST",), ("GET", "POST")
TENSOR_ROUTES: Final = (
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/load_lora_adapter_from_tensors",
    "/pull_weights",
    "/post_process_weights",
)
"""Routes that bring weights as pickles, handles or deltas, which this server refuses."""


@dataclass(frozen=True, slots=True)
class PathAnswer:
    """A path, its methods and what answers it."""

    path: str
    methods: tuple[str, ...]
    answer: Answer
    is_data: bool = False
    """True if the key of the routes that generate opens it; else it is a control route."""


class SGLangRoutes:
    """All routes of this dialect over one served engine."""

    def __init__(self, served: ServedEngine, weight_groups: WeightGroups, checks: WeightChecks) -> None:
        self.generation = GenerateRoute(served)
        self.control = ControlRoutes(served, self.generation, weight_groups)
        self.groups = WeightGroupRoutes(weight_groups, served.config)
        self.description = DescriptionRoutes(served)
        self.weights = WeightRoutes(served, weight_groups, checks)
        self.tokens = TokenRoutes(served)

    def always(self) -> list[PathAnswer]:
        """Return the routes whose paths vLLM does not have, which both dialects serve. Further routes go here."""
        control, weights, description = self.control, self.weights, self.description
        return [
            PathAnswer("/generate", ("POST", "PUT"), self.generation.generate, is_data=True),
            PathAnswer("/v1/tokenize", _POST, self.tokens.tokenize, is_data=True),
            PathAnswer("/v1/detokenize", _POST, self.tokens.detokenize, is_data=True),
            PathAnswer("/model_info", _GET, description.model_info, is_data=True),
            PathAnswer("/get_model_info", _GET, description.model_info, is_data=True),
            PathAnswer("/weight_version", _GET, description.weight_version, is_data=True),
            PathAnswer("/get_weight_version", _GET, description.weight_version, is_data=True),
            PathAnswer("/v1/loads", _GET, description.loads, is_data=True),
            PathAnswer("/flush_cache", _EITHER, control.flush_cache),
            PathAnswer("/pause_generation", _POST, control.pause_generation),
            PathAnswer("/continue_generation", _POST, control.continue_generation),
            PathAnswer("/abort_request", _POST, control.abort_request),
            PathAnswer("/release_memory_occupation", _EITHER, control.release_memory_occupation),
            PathAnswer("/resume_memory_occupation", _EITHER, control.resume_memory_occupation),
            PathAnswer("/start_profile", _EITHER, control.start_profile),
            PathAnswer("/stop_profile", _EITHER, control.stop_profile),
            PathAnswer("/update_weights_from_disk", _POST, weights.update_weights_from_disk),
            PathAnswer("/init_weights_update_group", _POST, self.groups.init_weights_update_group),
            PathAnswer("/destroy_weights_update_group", _POST, self.groups.destroy_weights_update_group),
            PathAnswer("/update_weights_from_distributed", _POST, self.groups.update_weights_from_distributed),
            PathAnswer("/begin_weight_update", _POST, self.groups.begin_weight_update),
            PathAnswer("/end_weight_update", _POST, self.groups.end_weight_update),
            PathAnswer("/get_weights_by_name", _EITHER, weights.get_weights_by_name),
            PathAnswer("/weights_checker", _EITHER, weights.weights_checker),
            PathAnswer("/unload_lora_adapter", _POST, weights.unload_lora_adapter),
            *(PathAnswer(path, _POST, weights.refuse_tensors) for path in TENSOR_ROUTES),
        ]

    def of_the_dialect(self) -> dict[str, Answer]:
        """Return the answers of paths that vLLM has too, for a server whose dialect is SGLang's."""
        return {
            "/tokenize": self.tokens.tokenize,
            "/detokenize": self.tokens.detokenize,
            "/load_lora_adapter": self.weights.load_lora_adapter,
            "/update_weight_version": self.weights.update_weight_version,
        }
