"""Engines that leak memory, threads or descriptors with each request, or block the trainer's event loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, TokenDelta
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.request_builder import ParamsLike
from drivetrain.errors import InvalidRequest
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import FinishReason, GenerationOutput
from drivetrain.types.prompts import PromptLike, TextPrompt
from drivetrain_conformance.mutants.registry import spoiled_backend, spoiled_engine
from drivetrain_conformance.mutants.spoil import SoundBackend, mixed, taking

_LEAVES = "growth/requests_leave_nothing_behind"


class _Keeping(SoundBackend):
    """Has a list that keeps objects alive."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.kept: list[object] = []


@spoiled_backend(caught_by=_LEAVES, says="more bytes of memory")
def keeps_every_result(backend: type[Backend]) -> type[Backend]:
    """Each request leaks some memory."""

    class Wrong(_Keeping):
        """Keeps memory for each result."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            self.kept.append(os.urandom(32 * 1024))
            return await super().generate(request)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by=_LEAVES, says="more bytes of memory")
def keeps_streams_that_were_closed_early(backend: type[Backend]) -> type[Backend]:
    """A stream that is closed early stays in memory."""

    class Wrong(_Keeping):
        """Frees a stream's buffer only at its last delta."""

        async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            buffer = os.urandom(512 * 1024)
            self.kept.append(buffer)
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    if delta.result is not None and delta.result.finish_reason is not FinishReason.ABORT:
                        self.kept.remove(buffer)
                    yield delta

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="lora/what_is_no_adapter_is_refused", says="descriptors grow while adapters are refused")
def leaves_a_descriptor_to_each_refused_adapter(backend: type[Backend]) -> type[Backend]:
    """A folder that is refused as an adapter stays open."""

    class Wrong(SoundBackend):
        """Closes the descriptor only after a successful load."""

        async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            await super().load_lora_adapter(lora_name, lora_path, pinned)
            os.close(descriptor)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by=_LEAVES, says="more threads")
def leaves_a_thread_to_each_stream(backend: type[Backend]) -> type[Backend]:
    """The thread that reads a stream survives when the stream is closed."""

    class Wrong(SoundBackend):
        """Never tells its reader thread to end."""

        async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    yield delta

    return mixed(backend, Wrong)


@spoiled_backend(caught_by=_LEAVES, says="more descriptors")
def leaves_a_descriptor_to_each_abort(backend: type[Backend]) -> type[Backend]:
    """Each abort opens a file that is never closed."""

    class Wrong(SoundBackend):
        """Opens a descriptor for each abort."""

        async def abort(self, request_ids: list[str]) -> None:
            os.open(os.devnull, os.O_RDONLY)
            await super().abort(request_ids)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
def waits_in_the_event_loop(backend: type[Backend]) -> type[Backend]:
    """A request blocks the event loop by sleeping."""

    class Wrong(SoundBackend):
        """Calls a blocking function."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            time.sleep(0.7)  # noqa: ASYNC251 - the mutant's fault
            return await super().generate(request)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
def computes_in_the_event_loop(backend: type[Backend]) -> type[Backend]:
    """A stream's first step blocks the event loop by computing."""

    class Wrong(SoundBackend):
        """Computes in the event loop instead of a thread."""

        async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            ends = time.thread_time() + 0.7
            while time.thread_time() < ends:
                pass
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    yield delta

    return mixed(backend, Wrong)


@spoiled_engine(caught_by="growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
def tokenises_in_the_event_loop(engine: type[InferenceEngine]) -> type[InferenceEngine]:
    """A text of any length is tokenised in the event loop before its length is checked."""

    class Wrong(InferenceEngine):
        """Tokenises text before it calls the engine."""

        async def generate(
            self,
            prompts: PromptLike | Sequence[PromptLike],
            sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
            **options: Any,
        ) -> GenerationOutput:
            if isinstance(prompts, str):
                prompts = self.tokenizer.encode(TextPrompt(text=prompts))
            return await super().generate(prompts, sampling_params, **options)

    return mixed(engine, Wrong)


@spoiled_engine(
    caught_by="errors/no_sampling_param_takes_a_wrong_value",
    says="expected InvalidRequest for sampling_params.n",
)
def lowers_n_in_silence(engine: type[InferenceEngine]) -> type[InferenceEngine]:
    """An n of 1000 or more is silently reduced to 2."""

    def change(params: Mapping[str, object]) -> Mapping[str, object]:
        n = params.get("n")
        return {**params, "n": 2} if isinstance(n, int) and n >= 1000 else params

    return taking(engine, change)


@spoiled_engine(
    caught_by="stop/a_stop_regex_that_takes_too_long_ends_its_own_request",
    says="expected InvalidRequest for sampling_params.stop_regex",
)
def forgets_slow_stop_regexes(engine: type[InferenceEngine]) -> type[InferenceEngine]:
    """A slow stop regex is silently dropped."""

    class Wrong(InferenceEngine):
        """Generates again without the regex."""

        async def generate(
            self,
            prompts: PromptLike | Sequence[PromptLike],
            sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
            **options: Any,
        ) -> GenerationOutput:
            try:
                return await super().generate(prompts, sampling_params, **options)
            except InvalidRequest as error:
                if error.field != "sampling_params.stop_regex" or "takes longer" not in str(error):
                    raise
                return await super().generate(prompts, {"max_new_tokens": 64}, **options)

    return mixed(engine, Wrong)
