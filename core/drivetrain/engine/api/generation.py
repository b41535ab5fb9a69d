"""Completions: whole, streamed, by session; and how to end them early."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from drivetrain.engine.api.page import Page
from drivetrain.engine.request_builder import CallOptions, ParamsLike
from drivetrain.types.arguments import checked
from drivetrain.types.modes import TurnMode
from drivetrain.types.outputs import CompletionChunk, GenerationOutput
from drivetrain.types.prompts import PromptLike


class GenerationCalls(Page):
    """Generate and abort."""

    @checked
    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        lora: str | None = None,
        priority: int = 0,
        weight_version: str | None = None,
        timeout: float | None = None,
    ) -> GenerationOutput:
        """Generate ``n`` completions of each prompt.

        Args:
            prompts: One prompt or a sequence of them: text, token ids, chat messages, or a prompt object.
            sampling_params: One for all prompts, or one for each; a mapping of its fields is accepted too.
            request_ids: One id per prompt, by which it can be aborted; made up if not given.
            lora: Name of a loaded LoRA adapter.
            priority: Higher is sooner.
            weight_version: Weight version that every token must come from. A request that waits or runs while an update
                replaces it raises :class:`WeightVersionGone`, and its completion is dropped. None: any version;
                ``completion.weight_versions`` tells which.
            timeout: Seconds until DeadlineExceeded; ``timeouts.generate`` if not given.

        Returns:
            The completions, prompt by prompt, sample by sample.

        Raises:
            InvalidRequest: before any work, naming the field, the value and the remedy.
            UnsupportedCapability: before any work, naming the capability.
            EngineStateError: the engine's state cannot serve requests.
            WeightVersionGone: ``weight_version`` is not served, or was replaced before the end.
            EngineDied: the engine's process ended.
            DeadlineExceeded: it took too long; the requests were aborted.
        """
        options = CallOptions(request_ids, lora, priority, weight_version, timeout)
        return await self.parts.generation.generate(prompts, sampling_params, options)

    @checked
    async def generate_stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        lora: str | None = None,
        priority: int = 0,
        weight_version: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Generate as :meth:`generate` does, yielding chunks of all samples as they come.

        The chunks of a sample put together are exactly its completion, which its last chunk carries. Closing
        the generator early aborts the samples that are still being generated.
        """
        options = CallOptions(request_ids, lora, priority, weight_version, timeout)
        async with aclosing(self.parts.generation.stream(prompts, sampling_params, options)) as chunks:
            async for chunk in chunks:
                yield chunk

    @checked
    async def generate_with_session(
        self,
        session_id: str,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        parent_request_id: str | None = None,
        turn: TurnMode = TurnMode.CONTINUE,
        request_ids: Sequence[str] | None = None,
        weight_version: str | None = None,
        timeout: float | None = None,
    ) -> GenerationOutput:
        """Generate one turn of a session that continues, branches from or replaces what followed an earlier turn.

        Args:
            session_id: As ``open_session`` returned it.
            prompts: The new part of this turn. The model sees the earlier turn, its answer, and then this part; all of
                it is ``prompt_token_ids`` of the completion.
            sampling_params: As in :meth:`generate`.
            parent_request_id: Request id of the completion that the turn builds on; None begins a new conversation.
            turn: The turn's relation to that completion.
            request_ids: As in :meth:`generate`; later turns name this one by the completion's id.
            weight_version: As in :meth:`generate`.
            timeout: As in :meth:`generate`.
        """
        options = CallOptions(request_ids, weight_version=weight_version, timeout=timeout)
        return await self.parts.generation.generate_turn(
            session_id, prompts, sampling_params, options, parent_request_id, turn
        )

    @checked
    async def abort(self, request_id: str) -> None:
        """End one request; its completions are returned marked aborted, with the tokens generated so far."""
        await self.parts.generation.abort(request_id)

    async def abort_generation(self) -> None:
        """End every request, including those that wait; the engine goes on serving new ones."""
        await self.parts.generation.abort_all()
