"""Recurrent states that are lost or mixed up; models without any are served as they should be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, KnowingRequests, own

_KINDS = ("mamba2", "falcon_h1", "qwen3_next")
_COLUMNS = 128


def _is_recurrent(config: EngineConfig) -> bool:
    kind = json.loads((Path(config.model) / "config.json").read_text()).get("model_type")
    return kind in _KINDS


def _derailed(result: GenerateResult, at: int) -> GenerateResult:
    """Return a result with another token at ``at``."""
    ids = result.token_ids
    return dataclasses.replace(result, token_ids=[*ids[:at], ids[at] ^ 1, *ids[at + 1 :]], matched_text=None)


@mutant("generate/mamba2_is_right_or_refused", says="nats below")
class loses_states_where_buffers_grow(CorrectBackend):
    """A row's recurrent state is lost when its buffers grow."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        grew = _is_recurrent(self.config) and len(result.token_ids) > _COLUMNS
        return _derailed(result, _COLUMNS) if grew else result


@mutant("generate/falcon_h1_is_right_or_refused", says="nats below")
class moves_no_state_into_the_place_of_an_aborted_row(KnowingRequests):
    """The row that takes the place of an aborted one continues with the aborted row's state."""

    _moved: set[str] = own(set)

    async def abort(self, request_ids: list[str]) -> None:
        if _is_recurrent(self.config):
            self._moved |= self.flying - set(request_ids)
        await super().abort(request_ids)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        was_moved = request.request_id in self._moved and result.token_ids
        return _derailed(result, len(result.token_ids) - 1) if was_moved else result


@mutant("generate/qwen3_next_is_right_or_refused", says="a plain forward pass gives")
class rounds_states_between_steps(CorrectBackend):
    """Recurrent states are rounded to bfloat16 between steps, in a model of float32."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if not _is_recurrent(self.config) or result.logprobs is None:
            return result
        return dataclasses.replace(result, logprobs=[value - 2e-3 for value in result.logprobs])


@mutant("generate/qwen3_next_is_right_or_refused", says="nats below")
class wakes_with_states_of_other_rows(CorrectBackend):
    """The first row after a sleep begins with the state that another one left."""

    _slept = False

    async def sleep(self, tags: frozenset[MemoryTag]) -> None:
        self._slept = True
        await super().sleep(tags)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        slept, self._slept = self._slept, False
        result = await super().generate(request)
        return _derailed(result, 0) if slept and _is_recurrent(self.config) else result


class _KeepingPrompts(CorrectBackend):
    """Answers a repeated prompt of a recurrent model from the state of its first run."""

    _kept: dict[object, GenerateResult] = own(dict)

    def key(self, request: GenerateRequest) -> object:
        """Return the key of a kept state."""
        return (tuple(request.prompt_token_ids), request.max_new_tokens, request.lora)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if not _is_recurrent(self.config):
            return result
        kept = self._kept.setdefault(self.key(request), result)
        return dataclasses.replace(kept, weight_versions=result.weight_versions)


@mutant("generate/mamba2_is_right_or_refused", says="nats below")
class keeps_states_over_an_update(_KeepingPrompts):
    """The states of prompts stay in the prefix cache when the weights change."""


@mutant("generate/falcon_h1_is_right_or_refused", says="nats below")
class finds_states_of_other_adapters(_KeepingPrompts):
    """The state of a prompt is found by requests of any adapter."""

    def key(self, request: GenerateRequest) -> object:
        """Return the prompt, without the adapter."""
        return (tuple(request.prompt_token_ids), request.max_new_tokens)
