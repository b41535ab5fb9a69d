# pyright: reportMissingImports=false
"""Primitives of the ``Backend`` page for SGLang's scheduler, run in its process between two steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from drivetrain.backend.base import EngineStats
from drivetrain.errors import EngineBusy
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import (
    ApplyUpdate,
    CommitUpdate,
    WeightManifest,
    WeightMessage,
    WeightReply,
)
from drivetrain_sglang.in_engine.adapters import load_held
from drivetrain_sglang.in_engine.expert_records import collect, layers_with_experts
from drivetrain_sglang.in_engine.multimodal_hooks import forget_embeddings
from drivetrain_sglang.in_engine.quantised_layers import quantised_layers
from drivetrain_sglang.in_engine.request_cache import of_request
from drivetrain_weight_sync.receiver.cache_epochs import CacheEpochs
from drivetrain_weight_sync.receiver.checkpoint_manifest import checkpoint_of, eos_of_checkpoint
from drivetrain_weight_sync.receiver.cpu_sleep import HostMemory
from drivetrain_weight_sync.receiver.rank_weights import RankWeights
from drivetrain_weight_sync.receiver.request_arrivals import Arrivals
from drivetrain_weight_sync.receiver.sleeping_memory import waking_up
from drivetrain_weight_sync.tracing.derived_tensors import AfterLoading
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_WATCHED: Final = "cur_batch_for_debug"
"""The scheduler's attribute with the current batch, which the watchdog looks at."""


