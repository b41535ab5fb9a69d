"""Shared translation between drivetrain's and an engine's values. Pure functions over plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from drivetrain.backend.base import GenerateRequest
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig, InvalidRequest, NonFiniteLogits, NoTokenAllowed
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import VersionSpan
from drivetrain.types.sampling import LogprobsMode, SamplingParams

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_OF_A_GRAMMAR: Final = ("grammar", "schema", "regex")


def wants_experts(params: SamplingParams) -> bool:
    """Return whether a request asks for the experts of any token."""
    return params.return_routed_experts or params.return_prompt_routed_experts


def as_slice(numbers: Sequence[int]) -> slice | list[int]:
    """Return an index that selects these, a slice if they follow each other: numpy then copies nothing."""
    if numbers and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return slice(numbers[0], numbers[-1] + 1)
    return list(numbers)


def refused_field(error: BaseException) -> str:
    """Return the field that an engine's refusal of a request is about, by the error's words: its grammar, or any."""
    words = str(error).lower()
    return "sampling_params.structured_output" if any(word in words for word in _OF_A_GRAMMAR) else "sampling_params"


def with_engine_kwargs(
    config: EngineConfig,
    relied_on: Mapping[str, Any],
    defaults: Mapping[str, Any],
    without_effect: Mapping[str, str] = _NONE,
) -> dict[str, Any]:
    """Merge the engine's arguments: backend defaults, overridden by ``engine_kwargs``, plus arguments the backend sets.

    Args:
        config: The configuration.
        relied_on: Arguments that the backend sets itself.
        defaults: Arguments that ``engine_kwargs`` may replace.
        without_effect: Arguments that the engine accepts but would not use here, each with the remedy.

    Raises:
        InvalidConfig: ``engine_kwargs`` holds an argument that a configuration field or the backend sets, or that would
            have no effect.
    """
    for name in sorted(without_effect.keys() & config.engine_kwargs.keys()):
        raise InvalidConfig(
            f"engine_kwargs holds {name}, which would have no effect: {without_effect[name]}", field="engine_kwargs"
        )
    both = sorted(relied_on.keys() & config.engine_kwargs.keys())
    if both:
        raise InvalidConfig(
            f"engine_kwargs holds {', '.join(both)}, which the backend sets itself; use the fields of the "
            "configuration, or leave it out",
            field="engine_kwargs",
        )
    return {**defaults, **relied_on, **config.engine_kwargs}


def require_fields_of_a_cpu(config: EngineConfig, engine: str, attention: Sequence[str], cache_size: str) -> None:
    """Refuse fields that an engine ignores on a CPU.

    Args:
        config: The configuration.
        engine: Name of the engine in errors.
        attention: Names of the attention implementations that the engine has there.
        cache_size: The engine's argument that sizes its KV cache there.

    Raises:
        InvalidConfig: The configuration asks for a share of a GPU's memory, or for another attention implementation.
    """
    if config.gpu_memory_utilization is not None:
        raise InvalidConfig(
            f"gpu_memory_utilization={config.gpu_memory_utilization:g}: {engine} runs on a CPU here, with a KV cache "
            f"of fixed size; leave it out, or set engine_kwargs={{'{cache_size}': …}}",
            field="gpu_memory_utilization",
        )
    if config.attention_backend is not None and config.attention_backend not in attention:
        raise InvalidConfig(
            f"attention_backend={shown(config.attention_backend)}: on a CPU {engine} has {', '.join(attention)}; leave "
            "it out, or name one of them",
            field="attention_backend",
        )


def spreads_experts(config: EngineConfig) -> bool:
    """Return True if each rank holds whole experts, False if each holds a slice of every expert.

    Raises:
        InvalidConfig: The experts would be spread over only some of the ranks.
    """
    experts, ranks = config.expert_parallel_size, config.tensor_parallel_size
    if experts not in (1, ranks):
        raise InvalidConfig(
            f"expert_parallel_size={experts} with tensor_parallel_size={ranks}: experts are spread over all ranks of "
            "the engine or over none; give both the same size, or leave it out",
            field="expert_parallel_size",
        )
    return experts > 1


def require_experts(config: EngineConfig, fields: Iterable[str]) -> None:
    """Raise :class:`InvalidConfig` if experts are to be spread over ranks but the model has none.

    Args:
        config: The configuration.
        fields: Field names of the model's ``config.json``; those of a mixture of experts contain "expert".
    """
    if config.expert_parallel_size > 1 and not any("expert" in field for field in fields):
        raise InvalidConfig(
            f"expert_parallel_size={config.expert_parallel_size}: the model has no experts to spread; leave it out",
            field="expert_parallel_size",
        )


def context_length_of(own: int, configured: int | None) -> int:
    """Return the maximum number of prompt and output tokens: the configured limit, or else the model's.

    Raises:
        InvalidConfig: The configured limit exceeds the model's.
    """
    if configured is None:
        return own
    if configured > own:
        raise InvalidConfig(
            f"context_length={configured} is more than the model's {own}; lower it or leave it out",
            field="context_length",
        )
    return configured


def eos_token_ids(*sources: object) -> tuple[int, ...]:
    """Collect ``eos_token_id`` of all sources: a model's configurations, its tokenizer, or fields of its JSON files.

    A source without it counts for nothing.
    """
    found: dict[int, None] = {}
    for source in sources:
        named = source.get("eos_token_id") if isinstance(source, Mapping) else getattr(source, "eos_token_id", None)
        for token_id in named if isinstance(named, list | tuple) else [named]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)


def version_spans(ends: Iterable[tuple[str, float]], count: int) -> list[VersionSpan]:
    """Build the version spans of a sample.

    Args:
        ends: Each version in order, with the number of tokens sampled when it was replaced.
        count: Number of tokens of the sample.
    """
    found: list[VersionSpan] = []
    for version, replaced in ends:
        begin, end = found[-1].end if found else 0, int(min(replaced, count))
        if end <= begin:
            continue
        if found and found[-1].version == version:
            begin = found.pop().start
        found.append(VersionSpan(version, begin, end))
    return found


def shortened_all(vectors: list[list[float]], dimensions: int | None) -> list[list[float]]:
    """Return embeddings as they are, or each of them :func:`shortened` to ``dimensions``."""
    return vectors if dimensions is None else [shortened(vector, dimensions) for vector in vectors]


def shortened(vector: list[float], dimensions: int) -> list[float]:
    """Truncate an embedding to ``dimensions`` and rescale it to length 1, as for Matryoshka models.

    Raises:
        InvalidRequest: The embedding has fewer dimensions.
    """
    if dimensions > len(vector):
        raise InvalidRequest(
            f"dimensions={dimensions} is more than the model's {len(vector)}; ask for fewer", field="dimensions"
        )
    kept = vector[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in kept)) or 1.0
    return [value / norm for value in kept]


def is_plain(request: GenerateRequest, native: LogprobsMode) -> bool:
    """Return whether an engine's own sampler and logprobs do exactly what a request asks for.

    True of an engine that applies temperature and at most one limit alike, and that knows no penalties, masks or seeds
    as drivetrain means them. All other requests need drivetrain's sampler inside the engine.

    Args:
        request: The request.
        native: The engine's own logprobs: ``RAW`` or ``TEMPERATURE``.
    """
    params = request.params
    adjusted = bool(
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.logit_processors
        or (params.min_new_tokens and request.stop_token_ids)
    )
    limits = (params.top_k > 0) + (params.top_p < 1) + (params.min_p > 0)
    if adjusted or limits > 1 or request.seed is not None or params.return_sampling_mask:
        return False
    if params.logprobs is None:
        return True
    if params.structured_output is not None:
        return False  # its logprobs are those of the masked distribution
    both_are_the_same = request.logprobs_mode is not LogprobsMode.PROCESSED and params.temperature in (0.0, 1.0)
    return both_are_the_same or request.logprobs_mode is native


def non_finite_logits(request: GenerateRequest, token: int | None = None) -> NonFiniteLogits:
    """Make the error for a request whose logits were NaN or infinite.

    Args:
        request: The request.
        token: Index of the output token, from 0; None: the prompt.
    """
    where = "its prompt" if token is None else f"output token {token}"
    whose = "the weights" if request.lora is None else f"the weights or the adapter {request.lora!r}"
    return NonFiniteLogits(
        f"request {request.request_id}: the model gave NaN or infinite logits for {where}. Either {whose} diverged: "
        "push good ones; or a type such as float16 does not hold the model's activations"
    )


def no_token_allowed(request: GenerateRequest, token: int) -> NoTokenAllowed:
    """Make the error for a request whose own fields allow no token at output position ``token``, counted from 0."""
    params = request.params
    used = {
        "structured_output": params.structured_output is not None,
        "logit_processors": bool(params.logit_processors),
        "min_new_tokens": token < params.min_new_tokens,
    }
    names = [f"sampling_params.{name}" for name, is_used in used.items() if is_used]
    leave = "leaves" if len(names) == 1 else "together leave"
    return NoTokenAllowed(
        f"request {request.request_id}: {' and '.join(names) or 'its sampling_params'} {leave} no token to draw "
        f"as output token {token}; loosen one of them",
        field=", ".join(names),
    )


def require_numbers(values: Iterable[float], what: str) -> None:
    """Raise :class:`NonFiniteLogits` for the first value that is NaN or infinite; ``what`` names the values."""
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteLogits(
                f"prompts[{index}]: the model gave {what} that holds NaN or infinite numbers. Its weights diverged, or "
                "its type does not hold its activations"
            )
