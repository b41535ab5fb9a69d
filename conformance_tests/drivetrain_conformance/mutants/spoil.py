"""Building blocks of mutants: subclasses that change one behaviour of the class they are given and keep the rest.

They override public methods only, so that each mutant could spoil any backend. A decorator such as ``request_mutant``
makes a mutant of a function that changes one value on its way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import Completion, FinishReason, GenerationOutput, VersionSpan
from drivetrain.types.prompts import MediaInput
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_conformance.mutants.registry import backend_mutants, engine_mutants, mixed

ChangeRequest = Callable[[GenerateRequest], GenerateRequest]
_T = TypeVar("_T")


def own(kind: Callable[[], _T]) -> _T:
    """Declare an attribute whose value each engine has for itself.

    For example, ``seen: set[str] = own(set)``.
    """
    return cast(_T, cached_property(lambda _: kind()))


class CorrectBackend(Backend):
    """Base class of mutants of a backend: ``super()`` leads to the correct backend, even from abstract methods."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Return the correct backend's capabilities."""
        return super().capabilities(config)

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Start the correct backend."""
        return await super().start(report)  # type: ignore[safe-super]

    async def close(self) -> None:
        """Close the correct backend."""
        await super().close()  # type: ignore[safe-super]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate with the correct backend."""
        return await super().generate(request)

    async def stats(self) -> EngineStats:
        """Return the correct backend's stats."""
        return await super().stats()  # type: ignore[safe-super]


def claiming(correct: type[Backend], *capabilities: Capability) -> type[Backend]:
    """Return a backend that claims further capabilities."""

    class Wrong(CorrectBackend):
        """Claims capabilities that it may lack."""

        @classmethod
        def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
            return super().capabilities(config) | set(capabilities)

    return mixed(correct, Wrong)


def asking(correct: type[Backend], change: ChangeRequest) -> type[Backend]:
    """Return a backend that changes each request before its engine gets it."""

    class Wrong(CorrectBackend):
        """Changes each request."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return await super().generate(change(request))

        def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            return super().stream(change(request))

    return mixed(correct, Wrong)


def asking_for_params(
    correct: type[Backend], change: Callable[[GenerateRequest], Mapping[str, object]]
) -> type[Backend]:
    """Return a backend that changes sampling params: ``change`` returns the fields to replace."""

    def changed(request: GenerateRequest) -> GenerateRequest:
        return dataclasses.replace(request, params=request.params.model_copy(update=dict(change(request))))

    return asking(correct, changed)


def asking_in_streams(correct: type[Backend], change: ChangeRequest) -> type[Backend]:
    """Return a backend that changes the requests of streams only."""

    class Wrong(CorrectBackend):
        """Changes each streamed request."""

        def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            return super().stream(change(request))

    return mixed(correct, Wrong)


def answering(
    correct: type[Backend], change: Callable[[GenerateRequest, GenerateResult], GenerateResult]
) -> type[Backend]:
    """Return a backend that changes each result of its engine."""

    class Wrong(CorrectBackend):
        """Changes each result."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return change(request, await super().generate(request))

        async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    result = None if delta.result is None else change(request, delta.result)
                    yield dataclasses.replace(delta, result=result)

    return mixed(correct, Wrong)


def streaming(
    correct: type[Backend], change: Callable[[AsyncGenerator[TokenDelta, None]], AsyncGenerator[TokenDelta, None]]
) -> type[Backend]:
    """Return a backend that changes the deltas of each stream."""

    class Wrong(CorrectBackend):
        """Changes each stream."""

        async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            async with aclosing(super().stream(request)) as deltas, aclosing(change(deltas)) as changed:
                async for delta in changed:
                    yield delta

    return mixed(correct, Wrong)