class Worker(RankWeights):
    """The worker of one rank's scheduler. Methods have the names and meanings of those on the ``Backend`` page."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.arrivals = Arrivals()
        self.cache_epochs = CacheEpochs()
        self.bytes_asleep: dict[MemoryTag, int] = {}
        """Bytes of the tensors of each tag on the GPU, at the tag's last sleep."""
        self._unfilled: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Parameters that no update fills, with their values at the last sleep of the weights, on a GPU."""
        self._is_tainted = False
        """True once a failed request may have left NaN in the cache, until no cache of that time is left."""

    @property
    def model(self) -> torch.nn.Module:
        """SGLang's model."""
        model: torch.nn.Module = self._scheduler.tp_worker.model_runner.model
        return model

    @property
    def checkpoint(self) -> WeightManifest:
        """Manifest of the model's checkpoint tensors, as a trainer has them."""
        served = self._served
        return checkpoint_of(served.model_path, served.revision, trust_remote_code=self._arguments.trust_remote_code)

    @property
    def folder(self) -> Path | None:
        """Folder from which SGLang read the weights; None if it made dummy weights or downloaded the model."""
        folder = Path(self._served.model_path)
        return folder if folder.is_dir() and self._arguments.load_format != "dummy" else None

    @property
    def group(self) -> Any:
        """The ranks of SGLang's tensor parallelism."""
        group = self._scheduler.tp_group
        return group.cpu_group if group.world_size > 1 else None

    @property
    def rank(self) -> int:
        """Index of this scheduler's rank in the group."""
        return int(self._scheduler.tp_group.rank_in_group)

    def load_held_adapters(self) -> None:
        """Have SGLang's manager of adapters look among the held ones first."""
        load_held(self._scheduler.tp_worker.model_runner.lora_manager, self.adapters)

    @property
    def _served(self) -> Any:
        return self._scheduler.model_config

    @property
    def _arguments(self) -> Any:
        return self._scheduler.server_args

    @cached_property
    def eos_token_ids(self) -> set[int]:
        """EOS ids of the model's configurations."""
        served = self._served
        revision = self._arguments.revision
        return set(eos_of_checkpoint(served.model_path, revision, served.hf_text_config, served.hf_config))

    @cached_property
    def _memory(self) -> HostMemory | None:
        """Memory that sleeps on a CPU; None on a GPU, where SGLang's memory saver frees memory and keeps addresses."""
        if next(self.model.parameters()).device.type != "cpu":
            return None
        cache = kv_tensors(self._scheduler.token_to_kv_pool_allocator.get_kvcache())
        return HostMemory(
            {MemoryTag.WEIGHTS: self.target.storages, MemoryTag.KV_CACHE: [held.untyped_storage() for held in cache]}
        )

    def after_loading(self) -> Iterable[AfterLoading]:
        """Return the steps to run after loading: splitting MLA's projection, and steps that some models add."""
        outer: list[str] = []
        for name, module in self.model.named_modules():
            compute: Any = getattr(module, "post_load_weights", None)
            # A module's step also runs those of its submodules.
            if compute is not None and not any(not of or name.startswith(f"{of}.") for of in outer):
                outer.append(name)
                # SGLang takes the step within load_weights, and quantises layers afterwards.
                yield AfterLoading(name or "the model", module, compute, before_conversion=True)

    def converted(self) -> QuantisedParts:
        """Return the layers that SGLang quantised, or packed for its kernels."""
        return quantised_layers(self.model, self._served.dtype, self.load_weights)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load tensors as SGLang does, but skip :meth:`after_loading`: an update runs it once all are loaded."""
        modules: list[Any] = [module for module in self.model.modules() if hasattr(module, "post_load_weights")]
        for module in modules:
            module.post_load_weights = _nothing
        try:
            return super().load_weights(weights)
        finally:
            for module in modules:
                del module.post_load_weights

    def _dispatch(self, request: Any) -> Any:
        return self._scheduler._request_dispatcher(request)

    # Inspection --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Count requests and memory."""
        scheduler = self._scheduler
        running = {req.rid for req in self._in_batch() if not req.finished()}
        waiting = [req for req in scheduler.waiting_queue if not req.finished()]
        of_ranks = self.of_ranks(self._occupied)
        return EngineStats(
            running=len(running),
            waiting=len(waiting) + len(scheduler.grammar_manager.grammar_queue),
            kv_cache_bytes=sum(cache for cache, _ in of_ranks),
            weight_bytes=sum(weights for _, weights in of_ranks),
        )

    def _occupied(self) -> tuple[int, int]:
        """Return the bytes of this rank's cache and of its weights."""
        cache = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        weights = {tensor.untyped_storage()._cdata: _nbytes(tensor) for tensor in self.model.parameters()}
        return (
            0 if MemoryTag.KV_CACHE in self.asleep else sum(map(_nbytes, kv_tensors(cache))),
            0 if MemoryTag.WEIGHTS in self.asleep else sum(weights.values()),
        )

    def tokens_so_far(self, request_ids: list[str]) -> dict[str, int]:
        """Return token counts of unfinished requests; finished ones are left out."""
        found = [*self._in_batch(), *self._waiting()]
        live = {req.rid: len(req.output_ids) for req in found if not req.finished()}
        return self.arrivals.tokens(request_ids, live)

    def _waiting(self) -> list[Req]:
        """Return the requests that hold no cache: new ones, those whose grammar is compiled, and retracted ones."""
        return [*self._scheduler.waiting_queue, *self._scheduler.grammar_manager.grammar_queue]

    def _in_batch(self) -> set[Req]:
        scheduler = self._scheduler
        batches = [scheduler.running_batch, scheduler.last_batch]
        found = {req for batch in batches if batch is not None for req in batch.reqs}
        if scheduler.chunked_req is not None:
            found.add(scheduler.chunked_req)
        return found

    def expert_layers(self) -> list[int]:
        """Return the numbers of the layers whose experts SGLang records."""
        return layers_with_experts(self.model)

    def pooling(self) -> str | None:
        """Return the name of the pooling that SGLang has for the model's architecture; None if the model says none."""
        kind = getattr(getattr(self.model, "pooler", None), "pooling_type", None)
        return None if kind is None else str(kind.name)

    # Pausing -----------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """True while requests are frozen."""
        return bool(self._scheduler._engine_paused)

    def freeze(self, mode: PauseMode) -> None:
        """Freeze requests, keeping their cache only with ``IN_PLACE``."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode is PauseMode.IN_PLACE:
            if self.is_paused:
                return
            self._settle()
        self._scheduler.pause_generation(PauseGenerationReqInput(mode=mode.value))
        if mode is PauseMode.RETRACT:
            self._mark_waiting()  # a request that was frozen in place through an update has an older mark
        # SGLang's watchdog ends the engine if a current batch takes no step for watchdog_timeout, 300 s by default.
        if hasattr(self._scheduler, _WATCHED):
            setattr(self._scheduler, _WATCHED, None)

    def _settle(self) -> None:
        """Take the results of launched steps now: later they could not be told from steps with newer weights."""
        scheduler = self._scheduler
        if not scheduler.enable_overlap or scheduler.last_batch is None:
            return
        while scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        last, running = scheduler.last_batch, scheduler.running_batch
        # SGLang's loop expects the last batch's result in the queue, so its handling of the batch is repeated here.
        if last.forward_mode.is_extend() and last is not running:
            # By position: the argument's name differs between releases.
            last.filter_batch([req for req in (scheduler.chunked_req, last.chunked_req) if req])
            if not last.is_empty():
                if running.is_empty():
                    scheduler.running_batch = last
                else:
                    running.merge_batch(last)
        scheduler.last_batch = None

    def unfreeze(self) -> None:
        """Resume frozen requests."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self.is_paused:
            self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def end(self, rid: str) -> bool:
        """End a request that takes no further step by itself; return False if SGLang's own abort works for it."""
        scheduler = self._scheduler
        for req in scheduler.waiting_queue:
            if req.rid == rid:
                if not req.output_ids:
                    return False
                scheduler.waiting_queue.remove(req)
                self._finish(req, holds_cache=False)
                return True
        compiling = scheduler.grammar_manager.grammar_queue
        for req in compiling:
            if req.rid == rid:
                # SGLang lets such a request take a step, but removes one that waits for its turn.
                compiling.remove(req)
                scheduler.waiting_queue.append(req)
                return False
        if not self.is_paused:
            return False
        frozen = next((req for req in self._in_batch() if req.rid == rid and not req.finished()), None)
        if frozen is None:
            return False
        self._finish(frozen, holds_cache=True)
        self._release(frozen)
        if scheduler.chunked_req is frozen:
            scheduler.chunked_req = None
        for batch in (scheduler.running_batch, scheduler.last_batch):
            if batch is not None and frozen in batch.reqs:
                batch.filter_batch()
        return True

    def _finish(self, req: Req, *, holds_cache: bool) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.finished_reason = FINISH_ABORT()
        collect(req, self._scheduler.req_to_token_pool.req_to_token if holds_cache else None)
        self._scheduler.output_streamer.stream_output([req], req.return_logprob)

    def _release(self, req: Req) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        keeps = {"checkpoint", "is_insert"} & set(inspect.signature(release_kv_cache).parameters)
        release_kv_cache(req, self._scheduler.tree_cache, **{name: False for name in keeps})

    # Memory and cache --------------------------------------------------------------------------------------------

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Hide the requests that hold no cache from SGLang's scheduler."""
        scheduler, grammars = self._scheduler, self._scheduler.grammar_manager
        waiting, compiling = scheduler.waiting_queue, grammars.grammar_queue
        scheduler.waiting_queue, grammars.grammar_queue = [], []
        try:
            yield
        finally:
            scheduler.waiting_queue, grammars.grammar_queue = waiting, compiling

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        """Give memory back."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if MemoryTag.WEIGHTS in tags:
            self.receiver.forget_held()  # creates the receiver if needed, since tracing the loader needs the weights
            self.writer.stop()
        with self.without_waiting():  # older releases require that no request waits
            if not self._scheduler.is_fully_idle():
                raise EngineBusy("requests hold cache: abort them, or pause_generation('retract') first")
            if self._memory is None:
                # torch_memory_saver frees active memory only; a sleep that timed out is asked for again.
                if falling := tags - self.asleep:
                    for tag in falling:
                        self.bytes_asleep[tag] = sum(map(_nbytes, self._on_gpu(tag)))
                    if MemoryTag.WEIGHTS in falling:
                        self._unfilled = [
                            (held, held.detach().to("cpu", copy=True)) for held in self._parameters_beside()
                        ]
                    self._dispatch(ReleaseMemoryOccupationReqInput(tags=sorted(tag.value for tag in falling)))
                self.asleep |= tags
                return
            if MemoryTag.KV_CACHE in tags:
                self._scheduler.flush_cache()
        self.put_to_sleep(self._memory, tags)

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if self._memory is not None:
            self.awaken(self._memory, tags)
            return
        if waking := tags & self.asleep:
            # torch_memory_saver ends the process if the driver refuses it memory.
            with waking_up():
                self.of_ranks(lambda: self._require_room(waking))
            self._dispatch(ResumeMemoryOccupationReqInput(tags=sorted(tag.value for tag in waking)))
            if MemoryTag.WEIGHTS in waking:
                with torch.no_grad():
                    for held, values in self._unfilled:
                        held.copy_(values)
        self.asleep -= tags

    def _on_gpu(self, tag: MemoryTag) -> Iterable[torch.Tensor]:
        """Return a tensor of each storage on the GPU that holds weights or cache; none of other memory."""
        found: list[torch.Tensor] = []
        if tag is MemoryTag.WEIGHTS:
            found = [*self.model.parameters(), *self.model.buffers()]
        elif tag is MemoryTag.KV_CACHE:
            scheduler = self._scheduler
            found = tensors_of(scheduler.token_to_kv_pool_allocator.get_kvcache())
            found += tensors_of(scheduler.req_to_token_pool)
        return {tensor.untyped_storage()._cdata: tensor for tensor in found if tensor.is_cuda}.values()

    def _parameters_beside(self) -> list[torch.nn.Parameter]:
        """Return the parameters that no update fills, such as scales of the cache. SGLang keeps buffers itself."""
        filled = {storage._cdata for storage in self.target.storages}
        return [own for own in self.model.parameters() if own.untyped_storage()._cdata not in filled]

    def _require_room(self, tags: frozenset[MemoryTag]) -> None:
        """Raise :class:`MemoryError` if the GPU has less free memory than the tensors of these tags took."""
        wanted = sum(self.bytes_asleep[tag] for tag in tags)
        free, _ = torch.cuda.mem_get_info()
        if wanted > free:
            raise MemoryError(f"{wanted / 1e9:.2f} GB are wanted of the GPU, and {free / 1e9:.2f} GB are free")

    def reset_prefix_cache(self) -> None:
        """Free the cached prefixes if no running request holds any; only running requests can match them any more."""
        forget_embeddings()
        self.cache_epochs.renew()
        self._mark_waiting()
        flush = self._scheduler.flush_cache
        # Keep the memory if the release allows it: returning it to the GPU's driver takes milliseconds, and is sleep's
        # task.
        keeps = {"empty_cache"} & set(inspect.signature(flush).parameters)
        with self.without_waiting():
            flush(**{name: False for name in keeps})
            if self._is_tainted and MemoryTag.KV_CACHE not in self.asleep and self._scheduler.is_fully_idle():
                self._is_tainted = False
                for tensor in self._kv_of_tokens():
                    tensor.zero_()

    def _mark_waiting(self) -> None:
        """Let requests that hold no cache match no prefix from before the newest reset."""
        for req in self._waiting():
            req.extra_key = self.cache_epochs.marked_again(req.extra_key)

    def erase(self, reqs: Sequence[Req]) -> None:
        """Zero the cache that only these requests hold, before it is released.

        Some attention kernels read whole pages and multiply masked values by 0, and NaN times 0 is NaN.
        """
        self._is_tainted = True
        scheduler = self._scheduler
        table = scheduler.req_to_token_pool.req_to_token
        # Ordered after a step that was already launched and writes there too.
        with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
            if scheduler.enable_overlap:
                scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            own = [table[of_request(req, "req_pool_idx"), slice(*_own_span(req))] for req in reqs]
            slots = torch.cat(own).long()
            for tensor in self._kv_of_tokens():
                if len(tensor) > scheduler.token_to_kv_pool_allocator.size:
                    tensor.index_fill_(0, slots, 0)

    def _kv_of_tokens(self) -> list[torch.Tensor]:
        """Return the tensors of keys and values, without their scales; most have one row per token."""
        allocator = self._scheduler.token_to_kv_pool_allocator
        return [tensor for tensor in kv_tensors(allocator.get_kvcache()) if tensor.numel() > allocator.size]

    # Weights -----------------------------------------------------------------------------------------------------

    def receive_weights(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update."""
        reply = super().receive_weights(message)
        if isinstance(message, CommitUpdate):
            forget_embeddings()
            self._renew_experts()
            self.set_weight_version(message.version)
        return reply

    def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        """Take all steps of an update."""
        (reply, *_) = self.of_ranks(lambda: self._begin(update))
        return replace(reply, seconds=self.commit_weights(update).seconds)

    def _begin(self, update: ApplyUpdate) -> WeightReply:
        reply = self.begin_weights(update)
        self._renew_experts()
        if not update.keep_prefix_cache:
            self.reset_prefix_cache()  # overlaps with copies on the GPU
        return reply

    def _renew_experts(self) -> None:
        """Let requests for their prompt's experts use no prefix of the weights before an update."""
        self.cache_epochs.renew_experts()
        self._mark_waiting()

    def apply_weights_counting(self, update: ApplyUpdate, request_ids: list[str]) -> tuple[WeightReply, dict[str, int]]:
        """Take all steps of an update while requests are frozen, and count their tokens."""
        return self.apply_weights(update), self.tokens_so_far(request_ids)

    def set_weight_version(self, version: str) -> None:
        """Label the weights with a version."""
        # Releases without this method do not label tokens; the backend labels completions instead.
        if hasattr(self._scheduler, "record_weight_version_change"):
            self._scheduler.record_weight_version_change(new_version=version)


