"""Engines that leak memory, threads or descriptors with each request, or block the trainer's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from drivetrain.backend.base import EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError, InvalidRequest
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, GenerationOutput
from drivetrain.types.prompts import TextPrompt
from drivetrain.types.sampling import JsonSchema
from drivetrain.types.weights import CommitUpdate, PrepareUpdate, ReleaseSources, WeightMessage, WeightReply
from drivetrain_conformance.assets.weight_sources import tensors_of
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, KnowingRequests, KnowingSleep, arguments_mutant, own

_LEAVES = "growth/requests_leave_nothing_behind"


def _contents(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.glob("*.safetensors")]


class _Keeping(CorrectBackend):
    """Has a list that keeps objects alive."""

    kept: list[object] = own(list)


@mutant(_LEAVES, says="more bytes of memory")
class keeps_every_result(_Keeping):
    """Each request leaks some memory."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.kept.append(os.urandom(32 * 1024))
        return await super().generate(request)


@mutant(_LEAVES, says="more bytes of memory")
class keeps_streams_that_were_closed_early(_Keeping):
    """A stream that is closed early stays in memory."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        buffer = os.urandom(512 * 1024)
        self.kept.append(buffer)
        async with aclosing(super().stream(request)) as deltas:
            async for delta in deltas:
                if delta.result is not None and delta.result.finish_reason is not FinishReason.ABORT:
                    self.kept.remove(buffer)
                yield delta


@mutant("lora/what_is_no_adapter_is_refused", says="descriptors grow while adapters are refused")
class leaves_a_descriptor_to_each_refused_adapter(CorrectBackend):
    """A folder that is refused as an adapter stays open."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        os.close(descriptor)


@mutant(_LEAVES, says="more threads")
class leaves_a_thread_to_each_stream(CorrectBackend):
    """The thread that reads a stream survives when the stream is closed."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().stream(request)


@mutant(_LEAVES, says="more descriptors")
class leaves_a_descriptor_to_each_abort(CorrectBackend):
    """Each abort opens a file that is never closed."""

    async def abort(self, request_ids: list[str]) -> None:
        os.open(os.devnull, os.O_RDONLY)
        await super().abort(request_ids)


@mutant(_LEAVES, says="more threads")
class leaves_a_thread_to_each_pause(CorrectBackend):
    """The thread that freezes requests survives."""

    async def freeze(self, mode: PauseMode) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        await super().freeze(mode)


@mutant(_LEAVES, says="more tasks")
class leaves_a_task_to_each_request(CorrectBackend):
    """Each request leaves a task in the trainer's event loop."""

    _tasks: set[asyncio.Task[bool]] = own(set)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._tasks.add(asyncio.create_task(asyncio.Event().wait()))
        return await super().generate(request)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await super().close()


@mutant(_LEAVES, says="more timers")
class leaves_a_timer_to_each_request(CorrectBackend):
    """Each request leaves a timer in the trainer's event loop, which holds the request."""

    _timers: list[asyncio.TimerHandle] = own(list)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._timers.append(asyncio.get_running_loop().call_later(3600, request.prompt_token_ids.count, 0))
        return await super().generate(request)

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        await super().close()


@mutant("weight_sync/many_pushes_in_process_leave_nothing_behind", says="more timers")
class leaves_a_timer_to_each_push(CorrectBackend):
    """Each update leaves a timer in the trainer's event loop."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, CommitUpdate):
            asyncio.get_running_loop().call_later(3600, int)
        return await super().receive_weights(message)


@mutant("lora/a_name_may_come_back_as_another_adapter", says="more threads")
class leaves_a_thread_to_every_fourth_adapter(CorrectBackend):
    """Every fourth adapter that is loaded leaves a thread behind."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._loads = 0

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        self._loads += 1
        if self._loads % 4 == 0:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        await super().load_lora_adapter(lora_name, lora_path, pinned)


