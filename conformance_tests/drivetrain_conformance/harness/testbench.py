"""The bench that a case works with: an engine, an oracle, prompts, and the run's sizes. Never the backend's name."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.pause_and_sleep import PAUSE_CAPABILITY
from drivetrain.errors import DrivetrainError
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion, FinishReason, GenerationOutput
from drivetrain.types.prompts import PromptLike
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assets.served_models import ModelKind, Models
from drivetrain_conformance.harness.run_profile import Profile
from drivetrain_conformance.harness.time_limits import until_ended, within
from drivetrain_conformance.references.oracle import Logits, Oracle, RoundingOracle, token_logprobs
from drivetrain_conformance.references.tolerances import tolerance_of

_T = TypeVar("_T")

GREEDY_TOKENS = 12
"""Tokens that :meth:`Bench.greedy` generates by default."""
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of one rounding, by dtype."""
_STARTS = 10
_IN_FLIGHT = 100
"""Requests of at least this many tokens are meant to be observed in flight; shorter ones are meant to end."""
_LASTS = 0.5
"""Minimum duration in seconds of a request that is to be observed in flight, if the context is long enough."""
_ROUND_TRIPS = 4
"""Consecutive calls to an engine; when they are answered, results that it sent earlier have arrived."""


Opener = Callable[[dict[str, object]], InferenceEngine]
"""Creates an engine, not started, from fields of its configuration."""
OracleMaker = Callable[[Path], Oracle | None]
"""Makes the oracle for a model folder, or returns None."""


class Runs(Protocol):
    """Runs a coroutine to its end in the event loop of the engine under test."""

    def __call__(self, coroutine: Coroutine[object, object, _T]) -> _T: ...


