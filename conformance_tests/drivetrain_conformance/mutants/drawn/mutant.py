"""A wrong backend that is drawn: an effect, which says what goes wrong, and a condition, which says when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.backend.base import GenerateRequest
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling_mask import SamplingMask


@dataclass(slots=True)
class Scene:
    """A call of a backend, and the calls before it."""

    method: str
    number: int
    """Number of calls of this method, this one included."""
    beside: list[GenerateRequest]
    """Requests in flight, without this one."""
    past: frozenset[str]
    """Kinds of calls that came before."""
    request: GenerateRequest | None = None
    earlier: GenerateRequest | None = None
    """The request that arrived before this one."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Answers that the backend keeps."""
    config: EngineConfig = field(default_factory=lambda: EngineConfig(backend="-", model="-"))


Holds = Callable[[Scene], bool]
ChangeRequest = Callable[[GenerateRequest, Scene], GenerateRequest]
ChangeItems = Callable[[list[Any], Any], list[Any]]
"""Changes some items of an answer, given the item before them; None before the first."""


@dataclass(frozen=True, slots=True)
class OnRequest:
    """Changes each request, from one of its tokens on, or once it was frozen in one mode."""

    change: ChangeRequest
    shows: Callable[[GenerateRequest], bool] = lambda request: True
    """Returns whether a user could see the change of such a request."""
    start: int = 0
    frozen: PauseMode | None = None

    def spoils(self, request: GenerateRequest, scene: Scene) -> bool:
        """Return whether a user could see its change of a request."""
        return self.shows(request) and self.change(request, scene) != request


@dataclass(frozen=True, slots=True)
class OnResult:
    """Changes a list of a result, from one of its items on."""

    field: str
    change: ChangeItems
    start: int = 0

    def spoiled(self, part: Any, first: int = 0, before: Any = None) -> Any:
        """Return a result or a delta with its items changed; earlier deltas had ``first`` items."""
        items = getattr(part, self.field, None)
        if items is None or not len(items):
            return part
        kept = max(self.start - first, 0)
        whole = items if isinstance(items, list) else [items[at : at + 1] for at in range(len(items))]
        changed = whole[:kept] + self.change(whole[kept:], whole[kept - 1] if 0 < kept <= len(whole) else before)
        return replace(part, **{self.field: like(items, changed)})


@dataclass(frozen=True, slots=True)
class OnAnswer:
    """Changes a whole result, or the answer of another call."""

    method: str
    change: Callable[[Any, Scene], Any]


@dataclass(frozen=True, slots=True)
class OnCall:
    """Surrounds a call: gets the backend, a function that makes the call, and its arguments."""

    methods: tuple[str, ...]
    act: Callable[[Any, Callable[..., Awaitable[Any]], tuple[Any, ...]], Awaitable[Any]]
    shows: Callable[[tuple[Any, ...], Scene, Exception | None], bool] = lambda arguments, scene, error: error is None
    least: int = 1
    """Calls in one case after which a user could see it."""
    needs: Capability | None = None
    """Capability without which the call has no such effect."""


@dataclass(frozen=True, slots=True)
class OnConfig:
    """Loses a field of the configuration."""

    field: str
    needs: Capability | None = None
    """Capability that a value other than the default needs."""


Effect = OnRequest | OnResult | OnAnswer | OnCall | OnConfig


@dataclass(frozen=True, slots=True)
class Drawn:
    """A wrong backend that was drawn."""

    name: str
    effect: Effect
    holds: Holds


def like(items: Any, changed: list[Any]) -> Any:
    """Return items in the form in which a result holds them."""
    if isinstance(items, RoutedExperts):
        return RoutedExperts.join(changed)
    return SamplingMask.join(items.vocab_size, changed) if isinstance(items, SamplingMask) else changed
