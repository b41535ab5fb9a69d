"""The requests of one engine: held at the gate or admitted, run, streamed, aborted, drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TypeVar

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, StopKind, TokenDelta
from drivetrain.checks.limits import SAMPLES_AT_ONCE, SAMPLES_UNDER_WAY, TOKENS_AT_ONCE
from drivetrain.engine.completions import (
    aborted_before_start,
    check_sampled_ids,
    is_unlabelled_score,
    labelled_score,
    to_completion,
)
from drivetrain.engine.controller import Controller
from drivetrain.engine.counts import SampleCounts
from drivetrain.engine.loaded_adapters import LoadedAdapters
from drivetrain.engine.model import StartedModel
from drivetrain.engine.samples import Sample, Samples
from drivetrain.engine.served_weights import ServedWeights
from drivetrain.engine.states import WeightState
from drivetrain.engine.streamed_text import StreamedText
from drivetrain.errors import (
    EngineDied,
    EngineError,
    EngineInternalError,
    EngineOutOfMemory,
    InvalidRequest,
    WeightVersionGone,
)
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.outputs import CompletionChunk, FinishReason, TopLogprobs
from drivetrain.types.sampling_mask import SamplingMask

_T = TypeVar("_T")

OUT_OF_MEMORY_DELAYS = (0.5, 1.0, 2.0)
"""Seconds to wait before each retry of a request that ran the engine out of memory."""


class RequestsInFlight:
    """Takes samples from the gate to their result, and knows which are under way."""

    def __init__(
        self,
        controller: Controller,
        backend: Backend,
        model: StartedModel,
        adapters: LoadedAdapters,
        weights: ServedWeights,
    ) -> None:
        self.controller = controller
        self.backend = backend
        self.model = model
        self.adapters = adapters
        self.weights = weights
        self.counts = SampleCounts()
        self._at_gate: dict[asyncio.Future[None], None] = {}
        """One future per sample that waits there, in order of arrival."""
        self._drained = asyncio.Event()
        self._keeping_weights = 0
        """Number of changes of state under way that leave the weights of every sample in the backend as they are."""
        self._known: dict[str, Samples] = {}
        self._like_samples: set[str] = set()
        """Known ids that could be the ids of another prompt's samples."""
        self._in_backend: dict[str, Sample] = {}
        self._lost: EngineError | None = None
        """The error with which every sample ends, once the engine is dead."""
        controller.subscribe(self.changed)

    # The gate ----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Wake the samples at the gate to check again: the engine's state changed, or some were aborted."""
        waiting, self._at_gate = list(self._at_gate), {}
        _wake(waiting)

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_gate[waiter] = None
        try:
            await waiter
        finally:
            self._at_gate.pop(waiter, None)

    @property
    def waiting(self) -> int:
        """Number of samples that wait at the gate."""
        return len(self._at_gate)

    @property
    def running(self) -> int:
        """Number of samples in the backend."""
        return len(self._in_backend)

    def using_lora(self, lora_name: str) -> int:
        """Count the samples under way that use the adapter, those at the gate included."""
        return sum(samples.count for samples in self._known.values() if samples.request.lora == lora_name)

    def running_with_lora(self, lora_name: str) -> int:
        """Count the samples in the backend that use the adapter."""
        return sum(sample.request.lora == lora_name for sample in self._in_backend.values())

    async def drained(self) -> None:
        """Wait until the backend has no sample. Shut the gate first, or new samples may enter meanwhile."""
        while self._in_backend:
            self._drained.clear()
            await self._drained.wait()

    async def drained_first(self) -> None:
        """Wait as :meth:`drained` does, for a change of state that does not touch the weights before."""
        with self.weights_are_kept():
            await self.drained()

    @contextmanager
    def weights_are_kept(self) -> Generator[None, None, None]:
        """Mark a change of state that leaves the weights of every sample in the backend as they are.

        Such samples can be scored meanwhile, although the status says that weights are being updated.
        """
        self._keeping_weights += 1
        try:
            yield
        finally:
            self._keeping_weights -= 1

    @contextmanager
    def under_way(self, prompts: Sequence[Samples]) -> Generator[None, None, None]:
        """Register the samples of a call for as long as it runs, so that they can be aborted by id.

        Raises:
            InvalidRequest: an id is already under way, or two samples of the call have the same.
        """
        new: list[str] = []
        try:
            for samples in prompts:
                request_id = samples.request.request_id
                if request_id in self._known or self._clashes(samples):
                    raise InvalidRequest(
                        f"request id {request_id!r} is already under way; ids must differ", field="request_ids"
                    )
                self._known[request_id] = samples
                new.append(request_id)
                if "/" in request_id:
                    self._like_samples.add(request_id)
            yield
        finally:
            for request_id in new:
                del self._known[request_id]
            self._like_samples.difference_update(new)

    def _clashes(self, samples: Samples) -> bool:
        """Return True if an id of these samples is the id of another prompt in flight, or the reverse."""
        if any(samples.index_of(other) is not None for other in self._like_samples):
            return True
        found = self._sample(samples.request.request_id)
        return found is not None

    def _sample(self, request_id: str) -> tuple[Samples, int] | None:
        """Find the sample with this id, if its prompt is under way and has several samples."""
        samples = self._known.get(request_id.rpartition("/")[0])
        index = None if samples is None else samples.index_of(request_id)
        return None if samples is None or index is None else (samples, index)

    # Ending early ------------------------------------------------------------------------------------------------

    async def abort(self, request_id: str | None) -> None:
        """End one request with all its samples, or every request; those at the gate come back with no token."""
        if request_id is None:
            for samples in self._known.values():
                samples.aborted = True
        elif request_id in self._known:
            self._known[request_id].aborted = True
        elif (found := self._sample(request_id)) is not None:
            found[0].aborted_samples.add(found[1])
        else:
            for samples in self._known.values():
                samples.aborted |= samples.holders_request == request_id
        self.changed()
        await self._abort_in_backend(
            known
            for known, sample in self._in_backend.items()
            if request_id in (None, known, sample.samples.request.request_id, sample.samples.holders_request)
        )

    async def abort_running(self) -> None:
        """End the samples in the backend; those at the gate go on waiting."""
        for sample in self._in_backend.values():
            sample.samples.aborted_samples.add(sample.sample_index)
        await self._abort_in_backend(self._in_backend)

    async def _abort_in_backend(self, request_ids: Iterable[str]) -> None:
        if chosen := list(request_ids):
            await self.backend.abort(chosen)

    # Running -----------------------------------------------------------------------------------------------------

    async def _admitted(self, sample: Sample) -> bool:
        """Wait at the gate; return False if the request was aborted there."""
        while not sample.aborted and self.controller.holds_requests():
            await self._change()
        if not sample.aborted:
            self.require_version(sample.request)
        return not sample.aborted

    def require_version(self, request: GenerateRequest) -> None:
        """Raise :class:`WeightVersionGone` if the request is pinned to a version that is not served."""
        pinned = request.weight_version
        if pinned is not None and pinned != self.weights.version:
            raise WeightVersionGone(
                f"weight_version={pinned!r} is not served; the engine serves {self.weights.version!r}. Send the "
                "request again for that version, or for any"
            )

    def fail(self, error: EngineError) -> None:
        """End every sample in the backend with this error: the engine is dead and will not answer."""
        self._lost = error
        for sample in self._in_backend.values():
            if sample.task is not None:
                sample.task.cancel()

    def _enter(self, sample: Sample) -> None:
        sample.task = asyncio.current_task()
        self._in_backend[sample.request.request_id] = sample
        self.counts.entered(sample.request)

    def _left(self, sample: Sample) -> None:
        self._in_backend.pop(sample.request.request_id, None)
        sample.task = None  # a cancelled task refers to its frames, and these to the sample: no cycle may be left
        if not self._in_backend:
            self._drained.set()

    async def run(self, sample: Sample, *, match_text: bool = True) -> GenerateResult:
        """Take one sample to its result. Without ``match_text`` the caller looks for stops that the backend ignores."""
        with self.counts.sample() as end:
            result = await self._run(sample, match_text)
            end.set(result.finish_reason, result.cached_tokens)
            return result

    async def _run(self, sample: Sample, match_text: bool) -> GenerateResult:
        for delay in OUT_OF_MEMORY_DELAYS:
            try:
                return await self._run_once(sample, match_text)
            except EngineOutOfMemory:
                await asyncio.sleep(delay)
        try:
            return await self._run_once(sample, match_text)
        except EngineOutOfMemory as error:
            raise self._out_of_memory(error) from error

    def _out_of_memory(self, error: EngineOutOfMemory, shown: int = 0) -> EngineOutOfMemory:
        """Return the error of a request that cannot be retried; its stream has already yielded ``shown`` chunks."""
        batch_size = max(error.batch_size, self.running + 1)
        tried = (
            f"after {shown} chunks of a stream, which cannot be generated twice"
            if shown
            else f"also after {len(OUT_OF_MEMORY_DELAYS)} retries"
        )
        return EngineOutOfMemory(
            f"out of memory with {batch_size} requests in flight, {tried}; "
            f"run fewer at once (max_num_seqs) or shorter ones: {error}",
            batch_size=batch_size,
        )

    async def _run_once(self, sample: Sample, match_text: bool) -> GenerateResult:
        if match_text and self._must_watch_text(sample):
            return await self._run_watched(sample)
        while await self._admitted(sample):
            self._enter(sample)
            served, version = self._served(), self.weights.version
            try:
                whole = await self.backend.generate(self._for_backend(sample.request))
                self.counts.step(TokenDelta([], result=whole))
            except asyncio.CancelledError as error:
                raise self._lost or error from None
            finally:
                self._left(sample)
            if not is_unlabelled_score(sample, whole):
                await self._until_published(whole)
                return whole
            if served == self._served():  # else either version may have scored it, and it is scored again
                return labelled_score(whole, version)
        return aborted_before_start(sample)

    async def _until_published(self, result: GenerateResult) -> None:
        """Wait until the engine's version is no older than that of a result: the backend serves new weights earlier."""
        spans = result.weight_versions
        while spans and spans[-1].version == self.weights.coming != self.weights.version:
            await self._change()

    async def _run_watched(self, sample: Sample) -> GenerateResult:
        if not await self._admitted(sample):
            return aborted_before_start(sample)
        result: GenerateResult | None = None
        async for delta, _ in self._watched(sample):
            result = delta.result
        return _whole(sample, result)

    def _served(self) -> tuple[bool, int]:
        """Return a value that changes with the weights of the samples in the backend.

        It differs from the moment at which an update may touch them: the backend serves the new weights before the
        update's end is known here. An adapter's update changes the weights of no sample that outlasts it, and neither
        does another name for the weights.
        """
        status = self.controller.status
        return status.weights is WeightState.CLEAN or self._keeping_weights > 0, status.updates

    def _for_backend(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the backend's current name for its adapter."""
        if request.lora is None:
            return request
        return replace(request, lora=self.adapters.backend_name(request.lora))

    def _must_watch_text(self, sample: Sample) -> bool:
        params, native = sample.request.params, self.backend.native_stops
        return bool(
            (params.stop and StopKind.STRING not in native) or (params.stop_regex and StopKind.REGEX not in native)
        )

    async def _watched(self, sample: Sample) -> AsyncGenerator[tuple[TokenDelta, StreamedText], None]:
        """Stream a sample while matching its text; at the first match abort the rest and hide it.

        Ids that the backend matched are passed on.
        """
        text = StreamedText(sample, self.model.tokenizer)
        async with aclosing(self._steps(sample)) as deltas:
            async for delta in deltas:
                check_sampled_ids(sample, delta.token_ids)
                if delta.result is not None:
                    yield _matched(delta, delta.result, sample, text), text
                elif delta.released is not None:
                    yield delta, text
                elif not text.matched:
                    if text.add(delta.token_ids):
                        await self.backend.abort([sample.request.request_id])
                    else:
                        yield delta, text

    async def stream_steps(self, sample: Sample) -> AsyncGenerator[TokenDelta, None]:
        """Take one sample through the gate and yield the backend's steps; the caller looks for stops and cuts text."""
        with self.counts.sample() as end:
            if not await self._admitted(sample):
                end.set(FinishReason.ABORT, 0)
                yield TokenDelta([], result=aborted_before_start(sample))
                return
            async with aclosing(self._steps(sample)) as steps:
                async for step in steps:
                    if step.result is not None:
                        end.set(step.result.finish_reason, step.result.cached_tokens)
                    yield step

    async def _steps(self, sample: Sample) -> AsyncGenerator[TokenDelta, None]:
        """Yield the backend's steps of a sample that the gate has let through."""
        if sample.request.max_new_tokens == 0:  # a score: one step, which may have to be made again
            yield TokenDelta([], result=await self._run_once(sample, match_text=False))
            return
        self._enter(sample)
        counted = 0
        try:
            async with aclosing(self.backend.stream(self._for_backend(sample.request))) as deltas:
                async for delta in deltas:
                    counted = self.counts.step(delta, counted)
                    if delta.token_ids and delta.result is None:
                        self.require_version(sample.request)
                    if delta.result is not None:
                        await self._until_published(delta.result)
                    yield delta
        except EngineDied as error:
            self.controller.fail(str(error), died=True)
            raise
        except asyncio.CancelledError as error:
            raise self._lost or error from None
        finally:
            self._left(sample)

    async def stream(self, sample: Sample) -> AsyncGenerator[CompletionChunk, None]:
        """Stream one sample; the chunks' ids and texts put together are exactly the completion's.

        If the engine runs out of memory, the stream is retried as in :meth:`run`, unless a chunk was yielded.
        """
        with self.counts.sample() as end:
            for delay in (*OUT_OF_MEMORY_DELAYS, None):
                shown = 0
                try:
                    async with aclosing(self._stream_once(sample)) as chunks:
                        async for chunk in chunks:
                            shown += 1
                            if (completion := chunk.completion) is not None:
                                end.set(completion.finish_reason, completion.cached_tokens)
                            yield chunk
                    return
                except EngineOutOfMemory as error:
                    if shown or delay is None:
                        raise self._out_of_memory(error, shown) from error
                    await asyncio.sleep(delay)

    async def _stream_once(self, sample: Sample) -> AsyncGenerator[CompletionChunk, None]:
        if not await self._admitted(sample):
            yield _last_chunk(sample, aborted_before_start(sample), self.model.tokenizer, 0, 0)
            return
        shown_text = shown_ids = 0
        ids: list[int] = []
        logprobs: list[float] = []
        top_logprobs: list[TopLogprobs] = []
        mask: SamplingMask | None = None
        async with aclosing(self._watched(sample)) as deltas:
            async for delta, text in deltas:
                if delta.result is not None:
                    yield _last_chunk(sample, delta.result, self.model.tokenizer, shown_ids, shown_text)
                    return
                ids += delta.token_ids
                logprobs += delta.logprobs or []
                top_logprobs += delta.top_logprobs or []
                if delta.sampling_mask is not None:
                    mask = delta.sampling_mask if mask is None else mask + delta.sampling_mask
                released = delta.released
                if released is None:
                    if ids and ids[-1] in sample.request.stop_token_ids:
                        continue  # a stop token's text is not part of the completion; the result follows
                    released = text.release()
                ids_to = released.token_count
                if ids_to > shown_ids or released.text:
                    params = sample.request.params
                    yield CompletionChunk(
                        request_id=sample.request.request_id,
                        prompt_index=sample.prompt_index,
                        sample_index=sample.sample_index,
                        token_ids=ids[shown_ids:ids_to],
                        text=released.text,
                        logprobs=logprobs[shown_ids:ids_to] if params.logprobs is not None else None,
                        top_logprobs=top_logprobs[shown_ids:ids_to] if params.logprobs else None,
                        sampling_mask=mask and mask[: ids_to - shown_ids],
                        prompt_token_ids=sample.request.prompt_token_ids,
                    )
                    mask = mask and mask[ids_to - shown_ids :]
                    shown_text, shown_ids = shown_text + len(released.text), ids_to
        raise _ended_without_result(sample)


async def run_each(
    prompts: Sequence[Samples],
    run: Callable[[Sample], Coroutine[object, object, _T]],
    started: list[asyncio.Task[_T]],
) -> None:
    """Await ``run`` for every sample, prompt by prompt, and append each task to ``started``; raise the first error.

    The event loop gets turns in between, and samples of a large call are created only as earlier ones end.
    """
    under_way = 0
    failed: asyncio.Task[_T] | None = None
    changed = asyncio.Event()

    def ended(task: asyncio.Task[_T]) -> None:
        nonlocal under_way, failed
        under_way -= 1
        broke = task.cancelled() or task.exception() is not None  # retrieve every exception, or asyncio logs it
        if broke and failed is None:
            failed = task
        changed.set()

    async def room(most: int) -> None:
        while under_way >= most and failed is None:
            changed.clear()
            await changed.wait()
        if failed is not None:
            failed.result()

    since_turn = tokens = 0
    for samples in prompts:
        for index in range(samples.count):
            if since_turn == SAMPLES_AT_ONCE or tokens > TOKENS_AT_ONCE:
                since_turn = tokens = 0
                await asyncio.sleep(0)
            await room(SAMPLES_UNDER_WAY)
            task = asyncio.ensure_future(run(samples.sample(index)))
            task.add_done_callback(ended)
            started.append(task)
            under_way += 1
            since_turn += 1
            tokens += len(samples.request.prompt_token_ids)
    await room(1)


def _wake(waiting: Sequence[asyncio.Future[None]]) -> None:
    """Wake the waiters a few at each turn of the event loop; waking thousands at once would block it."""
    for waiter in waiting[:SAMPLES_AT_ONCE]:
        if not waiter.done():
            waiter.set_result(None)
    if len(waiting) > SAMPLES_AT_ONCE:
        asyncio.get_running_loop().call_soon(_wake, waiting[SAMPLES_AT_ONCE:])


def _ended_without_result(sample: Sample) -> EngineInternalError:
    return EngineInternalError(f"request {sample.request.request_id}: the engine's stream ended without a result")


def _matched(delta: TokenDelta, result: GenerateResult, sample: Sample, text: StreamedText) -> TokenDelta:
    if result.matched_text is not None:
        return delta
    check_sampled_ids(sample, result.token_ids)
    return replace(delta, result=text.end(result))


def _whole(sample: Sample, result: GenerateResult | None) -> GenerateResult:
    if result is None:
        raise _ended_without_result(sample)
    return result


def _last_chunk(
    sample: Sample, result: GenerateResult, tokenizer: Tokenizer, shown_ids: int, shown_text: int
) -> CompletionChunk:
    completion = to_completion(sample, result, tokenizer)
    return CompletionChunk(
        request_id=completion.request_id,
        prompt_index=completion.prompt_index,
        sample_index=completion.sample_index,
        token_ids=completion.token_ids[shown_ids:],
        text=completion.text[shown_text:],
        logprobs=completion.logprobs[shown_ids:] if completion.logprobs is not None else None,
        top_logprobs=completion.top_logprobs[shown_ids:] if completion.top_logprobs is not None else None,
        completion=completion,
        sampling_mask=completion.sampling_mask[shown_ids:] if completion.sampling_mask is not None else None,
        prompt_token_ids=completion.prompt_token_ids,
    )