def configured(correct: type[Backend], change: Callable[[EngineConfig], Mapping[str, object]]) -> type[Backend]:
    """Return a backend that changes the configuration it is given: ``change`` returns the fields to replace."""

    class Wrong(CorrectBackend):
        """Changes its configuration."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config.model_copy(update=dict(change(config))))

    return mixed(correct, Wrong)


def taking(
    correct: type[InferenceEngine], change: Callable[[Mapping[str, object]], Mapping[str, object]]
) -> type[InferenceEngine]:
    """Return an engine whose ``generate`` changes sampling params given as a mapping, before they are checked."""

    class Wrong(InferenceEngine):
        """Changes the params of each call."""

        async def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> GenerationOutput:
            if isinstance(sampling_params, Mapping):
                sampling_params = change(sampling_params)
            return await super().generate(prompts, sampling_params, **options)

    return mixed(correct, Wrong)


def returning(
    correct: type[InferenceEngine], change: Callable[[list[Completion]], list[Completion]]
) -> type[InferenceEngine]:
    """Return an engine whose ``generate`` changes the completions."""

    class Wrong(InferenceEngine):
        """Changes the completions of each call."""

        async def generate(self, *prompts: Any, **options: Any) -> GenerationOutput:
            return GenerationOutput(change((await super().generate(*prompts, **options)).completions))

    return mixed(correct, Wrong)


request_mutant = backend_mutants(asking)
params_mutant = backend_mutants(asking_for_params)
streamed_mutant = backend_mutants(asking_in_streams)
result_mutant = backend_mutants(answering)
deltas_mutant = backend_mutants(streaming)
config_mutant = backend_mutants(configured)
arguments_mutant = engine_mutants(taking)
completions_mutant = engine_mutants(returning)


def cut(result: GenerateResult, count: int) -> GenerateResult:
    """Return the first ``count`` tokens of a result, with their logprobs and spans; the engine finds their text."""
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
        matched_text=None,
        sampling_mask=None if result.sampling_mask is None else result.sampling_mask[:count],
    )


def fifos_in(folder: str) -> list[Path]:
    """Return the FIFOs in a folder."""
    return [file for file in Path(folder).glob("*") if file.is_fifo()]


async def waits_in_open(fifo: Path) -> None:
    """Start a thread that waits in ``open()`` until the FIFO is opened for writing; return when it waits."""
    waiting = threading.Event()

    def read() -> None:
        waiting.set()
        fifo.read_bytes()

    threading.Thread(target=read, daemon=True).start()
    await asyncio.to_thread(waiting.wait)
    await asyncio.sleep(0.2)


class KnowingSleep(CorrectBackend):
    """Base class of mutants that differ while the weights sleep."""

    weights_sleep = False

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        await super().sleep(tags)
        self.weights_sleep |= MemoryTag.WEIGHTS in tags

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        await super().wake_up(tags)
        self.weights_sleep &= MemoryTag.WEIGHTS not in tags


class KnowingRequests(CorrectBackend):
    """Base class of mutants that need to know which requests are in flight."""

    flying: set[str] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate with the correct backend."""
        with self._noted(request):
            return await super().generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream from the correct backend."""
        with self._noted(request):
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    yield delta

    @contextmanager
    def _noted(self, request: GenerateRequest) -> Iterator[None]:
        self.flying.add(request.request_id)
        try:
            yield
        finally:
            self.flying.discard(request.request_id)


class KnowingMedia(CorrectBackend):
    """Answers a prompt whose ids were seen before with the media that it had then."""

    _media_by_ids: dict[tuple[int, ...], tuple[MediaInput, ...]] = own(dict)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        media = self._media_by_ids.setdefault(tuple(request.prompt_token_ids), request.media)
        return await super().generate(dataclasses.replace(request, media=media))


class MixingMedia(CorrectBackend):
    """Answers a request with the media of the first one in flight that is like it."""

    _in_flight: list[GenerateRequest] = own(list)

    def is_like(self, request: GenerateRequest, other: GenerateRequest) -> bool:
        """Return whether two requests have as many media."""
        return len(request.media) == len(other.media)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        alike = [other.media for other in self._in_flight if self.is_like(request, other)]
        self._in_flight.append(request)
        try:
            return await super().generate(dataclasses.replace(request, media=[*alike, request.media][0]))
        finally:
            self._in_flight.remove(request)


class KnowingEos(CorrectBackend):
    """Base class of mutants that need to know the model's EOS ids."""

    eos: tuple[int, ...] = ()

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Start the correct backend, and remember the EOS ids."""
        info = await super().start(report)
        self.eos = info.eos_token_ids
        return info


def after(request: GenerateRequest, made: GenerateResult) -> GenerateRequest:
    """Return the request for the remaining tokens of ``request`` after ``made``."""
    return dataclasses.replace(
        request,
        prompt_token_ids=request.prompt_token_ids + made.token_ids,
        max_new_tokens=request.max_new_tokens - len(made.token_ids),
    )


def joined(first: GenerateResult, rest: GenerateResult) -> GenerateResult:
    """Return the tokens of two results as one result of the last one's weight version."""
    ids = first.token_ids + rest.token_ids
    return dataclasses.replace(
        rest,
        token_ids=ids,
        weight_versions=[VersionSpan(span.version, 0, len(ids)) for span in rest.weight_versions[-1:]],
        logprobs=None if rest.logprobs is None else [*(first.logprobs or ()), *rest.logprobs],
        top_logprobs=None if rest.top_logprobs is None else [*(first.top_logprobs or ()), *rest.top_logprobs],
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_logprobs=first.prompt_top_logprobs,
        prompt_ranks=first.prompt_ranks,
        cached_tokens=first.cached_tokens,
        sampling_mask=_joined(first.sampling_mask, rest.sampling_mask),
    )


