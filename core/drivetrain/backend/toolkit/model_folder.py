"""Checks of a configuration against the model's ``config.json``, read without transformers or the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from drivetrain.backend.toolkit.hub_files import cached_file
from drivetrain.backend.toolkit.rope_config import require_short_rope
from drivetrain.backend.toolkit.translation import context_length_of, require_experts
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig

_LENGTH: Final = "max_position_embeddings"
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of ``config.json`` that count a model's experts."""


def config_levels(model: str) -> list[Mapping[str, object]]:
    """Return the fields of the model folder's ``config.json``, then those of its ``text_config`` if it has one.

    Returns:
        An empty list if ``model`` is not a folder or its file cannot be read: the engine's start reports that.
    """
    path = Path(model).expanduser() / "config.json"
    try:
        fields: object = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return []
    return levels_in(fields)


def levels_in(fields: object) -> list[Mapping[str, object]]:
    """Return the fields of a ``config.json``, then the fields of its ``text_config`` if it has one."""
    text = fields.get("text_config") if isinstance(fields, dict) else None
    return [level for level in (fields, text) if isinstance(level, dict) and level]


def model_file(config: EngineConfig, name: str) -> Mapping[str, object]:
    """Return the fields of a JSON file of the model's folder or hub id; none if it is missing or broken."""
    fields = model_json(config, name)
    return fields if isinstance(fields, dict) else {}


def model_json(config: EngineConfig, name: str) -> object:
    """Return the content of a JSON file of the model's folder or hub id; None if it is missing or broken.

    A hub model is looked up in the local cache alone: ``InferenceEngine.start`` fetches the files that were missing.
    """
    try:
        folder = Path(config.model).expanduser()
        file = folder / name if folder.is_dir() else cached_file(config, name)
        if file is None:
            return None
        if not file.is_file():
            return None
        held: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # without a configuration the engine's start fails and says why
    return held


def require_files(model: str) -> None:
    """Refuse a model folder with an entry that is neither a file nor a folder: reading a FIFO would never end.

    Args:
        model: The configured model; names of a hub's models pass.

    Raises:
        InvalidConfig: naming the entry.
    """
    try:
        folder = Path(model).expanduser()
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        odd = next((one.name for one in entries if one.exists() and not one.is_file() and not one.is_dir()), None)
    except (OSError, RuntimeError, ValueError):
        return  # the engine's start says why it cannot be read
    if odd is not None:
        raise InvalidConfig(
            f"model={shown(model)}: {odd} is neither a file nor a folder, and reading it might never end; remove it",
            field="model",
        )


def experts_of(levels: Iterable[Mapping[str, object]]) -> str:
    """Return the field that counts the model's experts, with its value; "" if the model is dense.

    Args:
        levels: Fields of the model's ``config.json``, as :func:`config_levels` returns them.
    """
    for level in levels:
        for name in _EXPERTS:
            count = level.get(name)
            if isinstance(count, int) and count > 1:
                return f"{name}={count}"
    return ""


def has_experts(config: EngineConfig) -> bool:
    """Return whether the model is a mixture of experts, by its ``config.json``."""
    return bool(experts_of(levels_in(model_file(config, "config.json"))))


def require_dense_for_adapters(config: EngineConfig, levels: Iterable[Mapping[str, object]], engine: str) -> None:
    """Raise :class:`InvalidConfig` if adapters are enabled for a mixture of experts.

    For engines whose kernels for experts beside adapters need a GPU, when they run on a CPU. They would wrap the
    experts even if no adapter changes them, and fail at the first forward pass.

    Args:
        config: The configuration.
        levels: As for :func:`experts_of`.
        engine: Name of the engine in errors.
    """
    if config.enable_lora and (experts := experts_of(levels)):
        raise InvalidConfig(
            f"enable_lora=True: the model is a mixture of experts ({experts}), which {engine} runs with adapters only "
            "on a GPU; leave it out, use a GPU or the transformers backend, or merge adapters and push all weights",
            field="enable_lora",
        )


def check_model_folder(config: EngineConfig, engine: str) -> None:
    """Check the configuration against the model folder, as far as its ``config.json`` says enough.

    For :meth:`drivetrain.Backend.validate`. The engine's start checks again, with :func:`served_context_length`: it
    also knows models of a hub and the defaults of fields that the file leaves out.

    Args:
        config: The configuration.
        engine: Name of the engine in errors.

    Raises:
        InvalidConfig: As for :func:`served_context_length`.
    """
    levels = config_levels(config.model)
    own = levels[-1].get(_LENGTH) if levels else None
    if isinstance(own, int):
        served_context_length(config, levels[-1], own, engine)


def served_context_length(config: EngineConfig, fields: Mapping[str, object], own: int, engine: str) -> int:
    """Return the maximum number of prompt and output tokens of an engine that serves this model.

    Args:
        config: The configuration.
        fields: Fields of the model's ``config.json``, or of its ``text_config``.
        own: The model's own limit.
        engine: Name of the engine in errors.

    Raises:
        InvalidConfig: The configured length is too long for the model, or experts are to be spread and it has none.
    """
    require_experts(config, fields)
    length = context_length_of(own, config.context_length)
    require_short_rope(length, fields, engine)
    return length
