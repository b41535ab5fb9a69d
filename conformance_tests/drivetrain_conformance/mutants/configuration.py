"""Settings with no effect, or a smaller one than asked for, and counts that are too high."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, nullcontext

import numpy as np

from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.weights import CommitUpdate, WeightManifest, WeightMessage, WeightReply
from drivetrain_conformance.mutants.registry import mixed, mutant, spoiled_backend
from drivetrain_conformance.mutants.spoil import CorrectBackend, arguments_mutant, config_mutant, own
from drivetrain_weight_sync.tensors.dtypes import nbytes_of

# Settings ------------------------------------------------------------------------------------------------------------


@config_mutant("lifecycle/a_life", says="context_length=701 was asked for, and it is 512")
def caps_the_context_length(config: EngineConfig) -> Mapping[str, object]:
    """A context_length above 512 is reduced to 512."""
    return {"context_length": config.context_length and min(config.context_length, 512)}


@config_mutant("lifecycle/a_life", says="context_length=701 was asked for, and it is 1024")
def drops_the_context_length(_: EngineConfig) -> Mapping[str, object]:
    """The context length is always the model's own."""
    return {"context_length": None}


@config_mutant("generate/every_file_that_names_an_end_is_heeded", says="is served in float32")
def widens_every_checkpoint(config: EngineConfig) -> Mapping[str, object]:
    """With dtype="auto" every checkpoint is served in float32."""
    return {"dtype": "float32" if config.dtype == "auto" else config.dtype}


@config_mutant("lifecycle/a_life", says="max_num_batched_tokens=128 allows one prompt in each step")
def drops_the_prompt_tokens_of_a_step(_: EngineConfig) -> Mapping[str, object]:
    """A step computes the prompts of all requests that wait, however many tokens they have."""
    return {"max_num_batched_tokens": None}


@config_mutant("lifecycle/a_life", says="dtype=bfloat16 was asked for")
def drops_the_dtype(_: EngineConfig) -> Mapping[str, object]:
    """Weights always keep the checkpoint's dtype."""
    return {"dtype": "auto"}


@mutant("lifecycle/off_the_main_thread", says="times those of weights rounded to float16")
class serves_bfloat16_for_float16(CorrectBackend):
    """An engine that was asked for float16 serves bfloat16, and reports float16."""

    def __init__(self, config: EngineConfig) -> None:
        self._is_asked = config.dtype == "float16"
        super().__init__(config.model_copy(update={"dtype": "bfloat16"}) if self._is_asked else config)

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        info = await super().start(report)
        return dataclasses.replace(info, dtype="float16") if self._is_asked else info

    async def weight_manifest(self) -> WeightManifest:
        manifest = await super().weight_manifest()
        if not self._is_asked:
            return manifest
        return dataclasses.replace(
            manifest, tensors=tuple(dataclasses.replace(spec, dtype="float16") for spec in manifest.tensors)
        )


@mutant("lifecycle/off_the_main_thread", says="it reports float16, and holds {'float32'}")
class holds_float32_for_float16(CorrectBackend):
    """An engine that was asked for float16 holds its weights in float32, which takes twice the memory."""

    async def weight_manifest(self) -> WeightManifest:
        manifest = await super().weight_manifest()
        if self.config.dtype != "float16":
            return manifest
        return dataclasses.replace(
            manifest, tensors=tuple(dataclasses.replace(spec, dtype="float32") for spec in manifest.tensors)
        )


@mutant("lifecycle/a_life", says="nats")
class reads_the_last_chunk_of_a_prompt(CorrectBackend):
    """The model sees only the last step's tokens of a prompt longer than max_num_batched_tokens."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        step, prompt = self.config.max_num_batched_tokens, request.prompt_token_ids
        if step is not None and len(prompt) > step:
            seen = prompt[(len(prompt) - 1) // step * step :]
            rest = [prompt[0]] * (len(prompt) - len(seen))
            request = dataclasses.replace(request, prompt_token_ids=rest + seen)
        return await super().generate(request)


@mutant("lifecycle/a_life", says="nats below the most likely one")
class reads_long_prompts_whole_only_to_score(CorrectBackend):
    """Without prompt logprobs, the model sees only the end of a prompt longer than max_num_batched_tokens."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        step = self.config.max_num_batched_tokens
        if step is not None and request.params.prompt_logprobs is None:
            request = dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[-step:])
        return await super().generate(request)


@mutant("lifecycle/a_life", says="the progress callback was called in another thread")
class reports_from_another_thread(CorrectBackend):
    """Inline, the stages of a start are reported from a thread."""

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        def elsewhere(words: str) -> None:
            thread = threading.Thread(target=report, args=(words,))
            thread.start()
            thread.join()

        return await super().start(elsewhere)


