"""The pooling that a model's folder names, in the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from drivetrain.backend.toolkit.model_folder import model_json
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig, Task

_MODE: Final = "pooling_mode"
_APPLIED: Final = ("Transformer", "Normalize")
"""Layers that every backend applies: the model itself, and the scaling of vectors to length 1."""


class PoolingMode(Enum):
    """The rule that makes one vector of the states of a sequence's tokens. Values are sentence-transformers' names."""

    LAST = "lasttoken"
    FIRST = "cls_token"
    MEAN = "mean_tokens"


def folder_pooling(config: EngineConfig) -> PoolingMode | None:
    """Return the pooling that the model's folder or hub id names in ``modules.json``; None if it names none.

    None as well for engines that do not embed.

    Raises:
        InvalidConfig: The file is broken, or names several poolings, one that is no :class:`PoolingMode`, or a further
            layer.
    """
    found: PoolingMode | None = None
    for module in _modules(config) if config.task is Task.EMBED else []:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            found = _pooling(config, model_json(config, f"{module.get('path', '')}/config.json"))
        elif kind not in _APPLIED:
            raise InvalidConfig(
                f"model={shown(config.model)} asks for a {kind} layer over its vectors, and no backend applies one; "
                "remove it from modules.json, and apply it to the vectors that the engine returns",
                field="model",
            )
    return found


def _modules(config: EngineConfig) -> list[Mapping[str, object]]:
    modules = model_json(config, "modules.json")
    if modules is None and not (Path(config.model).expanduser() / "modules.json").exists():
        return []
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        raise InvalidConfig(
            f"model={shown(config.model)}: its modules.json is no JSON list of layers; mend it, or remove it for the "
            "engine's own pooling",
            field="model",
        )
    return modules


def _pooling(config: EngineConfig, fields: object) -> PoolingMode:
    named = fields if isinstance(fields, Mapping) else {}
    flags = [name for name, value in named.items() if name.startswith(_MODE) and value is True]
    modes = [flag.removeprefix(f"{_MODE}_") for flag in flags]
    if isinstance(mode := named.get(_MODE), str):
        modes.append(mode)
    found = [known for known in PoolingMode if {known.value, known.value.partition("_")[0]} & set(modes)]
    if len(modes) != 1 or not found:
        raise InvalidConfig(
            f"model={shown(config.model)} asks for the pooling {', '.join(modes) or 'of no mode'}; expected one of "
            f"{', '.join(known.value for known in PoolingMode)}",
            field="model",
        )
    return found[0]