def _nothing(*_: object, **__: object) -> None:
    """Replaces a ``post_load_weights``."""


def _own_span(req: Req) -> tuple[int, int]:
    """Return the range of tokens whose cache belongs to the request and not to the prefix cache."""
    return of_request(req, "cache_protected_len"), of_request(req, "kv_allocated_len")


def kv_tensors(cache: Any) -> list[torch.Tensor]:
    """Return the tensors of a KV pool of any kind."""
    found: list[torch.Tensor] = []
    for value in vars(cache).values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, torch.Tensor) and item.is_floating_point()]
    return list({tensor.untyped_storage()._cdata: tensor for tensor in found}.values())


def tensors_of(pool: object) -> list[torch.Tensor]:
    """Return the tensors of a pool, of any dtype, and of the pools that it holds."""
    found: list[torch.Tensor] = []
    pools = {id(pool): pool}
    ahead = [pool]
    while ahead:
        for value in vars(ahead.pop()).values():
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, torch.Tensor):
                    found.append(item)
                elif _is_pool(item) and id(item) not in pools:
                    pools[id(item)] = item
                    ahead.append(item)
    return found


def _is_pool(value: object) -> bool:
    return hasattr(value, "__dict__") and type(value).__module__.startswith("sglang.srt.mem_cache")


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