@config_mutant("lifecycle/a_life", says="requests ran at once, where max_num_seqs is 20")
def drops_max_num_seqs(_: EngineConfig) -> Mapping[str, object]:
    """max_num_seqs does not limit concurrent requests."""
    return {"max_num_seqs": None}


@mutant("lifecycle/a_life", says="requests ran at once, where max_num_seqs is 20")
class does_not_count_requests_with_an_adapter(CorrectBackend):
    """max_num_seqs limits the concurrent requests to the base only."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"max_num_seqs": None}))
        self._room = asyncio.Semaphore(config.max_num_seqs or 256)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        async with nullcontext() if request.lora else self._room:
            return await super().generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with nullcontext() if request.lora else self._room, aclosing(super().stream(request)) as deltas:
            async for delta in deltas:
                yield delta


@mutant("generate/higher_priority_starts_sooner", says="requests ran at once, where max_num_seqs is 1")
class forgets_max_num_seqs_after_an_update(CorrectBackend):
    """After a weight update max_num_seqs no longer limits concurrent requests."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"max_num_seqs": None}))
        self._room = asyncio.Semaphore(config.max_num_seqs or 256)

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, CommitUpdate):
            self._room = asyncio.Semaphore(256)
        return await super().receive_weights(message)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        async with self._room:
            return await super().generate(request)


@config_mutant("lifecycle/a_life", says="code beside the model was run")
def trusts_remote_code(_: EngineConfig) -> Mapping[str, object]:
    """Code of the model's folder is run also without trust_remote_code."""
    return {"trust_remote_code": True}


@mutant("lifecycle/a_life", says="streams made their first tokens at once, where max_num_seqs is 20")
class says_that_others_wait(CorrectBackend):
    """max_num_seqs does not limit concurrent requests, and stats() reports the excess as waiting."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"max_num_seqs": None}))
        self._most = config.max_num_seqs

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        running = min(stats.running, self._most or stats.running)
        return dataclasses.replace(stats, running=running, waiting=stats.waiting + stats.running - running)


@arguments_mutant("lifecycle/a_life", says="logprobs_mode='raw' was configured, and logprobs are")
def drops_the_logprobs_mode(params: Mapping[str, object]) -> Mapping[str, object]:
    """Requests that name no logprobs mode get mode temperature; the configured mode is ignored."""
    return {"logprobs_mode": "temperature", **params} if "logprobs" in params else params


@config_mutant("lifecycle/a_life", says="the stop string")
def drops_the_tokenizer(_: EngineConfig) -> Mapping[str, object]:
    """The engine reads the tokenizer of the model's folder; the configured one is ignored."""
    return {"tokenizer": None}


@config_mutant("lifecycle/a_life", says="only 16 of 20 requests ran at once")
def caps_max_num_seqs(config: EngineConfig) -> Mapping[str, object]:
    """No more than 16 requests run at once; a larger max_num_seqs is ignored."""
    return {"max_num_seqs": min(config.max_num_seqs or 16, 16)}


@config_mutant("lifecycle/a_life", says="so they do not reach the engine")
def drops_engine_kwargs(_: EngineConfig) -> Mapping[str, object]:
    """The engine gets none of engine_kwargs."""
    return {"engine_kwargs": {}}


@mutant("lifecycle/a_life", says="times those of weights rounded to bfloat16")
class is_less_precise_than_its_dtype(CorrectBackend):
    """Errors in bfloat16 are more than twice as large as rounding's, but each is within its tolerance."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if self.config.dtype != "bfloat16" or result.logprobs is None:
            return result
        error = 0.08 * np.sin(7.0 * np.arange(len(result.logprobs)))
        return dataclasses.replace(result, logprobs=np.add(result.logprobs, error).tolist())


@mutant("sessions/without_prefix_caching_nothing_is_found", says="more bytes of KV cache")
class keeps_prefixes_that_it_may_not_use(CorrectBackend):
    """With enable_prefix_caching=False the KV cache keeps prompts, and stats() says so; cached_tokens is 0."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"enable_prefix_caching": True}))
        self._is_off = config.enable_prefix_caching is False

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        return dataclasses.replace(result, cached_tokens=0) if self._is_off else result


@config_mutant("lifecycle/a_life", says="the first tokens carry")
def drops_the_first_version(_: EngineConfig) -> Mapping[str, object]:
    """The first weights carry the version "initial"; the configured version is ignored."""
    return {"weight_version": "initial"}


