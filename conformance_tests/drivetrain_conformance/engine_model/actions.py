"""The actions of a history, and strategies that draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Final

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain_conformance.engine_model.contract import InFlight
from drivetrain_conformance.engine_model.expected_answers import Fields, Style
from drivetrain_conformance.engine_model.strategies import AbortPoint, WeightPlanChoice, abort_points, weight_plans
from drivetrain_conformance.harness.testbench import PAUSES

LONG: Final = 96
"""Length of a request that stays in flight for several actions, in tokens."""
PLAIN: Final = Fields()
AT_ONCE: Final = AbortPoint(0)
ONE_BUCKET: Final = WeightPlanChoice(1 << 40)


@dataclass(frozen=True, slots=True)
class Generate:
    """A request arrives."""

    prompt: int = 0
    long: bool = False
    samples: int = 1
    streamed: bool = False
    fields: Fields = PLAIN


@dataclass(frozen=True, slots=True)
class Ask:
    """A short request arrives; if it runs, its answer is awaited, so that earlier requests have begun too."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Time passes: running streams bring some tokens."""

    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Abort:
    """One of the unfinished requests is aborted, or an unknown id if there is none."""

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
    """Memory is put to sleep."""

    tags: frozenset[MemoryTag]
    in_flight: InFlight = InFlight.LEAVE


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Memory is woken up."""

    tags: frozenset[MemoryTag]


class Source(Enum):
    """Source of an update's weights."""

    DISK = "disk"
    MEMORY = "memory"
    """From tensors of this process, by WeightSync."""


class Meanwhile(Enum):
    """An event in the middle of an update from disk."""

    NOTHING = "nothing"
    REQUEST = "request"
    """A request arrives."""
    PAUSE = "pause"
    """A pause is requested."""


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
    """An update from disk fails with an exception after loading this share of its buckets."""

    weights: int = 1
    mode: PauseMode = PauseMode.ABORT
    loaded: float = 0.5


Action = Generate | Ask | Proceed | Abort | AbortAll | Pause | Continue | Sleep | WakeUp | Update | BrokenUpdate


class Ending(Enum):
    """The fate of unfinished requests at the end of a history."""

    FINISH = "finish"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class History:
    """A sequence of actions on an engine, and how it ends."""

    actions: tuple[Action, ...]
    ending: Ending = Ending.FINISH


# Strategies ----------------------------------------------------------------------------------------------------------


class Family(Enum):
    """Kinds of actions. Actions whose capability is unclaimed are never drawn."""

    REQUESTS = "requests"
    PAUSES = "pauses"
    SLEEPS = "sleeps"
    UPDATES = "updates"


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
    styles: Sequence[Style] = (Style.PLAIN,),
    adapted: bool = False,
) -> SearchStrategy[tuple[Action, ...]]:
    """Draw one or a few actions from these families that suit an engine with these capabilities.

    Most actions are drawn singly. Patterns that would be rare by chance, such as an update while long requests run, are
    drawn as a group.

    Args:
        families: The families to draw from; requests are always included.
        capabilities: The engine's capabilities.
        prompts: Number of prompts with expected answers.
        weight_sets: Number of sets of weights.
        weight_bytes: Bytes of one set.
        keeps_weights: Weights survive sleep, so they need no update after it.
        styles: Styles with expected answers.
        adapted: There are expected answers with an adapter.
    """
    drawn = _Steps(capabilities, prompts, weight_sets, weight_bytes, tuple(styles), adapted)
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
    styles: tuple[Style, ...]
    adapted: bool

    @property
    def tags(self) -> list[MemoryTag]:
        return [tag for capability, tag in _SLEEPS.items() if capability in self.capabilities]

    @property
    def modes(self) -> SearchStrategy[PauseMode]:
        return st.sampled_from([mode for capability, mode in PAUSES.items() if capability in self.capabilities])

    def requests(self, long: SearchStrategy[bool]) -> SearchStrategy[Action]:
        streamed = st.booleans() if Capability.STREAMING in self.capabilities else st.just(False)
        prompts, samples = st.integers(0, self.prompts - 1), st.sampled_from((1, 1, 2))
        fields = st.just(PLAIN) | self.fields()
        return st.builds(Generate, prompt=prompts, long=long, samples=samples, streamed=streamed, fields=fields)

    def fields(self) -> SearchStrategy[Fields]:
        """Any mixture of claimed fields."""

        def if_claimed(*needed: Capability) -> SearchStrategy[bool]:
            return st.booleans() if self.capabilities.issuperset(needed) else st.just(False)

        return st.builds(
            Fields,
            style=st.sampled_from(self.styles),
            lora=st.booleans() if self.adapted else st.just(False),
            stop=if_claimed(Capability.STOP_TOKEN_IDS),
            logprobs=if_claimed(Capability.LOGPROBS_RAW),
            scores=if_claimed(Capability.PROMPT_LOGPROBS),
            priority=st.sampled_from((0, 1, -1)) if Capability.PRIORITY in self.capabilities else st.just(0),
        )

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
    """Draw all of these actions, rarely leaving one out, so that hypothesis can shrink."""

    def often(action: SearchStrategy[Action]) -> SearchStrategy[Action | None]:
        return st.integers(0, 7).flatmap(lambda kept: action if kept else st.none())

    return st.tuples(*map(often, actions)).map(lambda drawn: tuple(action for action in drawn if action is not None))


def histories(step: SearchStrategy[tuple[Action, ...]], steps: int, *, can_abort: bool) -> SearchStrategy[History]:
    """Draw histories of up to ``steps`` steps; each step can be left out alone, so that hypothesis can shrink."""
    often = st.integers(0, 15).flatmap(lambda kept: step if kept else st.just(()))
    drawn = st.lists(often, min_size=steps, max_size=steps)
    endings = [Ending.FINISH] + [Ending.ABORT] * can_abort
    return st.builds(lambda found, end: History(tuple(chain(*found)), end), drawn, st.sampled_from(endings))