async def token_by_token(
    generate: Callable[[GenerateRequest], Awaitable[GenerateResult]],
    request: GenerateRequest,
    spoil: Callable[[GenerateRequest, list[int]], GenerateRequest],
) -> GenerateResult:
    """Generate a sample by requests of one token; ``spoil`` changes each, knowing the tokens so far."""
    made: GenerateResult | None = None
    while made is None or len(made.token_ids) < request.max_new_tokens:
        left, token_ids = (after(request, made), made.token_ids) if made else (request, [])
        step = await generate(dataclasses.replace(spoil(left, token_ids), max_new_tokens=1))
        made = joined(made, step) if made else step
        if step.finish_reason is not FinishReason.LENGTH:
            break
    return made


def _joined(first: SamplingMask | None, rest: SamplingMask | None) -> SamplingMask | None:
    return first + rest if first is not None and rest is not None else first or rest


def resubmitting(
    frozen: PauseMode,
    backend: type[Backend],
    change: Callable[[GenerateRequest], GenerateRequest | None],
    *,
    left: Callable[[GenerateRequest, GenerateResult], GenerateRequest] = after,
    join: Callable[[GenerateResult, GenerateResult], GenerateResult] = joined,
) -> type[Backend]:
    """Return a backend that ends requests instead of freezing them, and resubmits them later with their tokens.

    ``change`` returns the request to resubmit, or None for a request that is frozen as it should be. ``left`` gives it
    the request for the remaining tokens, and ``join`` joins both results.
    """

    class Wrong(CorrectBackend):
        """Keeps only the tokens of a frozen request."""

        _flying: set[str] = own(set)
        _ended: dict[str, asyncio.Future[bool]] = own(dict)
        """Requests that were ended by a freeze, each with whether it goes on."""

        async def freeze(self, mode: PauseMode) -> None:
            if mode is frozen:
                ended = self._flying - self._ended.keys()
                self._ended |= {name: asyncio.get_running_loop().create_future() for name in ended}
                await super().abort(list(self._flying))
            await super().freeze(mode)

        async def unfreeze(self) -> None:
            await super().unfreeze()
            self._decide(self._ended, goes_on=True)

        async def abort(self, request_ids: list[str]) -> None:
            self._decide(request_ids, goes_on=False)
            await super().abort(request_ids)

        def _decide(self, names: Iterable[str], *, goes_on: bool) -> None:
            for name in names:
                if name in self._ended and not self._ended[name].done():
                    self._ended[name].set_result(goes_on)

        async def stats(self) -> EngineStats:
            stats, count = await super().stats(), len(self._ended)
            if frozen is PauseMode.RETRACT:
                return dataclasses.replace(stats, waiting=stats.waiting + count)
            return dataclasses.replace(stats, running=stats.running + count)

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if change(request) is None:
                return await super().generate(request)
            self._flying.add(request.request_id)
            try:
                first = await super().generate(request)
            finally:
                self._flying.discard(request.request_id)
            if request.request_id not in self._ended:
                return first
            try:
                if first.finish_reason is not FinishReason.ABORT or not await self._ended[request.request_id]:
                    return first
            finally:
                del self._ended[request.request_id]
            again = change(left(request, first))
            assert again is not None
            return join(first, await super().generate(again))

    return mixed(backend, Wrong)