@mutant("lifecycle/what_is_saved_is_what_is_served", says="more threads")
class leaves_a_thread_to_each_save(CorrectBackend):
    """Each saved model leaves a thread behind."""

    async def save_sharded(self, path: str) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        await super().save_sharded(path)


@mutant("sleep/many_cycles_of_the_cache_hold_no_more_memory", says="more descriptors")
class leaves_a_descriptor_to_each_sleep(CorrectBackend):
    """Each sleep opens a file that is never closed."""

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        os.open(os.devnull, os.O_RDONLY)
        await super().sleep(tags)


@mutant("lifecycle/two_in_a_row_leave_nothing", says="left behind: temporary files")
class leaves_a_file_to_each_save(CorrectBackend):
    """Saving a model leaves a temporary folder behind."""

    async def save_sharded(self, path: str) -> None:
        tempfile.mkdtemp(prefix="save-")
        await super().save_sharded(path)


@mutant("lora/no_larger_rank_than_the_limit", says="more bytes of memory")
class keeps_adapters_that_it_refused(_Keeping):
    """An adapter that is refused stays in memory."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        try:
            await super().load_lora_adapter(lora_name, lora_path, pinned)
        except InvalidRequest:
            self.kept.append(_contents(Path(lora_path)))
            raise


@mutant("lifecycle/what_is_saved_is_what_is_served", says="the event loop stood still")
class saves_in_the_event_loop(CorrectBackend):
    """Saving a model blocks the event loop."""

    async def save_sharded(self, path: str) -> None:
        time.sleep(0.7)  # noqa: ASYNC251 - the mutant's fault
        await super().save_sharded(path)


@mutant(_LEAVES, says="more bytes of memory")
class keeps_the_cache_of_aborted_requests(_Keeping):
    """256 bytes for each token of its prompt stay in memory when a request is aborted."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if result.finish_reason is FinishReason.ABORT:
            self.kept.append(os.urandom(256 * len(request.prompt_token_ids)))
        return result


@mutant(_LEAVES, says="more bytes of memory")
class keeps_the_masks_of_grammars(_Keeping):
    """A kilobyte of each token that was drawn by a grammar stays in memory."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.params.structured_output is not None:
            self.kept.append(os.urandom(1024 * len(result.token_ids)))
        return result


@mutant(_LEAVES, says="more bytes of memory")
class keeps_the_states_of_scored_sequences(_Keeping):
    """256 bytes of each token of a scored sequence stay in memory."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.scoring is not None:
            self.kept.append(os.urandom(256 * len(request.prompt_token_ids)))
        return await super().generate(request)


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="4 calls that failed took")
class keeps_the_cache_of_failed_requests(_Keeping):
    """256 bytes for each token of its prompt stay in memory when a request fails."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        try:
            return await super().generate(request)
        except DrivetrainError:
            self.kept.append(os.urandom(256 * len(request.prompt_token_ids)))
            raise


@mutant("weight_sync/many_pushes_on_one_host_leave_nothing_behind", says="the trainer's memory is still mapped")
class keeps_the_trainers_memory_mapped(CorrectBackend):
    """The memory that a trainer shared stays mapped when the trainer is done."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        return WeightReply() if isinstance(message, ReleaseSources) else await super().receive_weights(message)


@mutant("sleep/many_cycles_give_the_same_answers", says="more bytes of memory")
class keeps_half_a_megabyte_per_wake_up(_Keeping):
    """Each wake-up leaves half a megabyte behind."""

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        await super().wake_up(tags)
        self.kept.append(os.urandom(512 * 1024))


def _smallest_matrix(config: EngineConfig) -> int:
    return min(tensor.nbytes for tensor in tensors_of(Path(config.model)).values() if tensor.ndim > 1)