@dataclass(slots=True)
class Bench:
    """The workplace of one case, made by the runner."""

    models: Models
    """Provides model folders."""
    model: Path
    """The model folder that :attr:`engine` serves."""
    profile: Profile
    seed: int
    opener: Opener
    oracles: dict[Path, Oracle | None]
    make_oracle: OracleMaker
    run: Runs
    """Runs a coroutine to its end, for bodies that are plain functions."""
    own_engine: bool
    fields: Mapping[str, object] = field(default_factory=dict)
    """Configuration fields of every engine that the case creates; arguments override them."""
    shared: InferenceEngine | None = None
    tokens_per_second: float = 0.0
    """Throughput of :attr:`shared` when it was opened; 0: not measured."""
    rng: random.Random = field(default_factory=random.Random)
    """Seeded with the run's seed and the case's id."""
    attempt: int = 0
    """Number of earlier attempts that ended with :class:`TooLate`."""

    # The engine --------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> InferenceEngine:
        """The engine under test: started, ready, idle, with its initial weights."""
        assert self.shared is not None, "a case with own_engine=True opens its engine with bench.open()"
        return self.shared

    def create(self, **fields: object) -> InferenceEngine:
        """Create an engine of the backend under test, not started; ``fields`` are configuration fields."""
        model = fields.pop("model", self.model)
        return self.opener({"model": str(model), **self.fields, **fields})

    @asynccontextmanager
    async def open(self, **fields: object) -> AsyncGenerator[InferenceEngine, None]:
        """Open an engine for this case alone, and tear it down at the end. Only with ``own_engine=True``."""
        assert self.own_engine, "only a case with own_engine=True opens engines: one runs at a time"
        async with self.create(**fields) as engine:
            yield engine

    def claims(self, capability: Capability) -> bool:
        """Return True if the engine under test claims a capability. Use it to check more, never to expect less."""
        return self.engine.supports(capability)

    def freezes(self, engine: InferenceEngine | None = None) -> list[PauseMode]:
        """Return the claimed pause modes that freeze requests in flight."""
        claims = (engine or self.engine).supports
        return [mode for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT) if claims(PAUSE_CAPABILITY[mode])]

    @property
    def is_hosted(self) -> bool:
        """True if the engine under test runs in a host process."""
        return self.engine.isolation is not Isolation.INLINE

    # Models and numbers ------------------------------------------------------------------------------------------

    def other_weights(self, seed: int = 1) -> Path:
        """Return a folder with the same model as :attr:`model` and every weight changed."""
        return self.models.with_other_weights(self.model, seed)

    def model_of(self, kind: ModelKind) -> Path:
        """Return the folder of the suite's model of this kind."""
        return self.models.path(kind)

    def folder(self, name: str = "files") -> Path:
        """Make an empty folder, removed when the run ends."""
        return self.models.folder(name)

    def oracle(self, model: Path | None = None) -> Oracle:
        """Return the independent source of logits for a model folder, by default :attr:`model`."""
        path = model or self.model
        if path not in self.oracles:
            self.oracles[path] = self.make_oracle(path)
        oracle = self.oracles[path]
        if oracle is None:
            raise NoOracle
        return oracle

    def output_logits(self, completion: Completion, model: Path | None = None) -> Logits:
        """Return the oracle's logits from which each token of a completion was drawn, shape (tokens, vocabulary)."""
        if not completion.token_ids:
            return self.oracle(model).logits([0])[:0]
        lowest = min(completion.token_ids)
        assert lowest >= 0, f"an answer holds the id {lowest}, which is outside the vocabulary of any model"
        return _of_the_output(completion, self.oracle(model).logits(_all_ids(completion)))

    def rounded_output_logits(
        self, completion: Completion, engine: InferenceEngine | None = None, model: Path | None = None
    ) -> list[Logits]:
        """Return the output logits under several roundings in the engine's dtype, if the oracle can vary rounding."""
        oracle = self.oracle(model)
        unit = _ROUNDING.get((engine or self.engine).model_info.dtype, _ROUNDING["bfloat16"])
        if not isinstance(oracle, RoundingOracle):
            return [self.output_logits(completion, model)]
        return [_of_the_output(completion, rows) for rows in oracle.rounded_logits(_all_ids(completion), unit)]

    def output_logprobs(
        self, completion: Completion, temperature: float = 1.0, model: Path | None = None
    ) -> list[float]:
        """Return the oracle's logprob of each token of a completion, after ``temperature``."""
        if not completion.token_ids:
            return []
        return token_logprobs(self.output_logits(completion, model) / temperature, completion.token_ids)

    def tolerance(self, engine: InferenceEngine | None = None) -> float:
        """Return the allowed difference of a logprob from the oracle's, in nats, for the engine's dtype."""
        return tolerance_of((engine or self.engine).model_info.dtype)

    # Requests ----------------------------------------------------------------------------------------------------

    def prompt(self, length: int = 6, engine: InferenceEngine | None = None) -> list[int]:
        """Return random token ids that decode to printable text, none of them special."""
        ids = ordinary_ids(engine or self.engine)
        return [self.rng.choice(ids) for _ in range(length)]

    def prompts(self, count: int, length: int = 6, engine: InferenceEngine | None = None) -> list[list[int]]:
        """Return several random prompts."""
        return [self.prompt(length, engine) for _ in range(count)]

    def long(self, max_new_tokens: int | None = None, *, prompt_length: int = 6, **fields: object) -> SamplingParams:
        """Return params of a request that stays in flight for a while, ignoring EOS if the engine can.

        Args:
            max_new_tokens: Default: as many as fit. Raised for a fast engine, and after an attempt that came too late,
                so that the request can be observed in flight.
            prompt_length: Tokens of the prompt.
            fields: Further fields of SamplingParams.
        """
        room = self.engine.model_info.context_length - prompt_length
        if max_new_tokens is not None and max_new_tokens >= _IN_FLIGHT:
            lasts = max(max_new_tokens, math.ceil(self.tokens_per_second * _LASTS))
            max_new_tokens = min(room, lasts * 2**self.attempt)
        fields.setdefault("ignore_eos", self.claims(Capability.IGNORE_EOS))
        fields.setdefault("temperature", 0.0)
        return SamplingParams.model_validate({"max_new_tokens": max_new_tokens or min(room, 900), **fields})

    @asynccontextmanager
    async def in_flight(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams],
        engine: InferenceEngine | None = None,
        *,
        tokens: int = GREEDY_TOKENS,
        **arguments: object,
    ) -> AsyncGenerator[asyncio.Task[GenerationOutput], None]:
        """Run requests during the block, and end them when it ends.

        On a busy machine they may have ended when the block does something. See :func:`in_time`.

        Args:
            prompts: As for ``generate``.
            params: As for ``generate``.
            engine: Default: the bench's.
            tokens: Tokens that later requests make before the block is entered, so that each of these has one by then.
                0: enter the block once they run, with or without a token.
            arguments: More arguments of ``generate``.
        """
        engine = engine or self.engine
        count = len(prompts) * params.n if isinstance(params, SamplingParams) else sum(one.n for one in params)
        task = await until_running(engine, count, lambda: engine.generate(list(prompts), params, **arguments))  # type: ignore[arg-type]
        try:
            if tokens:
                async with within():
                    await self.greedy(self.prompts(count, engine=engine), tokens, engine)
            yield task
        finally:
            await end_requests(engine, task)

    async def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = GREEDY_TOKENS,
        engine: InferenceEngine | None = None,
    ) -> list[Completion]:
        """Return greedy completions, one for each prompt."""
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0)
        return (await (engine or self.engine).generate([list(prompt) for prompt in prompts], params)).completions


