"""The requests of one engine: admitted or held at the gate, in flight, aborted, drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from drivetrain.backend import Backend, GenerateRequest, GenerateResult, StopKind, TokenDelta
from drivetrain.errors import EngineInternalError, EngineOutOfMemory, InvalidRequest
from drivetrain.outputs import CompletionChunk, TopLogprobs
from drivetrain.requests import Flight, aborted_before_start, to_completion
from drivetrain.stops import StopMatcher
from drivetrain.tokenizer import Tokenizer

OUT_OF_MEMORY_DELAYS = (0.5, 1.0, 2.0)
"""Seconds to wait before each retry of a request that ran the engine out of memory."""


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter that the backend has."""

    backend_name: str
    """By which the backend knows it; another one after each update of the adapter."""
    pinned: bool


class Flights:
    """Takes samples from the gate to their result, and knows which are under way."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, is_held: Callable[[], bool], loras: Mapping[str, LoadedLora]
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._is_held = is_held
        self._loras = loras
        self._changed = asyncio.Event()
        self._waiters = 0
        self._known: dict[str, Flight] = {}
        self._running: set[str] = set()

    # The gate ----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Let everything that waits look again: the engine's state changed, or a request ended."""
        if self._waiters:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _change(self) -> None:
        self._waiters += 1
        try:
            await self._changed.wait()
        finally:
            self._waiters -= 1

    @property
    def running(self) -> int:
        """Samples that the backend has."""
        return len(self._running)

    def using_lora(self, lora_name: str) -> int:
        """Samples under way that use the adapter."""
        return sum(flight.request.lora == lora_name for flight in self._known.values())

    def running_with_lora(self, lora_name: str) -> int:
        """Samples that use the adapter and that the backend has."""
        return sum(self._known[known].request.lora == lora_name for known in self._running)

    async def drained(self) -> None:
        """Wait until the backend has no sample. Nobody enters meanwhile if the gate is shut."""
        while self._running:
            await self._change()

    def register(self, flights: Iterable[Flight]) -> None:
        """Note the samples of a call.

        Raises:
            InvalidRequest: an id is already under way, or two samples of the call have the same.
        """
        new: dict[str, Flight] = {}
        for flight in flights:
            request_id = flight.request.request_id
            if request_id in self._known or request_id in new:
                raise InvalidRequest(
                    f"request id {request_id!r} is already under way; ids must differ", field="request_ids"
                )
            new[request_id] = flight
        self._known.update(new)

    def forget(self, flights: Iterable[Flight]) -> None:
        """Strike the samples of a call that has ended."""
        for flight in flights:
            self._known.pop(flight.request.request_id, None)

    # Ending early ------------------------------------------------------------------------------------------------

    async def abort(self, request_id: str | None) -> None:
        """End one request (all its samples), or all of them; those at the gate come back with no token."""
        chosen = [
            known
            for known, flight in self._known.items()
            if request_id is None or known == request_id or _base(flight) == request_id
        ]
        for known in chosen:
            self._known[known].aborted = True
        self.changed()
        await self._abort_running(chosen)

    async def abort_running(self) -> None:
        """End what the backend has; what waits at the gate goes on waiting."""
        for known in self._running:
            self._known[known].aborted = True
        await self._abort_running(list(self._running))

    async def _abort_running(self, chosen: list[str]) -> None:
        running = [known for known in chosen if known in self._running]
        if running:
            await self._backend.abort(running)

    # Running -----------------------------------------------------------------------------------------------------

    async def _admitted(self, flight: Flight) -> bool:
        """Wait at the gate; False if the request was aborted there."""
        while not flight.aborted and self._is_held():
            await self._change()
        return not flight.aborted

    def _left(self, flight: Flight) -> None:
        self._running.discard(flight.request.request_id)
        self.changed()

    async def run(self, flight: Flight) -> GenerateResult:
        """Take one sample to its result."""
        for delay in OUT_OF_MEMORY_DELAYS:
            try:
                return await self._run_once(flight)
            except EngineOutOfMemory:
                await asyncio.sleep(delay)
        try:
            return await self._run_once(flight)
        except EngineOutOfMemory as error:
            batch_size = max(error.batch_size, self.running + 1)
            raise EngineOutOfMemory(
                f"out of memory with {batch_size} requests in flight, also after {len(OUT_OF_MEMORY_DELAYS)} retries; "
                f"run fewer at once (max_num_seqs) or shorter ones: {error}",
                batch_size=batch_size,
            ) from error

    async def _run_once(self, flight: Flight) -> GenerateResult:
        if not await self._admitted(flight):
            return aborted_before_start(flight)
        if not self._must_watch_text(flight):
            self._running.add(flight.request.request_id)
            try:
                return await self._backend.generate(self._for_backend(flight.request))
            finally:
                self._left(flight)
        result: GenerateResult | None = None
        async for delta, _ in self._watched(flight):
            result = delta.result
        return _whole(flight, result)

    def _for_backend(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the name that its adapter has in the backend now."""
        if request.lora is None:
            return request
        return replace(request, lora=self._loras[request.lora].backend_name)

    def _must_watch_text(self, flight: Flight) -> bool:
        params, native = flight.request.params, self._backend.native_stops
        return bool(
            (params.stop and StopKind.STRING not in native) or (params.stop_regex and StopKind.REGEX not in native)
        )

    async def _watched(self, flight: Flight) -> AsyncGenerator[tuple[TokenDelta, StopMatcher], None]:
        """Stream a sample, following its text; at the first match the rest is aborted and not shown."""
        matcher = StopMatcher(flight.request.params, self._tokenizer)
        matched = False
        self._running.add(flight.request.request_id)
        try:
            async with aclosing(self._backend.stream(self._for_backend(flight.request))) as deltas:
                async for delta in deltas:
                    for token_id in () if matched else delta.token_ids:
                        if matcher.push(token_id) is not None:
                            matched = True
                            await self._backend.abort([flight.request.request_id])
                            break
                    if delta.result is not None or not matched:
                        yield delta, matcher
        finally:
            self._left(flight)

    async def stream(self, flight: Flight) -> AsyncGenerator[CompletionChunk, None]:
        """Stream one sample; the chunks' ids and texts put together are exactly the completion's."""
        if not await self._admitted(flight):
            yield _last_chunk(flight, aborted_before_start(flight), self._tokenizer, 0, 0)
            return
        shown_text = shown_ids = 0
        ids: list[int] = []
        logprobs: list[float] = []
        top_logprobs: list[TopLogprobs] = []
        async with aclosing(self._watched(flight)) as deltas:
            async for delta, matcher in deltas:
                if delta.result is not None:
                    yield _last_chunk(flight, delta.result, self._tokenizer, shown_ids, shown_text)
                    return
                ids += delta.token_ids
                logprobs += delta.logprobs or []
                top_logprobs += delta.top_logprobs or []
                if ids and ids[-1] in flight.request.stop_token_ids:
                    continue  # Its text is not part of the completion's: the result follows.
                text_to, ids_to = matcher.releasable()
                if ids_to > shown_ids or text_to > shown_text:
                    params = flight.request.params
                    yield CompletionChunk(
                        request_id=flight.request.request_id,
                        prompt_index=flight.prompt_index,
                        sample_index=flight.sample_index,
                        token_ids=ids[shown_ids:ids_to],
                        text=matcher.text[shown_text:text_to],
                        logprobs=logprobs[shown_ids:ids_to] if params.logprobs is not None else None,
                        top_logprobs=top_logprobs[shown_ids:ids_to] if params.logprobs else None,
                    )
                    shown_text, shown_ids = text_to, ids_to
        raise _ended_without_result(flight)


def _base(flight: Flight) -> str:
    request_id = flight.request.request_id
    return request_id if flight.request.params.n == 1 else request_id.rpartition("/")[0]


def _ended_without_result(flight: Flight) -> EngineInternalError:
    return EngineInternalError(f"request {flight.request.request_id}: the engine's stream ended without a result")


def _whole(flight: Flight, result: GenerateResult | None) -> GenerateResult:
    if result is None:
        raise _ended_without_result(flight)
    return result


def _last_chunk(
    flight: Flight, result: GenerateResult, tokenizer: Tokenizer, shown_ids: int, shown_text: int
) -> CompletionChunk:
    completion = to_completion(flight, result, tokenizer)
    return CompletionChunk(
        request_id=completion.request_id,
        prompt_index=completion.prompt_index,
        sample_index=completion.sample_index,
        token_ids=completion.token_ids[shown_ids:],
        text=completion.text[shown_text:],
        logprobs=completion.logprobs[shown_ids:] if completion.logprobs is not None else None,
        top_logprobs=completion.top_logprobs[shown_ids:] if completion.top_logprobs is not None else None,
        completion=completion,
    )
