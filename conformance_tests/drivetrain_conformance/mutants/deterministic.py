"""Results that claim to be deterministic, and whose bits depend on what else the engine computes or has computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator

import numpy as np

from drivetrain.backend.base import GenerateRequest, GenerateResult, TokenDelta
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, KnowingRequests, own

_CHUNK = 128


def _rounded_otherwise(result: GenerateResult) -> GenerateResult:
    """Return a result whose numbers for its last token differ in their last bit."""
    changes: dict[str, object] = {}
    if result.logprobs:
        changes["logprobs"] = [*result.logprobs[:-1], math.nextafter(result.logprobs[-1], -math.inf)]
    if result.hidden_states:
        *others, last = result.hidden_states
        changes["hidden_states"] = [*others, [math.nextafter(last[0], math.inf), *last[1:]]]
    if result.scores is not None:
        tokens = result.scores.token_logprobs.copy()
        tokens[-1] = np.nextafter(tokens[-1], np.float32(-np.inf))
        changes["scores"] = dataclasses.replace(result.scores, packed_tokens=tokens.tobytes())
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


class _Deterministic(KnowingRequests):
    """Changes the rounding of some results of a deterministic engine."""

    def is_spoiled(self, request: GenerateRequest) -> bool:
        """Return whether the rounding of an arriving request changes."""
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate with the correct backend."""
        is_spoiled = self.config.deterministic and self.is_spoiled(request)
        result = await super().generate(request)
        return _rounded_otherwise(result) if is_spoiled else result


@mutant("sampling/deterministic_logprobs_are_bitwise_the_same", says="in their last bits")
class shares_a_step_when_deterministic(CorrectBackend):
    """A deterministic engine computes the rows of a batch together, as others do."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model_copy(update={"deterministic": False}))


@mutant("sampling/deterministic_samples_are_the_same", says="assert")
class draws_by_the_batch(KnowingRequests):
    """Sums of probabilities are rounded by the number of rows, so that another token is drawn beside other requests."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        others = len(self.flying)
        result = await super().generate(request)
        if not (self.config.deterministic and others and result.token_ids):
            return result
        return dataclasses.replace(result, token_ids=[*result.token_ids[:-1], result.token_ids[-1] ^ 1])


@mutant("sampling/deterministic_results_are_the_same_after_cached_prefixes", says="in their last bits")
class uses_prefixes_of_any_length(_Deterministic):
    """A cached prefix is used to its last token, and the rest computed in a pass of another shape than without it."""

    _seen: set[tuple[int, ...]] = own(set)

    async def reset_prefix_cache(self) -> None:
        self._seen.clear()
        await super().reset_prefix_cache()

    def is_spoiled(self, request: GenerateRequest) -> bool:
        prefix = tuple(request.prompt_token_ids[:16])
        is_cached = prefix in self._seen
        self._seen.add(prefix)
        return is_cached


@mutant("sampling/deterministic_results_are_the_same_beside_a_long_prompt", says="in their last bits")
class chunks_by_the_budget(_Deterministic):
    """The chunks of a long prompt depend on the tokens that other requests take from a step's budget."""

    def is_spoiled(self, request: GenerateRequest) -> bool:
        return len(request.prompt_token_ids) > _CHUNK and bool(self.flying)


class _FrozenOtherwise(KnowingRequests):
    """Rounds a request differently once it was frozen in one mode."""

    mode: PauseMode

    _frozen: set[str] = own(set)

    async def freeze(self, mode: PauseMode) -> None:
        if mode is self.mode:
            self._frozen |= self.flying
        await super().freeze(mode)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        was_frozen = self.config.deterministic and request.request_id in self._frozen
        return _rounded_otherwise(result) if was_frozen else result


@mutant("sampling/deterministic_results_are_the_same_after_a_freeze", says="in their last bits")
class moves_frozen_rows_together(_FrozenOtherwise):
    """Requests that were frozen in place go on in a batch of another size."""

    mode = PauseMode.IN_PLACE


@mutant("sampling/deterministic_results_are_the_same_after_a_retraction", says="in their last bits")
class resumes_by_prefill(_FrozenOtherwise):
    """The generated tokens of a retracted request are computed again in one pass, not one at a time."""

    mode = PauseMode.RETRACT


@mutant("sampling/deterministic_results_are_the_same_beside_aborts_and_streams", says="in their last bits")
class streams_with_other_kernels(CorrectBackend):
    """The rounding of streamed requests differs from others'."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async for delta in super().stream(request):
            if self.config.deterministic and delta.result is not None:
                delta = dataclasses.replace(delta, result=_rounded_otherwise(delta.result))
            yield delta


@mutant("sampling/deterministic_results_are_the_same_beside_adapters", says="in their last bits")
class computes_all_adapters_together(_Deterministic):
    """Requests of different adapters are computed together, so that their number changes rounding."""

    def is_spoiled(self, request: GenerateRequest) -> bool:
        return request.lora is not None and bool(self.flying)


@mutant("sampling/deterministic_scores_are_bitwise_the_same", says="in their last bits")
class scores_in_shared_passes(_Deterministic):
    """Sequences to score are computed together with the requests that generate."""

    def is_spoiled(self, request: GenerateRequest) -> bool:
        return request.scoring is not None and bool(self.flying)


@mutant("sampling/deterministic_hidden_states_are_bitwise_the_same", says="in their last bits")
class returns_states_of_a_shared_step(_Deterministic):
    """Hidden states come from a step that other rows shared."""

    def is_spoiled(self, request: GenerateRequest) -> bool:
        return request.params.return_hidden_states and bool(self.flying)


@mutant(
    "embeddings/the_pooling_of_the_folder_is_applied_or_refused",
    says="a vector of a deterministic engine depends on the prompts beside it",
    needs=Capability.DETERMINISTIC,
)
class embeds_a_batch_otherwise(CorrectBackend):
    """A deterministic engine embeds the prompts of one call together, which changes their rounding."""

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        vectors = await super().embed(prompts, dimensions)
        if len(prompts) == 1:
            return vectors
        return [[math.nextafter(first, math.inf), *others] for first, *others in vectors]