class TooLate(AssertionError):
    """Requests had ended before the case acted on them, which judges the machine: the runner tries the case again."""


class NoOracle(Exception):
    """The suite has no oracle, so a case that compares with one is not run."""


def _all_ids(completion: Completion) -> list[int]:
    return [*completion.prompt_token_ids, *completion.token_ids]


def _of_the_output(completion: Completion, rows: Logits) -> Logits:
    before = len(completion.prompt_token_ids)
    return rows[before - 1 : before + len(completion.token_ids) - 1]


def ordinary_ids(engine: InferenceEngine) -> list[int]:
    """Return token ids that decode to printable characters and are not special, at most 512."""
    tokenizer = engine.tokenizer
    found: list[int] = []
    for token_id in range(min(engine.model_info.vocab_size, len(tokenizer))):
        text = tokenizer([token_id], skip_special_tokens=True)
        if text and text.isprintable() and "�" not in text and token_id not in engine.model_info.eos_token_ids:
            found.append(token_id)
        if len(found) == 512:
            break
    return found


async def until_running(
    engine: InferenceEngine, count: int, generate: Callable[[], Coroutine[None, None, GenerationOutput]]
) -> asyncio.Task[GenerationOutput]:
    """Start requests and return once ``count`` samples run in the engine. Errors of the requests are raised here.

    On a busy machine the requests may end before the engine has said how many run. Then they are started again, up to
    ten times in all, and run as soon as the backend was given them all.
    """
    ended: GenerationOutput | None = None
    for start in range(_STARTS):
        task = asyncio.create_task(generate())
        try:
            async with within():
                while not task.done():
                    running = engine.parts.in_flight.running if start else (await engine.stats()).running
                    if running >= count:
                        return task
                    await asyncio.sleep(0 if start else 0.002)
        except BaseException:
            await end_requests(engine, task)
            raise
        ended = await task
    assert ended is not None
    raise AssertionError(f"the requests ended before they could be looked at: {ended.completions[0].finish_reason}")


@contextmanager
def in_time(*requests: asyncio.Task[Any] | Completion) -> Iterator[None]:
    """Turn a check that fails into :class:`TooLate` if one of the requests has ended by itself, and not by an abort."""
    try:
        yield
    except AssertionError as error:
        if any(map(_has_ended, requests)):
            raise TooLate(str(error)) from error
        raise


def _has_ended(request: asyncio.Task[Any] | Completion) -> bool:
    if isinstance(request, Completion):
        return request.finish_reason is not FinishReason.ABORT
    return request.done()


async def check_held(engine: InferenceEngine, *requests: asyncio.Task[Any]) -> None:
    """Raise :class:`TooLate` unless the engine holds the requests; results that were on their way have arrived."""
    await results_arrive(engine)
    if any(request.done() for request in requests):
        raise TooLate("requests ended before they were frozen, or while they were")


async def results_arrive(engine: InferenceEngine) -> None:
    """Return once the results of requests that have ended in the engine are with their callers."""
    for _ in range(_ROUND_TRIPS):
        await engine.stats()
        for _ in range(5):
            await asyncio.sleep(0)


async def until_idle(engine: InferenceEngine) -> None:
    """Wait until the engine holds no request."""
    async with within():
        while (stats := await engine.stats()).running or stats.waiting:  # noqa: ASYNC110 - it may be another process
            await asyncio.sleep(0.002)


async def end_requests(engine: InferenceEngine, task: asyncio.Task[GenerationOutput]) -> None:
    """Leave nothing running: continue after a pause, abort, and wait for the requests to end."""
    if not task.done():
        try:
            if engine.is_paused:
                await engine.continue_generation()
            if engine.supports(Capability.ABORT):
                await engine.abort_generation()
        except DrivetrainError:
            task.cancel()
    if not await until_ended(task):
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