# Counts --------------------------------------------------------------------------------------------------------------


@mutant("pause/in_place_freezes_requests_in_flight", says="frozen requests it counts")
class counts_requests_twice(CorrectBackend):
    """A running request is also counted as waiting."""

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        return dataclasses.replace(stats, waiting=stats.waiting + stats.running)


@mutant("sleep/the_memory_of_weights_comes_back", says="awake, the engine says that it holds")
class counts_weights_twice(CorrectBackend):
    """The reported memory of the weights is twice the real one."""

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        return dataclasses.replace(stats, weight_bytes=2 * stats.weight_bytes)


@mutant("sleep/no_prefix_is_found_after_a_sleep", says="of KV cache")
class does_not_count_prefixes(CorrectBackend):
    """The reported memory of the KV cache leaves out the prompts that were kept."""

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        return dataclasses.replace(stats, kv_cache_bytes=min(stats.kv_cache_bytes, 2**20))


@mutant("weight_sync/tied_weights_are_pushed_once_and_used_twice", says="bytes of weights, where all are")
class counts_tied_weights_twice(CorrectBackend):
    """The reported memory of a model with tied weights has them under both names."""

    async def stats(self) -> EngineStats:
        stats, manifest = await super().stats(), await super().weight_manifest()
        sizes = {spec.name: nbytes_of(spec) for spec in manifest.tensors}
        again = sum(sizes[name] for name in manifest.aliases.values())
        return dataclasses.replace(stats, weight_bytes=stats.weight_bytes + again)


@mutant("weight_sync/many_pushes_in_process_leave_nothing_behind", says="left behind: threads: ['MainThread'")
class leaves_threads_of_a_common_name(CorrectBackend):
    """Every tenth update leaves a thread, with the name of another thread of the process."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._updates = 0

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        self._updates += isinstance(message, CommitUpdate)
        if isinstance(message, CommitUpdate) and self._updates % 10 == 0:
            name = threading.main_thread().name
            threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
        return await super().receive_weights(message)


# Embeddings ----------------------------------------------------------------------------------------------------------


class _Embedding(CorrectBackend):
    """A backend that embeds without its engine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"task": Task.GENERATE}))

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        without_task = config.model_copy(update={"task": Task.GENERATE})
        return (super().capabilities(without_task) - {Capability.WEIGHTS_DISK}) | {Capability.EMBED}

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return await asyncio.to_thread(lambda: [self.pooled(prompt)[:dimensions] for prompt in prompts])

    def pooled(self, prompt: list[int]) -> list[float]:
        """Return the vector of one prompt."""
        import torch
        from transformers import AutoModel

        model = AutoModel.from_pretrained(self.config.model, dtype=torch.float32)
        with torch.no_grad():
            states = model(input_ids=torch.tensor([prompt]), use_cache=False)[0][0]
        return [float(value) for value in np.asarray(self.pool(states.double().numpy()))]

    @staticmethod
    def pool(states: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> object:
        """Combine the states of all tokens into one vector."""
        return states.mean(axis=0)


@spoiled_backend(caught_by="embeddings/each_prompt_has_a_vector", says="cosines with the last tokens' states are")
def embeds_by_the_mean(backend: type[Backend]) -> type[Backend]:
    """A prompt's vector is the mean of its tokens' states, though the model's folder names no pooling."""
    made = mixed(backend, _Embedding)
    made.config_names = {**backend.config_names, "task": "its own"}
    return made


@spoiled_backend(caught_by="embeddings/each_prompt_has_a_vector", says="cosines with the last tokens' states are")
def keeps_vectors_over_an_update(backend: type[Backend]) -> type[Backend]:
    """A prompt's vector is kept, also when the weights have changed."""

    class Wrong(CorrectBackend):
        """Keeps every vector."""

        _vectors: dict[tuple[int, ...], list[float]] = own(dict)

        async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
            keys = [tuple(prompt) for prompt in prompts]
            new = [key for key in dict.fromkeys(keys) if key not in self._vectors]
            if new:
                vectors = await super().embed([list(key) for key in new], None)
                self._vectors |= zip(new, vectors, strict=True)
            return [self._vectors[key][:dimensions] for key in keys]

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="score/scores_are_the_models", says="off [")
def scores_without_the_last_token(backend: type[Backend]) -> type[Backend]:
    """A sequence's score is that of the sequence without its last token."""

    class Wrong(CorrectBackend):
        """Leaves a token out."""

        async def reward_score(self, sequences: list[list[int]]) -> list[float]:
            return await super().reward_score([sequence[:-1] or sequence for sequence in sequences])

    return mixed(backend, Wrong)
