"""The answers that a check asks an engine for, each compared with the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.check.comparison import Comparison, compare
from drivetrain_conformance.check.prompt_set import NEW_TOKENS, Prompts
from drivetrain_conformance.check.reference import Reference
from drivetrain_conformance.references.tolerances import rounding_explains, tolerance_of

_MODES: Final = (
    (Capability.LOGPROBS_RAW, LogprobsMode.RAW),
    (Capability.LOGPROBS_TEMPERATURE, LogprobsMode.TEMPERATURE),
)
"""Both are the model's own distribution, at temperature 1 and for greedy requests."""

Measure = Callable[[], Awaitable[Comparison]]


@dataclass(slots=True)
class Answers:
    """Asks a started engine for answers and compares them with the reference's; both may change weights in between."""

    engine: InferenceEngine
    reference: Reference
    prompts: Prompts

    @property
    def tolerance(self) -> float:
        """Tolerance of the engine's dtype in nats."""
        return tolerance_of(self.engine.model_info.dtype)

    @property
    def is_narrow(self) -> bool:
        """True for a 16-bit engine, whose tolerance would hide small faults."""
        return self.engine.model_info.dtype in ("bfloat16", "float16")

    async def require_checkable(self) -> None:
        """Require that rounding to the engine's dtype alone stays within the tolerance.

        Raises:
            InvalidConfig: it does not.
        """
        if not self.is_narrow:
            return
        dtype, score = self.engine.model_info.dtype, self.reference.score
        off = [
            abs((await asyncio.to_thread(score, ids, dtype)).own - (await asyncio.to_thread(score, ids)).own)
            for ids in self.prompts.short
        ]
        if not rounding_explains(errors := np.concatenate(off), self.tolerance):
            raise InvalidConfig(
                f"rounding to {dtype} alone moves this model's logprobs by up to {errors.max():.2g} nats, beyond the "
                f"tolerance of {self.tolerance:g}, so that nothing can be told of the "
                "engine; check it with dtype=float32",
                field="dtype",
            )

    @property
    def lacking(self) -> tuple[Capability, ...]:
        """The capability without which answers have no logprobs; empty if they have some."""
        return () if self._mode is not None else (Capability.LOGPROBS_RAW,)

    @property
    def _mode(self) -> LogprobsMode | None:
        return next((mode for capability, mode in _MODES if self.engine.supports(capability)), None)

    async def greedy(self) -> Comparison:
        """Greedy answers to short prompts, one request at a time."""
        return await self.compared(await self.greedy_completions())

    async def greedy_completions(self) -> list[Completion]:
        """Return the greedy answers to the short prompts, one request at a time."""
        return [completion for prompt in self.prompts.short for completion in await self._ask([prompt])]

    async def sampled(self) -> Comparison:
        """Answers sampled at temperature 1; the same ones each time, if the engine can be seeded."""
        seed = 0 if self.engine.supports(Capability.SEED) else None
        return await self.compared(await self._ask(self.prompts.short, temperature=1.0, seed=seed), greedy=False)

    async def long(self) -> Comparison:
        """The answer to a long prompt."""
        return await self.compared(await self._ask([self.prompts.long]))

    async def of_prompt(self) -> Comparison:
        """Logprobs of the long prompt's own tokens."""
        completions = await self._ask([self.prompts.long], max_new_tokens=1, prompt_logprobs=0)
        return await self.compared(completions, greedy=False, of_prompts=True)

    async def rounding(self) -> Comparison:
        """Errors of many logprobs, against those that transformers makes in the engine's dtype."""
        of_prompts = self.engine.supports(Capability.PROMPT_LOGPROBS)
        asked: dict[str, object] = {"max_new_tokens": 1, "prompt_logprobs": 0} if of_prompts else {"temperature": 1.0}
        completions = await self._ask([self.prompts.long, *self.prompts.short], **asked)
        dtype = self.engine.model_info.dtype
        return await compare(completions, self.reference, self.tolerance, of_prompts=of_prompts, plain_dtype=dtype)

    async def batch(self) -> Comparison:
        """Answers to prompts of many lengths in one batch."""
        return await self.compared(await self._ask(self.prompts.mixed))

    async def cached(self) -> tuple[Comparison, int]:
        """Return the answer to a prompt whose beginning was served before, and the number of its cached tokens."""
        await self._ask([self.prompts.long])
        completions = await self._ask([self.prompts.extended])
        return await self.compared(completions), completions[0].cached_tokens

    async def compared(
        self, completions: Sequence[Completion], *, greedy: bool = True, of_prompts: bool = False
    ) -> Comparison:
        """Compare completions with the reference; the arguments are those of :func:`compare`."""
        return await compare(completions, self.reference, self.tolerance, greedy=greedy, of_prompts=of_prompts)

    async def hidden_states(self) -> list[tuple[Completion, list[list[float]]]]:
        """Return greedy completions with the hidden states from which their tokens were sampled."""
        completions = [
            completion
            for prompt in self.prompts.short
            for completion in await self._ask([prompt], return_hidden_states=True)
        ]
        return [(completion, completion.hidden_states or []) for completion in completions]

    async def _ask(self, prompts: Sequence[list[int]], **fields: object) -> list[Completion]:
        """Generate once for each prompt, in one call, with logprobs if the engine can give them."""
        asked: dict[str, object] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}
        if self._mode is not None:
            asked |= {"logprobs": 0, "logprobs_mode": self._mode}
        asked["ignore_eos"] = self.engine.supports(Capability.IGNORE_EOS)
        params = SamplingParams.model_validate(asked | fields)
        return (await self.engine.generate(list(prompts), params)).completions
