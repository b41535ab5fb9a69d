"""Random histories: lists of actions, played on one engine with the contract's model beside.

A history is a value that is drawn whole and then played in one coroutine, not a ``RuleBasedStateMachine``: each action
is valid in every state (the contract says whether it must be refused), so hypothesis shrinks a failure by leaving
actions out and needs no engine to draw one, and the requests of a history make progress in one run of the event loop.

The engine is shared: each history ends with the engine ready and idle, with the weights it began with, and that it
comes back to this is part of what is checked. A failure carries a script that reproduces it.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from drivetrain.capability import Capability
from drivetrain.engine import InferenceEngine
from drivetrain.errors import WeightTransferFailed
from drivetrain.memory import MemoryTag, PauseMode
from drivetrain.outputs import FinishReason
from drivetrain.sampling import SamplingParams
from drivetrain.states import WeightState
from drivetrain_conformance.bench import Bench, NoOracle, Runs, until_idle
from drivetrain_conformance.contract import Contract, Fate, InFlight, Refusal, Request, Ruling, Weights
from drivetrain_conformance.oracle import Oracle
from drivetrain_conformance.replay import (
    Answers,
    End,
    Hangs,
    Live,
    bounded,
    ended,
    from_disk,
    greedy,
    load,
    look,
    proceed,
    push,
    refused,
    settle,
    start,
)
from drivetrain_conformance.strategies import AbortPoint, WeightPlanChoice, abort_points, weight_plans

SHORT: Final = 4
"""Tokens of a request that ends soon."""
LONG: Final = 96
"""Tokens of a request that is in flight for several actions."""
PROMPT_LENGTH: Final = 20
_DRAIN_SECONDS: Final = 30.0

AT_ONCE: Final = AbortPoint(0)
ONE_BUCKET: Final = WeightPlanChoice(1 << 40)

# Actions -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """A request arrives."""

    prompt: int = 0
    long: bool = False
    samples: int = 1
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A short request arrives and, if the engine serves, its answer is awaited: earlier ones have then begun."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Time passes: running streams bring some tokens, if there are any."""

    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Abort:
    """One of the requests under way is aborted; if there is none, one that nobody knows."""

    which: int = 0
    point: AbortPoint = AT_ONCE


@dataclass(frozen=True, slots=True)
class AbortAll:
    """All requests are aborted."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Generation is paused."""

    mode: PauseMode = PauseMode.ABORT


@dataclass(frozen=True, slots=True)
class Continue:
    """Generation is continued."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Memory is given back."""

    tags: frozenset[MemoryTag]
    in_flight: InFlight = InFlight.LEAVE


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Memory is taken again."""

    tags: frozenset[MemoryTag]


class Source(Enum):
    """Where an update's weights come from."""

    DISK = "disk"
    MEMORY = "memory"
    """This process, by WeightSync."""


class Meanwhile(Enum):
    """What happens in the middle of an update from disk."""

    NOTHING = "nothing"
    REQUEST = "request"
    """A request arrives."""
    PAUSE = "pause"
    """A pause is asked for."""


@dataclass(frozen=True, slots=True)
class Update:
    """The weights are updated."""

    weights: int = 0
    mode: PauseMode = PauseMode.ABORT
    source: Source = Source.DISK
    plan: WeightPlanChoice = ONE_BUCKET
    meanwhile: Meanwhile = Meanwhile.NOTHING


@dataclass(frozen=True, slots=True)
class BrokenUpdate:
    """An update from disk ends by an exception, after this share of its buckets was loaded."""

    weights: int = 1
    mode: PauseMode = PauseMode.ABORT
    loaded: float = 0.5


Action = Generate | Ask | Proceed | Abort | AbortAll | Pause | Continue | Sleep | WakeUp | Update | BrokenUpdate


class Ending(Enum):
    """What becomes of the requests that are under way when a history ends."""

    FINISH = "finish"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class History:
    """What happens to an engine."""

    actions: tuple[Action, ...]
    ending: Ending = Ending.FINISH


# Drawing them --------------------------------------------------------------------------------------------------------


class Family(Enum):
    """Kinds of actions. Within each, only those are drawn whose capabilities are claimed."""

    REQUESTS = "requests"
    PAUSES = "pauses"
    SLEEPS = "sleeps"
    UPDATES = "updates"


