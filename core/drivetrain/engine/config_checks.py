"""Checks of a configuration against its backend, before an engine is created."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from drivetrain.backend.toolkit.model_folder import config_levels, experts_of, require_files
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.validation import MEDIA_CAPABILITY, MODE_CAPABILITY, require
from drivetrain.errors import InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task


def check_folders(config: EngineConfig) -> None:
    """Raise :class:`InvalidConfig` for a model or tokenizer that looks like a folder and does not exist.

    A revision of a folder's model is refused too.
    """
    if config.revision is not None and _is_folder("model", config.model):
        raise InvalidConfig(
            f"revision={shown(config.revision)}: model={shown(config.model)} is a folder, and only a model of the hub "
            "has revisions; leave it out",
            field="revision",
        )
    for field, value in (("model", config.model), ("tokenizer", config.tokenizer)):
        if value is None or _is_folder(field, value):
            continue
        # A hub id is a name, or an organisation and a name.
        if value.startswith((".", "~", "/")) or value.count("/") > 1:
            raise InvalidConfig(
                f"{field}={shown(value)}: there is no such folder; give one that holds a model, or a hub id such as "
                "'organisation/name'",
                field=field,
            )


def absolute_folders(config: EngineConfig) -> dict[str, str]:
    """Return the fields that name folders by a relative path, made absolute: for a process with another directory."""
    named = {"model": config.model, "tokenizer": config.tokenizer}
    return {
        field: str(Path(value).expanduser().absolute())
        for field, value in named.items()
        if value is not None and _is_folder(field, value)
    }


def _is_folder(field: str, value: str) -> bool:
    try:
        return Path(value).expanduser().is_dir()
    except (RuntimeError, OSError, ValueError) as error:  # unknown user in ``~name``, name too long, NUL
        raise InvalidConfig(f"{field}={shown(value)}: {error}; give a folder or a hub id", field=field) from error


_CORE_FIELDS: Final = frozenset(
    {
        "backend",
        "model",
        "tokenizer",
        "tool_call_parser",
        "engine_kwargs",
        "isolation",
        "python",
        "timeouts",
        "logprobs_mode",
    }
    | {"weight_version", "seed"}
)
"""Fields that ``InferenceEngine`` itself honours, on any backend."""

_CONFIG_NEEDS: Final[tuple[tuple[str, Callable[[EngineConfig], bool], Capability], ...]] = (
    ("tensor_parallel_size", lambda c: c.tensor_parallel_size > 1, Capability.TENSOR_PARALLEL),
    ("pipeline_parallel_size", lambda c: c.pipeline_parallel_size > 1, Capability.PIPELINE_PARALLEL),
    ("data_parallel_size", lambda c: c.data_parallel_size > 1, Capability.DATA_PARALLEL),
    ("expert_parallel_size", lambda c: c.expert_parallel_size > 1, Capability.EXPERT_PARALLEL),
    ("task", lambda c: c.task is Task.EMBED, Capability.EMBED),
    ("task", lambda c: c.task is Task.REWARD, Capability.REWARD_SCORE),
    ("enable_lora", lambda c: c.enable_lora, Capability.LORA),
    ("deterministic", lambda c: c.deterministic, Capability.DETERMINISTIC),
    ("sleep_keeps_weights", lambda c: c.sleep_keeps_weights, Capability.SLEEP_KEEPS_WEIGHTS),
)

_ANYWAY: Final[Mapping[str, Callable[[EngineConfig, frozenset[Capability]], bool]]] = {
    "enable_prefix_caching": lambda c, can: not c.enable_prefix_caching and Capability.PREFIX_CACHE not in can,
    "enable_sleep": lambda c, can: not c.enable_sleep,
    "max_loras": lambda c, can: not c.enable_lora,
    "max_lora_rank": lambda c, can: not c.enable_lora,
    "media": lambda c, can: can.isdisjoint(capability for _, capability in MEDIA_CAPABILITY),
}
"""Fields accepted without an equivalent in the backend when their value asks for what every engine does anyway.

One configuration then fits all backends: ``enable_prefix_caching=False`` is fine where there is no cache."""


def check_config(config: EngineConfig, config_names: Mapping[str, str], capabilities: frozenset[Capability]) -> None:
    """Raise for a configured field that the backend cannot honour; no field is ignored silently.

    Raises:
        UnsupportedCapability: the field needs a capability that is not claimed.
        InvalidConfig: the backend has no equivalent for the field, or the model folder holds more than files.
    """
    require_files(config.model)
    for field, is_used, capability in _CONFIG_NEEDS:
        if is_used(config):
            require(capabilities, capability, f"{field}={shown(getattr(config, field))}", config.backend)
    if config.enable_lora and config.task is not Task.GENERATE:
        raise InvalidConfig(
            f"enable_lora=True: no call of an engine with task={config.task.value!r} takes an adapter; merge the "
            "adapter into the model, or leave it out",
            field="enable_lora",
        )
    if Capability.MOE not in capabilities and (experts := experts_of(config_levels(config.model))):
        what = f"model={shown(config.model)}: a mixture of experts ({experts})"
        require(capabilities, Capability.MOE, what, config.backend)
    if "logprobs_mode" in config.model_fields_set:
        mode = config.logprobs_mode
        require(capabilities, MODE_CAPABILITY[mode], f"logprobs_mode={mode.value!r}", config.backend)
    if config.seed is not None and "seed" not in config_names:
        # InferenceEngine seeds each request; a backend that names the field seeds its engine instead.
        require(capabilities, Capability.SEED, f"seed={config.seed}", config.backend)
    handled = _CORE_FIELDS | {field for field, _, _ in _CONFIG_NEEDS} | set(config_names)
    for field in sorted(config.model_fields_set - handled):
        value = getattr(config, field)
        if field in _ANYWAY and _ANYWAY[field](config, capabilities):
            continue
        if value != EngineConfig.model_fields[field].get_default(call_default_factory=True):
            raise InvalidConfig(
                f"{field}={shown(value)}: the {config.backend} backend has no equivalent; leave it out"
                f" (it honours: {', '.join(sorted(config_names))})",
                field=field,
            )