@mutant("sleep/the_memory_of_weights_comes_back", says="the smallest matrix of which has 1.02 MiB")
class keeps_a_matrix_asleep(_Keeping):
    """While the weights sleep, as many bytes as their smallest matrix has stay in memory, and stats() says none."""

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        await super().sleep(tags)
        if MemoryTag.WEIGHTS in tags:
            self.kept.append(os.urandom(_smallest_matrix(self.config)))

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        self.kept.clear()
        await super().wake_up(tags)


@mutant("sleep/the_memory_of_the_cache_comes_back", says="MiB came back, of")
class keeps_the_cache_of_rows_asleep(KnowingRequests):
    """Asleep, a part of the KV cache stays in memory for each sample that ran beside others."""

    _rows = 1
    _kept = b""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._rows = max(self._rows, len(self.flying) + 1)
        return await super().generate(request)

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        held = (await super().stats()).kv_cache_bytes
        await super().sleep(tags)
        if MemoryTag.KV_CACHE in tags:
            self._kept = os.urandom(held * min(self._rows - 1, 15) * 3 // 100)

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        self._kept = b""
        await super().wake_up(tags)


@mutant("sleep/the_memory_of_weights_comes_back", says="asleep, it says that it holds")
class counts_a_matrix_asleep(KnowingSleep):
    """While the weights sleep, the smallest of their matrices is reported to be in memory."""

    async def stats(self) -> EngineStats:
        stats, kept = await super().stats(), _smallest_matrix(self.config) if self.weights_sleep else 0
        return dataclasses.replace(stats, weight_bytes=stats.weight_bytes + kept)


_left: WeakKeyDictionary[asyncio.AbstractEventLoop, list[bytes]] = WeakKeyDictionary()
"""Bytes that closed engines left in memory, until their event loop is gone."""


@mutant("lifecycle/two_in_a_row_leave_nothing", says="a closed engine left")
class keeps_the_weights_of_closed_engines(CorrectBackend):
    """As many bytes as the weights have stay in memory when an engine is closed."""

    async def close(self) -> None:
        held = (await super().stats()).weight_bytes
        await super().close()
        _left.setdefault(asyncio.get_running_loop(), []).append(b"x" * held)


@mutant("lora/a_name_may_come_back_as_another_adapter", says="more bytes of memory")
class keeps_unloaded_adapters(_Keeping):
    """An adapter stays in memory after it was unloaded."""

    async def unload_lora_adapter(self, lora_name: str) -> None:
        await super().unload_lora_adapter(lora_name)
        self.kept.append(os.urandom(1024 * 1024))


class _Mapping(CorrectBackend):
    """Base class of mutants that keep files mapped: their memory is the page cache's, and no descriptor is open."""

    _mapped: list[object] = own(list)

    def map(self, file: Path) -> None:
        """Map a file for good."""
        self._mapped.append(torch.UntypedStorage.from_file(str(file), shared=False, nbytes=file.stat().st_size))


@mutant("lora/a_name_may_come_back_as_another_adapter", says="more mappings of files")
class keeps_the_files_of_adapters_mapped(_Mapping):
    """The file of an adapter stays mapped after the adapter was unloaded."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        self.map(Path(lora_path) / "adapter_model.safetensors")


@mutant("lora/no_larger_rank_than_the_limit", says="more mappings of files")
class keeps_the_files_of_refused_adapters_mapped(_Mapping):
    """The file of an adapter that was refused stays mapped."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        try:
            await super().load_lora_adapter(lora_name, lora_path, pinned)
        except InvalidRequest:
            self.map(Path(lora_path) / "adapter_model.safetensors")
            raise


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="the event loop stood still")
class opens_checkpoints_in_the_event_loop(CorrectBackend):
    """An update blocks the event loop while its source is opened."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, PrepareUpdate):
            time.sleep(0.7)  # noqa: ASYNC251 - the mutant's fault
        return await super().receive_weights(message)


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="the event loop stood still")
class takes_each_step_of_an_update_in_the_event_loop(CorrectBackend):
    """Each step of an update blocks the event loop for a short time."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        time.sleep(0.06)  # noqa: ASYNC251 - the mutant's fault
        return await super().receive_weights(message)


