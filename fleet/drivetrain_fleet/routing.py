"""Chooses the engine of a sample: least load in tokens, sticky sessions, and prefixes that an engine has seen.

Pure and deterministic: the same calls in the same order give the same answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain_fleet.prefix_index import Blocks, PrefixIndex


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Policy that spreads samples over the engines of a fleet.

    Raises:
        InvalidConfig: A value is wrong.
    """

    prefix_affinity: bool = True
    """Prefer the engine that has seen the longest prefix of the prompt."""
    margin_tokens: int = 16_384
    """Affinity yields to the least loaded engine if the preferred one's load exceeds that engine's by more tokens than
    this, and by more than :attr:`margin_ratio`."""
    margin_ratio: float = 1.5
    """Largest load of the preferred engine, as a multiple of the least load."""
    prefix_blocks: int = 1 << 16
    """Most blocks of 32 tokens that are remembered per engine."""
    sessions: int = 1 << 16
    """Most sessions whose engine is remembered; the one that was not used for longest is forgotten first."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix_affinity, bool):
            _refuse("prefix_affinity", self.prefix_affinity, "a bool")
        for name in ("margin_tokens", "prefix_blocks", "sessions"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                _refuse(name, value, "an integer from 0")
        ratio = self.margin_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio >= 1:
            _refuse("margin_ratio", ratio, "a number from 1")


def _refuse(field: str, value: object, expected: str) -> NoReturn:
    raise InvalidConfig(f"{field}={shown(value)}: expected {expected}", field=field)


@dataclass(frozen=True, slots=True)
class Work:
    """A sample, as routing sees it."""

    blocks: Blocks
    session: str | None = None


@dataclass(slots=True)
class Load:
    """Tokens and samples of the fleet that an engine has."""

    tokens: int = 0
    """Tokens of the prompts, and tokens that are still to be generated."""
    samples: int = 0
    taken: int = 0
    """Samples that it ever got; decides between engines of equal load."""


@dataclass(slots=True)
class Router:
    """Chooses an engine for each sample, and records which prompts it sent to which engine."""

    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    _prefixes: dict[str, PrefixIndex] = field(default_factory=dict)
    _sessions: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def choose(self, work: Work, loads: Mapping[str, Load]) -> str | None:
        """Return the engine for a sample; None if there is no candidate.

        Args:
            work: The sample.
            loads: The candidates, by name: engines that take requests and have room.
        """
        if not loads:
            return None
        if work.session is not None and (sticky := self._sessions.get(work.session)) in loads:
            return sticky
        least = min(loads, key=lambda name: (loads[name].tokens, loads[name].taken))
        preferred = self._longest_prefix(work, loads)
        if preferred is None or self._yields(loads[preferred].tokens, loads[least].tokens):
            return least
        return preferred

    def sent(self, work: Work, name: str) -> None:
        """Record that a sample goes to this engine."""
        if self.policy.prefix_affinity:
            self._index(name).add(work.blocks)
        if work.session is not None:
            self._sessions[work.session] = name
            self._sessions.move_to_end(work.session)
            while len(self._sessions) > self.policy.sessions:
                self._sessions.popitem(last=False)

    def answered(self, work: Work, token_ids: Sequence[int], name: str) -> None:
        """Record prompt and answer as seen by the engine: the next turn's prompt begins with them."""
        if self.policy.prefix_affinity:
            self._index(name).add(work.blocks.followed_by(token_ids))

    def cache_dropped(self, name: str) -> None:
        """Forget what an engine had cached."""
        if name in self._prefixes:
            self._prefixes[name].clear()

    def forget(self, name: str) -> None:
        """Forget an engine that has left or failed."""
        self._prefixes.pop(name, None)
        for session in [session for session, sticky in self._sessions.items() if sticky == name]:
            del self._sessions[session]

    def _index(self, name: str) -> PrefixIndex:
        return self._prefixes.setdefault(name, PrefixIndex(self.policy.prefix_blocks))

    def _longest_prefix(self, work: Work, loads: Mapping[str, Load]) -> str | None:
        if not self.policy.prefix_affinity or not len(work.blocks):
            return None
        best = 0
        holders: list[str] = []
        for name in loads:
            if (index := self._prefixes.get(name)) is None:
                continue
            tokens = index.matched(work.blocks, at_least=best)
            if tokens > best:
                best, holders = tokens, [name]
            elif tokens == best > 0:
                holders.append(name)
        return min(holders, key=lambda name: (loads[name].tokens, loads[name].taken), default=None)

    def _yields(self, preferred: int, least: int) -> bool:
        return preferred - least > self.policy.margin_tokens and preferred > self.policy.margin_ratio * least
