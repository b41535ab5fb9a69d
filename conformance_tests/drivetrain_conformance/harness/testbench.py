"""What a case works with: an engine, an oracle, prompts, and the sizes of the run. Never the backend's name."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain.types.outputs import Completion, GenerationOutput
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assets.served_models import ModelKind, Models
from drivetrain_conformance.harness.run_profile import Profile
from drivetrain_conformance.references.oracle import Logits, Oracle, RoundingOracle, log_softmax

_T = TypeVar("_T")

GREEDY_TOKENS = 12
"""Tokens of each probe in :meth:`Bench.fresh_outputs`."""
TOLERANCE = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 1.5e-1}
"""Of logprobs, in nats, by dtype."""
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of one rounding."""
_STARTS = 10
_IN_FLIGHT = 100
"""Requests of this many tokens or more are meant to be seen in flight; shorter ones to end."""
_LASTS = 0.2
"""Seconds that such a request lasts at least, if the context is long enough."""


class Opener(Protocol):
    """Makes an engine, not started, from fields of its configuration."""

    def __call__(self, fields: dict[str, object]) -> InferenceEngine: ...


class Runs(Protocol):
    """Runs a coroutine to its end in the loop of the engine under test."""

    def __call__(self, coroutine: Coroutine[object, object, _T]) -> _T: ...


@dataclass(slots=True)
class Bench:
    """The workplace of one case. Made by the runner."""

    models: Models
    """Model folders."""
    model: Path
    """The folder that :attr:`engine` serves."""
    profile: Profile
    seed: int
    opener: Opener
    oracles: dict[Path, Oracle | None]
    make_oracle: OracleMaker
    run: Runs
    """For plain bodies: run a coroutine to its end."""
    own_engine: bool
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of the configuration of each engine that the case makes, unless it says otherwise."""
    shared: InferenceEngine | None = None
    tokens_per_second: float = 0.0
    """How fast :attr:`shared` was when it was opened; 0: not measured."""
    rng: random.Random = field(default_factory=random.Random)
    """Seeded by the run's seed and the case's name."""

    # The engine --------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> InferenceEngine:
        """The engine under test: started, ready, idle, with the weights that it began with."""
        assert self.shared is not None, "a case with own_engine=True opens its engine with bench.open()"
        return self.shared

    def create(self, **fields: object) -> InferenceEngine:
        """Make an engine of the backend under test, not started; ``fields`` are those of its configuration."""
        model = fields.pop("model", self.model)
        return self.opener({"model": str(model), **self.fields, **fields})

    @asynccontextmanager
    async def open(self, **fields: object) -> AsyncGenerator[InferenceEngine, None]:
        """Open an engine of the case's own, and tear it down at the end. Only with ``own_engine=True``."""
        assert self.own_engine, "only a case with own_engine=True opens engines: one runs at a time"
        async with self.create(**fields) as engine:
            yield engine

    def claims(self, capability: Capability) -> bool:
        """Whether the engine under test claims a capability: to use more where there is more, never to expect less."""
        return self.engine.supports(capability)

    @property
    def is_hosted(self) -> bool:
        """Whether the engine under test runs in a host process."""
        return self.engine.isolation is not Isolation.INLINE

    # Models and numbers ------------------------------------------------------------------------------------------

    def other_weights(self, seed: int = 1) -> Path:
        """A folder with the same model as :attr:`model`, every weight of which has another value."""
        return self.models.with_other_weights(self.model, seed)

    def model_of(self, kind: ModelKind) -> Path:
        """The folder of the suite's model of this kind."""
        return self.models.path(kind)

    def folder(self, name: str = "files") -> Path:
        """An empty folder, removed when the run ends."""
        return self.models.folder(name)

    def oracle(self, model: Path | None = None) -> Oracle:
        """The independent source of logits for a model folder; the engine's own if none is given."""
        path = model or self.model
        if path not in self.oracles:
            self.oracles[path] = self.make_oracle(path)
        oracle = self.oracles[path]
        if oracle is None:
            raise NoOracle
        return oracle

    def output_logits(self, completion: Completion, model: Path | None = None) -> Logits:
        """The oracle's logits that each token of a completion was drawn from, shape (tokens, vocabulary)."""
        if not completion.token_ids:
            return np.zeros((0, self.engine.model_info.vocab_size if self.shared else 0))
        return _of_the_output(completion, self.oracle(model).logits(_all_ids(completion)))

    def rounded_output_logits(
        self, completion: Completion, engine: InferenceEngine | None = None, model: Path | None = None
    ) -> list[Logits]:
        """The same, each time as rounding in the dtype of the engine's weights may leave them, if the oracle knows."""
        oracle = self.oracle(model)
        unit = _ROUNDING.get((engine or self.engine).model_info.dtype, _ROUNDING["bfloat16"])
        if not isinstance(oracle, RoundingOracle):
            return [self.output_logits(completion, model)]
        return [_of_the_output(completion, rows) for rows in oracle.rounded_logits(_all_ids(completion), unit)]

    def output_logprobs(
        self, completion: Completion, temperature: float = 1.0, model: Path | None = None
    ) -> list[float]:
        """The oracle's logprob of each token of a completion, after ``temperature``."""
        if not completion.token_ids:
            return []
        rows = log_softmax(self.output_logits(completion, model) / temperature)
        return [float(row[token]) for row, token in zip(rows, completion.token_ids, strict=True)]

    def tolerance(self, engine: InferenceEngine | None = None) -> float:
        """How far a logprob may be from the oracle's, in nats, for the dtype of the engine's weights."""
        return TOLERANCE.get((engine or self.engine).model_info.dtype, TOLERANCE["bfloat16"])

    # Requests ----------------------------------------------------------------------------------------------------

    def prompt(self, length: int = 6, engine: InferenceEngine | None = None) -> list[int]:
        """Random token ids that decode to printable text, none of them special."""
        ids = ordinary_ids(engine or self.engine)
        return [self.rng.choice(ids) for _ in range(length)]

    def prompts(self, count: int, length: int = 6, engine: InferenceEngine | None = None) -> list[list[int]]:
        """Several random prompts."""
        return [self.prompt(length, engine) for _ in range(count)]

    def long(self, max_new_tokens: int | None = None, *, prompt_length: int = 6, **fields: object) -> SamplingParams:
        """Params of a request that stays in flight for a while: as many tokens as fit, past EOS where that is claimed.

        Args:
            max_new_tokens: Fewer tokens than fit. A fast engine gets more, so that they outlast a look at it.
            prompt_length: Tokens of the prompt.
            fields: Those of SamplingParams.
        """
        room = self.engine.model_info.context_length - prompt_length
        if max_new_tokens is not None and max_new_tokens >= _IN_FLIGHT:
            max_new_tokens = min(room, max(max_new_tokens, math.ceil(self.tokens_per_second * _LASTS)))
        fields.setdefault("ignore_eos", self.claims(Capability.IGNORE_EOS))
        fields.setdefault("temperature", 0.0)
        return SamplingParams.model_validate({"max_new_tokens": max_new_tokens or min(room, 900), **fields})

    @asynccontextmanager
    async def in_flight(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        engine: InferenceEngine | None = None,
        *,
        tokens: float = 0.05,
        **arguments: object,
    ) -> AsyncGenerator[asyncio.Task[GenerationOutput], None]:
        """Requests that run in the engine and have had ``tokens`` seconds to make some; ended when the block ends.

        ``arguments`` are further ones of ``generate``.
        """
        engine = engine or self.engine
        task = await until_running(
            engine,
            len(prompts) * params.n if isinstance(params, SamplingParams) else sum(one.n for one in params),
            lambda: engine.generate(list(prompts), params, **arguments),  # type: ignore[arg-type]
        )
        try:
            await asyncio.sleep(tokens)
            yield task
        finally:
            await end_requests(engine, task)

    async def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = GREEDY_TOKENS,
        engine: InferenceEngine | None = None,
    ) -> list[Completion]:
        """Greedy completions, one for each prompt."""
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0)
        return (await (engine or self.engine).generate([list(prompt) for prompt in prompts], params)).completions