@mutant("sleep/a_training_step", says="the event loop stood still")
class wakes_in_the_event_loop(CorrectBackend):
    """Each wake-up blocks the event loop for a short time."""

    async def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        time.sleep(0.2)  # noqa: ASYNC251 - the mutant's fault
        await super().wake_up(tags)


@mutant("growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
class begins_requests_in_the_event_loop(CorrectBackend):
    """Each request blocks the event loop for a short time."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        time.sleep(0.1)  # noqa: ASYNC251 - the mutant's fault
        return await super().generate(request)


@mutant("lora/a_name_may_come_back_as_another_adapter", says="the event loop stood still")
class reads_adapters_in_the_event_loop(CorrectBackend):
    """The event loop is blocked while an adapter's files are read."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        time.sleep(0.7)  # noqa: ASYNC251 - the mutant's fault
        await super().load_lora_adapter(lora_name, lora_path, pinned)


@mutant("growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
class reads_long_prompts_in_the_event_loop(CorrectBackend):
    """A request blocks the event loop for a quarter of a millisecond per token of its prompt."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        time.sleep(2.5e-4 * len(request.prompt_token_ids))  # noqa: ASYNC251 - the mutant's fault
        return await super().generate(request)


@mutant("growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
class computes_in_the_event_loop(CorrectBackend):
    """A stream's first step blocks the event loop by computing."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        ends = time.thread_time() + 0.7
        while time.thread_time() < ends:
            pass
        return super().stream(request)


@mutant("growth/requests_do_not_hold_the_event_loop", says="an idle engine takes")
class polls_while_idle(CorrectBackend):
    """A thread of the trainer's process asks again and again whether there is something to do."""

    _closed = own(threading.Event)

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        threading.Thread(target=self._poll, daemon=True).start()
        return await super().start(report)

    def _poll(self) -> None:
        while not self._closed.is_set():
            time.sleep(0)

    async def close(self) -> None:
        self._closed.set()
        await super().close()


@mutant("growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
class tokenises_in_the_event_loop(InferenceEngine):
    """A text of any length is tokenised in the event loop before its length is checked."""

    async def generate(self, prompts: Any, *args: Any, **options: Any) -> GenerationOutput:
        if isinstance(prompts, str):
            prompts = self.tokenizer.encode(TextPrompt(text=prompts))
        return await super().generate(prompts, *args, **options)


@mutant("growth/requests_do_not_hold_the_event_loop", says="the event loop stood still")
class compiles_in_the_event_loop(CorrectBackend):
    """A large JSON schema is compiled in the event loop."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        asked = request.params.structured_output
        if isinstance(asked, JsonSchema) and len(asked.json_schema) > 50_000:
            time.sleep(1)  # noqa: ASYNC251 - it blocks the loop on purpose
        return await super().generate(request)


@arguments_mutant("errors/no_sampling_param_takes_a_wrong_value", says="expected InvalidRequest for sampling_params.n")
def lowers_n_in_silence(params: Mapping[str, object]) -> Mapping[str, object]:
    """An n of 1000 or more is silently reduced to 2."""
    n = params.get("n")
    return {**params, "n": 2} if isinstance(n, int) and n >= 1000 else params


@mutant(
    "stop/a_stop_regex_that_takes_too_long_ends_its_own_request",
    says="expected InvalidRequest for sampling_params.stop_regex",
)
class forgets_slow_stop_regexes(InferenceEngine):
    """A slow stop regex is silently dropped."""

    async def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> GenerationOutput:
        try:
            return await super().generate(prompts, sampling_params, **options)
        except InvalidRequest as error:
            if error.field != "sampling_params.stop_regex" or "takes longer" not in str(error):
                raise
            return await super().generate(prompts, {"max_new_tokens": 64}, **options)