_PAUSES: Final[Mapping[Capability, PauseMode]] = {
    Capability.PAUSE_ABORT: PauseMode.ABORT,
    Capability.PAUSE_WAIT: PauseMode.WAIT,
    Capability.PAUSE_IN_PLACE: PauseMode.IN_PLACE,
    Capability.PAUSE_RETRACT: PauseMode.RETRACT,
}
_SLEEPS: Final[Mapping[Capability, MemoryTag]] = {
    Capability.SLEEP_KV_CACHE: MemoryTag.KV_CACHE,
    Capability.SLEEP_CUDA_GRAPH: MemoryTag.CUDA_GRAPH,
    Capability.SLEEP_WEIGHTS: MemoryTag.WEIGHTS,
}
_PUSHABLE: Final = frozenset({Capability.WEIGHTS_IN_PROCESS, Capability.WEIGHTS_SHARED_MEMORY, Capability.WEIGHTS_DISK})


def steps(
    families: frozenset[Family],
    capabilities: frozenset[Capability],
    *,
    prompts: int,
    weight_sets: int,
    weight_bytes: int = 1 << 20,
    keeps_weights: bool = False,
) -> SearchStrategy[tuple[Action, ...]]:
    """One or a few actions of these families, such as an engine with these capabilities takes.

    Most are drawn singly; some patterns, such as an update while long requests run, would be rare by chance.

    Args:
        families: What is drawn from; requests always are.
        capabilities: What the engine claims.
        prompts: How many prompts there are answers to.
        weight_sets: How many sets of weights there are.
        weight_bytes: Bytes of one set.
        keeps_weights: Weights that slept need no update.
    """
    drawn = _Steps(capabilities, prompts, weight_sets, weight_bytes)
    long = drawn.requests(long=st.just(True))
    choices = [
        (4, _one(drawn.requests(long=st.sampled_from((False, True, True))))),
        (2, _one(st.builds(Proceed, tokens=st.integers(1, LONG // 6)))),
        (1, _one(st.just(Ask()))),
    ]
    if Capability.ABORT in capabilities:
        aborts = st.builds(Abort, which=st.integers(0, 5), point=abort_points(LONG // 4))
        choices += [(2, _one(aborts)), (1, _one(st.just(AbortAll())))]
    pauses, go_on = drawn.pauses(), st.just(Continue())
    if Family.PAUSES in families:
        choices += [(2, _one(pauses)), (2, _one(go_on)), (2, _some(long, long, pauses))]
    if Family.SLEEPS in families:
        # Only an update brings back weights that were not kept.
        sleeps, wakes = drawn.sleeps(with_weights=keeps_weights or Family.UPDATES in families)
        choices += [(1, _one(sleeps)), (2, _one(wakes)), (1, _some(long, pauses, sleeps)), (1, _some(wakes, go_on))]
    if Family.UPDATES in families:
        updates, broken = drawn.updates()
        choices += [(2, _one(updates)), (1, _one(broken))]
        choices += [(4, _some(long, long, updates)), (1, _some(long, broken)), (1, _some(long, pauses, updates))]
        choices += [(3, _some(st.just(WakeUp(frozenset(drawn.tags))), updates, go_on))] if drawn.tags else []
    weighted = [strategy for weight, strategy in choices for _ in range(weight)]
    return st.integers(0, len(weighted) - 1).flatmap(weighted.__getitem__)


@dataclass(frozen=True, slots=True)
class _Steps:
    capabilities: frozenset[Capability]
    prompts: int
    weight_sets: int
    weight_bytes: int

    @property
    def tags(self) -> list[MemoryTag]:
        return [tag for capability, tag in _SLEEPS.items() if capability in self.capabilities]

    @property
    def modes(self) -> SearchStrategy[PauseMode]:
        return st.sampled_from([mode for capability, mode in _PAUSES.items() if capability in self.capabilities])

    def requests(self, long: SearchStrategy[bool]) -> SearchStrategy[Action]:
        streamed = st.booleans() if Capability.STREAMING in self.capabilities else st.just(False)
        prompts, samples = st.integers(0, self.prompts - 1), st.sampled_from((1, 1, 2))
        return st.builds(Generate, prompt=prompts, long=long, samples=samples, streamed=streamed)

    def pauses(self) -> SearchStrategy[Action]:
        return st.builds(Pause, self.modes)

    def sleeps(self, *, with_weights: bool) -> tuple[SearchStrategy[Action], SearchStrategy[Action]]:
        tags = [tag for tag in self.tags if with_weights or tag is not MemoryTag.WEIGHTS]
        some = st.frozensets(st.sampled_from(tags), min_size=1)
        fates = [fate for fate in InFlight if fate is not InFlight.ABORT or Capability.ABORT in self.capabilities]
        sleeps = st.builds(Sleep, tags=some, in_flight=st.sampled_from(fates))
        return sleeps, st.builds(WakeUp, tags=st.just(frozenset(tags)) | some)

    def updates(self) -> tuple[SearchStrategy[Action], SearchStrategy[Action]]:
        index, shares = st.integers(0, self.weight_sets - 1), st.sampled_from((0.0, 0.5, 1.0))
        sources = [Source.DISK] + [Source.MEMORY] * (not self.capabilities.isdisjoint(_PUSHABLE))
        whole = st.builds(
            Update,
            weights=index,
            mode=self.modes,
            source=st.sampled_from(sources),
            plan=weight_plans(self.weight_bytes),
            meanwhile=st.sampled_from((Meanwhile.NOTHING, *Meanwhile)),
        )
        return whole, st.builds(BrokenUpdate, weights=index, mode=self.modes, loaded=shares)


def _one(action: SearchStrategy[Action]) -> SearchStrategy[tuple[Action, ...]]:
    return action.map(lambda drawn: (drawn,))


def _some(*actions: SearchStrategy[Action]) -> SearchStrategy[tuple[Action, ...]]:
    """All of these or, to shrink, some of them."""

    def often(action: SearchStrategy[Action]) -> SearchStrategy[Action | None]:
        return st.integers(0, 7).flatmap(lambda kept: action if kept else st.none())

    return st.tuples(*map(often, actions)).map(lambda drawn: tuple(action for action in drawn if action is not None))


def histories(step: SearchStrategy[tuple[Action, ...]], steps: int, *, can_abort: bool) -> SearchStrategy[History]:
    """Histories of ``steps`` steps, or of fewer, to shrink: each step can be left out by itself."""
    often = st.integers(0, 15).flatmap(lambda kept: step if kept else st.just(()))
    drawn = st.lists(often, min_size=steps, max_size=steps)
    endings = [Ending.FINISH] + [Ending.ABORT] * can_abort
    return st.builds(lambda found, end: History(tuple(chain(*found)), end), drawn, st.sampled_from(endings))


# The script ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Script:
    """What was done so far, as a program."""

    prompts: Sequence[Sequence[int]]
    weight_sets: int
    config: Mapping[str, object]
    """Fields of the engine's configuration but its backend and model."""
    tolerance: float
    lines: list[str] = field(default_factory=list)
    _depth: int = 0

    def add(self, *lines: str) -> None:
        """Append statements of ``main``."""
        self.lines += [f"{'    ' * self._depth}{line}" for line in lines]

    @contextmanager
    def block(self, opening: str) -> Generator[None, None, None]:
        """What is added within stands in a block."""
        self.add(opening)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def text(self, error: BaseException) -> str:
        """The whole program."""
        first = f"{type(error).__name__}: {error}".splitlines()[0].replace("\\", "\\\\").replace('"""', "'''")
        others = ", ".join(f"models.with_other_weights(Path(MODEL), {seed})" for seed in range(1, self.weight_sets))
        return _SCRIPT.format(
            error=textwrap.shorten(first, 300),
            prompts=",\n    ".join(str(list(prompt)) for prompt in self.prompts),
            config="".join(f", {name}={value!r}" for name, value in self.config.items()),
            folders=f"[{', '.join(filter(None, ['Path(MODEL)', others]))}]",
            tolerance=self.tolerance,
            long=LONG,
            body=textwrap.indent("\n".join(self.lines), " " * 8),
        )


_SCRIPT: Final = '''\
"""Reproduces: {error}

Run it as: python SCRIPT.py BACKEND MODEL
"""

import asyncio
import contextlib
import sys
from pathlib import Path

from drivetrain import (
    EngineBusy,
    EngineStateError,
    SamplingParams,
    UnsupportedCapability,
    WeightTransferFailed,
    create_engine,
)
from drivetrain_conformance.bench import until_idle
from drivetrain_conformance.models import Models
from drivetrain_conformance.oracle import TransformersOracle
from drivetrain_conformance.replay import (
    Answers,
    End,
    ended,
    from_disk,
    load,
    look,
    proceed,
    push,
    refused,
    settle,
    start,
)
from drivetrain_conformance.strategies import WeightPlanChoice

BACKEND, MODEL = sys.argv[1:3]
PROMPTS = [
    {prompts},
]


async def main(models: Models) -> None:
    folders = {folders}
    async with create_engine(BACKEND, model=MODEL{config}) as engine:
        answers = await Answers.note(
            engine, folders, PROMPTS, {long}, oracle=TransformersOracle, tolerance={tolerance}
        )
{body}


with contextlib.closing(Models()) as models:
    asyncio.run(main(models))
'''


# Playing them --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was made."""

    live: Live
    variable: str
    tokens: int
    samples: int
    streamed: bool


class _TrainerFailed(Exception):
    """What breaks an update."""


class Player:
    """Plays one history on an engine that is ready and idle, and holds the engine to the contract at each step.

    Args:
        engine: The engine.
        answers: What it must answer.
        prompts: The prompts of the requests: of those that ``answers`` were noted for.
        contract: What it must do; the contract of the design if none is given.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        answers: Answers,
        prompts: Sequence[Sequence[int]],
        contract: Contract | None = None,
    ) -> None:
        self._engine = engine
        self._answers = answers
        self._prompts = prompts
        self._contract = contract or contract_of(engine)
        self._requests: dict[str, _Asked] = {}
        self._taken: set[str] = set()
        self._begun: set[str] = set()
        """Requests that must have made a token: one that came later has been answered meanwhile."""
        self._updates = 0
        config = engine.config.model_dump(mode="json", exclude_unset=True, exclude={"backend", "model"})
        self._script = Script(prompts, len(answers.folders), config, answers.tolerance)
        self.raced: list[bool] = []
        """For each long request that was aborted while it ran: whether it came back whole nevertheless."""

    async def play(self, history: History) -> None:
        """Play it. A failure carries the script that reproduces it as a note.

        Raises:
            AssertionError: the engine did not do what the contract says.
            DrivetrainError: it refused or failed where it must not.
        """
        try:
            await self._look()
            for action in history.actions:
                await self._step(action)
            await self._finish(history.ending)
        except Exception as error:
            error.add_note(f"This script reproduces it:\n\n{self._script.text(error)}")
            raise
        finally:
            for asked in self._requests.values():
                await asked.live.drop()

    async def _step(self, action: Action) -> None:
        await self._observe()
        before = self._contract
        self._script.add("", f"# {action}")
        match action:
            case Generate(prompt, long, samples, streamed):
                await self._generate(prompt, LONG if long else SHORT, samples, streamed)
            case Ask():
                await self._ask()
            case Proceed(tokens):
                await self._proceed(self._contract.having(Fate.RUNNING), tokens)
            case Abort(which, point):
                await self._abort(which, point)
            case AbortAll():
                await self._do(self._contract.abort(None), "engine.abort_generation()", self._engine.abort_generation)
            case Pause(mode):
                await self._pause(mode)
            case Continue():
                ruling = self._contract.continue_generation()
                await self._do(ruling, "engine.continue_generation()", self._engine.continue_generation)
            case Sleep(tags, in_flight):
                await self._sleep(tags, in_flight)
            case WakeUp(tags):
                ruling = self._contract.wake_up(tags)
                await self._do(ruling, f"engine.wake_up({_names(tags)})", lambda: self._engine.wake_up(tags))
            case Update() | BrokenUpdate():
                self._updates += 1
                await self._update(action, f"update-{self._updates}")
        await self._settle(before)
        await self._look()

    async def _finish(self, ending: Ending) -> None:
        """Bring the engine back to where it began; each step is checked as any other."""
        claims = self._engine.capabilities
        stuck = self._contract.weights is Weights.DIRTY and Capability.WEIGHT_UPDATE_IN_FLIGHT not in claims
        if Capability.ABORT in claims and (ending is Ending.ABORT or (stuck and self._contract.in_flight())):
            await self._step(AbortAll())
        if self._contract.asleep:
            await self._step(WakeUp(self._contract.asleep))
        if self._contract.weights is Weights.DIRTY:
            await self._step(Update(0, PauseMode.RETRACT if Capability.PAUSE_RETRACT in claims else PauseMode.ABORT))
        if self._contract.paused:
            await self._step(Continue())
        for name in self._contract.under_way():
            await self._await_end(name)
        if self._contract.version != self._answers.original:
            await self._update(Update(0), self._answers.original)
        await self._look()
        assert self._contract.state == "ready", f"the history leaves the engine {self._contract.state}"
        self._script.add("await until_idle(engine)")
        await until_idle(self._engine)

    # What is seen ------------------------------------------------------------------------------------------------

    async def _observe(self) -> None:
        """Take what has come back since the last step."""
        done = [name for name in self._contract.under_way() if self._requests[name].live.done]
        for name in done:
            if self._contract.requests[name].fate is Fate.RUNNING:
                self._contract = self._contract.ended_by_itself(name)
                await self._take(name, by_now=True)
            else:
                await self._look()

    async def _settle(self, before: Contract) -> None:
        """Take what must come back because of this step, and what ended just before it."""
        in_flight = [self._requests[name] for name in self._contract.in_flight()]
        self._script.add(f"await settle({', '.join(['engine', *(asked.variable for asked in in_flight)])})")
        await settle(self._engine, *(asked.live for asked in in_flight))
        for name in self._contract.having(Fate.FROZEN):
            if self._requests[name].live.done and before.requests[name].fate is Fate.RUNNING:
                self._contract = self._contract.ended_by_itself(name)
        for name, request in self._contract.requests.items():
            if not request.under_way and name not in self._taken:
                await self._take(name, by_now=request.fate is Fate.DONE)

    async def _await_end(self, name: str) -> None:
        self._contract = self._contract.ended_by_itself(name)
        await self._take(name, by_now=False)

    async def _take(self, name: str, *, by_now: bool) -> None:
        """Hold a request that ends against what it must be."""
        asked, request = self._requests[name], self._contract.requests[name]
        end = _end(request)
        arguments = [asked.variable, "answers", str(asked.tokens), f"End.{end.name}", str(list(request.versions))]
        stale = sorted(request.stale)
        least = int(name in self._begun)
        arguments += [f"stale={stale}"] * bool(stale) + [f"samples={asked.samples}"] * (asked.samples > 1)
        arguments += [f"least={least}"] * bool(least)
        self._script.add(f"await ended({', '.join(arguments + ['by_now=True'] * by_now)})")
        self._taken.add(name)
        completions = await ended(
            asked.live,
            self._answers,
            asked.tokens,
            end,
            request.versions,
            stale,
            samples=asked.samples,
            least=least,
            by_now=by_now,
        )
        if end is End.ABORTED_OR_WHOLE and asked.tokens == LONG:
            self.raced += [completion.finish_reason is not FinishReason.ABORT for completion in completions]

    async def _look(self) -> None:
        contract = self._contract
        by_fate = {fate: [self._requests[n] for n in contract.having(fate)] for fate in _STANDING}
        shown = "".join(
            f", {fate.value}=[{', '.join(asked.variable for asked in found)}]"
            for fate, found in by_fate.items()
            if found
        )
        where = f"state={contract.state!r}, version={contract.version!r}, paused={contract.is_paused}"
        self._script.add(f"await look(engine, {where}{shown})")
        await look(
            self._engine,
            state=contract.state,
            version=contract.version,
            paused=contract.is_paused,
            running=[asked.live for asked in by_fate[Fate.RUNNING]],
            frozen=[asked.live for asked in by_fate[Fate.FROZEN]],
            waiting=[asked.live for asked in by_fate[Fate.WAITING]],
        )

    # What is done ------------------------------------------------------------------------------------------------

    async def _do(self, ruling: Ruling, code: str, call: Callable[[], Awaitable[None]], *, target: str = "") -> bool:
        """Ask the engine; return whether it accepted, which is as it was ruled."""
        refusal, at = ruling.refusal, len(self._script.lines)
        if refusal is not None and not refusal.unless_ended:
            with self._script.block(_refused(refusal)):
                self._script.add(f"await {code}")
            with refused(refusal.error, refusal.state):
                async with bounded(code):
                    await call()
            return False
        self._script.add(f"{target}await {code}")
        try:
            async with bounded(code):
                await call()
        except Exception as error:
            if refusal is None or not isinstance(error, refusal.error):
                raise
            del self._script.lines[at:]
            with self._script.block(_refused(refusal)):
                self._script.add(f"await {code}")
            return False
        self._contract = ruling.after
        return True

    async def _generate(self, prompt: int, tokens: int, samples: int, streamed: bool) -> str | None:
        """A request arrives; its name if it was admitted."""
        # Each id begins with all earlier ones, so that an abort by prefix would end others too.
        name = "r" * (len(self._requests) + 1)
        variable = f"r{len(self._requests) + 1}"
        params = greedy(self._engine, tokens, samples)
        method = "generate_stream" if streamed else "generate"
        code = f"engine.{method}(PROMPTS[{prompt}], {_code(params)}, request_ids=[{name!r}])"
        token_ids, ids = list(self._prompts[prompt]), [self._id(name)]
        made: list[Live] = []

        async def begin() -> None:
            call = self._engine.generate_stream if streamed else self._engine.generate
            made.append(await start(self._engine, call(token_ids, params, request_ids=ids)))

        ruling = self._contract.generate(name)
        if not await self._do(ruling, f"start(engine, {code})", begin, target=f"{variable} = "):
            return None
        self._requests[name] = _Asked(made[0], variable, tokens, samples, streamed)
        return name

    async def _ask(self) -> None:
        earlier = self._contract.having(Fate.RUNNING)
        name = await self._generate(len(self._requests) % len(self._prompts), SHORT, 1, streamed=False)
        if name is not None and self._contract.requests[name].fate is Fate.RUNNING:
            await self._await_end(name)
            self._begun.update(earlier)

    async def _proceed(self, names: Sequence[str], tokens: int) -> None:
        running = [self._requests[name] for name in names if self._requests[name].streamed]
        if running:
            shown = ", ".join(asked.variable for asked in running)
            self._script.add(f"await proceed({shown}, tokens={tokens})")
            await proceed(*(asked.live for asked in running), tokens=tokens)

    async def _abort(self, which: int, point: AbortPoint) -> None:
        under_way = self._contract.under_way()
        name = under_way[which % len(under_way)] if under_way else "nobody"
        if under_way and self._contract.requests[name].fate is Fate.RUNNING:
            if point.tokens is None:
                await self._await_end(name)
            elif point.tokens and self._requests[name].streamed:
                await self._proceed([name], point.tokens)
            elif point.tokens:
                await self._ask()
            await self._observe()
        ruling = self._contract.abort(name)
        await self._do(ruling, f"engine.abort({name!r})", lambda: self._engine.abort(self._id(name)))

    async def _pause(self, mode: PauseMode) -> None:
        ruling, code = self._contract.pause(mode), f"engine.pause_generation({mode.value!r})"
        await self._do(ruling, code, lambda: self._engine.pause_generation(mode))

    async def _sleep(self, tags: frozenset[MemoryTag], in_flight: InFlight) -> None:
        abort, drain = in_flight is InFlight.ABORT, 0.0
        if in_flight is InFlight.DRAIN:
            # Frozen requests do not end however long they are given.
            drain = 0.02 if self._contract.having(Fate.FROZEN) else _DRAIN_SECONDS
        code = f"engine.sleep({_names(tags)}, abort_first={abort}, drain_timeout={drain})"
        ruling = self._contract.sleep(tags, in_flight)
        await self._do(ruling, code, lambda: self._engine.sleep(tags, abort_first=abort, drain_timeout=drain))

    async def _update(self, action: Update | BrokenUpdate, version: str) -> None:
        self._answers.made_by[version] = action.weights
        self._script.add(f"answers.made_by[{version!r}] = {action.weights}")
        ruling, at = self._contract.begin_update(action.mode), len(self._script.lines)
        refusal = ruling.refusal
        if isinstance(action, Update) and action.source is Source.MEMORY:
            await self._push(action, version)
        elif refusal is not None and not refusal.unless_ended:
            with self._script.block(_refused(refusal)), refused(refusal.error, refusal.state):
                await self._load(action, version, ruling)
        else:
            try:
                await self._load(action, version, ruling)
            except Exception as error:
                if refusal is None or not isinstance(error, refusal.error):
                    raise
                del self._script.lines[at:]
                with self._script.block(_refused(refusal)), self._script.block(_opening(action, version)):
                    self._script.add("await load(update)")

    async def _push(self, action: Update, version: str) -> None:
        """Update by WeightSync."""
        begun = self._contract.begin_update(action.mode)
        ruling = replace(begun, after=begun.after.commit_update(version))
        folder, plan, mode = self._answers.folders[action.weights], action.plan, action.mode
        code = f"push(engine, folders[{action.weights}], {version!r}, {mode.value!r}, plan={plan})"
        await self._do(ruling, code, lambda: push(self._engine, folder, version, mode, plan=plan))

    async def _load(self, action: Update | BrokenUpdate, version: str, ruling: Ruling) -> None:
        """Update from disk, bucket by bucket, and see what can happen in the middle of it."""
        request = from_disk(self._answers.folders[action.weights], version, action.mode)
        async with bounded("a weight update"):
            if isinstance(action, BrokenUpdate):
                broken = Refusal(WeightTransferFailed)
                with self._script.block(_refused(broken)), self._script.block(_opening(action, version)):
                    self._script.add(f"await load(update, 0.0, {action.loaded})")
                    with refused(broken.error):
                        async with self._engine.weight_update(request) as update:
                            self._contract = ruling.after
                            await load(update, 0.0, action.loaded)
                            self._script.add('raise RuntimeError("the trainer failed")')
                            raise _TrainerFailed
                self._contract = self._contract.break_update()
                return
            order = action.plan.order
            with self._script.block(_opening(action, version)):
                self._script.add(f"await load(update, 0.0, 0.5, order={order})")
                async with self._engine.weight_update(request) as update:
                    self._contract = ruling.after
                    await load(update, 0.0, 0.5, order=order)
                    if action.meanwhile is Meanwhile.REQUEST:
                        await self._generate(0, SHORT, 1, streamed=False)
                    elif action.meanwhile is Meanwhile.PAUSE:
                        await self._pause(action.mode)
                    self._script.add(f"await load(update, 0.5, 1.0, order={order})")
                    await load(update, 0.5, 1.0, order=order)
            self._contract = self._contract.commit_update(version)

    def _id(self, name: str) -> str:
        """The id of a request; those of other histories differ, as an engine may remember them."""
        return f"{id(self)}-{name}"


_STANDING: Final = (Fate.RUNNING, Fate.FROZEN, Fate.WAITING)


def contract_of(engine: InferenceEngine) -> Contract:
    """The contract of an engine that is ready and idle."""
    return Contract(
        version=engine.get_weight_version(),
        capabilities=engine.capabilities,
        keeps_weights=engine.config.sleep_keeps_weights,
    )


def _end(request: Request) -> End:
    if request.fate is Fate.DONE:
        return End.WHOLE
    if not request.versions:
        return End.EMPTY
    return End.ABORTED_OR_WHOLE if request.raced else End.ABORTED


def _refused(refusal: Refusal) -> str:
    state = "" if refusal.state is None else f", {refusal.state!r}"
    return f"with refused({refusal.error.__name__}{state}):"


def _opening(action: Update | BrokenUpdate, version: str) -> str:
    request = f"from_disk(folders[{action.weights}], {version!r}, {action.mode.value!r})"
    return f"async with engine.weight_update({request}) as update:"


def _names(tags: frozenset[MemoryTag]) -> str:
    return str(sorted(tag.value for tag in tags))


def _code(params: SamplingParams) -> str:
    fields = params.model_dump(exclude_unset=True)
    return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


# Checking an engine --------------------------------------------------------------------------------------------------


async def prepare(bench: Bench, weight_sets: int = 1, prompts: int = 3) -> tuple[Answers, list[list[int]]]:
    """Note the engine's answers with each set of weights, and choose prompts that these answer differently."""
    engine = bench.engine
    beginning = bench.prompt(PROMPT_LENGTH - 4)
    # Half of them begin alike, for the prefix cache.
    candidates = [beginning + bench.prompt(4) for _ in range(4)] + bench.prompts(4, PROMPT_LENGTH)
    folders = [bench.model, *(bench.other_weights(number) for number in range(1, weight_sets))]

    def oracle(folder: Path) -> Oracle | None:
        try:
            return bench.oracle(folder)
        except NoOracle:
            return None

    answers = await Answers.note(engine, folders, candidates, LONG, oracle=oracle, tolerance=bench.tolerance())

    def tells_apart(prompt: list[int]) -> tuple[bool, int]:
        found = [answers.of(weights, prompt) for weights in range(weight_sets)]
        return len({tuple(answer[:SHORT]) for answer in found}) == weight_sets, min(map(len, found))

    chosen = sorted(candidates, key=tells_apart, reverse=True)[:prompts]
    for prompt in chosen:
        assert len({tuple(answers.of(weights, prompt)) for weights in range(weight_sets)}) == weight_sets, (
            f"different weights give the same answer to {prompt}"
        )
    return answers, chosen


async def restore(engine: InferenceEngine, answers: Answers) -> None:
    """Bring an engine back on which a history failed."""
    if engine.status.asleep:
        await engine.wake_up(engine.status.asleep)
    if engine.status.weights is not WeightState.CLEAN or engine.get_weight_version() != answers.original:
        await engine.load_weights_from_disk(str(answers.folders[0]), answers.original)
    if engine.is_paused:
        await engine.continue_generation()
    await until_idle(engine)


class Checker:
    """Plays histories on one engine; restores it after a failure, so that hypothesis can shrink the history.

    Args:
        run: Runs a coroutine in the engine's event loop.
        engine: The engine, ready and idle.
        answers: What it answers.
        prompts: The prompts of the histories.
        contract: What it must do; the contract of the design if none is given.
        shrink_seconds: For how long a history that failed is made smaller.
    """

    def __init__(
        self,
        run: Runs,
        engine: InferenceEngine,
        answers: Answers,
        prompts: Sequence[Sequence[int]],
        contract: Contract | None = None,
        shrink_seconds: float = 60.0,
    ) -> None:
        self._run = run
        self._engine = engine
        self._answers = answers
        self._prompts = prompts
        self._contract = contract
        self._failures: list[tuple[int, Exception]] = []
        self._shrink_seconds = shrink_seconds
        self._shrinks_until = math.inf
        self._raced: list[bool] = []

    def check(self, history: History) -> None:
        """Play one history."""
        player = Player(self._engine, self._answers, self._prompts, self._contract)
        try:
            self._run(player.play(history))
        except Exception as error:
            self._failures.append((len(history.actions), error))
            self._restore(error)
            raise
        self._raced += player.raced

    def check_random(self, step: SearchStrategy[tuple[Action, ...]], *, count: int, steps: int, seeded_by: int) -> None:
        """Play ``count`` random histories of up to ``steps`` steps; raise the failure of the shortest that fails."""
        can_abort = Capability.ABORT in self._engine.capabilities

        @seed(seeded_by)
        @property_settings(count)
        @given(histories(step, steps, can_abort=can_abort))
        def holds(history: History) -> None:
            if time.monotonic() > self._shrinks_until:
                reject()
            self.check(history)

        try:
            holds()
        except Exception:
            if not self._failures:
                raise
        if self._failures:
            # Also where hypothesis speaks of flakiness: what was seen was seen.
            fewest = min(actions for actions, _ in self._failures)
            raise [error for actions, error in self._failures if actions == fewest][-1]
        whole = sum(self._raced)
        assert whole <= len(self._raced) / 2, (
            f"of {len(self._raced)} requests of {LONG} tokens that were aborted as they ran, {whole} came back whole"
        )

    def _restore(self, error: Exception) -> None:
        self._shrinks_until = min(self._shrinks_until, time.monotonic() + self._shrink_seconds)
        if isinstance(error, Hangs):
            self._shrinks_until = 0  # each further one would take as long
        try:
            self._run(restore(self._engine, self._answers))
        except Exception as failed:
            self._shrinks_until = 0
            error.add_note(f"The engine could not be restored: {type(failed).__name__}: {failed}")


def property_settings(examples: int) -> settings:
    """Settings of a property that holds of a live engine: no deadline, nothing kept, one failure, shrunk."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        phases=(Phase.generate, Phase.shrink),
    )