class OracleMaker(Protocol):
    """Makes the oracle of a model folder, or says that there is none."""

    def __call__(self, model: Path) -> Oracle | None: ...


class NoOracle(Exception):
    """The suite was given no oracle, so a case that compares with one is not run."""


def _all_ids(completion: Completion) -> list[int]:
    return [*completion.prompt_token_ids, *completion.token_ids]


def _of_the_output(completion: Completion, rows: Logits) -> Logits:
    before = len(completion.prompt_token_ids)
    return rows[before - 1 : before + len(completion.token_ids) - 1]


def ordinary_ids(engine: InferenceEngine) -> list[int]:
    """Token ids that decode to printable characters and are not special, at most 512."""
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
    engine: InferenceEngine,
    count: int,
    generate: Callable[[], Coroutine[None, None, GenerationOutput]],
    within: float = 60.0,
) -> asyncio.Task[GenerationOutput]:
    """Start requests; return when ``count`` samples run in the engine. An error of the requests' is raised here.

    On a machine that does other work they may be over before anybody looks: then they are started again, some times.
    """
    ended: GenerationOutput | None = None
    for _ in range(_STARTS):
        task = asyncio.create_task(generate())
        try:
            async with asyncio.timeout(within):
                while not task.done():
                    if (await engine.stats()).running >= count:
                        return task
                    await asyncio.sleep(0.002)
        except BaseException:
            await end_requests(engine, task)
            raise
        ended = await task
    assert ended is not None
    raise AssertionError(f"the requests ended before they could be looked at: {ended.completions[0].finish_reason}")


async def until_idle(engine: InferenceEngine, within: float = 30.0) -> None:
    """Return when the engine holds no request."""
    async with asyncio.timeout(within):
        while (stats := await engine.stats()).running or stats.waiting:  # noqa: ASYNC110 - it may be another process
            await asyncio.sleep(0.002)


async def end_requests(engine: InferenceEngine, task: asyncio.Task[GenerationOutput]) -> None:
    """Leave nothing running: go on after a pause, abort, and take what comes."""
    if not task.done():
        try:
            if engine.is_paused:
                await engine.continue_generation()
            if engine.supports(Capability.ABORT):
                await engine.abort_generation()
        except DrivetrainError:
            task.cancel()
    await asyncio.wait([task], timeout=60)
    if not task.done():
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
