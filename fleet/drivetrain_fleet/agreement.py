"""Compare the engines of a fleet, and derive its capabilities, model and configuration from theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from drivetrain.backend.base import ModelInfo, StopKind
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.weight_transaction import SOURCE_CAPABILITY
from drivetrain.errors import InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation, Timeouts
from drivetrain.types.weights import TensorSpec, WeightManifest

_UNCLAIMED: Final = frozenset(
    {
        Capability.PROFILE,  # each engine would write a trace of its own
        Capability.WEIGHTS_LORA_TENSORS,  # an engine that joins later needs the adapter's folder
    }
)
"""Capabilities that a fleet never has, even if all of its engines do."""
_AT_ENGINE: Final = frozenset({Capability.STREAMING, Capability.ABORT})
"""Capabilities without which ``InferenceEngine`` cannot look for stops on text itself."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties that must be equal in all engines of a fleet."""

    task: str
    tokenizer: str
    """Digest of the files that map text to token ids."""
    vocabulary: int
    dtype: str
    architecture: str
    tensors: tuple[TensorSpec, ...] | None
    """The tensors of a complete update, by name; None if the engine takes none."""


async def facts_of(engine: InferenceEngine, fingerprint: str) -> Facts:
    """Return the facts of a started engine."""
    manifest: WeightManifest | None = None
    if not engine.capabilities.isdisjoint(SOURCE_CAPABILITY.values()):
        manifest = await engine.weight_manifest()
    info = engine.model_info
    return Facts(
        task=engine.config.task.value,
        tokenizer=fingerprint,
        vocabulary=info.vocab_size,
        dtype=info.dtype,
        architecture=info.architecture,
        tensors=None if manifest is None else tuple(sorted(manifest.tensors, key=lambda spec: spec.name)),
    )


def require_agreement(facts: Mapping[str, Facts]) -> None:
    """Raise :class:`InvalidConfig` for the first engine that differs from the first one.

    Args:
        facts: By the engines' names.
    """
    (first, expected), *others = facts.items()
    for name, found in others:
        for field in ("task", "tokenizer", "vocabulary", "dtype", "architecture"):
            one, other = getattr(expected, field), getattr(found, field)
            if one != other:
                raise _differ(first, name, field, repr(one), repr(other))
        if expected.tensors is not None and found.tensors is not None and expected.tensors != found.tensors:
            one, other = _first_difference(expected.tensors, found.tensors)
            raise _differ(first, name, "tensors", one, other)


def require_context(name: str, model: ModelInfo, fleet: ModelInfo) -> None:
    """Raise :class:`InvalidConfig` if an engine that joins has a shorter context than the fleet promises."""
    if model.context_length < fleet.context_length:
        raise InvalidConfig(
            f"{name} has a context length of {model.context_length}; the fleet admits requests of "
            f"{fleet.context_length} tokens. Give it as long a context, or make a fleet with it",
            field="context_length",
        )


def require_capabilities(name: str, engine: InferenceEngine, fleet: frozenset[Capability]) -> None:
    """Raise :class:`InvalidConfig` if an engine that joins lacks a capability that the fleet claims."""
    lacks = sorted(capability.value for capability in fleet - engine.capabilities)
    if lacks:
        raise InvalidConfig(
            f"{name} does not claim {', '.join(lacks)}, which the fleet claims; make a fleet with it",
            field="capabilities",
        )


def _differ(first: str, name: str, field: str, one: str, other: str) -> InvalidConfig:
    return InvalidConfig(
        f"{first} and {name} differ in {field}: {one} and {other}; the engines of a fleet serve one model. Take one "
        "out, or give both the same model, tokenizer and dtype",
        field=field,
    )


def _first_difference(ones: Sequence[TensorSpec], others: Sequence[TensorSpec]) -> tuple[str, str]:
    these, those = {spec.name: spec for spec in ones}, {spec.name: spec for spec in others}
    name = next(name for name in [*these, *those] if these.get(name) != those.get(name))
    return _shown(these.get(name), name), _shown(those.get(name), name)


def _shown(spec: TensorSpec | None, name: str) -> str:
    return f"no {name}" if spec is None else f"{name} {spec.dtype}{list(spec.shape)}"


# The fleet's own capabilities, model and configuration -------------------------------------------------------------


def fleet_capabilities(engines: Iterable[InferenceEngine], native: frozenset[StopKind]) -> frozenset[Capability]:
    """Return the capabilities that every engine claims, less those that no fleet has.

    Args:
        engines: The engines.
        native: Stops on text that the fleet leaves to its engines.
    """
    engines = list(engines)
    shared = frozenset.intersection(*(engine.capabilities for engine in engines)) - _UNCLAIMED
    if any(engine.isolation is Isolation.INLINE for engine in engines):
        shared -= {Capability.WEIGHTS_CUDA_IPC}  # a process cannot open handles of its own memory
    for kind, capability in ((StopKind.STRING, Capability.STOP_STRINGS), (StopKind.REGEX, Capability.STOP_REGEX)):
        if kind not in native and not shared >= _AT_ENGINE:
            shared -= {capability}
    return shared


def native_stops(engines: Iterable[InferenceEngine]) -> frozenset[StopKind]:
    """Return the stops on text at which every engine ends by itself."""
    return frozenset.intersection(*(engine.parts.backend.native_stops for engine in engines))


def fleet_isolation(engines: Iterable[InferenceEngine]) -> Isolation:
    """Return ``inline`` if every engine runs in this process."""
    inline = all(engine.isolation is Isolation.INLINE for engine in engines)
    return Isolation.INLINE if inline else Isolation.PROCESS


def fleet_model(models: Sequence[ModelInfo]) -> ModelInfo:
    """Return the model that the fleet serves: the first one's, with the smallest context length."""
    return replace(
        models[0],
        context_length=min(model.context_length for model in models),
        device=", ".join(dict.fromkeys(model.device for model in models)),
        weight_version=None,
        gpus=tuple(dict.fromkeys(gpu for model in models for gpu in model.gpus)),
    )


def fleet_config(configs: Sequence[EngineConfig]) -> EngineConfig:
    """Return the fleet's configuration: the first engine's, with the strictest value of each field that may differ."""
    first = configs[0]
    return first.model_copy(
        update={
            "backend": "+".join(dict.fromkeys(config.backend for config in configs)),
            "endpoint": None,
            "endpoint_api_key": None,
            "python": None,
            "engine_kwargs": {},
            "max_num_seqs": None,
            "max_loras": _least(config.max_loras for config in configs),
            "sleep_keeps_weights": all(config.sleep_keeps_weights for config in configs),
            "timeouts": _timeouts([config.timeouts for config in configs]),
        }
    )


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _timeouts(timeouts: Sequence[Timeouts]) -> Timeouts:
    """Return the longest of each."""
    return Timeouts(**{name: max(getattr(one, name) for one in timeouts) for name in Timeouts.model_fields})
