"""What mutants are made with: subclasses of a class that is handed in, wrong in one place and sound in all others.

Everything is written against the public page, so that each mutant could spoil any backend.
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
    """Stands for the sound backend among a wrong one's bases: ``super()`` leads there, also from abstract methods."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """As the sound backend claims them."""
        return super().capabilities(config)

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """As the sound backend does."""
        return await super().start(report)  # type: ignore[safe-super]

    async def close(self) -> None:
        """As the sound backend does."""
        await super().close()  # type: ignore[safe-super]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """As the sound backend does."""
        return await super().generate(request)  # type: ignore[safe-super]

    async def stats(self) -> EngineStats:
        """As the sound backend does."""
        return await super().stats()  # type: ignore[safe-super]


def mixed(sound: type[_T], wrong: type[object]) -> type[_T]:
    """``sound`` with the methods of ``wrong`` in front."""
    return cast(type[_T], type(wrong.__name__, (wrong, sound), {"__doc__": wrong.__doc__}))


def claiming(sound: type[Backend], *capabilities: Capability) -> type[Backend]:
    """A backend that claims more."""

    class Wrong(SoundBackend):
        """Claims what it may not be able to do."""

        @classmethod
        def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
            return super().capabilities(config) | set(capabilities)

    return mixed(sound, Wrong)


def asking(sound: type[Backend], change: Callable[[GenerateRequest], GenerateRequest]) -> type[Backend]:
    """A backend that asks its engine for something else than it was asked for."""

    class Wrong(SoundBackend):
        """Changes each request."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return await super().generate(change(request))

        def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            return super().stream(change(request))

    return mixed(sound, Wrong)


def asking_for_params(sound: type[Backend], change: Callable[[GenerateRequest], Mapping[str, object]]) -> type[Backend]:
    """A backend that asks its engine for other sampling params: the fields that ``change`` returns."""

    def changed(request: GenerateRequest) -> GenerateRequest:
        return dataclasses.replace(request, params=request.params.model_copy(update=dict(change(request))))

    return asking(sound, changed)


def answering(
    sound: type[Backend], change: Callable[[GenerateRequest, GenerateResult], GenerateResult]
) -> type[Backend]:
    """A backend that returns something else than its engine did."""

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
    """An engine page whose ``generate`` changes sampling params that are given as a mapping, before it checks them."""

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
    """An engine page whose ``generate`` returns something else."""

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
    """The first ``count`` tokens of a result, with all that goes with them."""
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
