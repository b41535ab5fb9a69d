"""Building blocks of mutants: subclasses that change one behaviour of the class they are given and keep the rest.

They override public methods only, so that each mutant could spoil any backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.request_builder import ParamsLike
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import Completion, GenerationOutput, VersionSpan
from drivetrain.types.prompts import PromptLike

_T = TypeVar("_T")


class SoundBackend(Backend):
    """Base class of mutants of a backend: ``super()`` leads to the sound backend, even from abstract methods."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Return the sound backend's capabilities."""
        return super().capabilities(config)

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Start the sound backend."""
        return await super().start(report)  # type: ignore[safe-super]

    async def close(self) -> None:
        """Close the sound backend."""
        await super().close()  # type: ignore[safe-super]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate with the sound backend."""
        return await super().generate(request)

    async def stats(self) -> EngineStats:
        """Return the sound backend's stats."""
        return await super().stats()  # type: ignore[safe-super]


def mixed(sound: type[_T], wrong: type[object]) -> type[_T]:
    """Return a subclass of ``sound`` whose methods ``wrong`` overrides."""
    return cast(type[_T], type(wrong.__name__, (wrong, sound), {"__doc__": wrong.__doc__}))


def claiming(sound: type[Backend], *capabilities: Capability) -> type[Backend]:
    """Return a backend that claims further capabilities."""

    class Wrong(SoundBackend):
        """Claims capabilities that it may lack."""

        @classmethod
        def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
            return super().capabilities(config) | set(capabilities)

    return mixed(sound, Wrong)


def asking(sound: type[Backend], change: Callable[[GenerateRequest], GenerateRequest]) -> type[Backend]:
    """Return a backend that changes each request before its engine gets it."""

    class Wrong(SoundBackend):
        """Changes each request."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return await super().generate(change(request))

        def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            return super().stream(change(request))

    return mixed(sound, Wrong)


def asking_for_params(sound: type[Backend], change: Callable[[GenerateRequest], Mapping[str, object]]) -> type[Backend]:
    """Return a backend that changes sampling params: ``change`` returns the fields to replace."""

    def changed(request: GenerateRequest) -> GenerateRequest:
        return dataclasses.replace(request, params=request.params.model_copy(update=dict(change(request))))

    return asking(sound, changed)


def answering(
    sound: type[Backend], change: Callable[[GenerateRequest, GenerateResult], GenerateResult]
) -> type[Backend]:
    """Return a backend that changes each result of its engine."""

    class Wrong(SoundBackend):
        """Changes each result."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return change(request, await super().generate(request))

        async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    result = None if delta.result is None else change(request, delta.result)
                    yield dataclasses.replace(delta, result=result)

    return mixed(sound, Wrong)


def taking(
    sound: type[InferenceEngine], change: Callable[[Mapping[str, object]], Mapping[str, object]]
) -> type[InferenceEngine]:
    """Return an engine whose ``generate`` changes sampling params given as a mapping, before they are checked."""

    class Wrong(InferenceEngine):
        """Changes the params of each call."""

        async def generate(
            self,
            prompts: PromptLike | Sequence[PromptLike],
            sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
            **options: Any,
        ) -> GenerationOutput:
            if isinstance(sampling_params, Mapping):
                sampling_params = change(sampling_params)
            return await super().generate(prompts, sampling_params, **options)

    return mixed(sound, Wrong)


def returning(
    sound: type[InferenceEngine], change: Callable[[list[Completion]], list[Completion]]
) -> type[InferenceEngine]:
    """Return an engine whose ``generate`` changes the completions."""

    class Wrong(InferenceEngine):
        """Changes the completions of each call."""

        async def generate(
            self,
            prompts: PromptLike | Sequence[PromptLike],
            sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
            **options: Any,
        ) -> GenerationOutput:
            output = await super().generate(prompts, sampling_params, **options)
            return GenerationOutput(change(output.completions))

    return mixed(sound, Wrong)


def cut(result: GenerateResult, count: int) -> GenerateResult:
    """Return the first ``count`` tokens of a result, with their logprobs and spans."""
    spans = [
        VersionSpan(span.version, span.start, min(span.end, count))
        for span in result.weight_versions
        if span.start < count
    ]
    return dataclasses.replace(
        result,
        token_ids=result.token_ids[:count],
        weight_versions=spans,
        logprobs=None if result.logprobs is None else result.logprobs[:count],
        top_logprobs=None if result.top_logprobs is None else result.top_logprobs[:count],
    )
