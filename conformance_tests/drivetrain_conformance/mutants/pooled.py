"""Embeddings and rewards that are right for a few short inputs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from drivetrain.backend.base import Backend
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.pooling import Pooling
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.modes import PauseMode
from drivetrain.types.prompts import PromptLike
from drivetrain_conformance.assets.served_models import copy_model
from drivetrain_conformance.mutants.drawn.numbers import in_bfloat16
from drivetrain_conformance.mutants.registry import mixed, mutant, spoiled_backend
from drivetrain_conformance.mutants.spoil import CorrectBackend, config_mutant, own

_T = TypeVar("_T")
_CUT = 512
_AT_ONCE = 8192


def pooling_changed(correct: type[Backend], change: Callable[[list[int]], list[int]]) -> type[Backend]:
    """Return a backend that changes each input that it embeds or scores."""

    class Wrong(CorrectBackend):
        """Changes inputs."""

        async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
            return await super().embed([change(ids) for ids in prompts], dimensions)

        async def reward_score(self, sequences: list[list[int]]) -> list[float]:
            return await super().reward_score([change(ids) for ids in sequences])

    return mixed(correct, Wrong)


@spoiled_backend(caught_by="embeddings/each_prompt_has_a_vector", says="cosines with the last tokens' states are")
def embeds_the_first_512_tokens(backend: type[Backend]) -> type[Backend]:
    """A prompt's vector is that of its first 512 tokens."""
    return pooling_changed(backend, lambda ids: ids[:_CUT])


@spoiled_backend(caught_by="score/scores_are_the_models", says="off [")
def scores_the_last_512_tokens(backend: type[Backend]) -> type[Backend]:
    """A sequence's score is that of its last 512 tokens."""
    return pooling_changed(backend, lambda ids: ids[-_CUT:])


@mutant("score/scores_are_the_models", says="off [")
class scores_before_padding(CorrectBackend):
    """A sequence that ends with the padding id has the score of the token before it."""

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        padding = json.loads((Path(self.config.model) / "config.json").read_text())["pad_token_id"]

        def without(ids: list[int]) -> list[int]:
            while len(ids) > 1 and ids[-1] == padding:
                ids = ids[:-1]
            return ids

        return await super().reward_score([without(ids) for ids in sequences])


def _by_pass(inputs: Sequence[list[int]], made: list[_T]) -> list[_T]:
    """Return results in the order of the forward passes, to which the shortest inputs go first."""
    if sum(map(len, inputs)) <= _AT_ONCE:
        return made
    return [made[index] for index in sorted(range(len(inputs)), key=lambda index: len(inputs[index]))]


@mutant("embeddings/a_batch_changes_no_vector", says="a number is off by")
class returns_vectors_pass_by_pass(CorrectBackend):
    """Vectors of a call that takes several forward passes come in the order of the passes."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return _by_pass(prompts, await super().embed(prompts, dimensions))


@mutant("score/a_batch_changes_no_score", says="off [")
class returns_scores_pass_by_pass(CorrectBackend):
    """Scores of a call that takes several forward passes come in the order of the passes."""

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        return _by_pass(sequences, await super().reward_score(sequences))


@mutant("embeddings/each_prompt_has_a_vector", says=("of several weight versions", "in the middle of an update"))
class embeds_while_weights_change(Pooling):
    """A call during an update has vectors of both versions, or of half an update."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return await self.backend.embed(prompts, dimensions)


@mutant("score/scores_are_the_models", says=("of several weight versions", "in the middle of an update"))
class scores_while_weights_change(Pooling):
    """A call during an update has scores of both versions, or of half an update."""

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        return await self.backend.reward_score(sequences)


@mutant("embeddings/each_prompt_has_a_vector", says="off the last tokens' states")
class halves_the_precision_of_vectors(CorrectBackend):
    """Vectors pass through float16."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        vectors = await super().embed(prompts, dimensions)
        return [np.array(vector, np.float16).astype(float).tolist() for vector in vectors]


class _Keeping(CorrectBackend):
    _kept: list[bytearray] = own(list)


@mutant("embeddings/a_batch_changes_no_vector", says="more bytes of memory")
class keeps_what_it_embedded(_Keeping):
    """Each prompt that was embedded leaves 4 kB behind."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        self._kept += [bytearray(b"x" * 4096) for _ in prompts]
        return await super().embed(prompts, dimensions)


@mutant("score/a_batch_changes_no_score", says="more bytes of memory")
class keeps_what_it_scored(_Keeping):
    """Each sequence that was scored leaves 4 kB behind."""

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        self._kept += [bytearray(b"x" * 4096) for _ in sequences]
        return await super().reward_score(sequences)


