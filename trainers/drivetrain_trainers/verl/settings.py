# pyright: reportMissingImports=false
"""Translate verl's configuration of a rollout to an engine's. Settings without an equivalent are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch

from drivetrain.backend.registry import load_backend
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig
from drivetrain.types.sampling import LogprobsMode
from drivetrain_trainers.verl.adapters import adapter_rank
from drivetrain_trainers.verl.plugin_names import OPTIONS, ROLLOUT, TEACHER

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

_POLICY: Final = "actor_rollout_ref.rollout"

_FIELDS: Final[Mapping[str, str]] = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "expert_parallel_size": "expert_parallel_size",
    "enable_prefix_caching": "enable_prefix_caching",
    "max_model_len": "context_length",
}
"""verl's names to the engine's. Every backend honours these or refuses them by name."""

_TUNING: Final = ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs")
"""Fields of the same name, which verl always sets. A backend without an equivalent ignores verl's default alone."""

_DTYPES: Final[Mapping[str, str]] = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}

_LOGPROBS: Final[Mapping[str, LogprobsMode]] = {
    "raw_logprobs": LogprobsMode.RAW,
    "processed_logprobs": LogprobsMode.PROCESSED,
}

_PASS_IT_ON: Final = f"pass the engine's own argument in {OPTIONS}.engine_kwargs"

_REFUSED: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "enforce_eager": (bool, _PASS_IT_ON),
    "cudagraph_capture_sizes": (lambda value: value is not None, _PASS_IT_ON),
    "quantization": (lambda value: value is not None, _PASS_IT_ON),
    "quantization_config_file": (lambda value: value is not None, _PASS_IT_ON),
    "enable_chunked_prefill": (lambda value: not value, _PASS_IT_ON),
    "scheduling_policy": (lambda value: value not in (None, "fcfs"), _PASS_IT_ON),
    "over_sample_rate": (bool, "set it to 0"),
    "disable_log_stats": (lambda value: not value, "set it to true; the engine serves no metrics of its own"),
}
"""Fields without an equivalent: the values that are refused, and the remedy."""

_SWITCHES: Final = (("mtp", "enable_rollout"), ("qat", "enable"), ("prometheus", "enable"), ("profiler", "enable"))
"""Groups of fields that are refused if they are switched on."""


def engine_config(
    rollout: RolloutConfig,
    model: HFModelConfig,
    *,
    mode: str = "hybrid",
    device: str | None = None,
    is_teacher: bool = False,
) -> EngineConfig:
    """Return the configuration of a replica's engine.

    Args:
        rollout: ``actor_rollout_ref.rollout``; ``engine_kwargs.drivetrain`` has the backend's name and further fields.
        model: ``actor_rollout_ref.model``.
        mode: Value of verl's ``RolloutMode``. Only colocated engines wake up without a weight update, so only their
            weights are kept during sleep.
        device: Device of the engine; None: the backend's choice.
        is_teacher: True if ``rollout`` is a teacher's ``inference``. verl never lets a teacher sleep, and its default
            of ``enforce_eager`` is true there: both fields are left out.

    Raises:
        InvalidConfig: A field is set to a value that no engine of drivetrain honours, or no backend is named.
    """
    if is_teacher:
        rollout = dataclasses.replace(rollout, free_cache_engine=False, enforce_eager=False)
        try:
            return engine_config(rollout, model, mode=mode, device=device)
        except InvalidConfig as error:
            message, field = (text.replace(_POLICY, TEACHER) for text in (str(error), error.field))
            raise InvalidConfig(message, field=field) from error
    _refuse(rollout, model)
    own = _own_fields(rollout)
    fields: dict[str, object] = {
        "model": model.local_path,
        "trust_remote_code": model.trust_remote_code,
        "dtype": _DTYPES.get(rollout.dtype, rollout.dtype),
        "logprobs_mode": _logprobs_mode(rollout.logprobs_mode),
        "enable_sleep": bool(rollout.free_cache_engine and rollout.enable_sleep_mode),
        "sleep_keeps_weights": mode == "colocated" and bool(rollout.free_cache_engine),
    }
    if rank := adapter_rank(model):
        fields |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if model.local_tokenizer_path not in (None, model.local_path):
        fields["tokenizer"] = model.local_tokenizer_path
    if device is not None:
        fields["device"] = device
    if rollout.full_determinism:
        fields["deterministic"] = True
    fields |= {ours: value for theirs, ours in _FIELDS.items() if (value := getattr(rollout, theirs)) is not None}
    fields |= _tuning(rollout, str(own["backend"]), own.get("device", device))
    return EngineConfig.from_mapping(fields | own)


def _own_fields(rollout: RolloutConfig) -> dict[str, object]:
    given = rollout.engine_kwargs.get(ROLLOUT)
    if not isinstance(given, Mapping) or not given.get("backend"):
        raise InvalidConfig(
            f"{OPTIONS}.backend is not set; expected the name of a backend: add +{OPTIONS}.backend=sglang",
            field=f"{OPTIONS}.backend",
        )
    return dict(given)


def _tuning(rollout: RolloutConfig, backend: str, device: object) -> dict[str, object]:
    defaults = {field.name: field.default for field in dataclasses.fields(rollout)}
    honoured = set(load_backend(backend).config_names)
    if not torch.cuda.is_available() if device is None else str(device).startswith("cpu"):
        honoured.discard("gpu_memory_utilization")
    given = {name: getattr(rollout, name) for name in _TUNING}
    return {name: value for name, value in given.items() if name in honoured or value != defaults[name]}


def _logprobs_mode(name: str | None) -> LogprobsMode:
    if name is None:
        return LogprobsMode.TEMPERATURE
    if name not in _LOGPROBS:
        expected = ", ".join(_LOGPROBS)
        raise _invalid("rollout.logprobs_mode", name, f"expected one of {expected}; null for those of the temperature")
    return _LOGPROBS[name]


def _refuse(rollout: RolloutConfig, model: HFModelConfig) -> None:
    for name, (is_refused, remedy) in _REFUSED.items():
        value = getattr(rollout, name, None)
        if hasattr(rollout, name) and is_refused(value):
            raise _invalid(f"rollout.{name}", value, f"the drivetrain rollout has no equivalent; {remedy}")
    for name, switch in _SWITCHES:
        if _get(getattr(rollout, name, None), switch):
            raise _invalid(f"rollout.{name}.{switch}", True, "the drivetrain rollout cannot do it; set it to false")
    if adapter_rank(model) and rollout.checkpoint_engine.backend != "naive":
        raise _invalid(
            "rollout.checkpoint_engine.backend",
            rollout.checkpoint_engine.backend,
            "verl sends no adapter to engines on GPUs of their own; set actor_rollout_ref.model.lora.merge=true, and "
            "merged weights are pushed",
        )


def _get(group: object, name: str) -> object:
    return group.get(name) if isinstance(group, Mapping) else getattr(group, name, None)


def _invalid(field: str, value: object, remedy: str) -> InvalidConfig:
    field = f"actor_rollout_ref.{field}"
    return InvalidConfig(f"{field}={shown(value)}: {remedy}", field=field)
