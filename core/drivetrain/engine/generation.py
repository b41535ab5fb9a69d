"""From a call that asks for completions to the completions, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.deadlines import Alarm, deadline
from drivetrain.engine.completions import completed
from drivetrain.engine.controller import Controller
from drivetrain.engine.loaded_adapters import LoadedAdapters
from drivetrain.engine.model import StartedModel
from drivetrain.engine.request_builder import CallOptions, ParamsLike
from drivetrain.engine.requests_in_flight import RequestsInFlight, run_each
from drivetrain.engine.samples import Sample, Samples
from drivetrain.engine.scoring import ScoringCall
from drivetrain.engine.sessions import Sessions
from drivetrain.engine.tasks import cancel_all, gather_or_cancel
from drivetrain.engine.validation import check_seconds
from drivetrain.errors import DeadlineExceeded
from drivetrain.types.capability import Capability
from drivetrain.types.config import Task
from drivetrain.types.modes import TurnMode
from drivetrain.types.outputs import Completion, CompletionChunk, GenerationOutput
from drivetrain.types.prompts import PromptLike

Prompts = PromptLike | Sequence[PromptLike]
Params = ParamsLike | Sequence[ParamsLike] | None
Whole = Callable[[list[int]], list[int]]
"""Makes the token ids of a whole conversation from the ids of its new turn."""


class Generation:
    """Builds the samples of a call, runs them, and puts their results together. It keeps no state."""

    def __init__(
        self,
        controller: Controller,
        backend: Backend,
        model: StartedModel,
        in_flight: RequestsInFlight,
        adapters: LoadedAdapters,
        sessions: Sessions,
    ) -> None:
        self.controller = controller
        self.backend = backend
        self.model = model
        self.in_flight = in_flight
        self.adapters = adapters
        self.sessions = sessions

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: Params,
        options: CallOptions,
        *,
        whole: Whole | None = None,
        scored: ScoringCall | None = None,
    ) -> GenerationOutput:
        """Generate ``n`` completions of each prompt, or score it; see ``InferenceEngine.generate``."""
        seconds = check_seconds(options.timeout, self.controller.config.timeouts.generate)
        samples = self._build("generate()", prompts, sampling_params, options)
        async with deadline(seconds, f"{sum(one.count for one in samples)} completions"):
            with self.in_flight.under_way(samples):
                await self._read(samples, whole)
                if scored is not None:
                    self._ask_for_scores(samples, scored)
                tasks: list[asyncio.Task[Completion]] = []
                try:
                    await run_each(samples, self.complete, tasks)
                except BaseException:
                    await cancel_all(tasks)
                    raise
                return GenerationOutput([task.result() for task in tasks])

    def _ask_for_scores(self, samples: Sequence[Samples], call: ScoringCall) -> None:
        """Ask for logprobs of prompts that were read."""
        lengths = [len(one.request.prompt_token_ids) for one in samples]
        scorings = call.scorings(lengths, self.model.info.vocab_size)
        for one, scoring in zip(samples, scorings, strict=True):
            one.request = replace(one.request, scoring=scoring)

    async def complete(self, sample: Sample) -> Completion:
        """Run one sample to its completion."""
        return await completed(sample, await self.in_flight.run(sample), self.model.tokenizer)

    async def stream(
        self, prompts: Prompts, sampling_params: Params, options: CallOptions
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the chunks of all samples as they come; see ``InferenceEngine.generate_stream``."""
        self.controller.require_claimed("generate_stream()", Capability.STREAMING)
        seconds = check_seconds(options.timeout, self.controller.config.timeouts.generate)
        samples = self._build("generate_stream()", prompts, sampling_params, options)
        ends = time.monotonic() + seconds
        queue: asyncio.Queue[CompletionChunk | BaseException] = asyncio.Queue()
        overdue: list[DeadlineExceeded] = []

        async def pump(sample: Sample) -> None:
            try:
                async with aclosing(self.in_flight.stream(sample)) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait(chunk)
            except Exception as error:
                queue.put_nowait(error)

        total = sum(one.count for one in samples)
        tasks: list[asyncio.Task[None]] = []

        def ring() -> None:
            # Samples that have ended are in the queue, and are handed out whenever the caller reads them.
            if late := total - sum(task.done() for task in tasks):
                overdue.append(
                    DeadlineExceeded(f"timed out after {seconds:g} s waiting for {late} streamed completions")
                )
                queue.put_nowait(overdue[0])

        with self.in_flight.under_way(samples):
            async with deadline(seconds, "the prompts to be read"):
                await self._read(samples)
            alarm = Alarm(max(0.0, ends - time.monotonic()), ring)
            starting = asyncio.create_task(run_each(samples, pump, tasks))
            try:
                open_samples = total
                while open_samples:
                    item = overdue[0] if overdue else await queue.get()
                    if isinstance(item, BaseException):
                        raise item
                    open_samples -= item.completion is not None
                    yield item
            finally:
                alarm.cancel()
                await cancel_all([starting])
                await cancel_all(tasks)

    async def generate_turn(
        self,
        session_id: str,
        prompts: Prompts,
        sampling_params: Params,
        options: CallOptions,
        parent_request_id: str | None,
        turn: TurnMode,
    ) -> GenerationOutput:
        """Generate one turn of a session; see ``InferenceEngine.generate_with_session``."""
        self.controller.require_claimed("generate_with_session()", Capability.SESSIONS)
        session = self.sessions.get(session_id)

        def whole(token_ids: list[int]) -> list[int]:
            return session.prompt(token_ids, parent_request_id, turn)

        output = await self.generate(prompts, sampling_params, options, whole=whole)
        for completion in output.completions:
            session.add(completion, parent_request_id, turn)
        return output

    async def abort(self, request_id: str) -> None:
        """End one request; see ``InferenceEngine.abort``."""
        await self._abort("abort()", request_id)

    async def abort_all(self) -> None:
        """End every request; see ``InferenceEngine.abort_generation``."""
        await self._abort("abort_generation()", None)

    async def _abort(self, action: str, request_id: str | None) -> None:
        self.controller.require(action, Capability.ABORT)
        async with self.controller.bounded("the abort to reach the engine"):
            await self.in_flight.abort(request_id)

    def _build(self, action: str, prompts: Prompts, sampling_params: Params, options: CallOptions) -> list[Samples]:
        builder = self.model.builder_for(Task.GENERATE, action)
        if options.lora is not None and Capability.LORA in self.controller.capabilities:
            self.adapters.require(options.lora, "lora")
        samples = builder.build(prompts, sampling_params, options)
        if samples:
            self.in_flight.require_version(samples[0].request)
        return samples

    async def _read(self, prompts: Sequence[Samples], whole: Whole | None = None) -> None:
        """Turn the prompts into the token ids that the model sees; the backend reads images, videos and sounds."""
        builder = self.model.builder_for(Task.GENERATE, "generate()")
        await builder.read(prompts, whole)
        with_media = [samples for samples in prompts if samples.request.media]
        if not with_media:
            return
        read = await gather_or_cancel(self.backend.read_media(samples.request.media) for samples in with_media)
        for samples, media in zip(with_media, read, strict=True):
            builder.place(samples, media)