@mutant("embeddings/a_batch_changes_no_vector", says="more descriptors")
class leaves_a_descriptor_to_each_fourth_embedding(_Keeping):
    """Every fourth call of embed() leaves a descriptor open."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        self._kept.append(bytearray())
        if len(self._kept) % 4 == 0:
            os.open(os.devnull, os.O_RDONLY)
        return await super().embed(prompts, dimensions)


@mutant("score/a_batch_changes_no_score", says="more descriptors")
class leaves_a_descriptor_to_each_fourth_score(_Keeping):
    """Every fourth call of reward_score() leaves a descriptor open."""

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        self._kept.append(bytearray())
        if len(self._kept) % 4 == 0:
            os.open(os.devnull, os.O_RDONLY)
        return await super().reward_score(sequences)


class _OnceFrozen(CorrectBackend):
    _was_frozen = own(bool)

    async def freeze(self, mode: PauseMode) -> None:
        self._was_frozen = True
        await super().freeze(mode)


@mutant("score/a_batch_changes_no_score", says="off [")
class scores_in_bfloat16_after_a_pause(_OnceFrozen):
    """After a pause, scores pass through bfloat16."""

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        scores = await super().reward_score(sequences)
        return [*map(in_bfloat16, scores)] if self._was_frozen else scores


@mutant("score/a_reward_engine_does_not_generate", says="after an adapter was refused: scores")
class scores_in_bfloat16_after_a_refused_adapter(InferenceEngine):
    """Once an adapter was refused, scores pass through bfloat16."""

    _was_asked = False

    async def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, pinned: bool = False
    ) -> None:
        self._was_asked = True
        await super().load_lora_adapter(lora_name, lora_path, pinned=pinned)

    async def score(self, input_ids: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]]) -> list[float]:
        scores = await super().score(input_ids, output_ids)
        return [*map(in_bfloat16, scores)] if self._was_asked else scores


@mutant("embeddings/an_embedding_engine_does_not_generate", says="an adapter was accepted")
class takes_an_adapter_that_changes_no_vector(InferenceEngine):
    """An adapter is loaded beside embeddings, none of which it changes."""

    async def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, pinned: bool = False
    ) -> None:
        """Load nothing."""


@mutant("embeddings/the_pooling_of_the_folder_is_applied_or_refused", says="vectors are others after a pause")
class embeds_another_last_bit_after_a_pause(_OnceFrozen):
    """After a pause, vectors of a deterministic engine differ in a last bit."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        vectors = await super().embed(prompts, dimensions)
        if not (self._was_frozen and self.config.deterministic):
            return vectors
        return [[float(np.nextafter(np.float32(first), np.float32(9))), *others] for first, *others in vectors]


@mutant("embeddings/dimensions_shorten_a_vector", says="a number is off by")
class shortens_without_scaling(CorrectBackend):
    """A shortened vector is the beginning of the whole one, shorter than 1."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        return [vector[:dimensions] for vector in await super().embed(prompts, None)]


def _whole_context(config: EngineConfig) -> Mapping[str, object]:
    return {} if config.task is Task.GENERATE else {"context_length": None}


@config_mutant("embeddings/the_pooling_of_the_folder_is_applied_or_refused", says="the folder asks for mean_tokens")
def pools_as_the_architecture_does(config: EngineConfig) -> Mapping[str, object]:
    """A pooling that the model's folder names is not read."""
    model = Path(config.model)
    if not (model / "modules.json").exists():
        return {}
    plain = model.with_name(f"{model.name}-plain")
    copy_model(model, plain, without="modules.json")
    return {"model": str(plain)}


@mutant("embeddings/the_pooling_of_the_folder_is_applied_or_refused", says="the folder asks for cls_token")
class pools_the_first_column(CorrectBackend):
    """If the folder asks for the first token's state, a prompt beside a longer one gets padding's state."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        pooling = Path(self.config.model) / "1_Pooling" / "config.json"
        if not pooling.exists() or not json.loads(pooling.read_text()).get("pooling_mode_cls_token"):
            return await super().embed(prompts, dimensions)
        longest = max(map(len, prompts))
        padded = [prompt if len(prompt) == longest else [0, *prompt] for prompt in prompts]
        return await super().embed(padded, dimensions)


@config_mutant("embeddings/bad_prompts_are_refused", says="context_length=128 was asked for")
def embeds_in_the_models_context(config: EngineConfig) -> Mapping[str, object]:
    """A configured context_length is not applied to embeddings."""
    return _whole_context(config)


@config_mutant("score/sequences_that_cannot_be_are_refused", says="context_length=128 was asked for")
def scores_in_the_models_context(config: EngineConfig) -> Mapping[str, object]:
    """A configured context_length is not applied to rewards."""
    return _whole_context(config)


@mutant("lifecycle/closing_never_hangs", says="a call of encode() that outlasts timeouts.generate is answered")
class embeds_without_the_configured_timeout(Pooling):
    """A call of encode() ignores timeouts.generate."""

    async def encode(self, prompts: PromptLike | Sequence[PromptLike], dimensions: int | None) -> list[list[float]]:
        builder = self.model.builder_for(Task.EMBED, "encode()")
        return await self.embed(await builder.prompt_token_ids(prompts), dimensions)


@mutant("lifecycle/closing_never_hangs", says="a call of score() that outlasts timeouts.generate is answered")
class scores_without_the_configured_timeout(Pooling):
    """A call of score() ignores timeouts.generate."""

    async def score(self, input_ids: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]]) -> list[float]:
        return await self.reward_score([[*one, *other] for one, other in zip(input_ids, output_ids, strict=True)])
