"""The health of one engine of a fleet: pure values, no I/O.

    STARTING → READY | STALE
    READY ⇄ PAUSED       READY | PAUSED | LAGGING → LAGGING
    READY | PAUSED | LAGGING | STALE → UPDATING → READY | PAUSED | STALE
    any but FAILED → DRAINING        any → FAILED

An engine can be paused, drained and behind with its weights at once, so a status keeps these apart, and ``health``
names the one that takes precedence. STALE is left only by a committed update, or by weights that are shown to be the
fleet's: an engine with other weights would answer with tokens of the wrong version. FAILED is final, and DRAINING ends
when the engine has left the fleet. A LAGGING engine missed an update and still has the weights of an earlier version
of the fleet; ``max_staleness`` bounds how many versions it may be behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from drivetrain.errors import EngineStateError


class Health(Enum):
    """The health of one engine of a fleet, as its name is shown."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    UPDATING = "updating"
    LAGGING = "lagging"
    """It missed an update, and serves on with the weights of an earlier version of the fleet's."""
    STALE = "stale"
    """Its weights are not the fleet's: it gets no requests until a complete update is committed on it."""
    FAILED = "failed"
    DRAINING = "draining"
    """It is about to leave: it ends the requests that it has, and gets no new ones."""


EXPLAINED: Final = (Health.STALE, Health.LAGGING, Health.FAILED)
"""Healths whose reason is shown."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The facts that decide whether an engine gets requests. Each transition returns the next status or raises."""

    version: str = ""
    """The weight version that it was last seen to serve."""
    update_id: str = ""
    """Id of the update that brought its weights; empty: it has loaded them, or their origin is unknown."""
    started: bool = False
    synced: bool = False
    """True if its weights are the fleet's."""
    behind: int = 0
    """Number of the fleet's versions that a lagging engine has missed; 0 if it does not lag."""
    updating: bool = False
    paused: bool = False
    """True while the engine itself holds requests: paused or asleep."""
    draining: bool = False
    failed: bool = False
    why: str = ""
    """The reason for which it is stale, lagging or failed."""

    @property
    def servable(self) -> bool:
        """True if its weights are of a version that may be served: the fleet's, or one that it may lag behind with."""
        return self.synced or self.behind > 0

    @property
    def health(self) -> Health:
        """The health that takes precedence where several hold at once."""
        if self.failed:
            return Health.FAILED
        if not self.started:
            return Health.STARTING
        if self.draining:
            return Health.DRAINING
        if self.updating:
            return Health.UPDATING
        if not self.servable:
            return Health.STALE
        if self.paused:
            return Health.PAUSED
        return Health.READY if self.synced else Health.LAGGING

    @property
    def takes_requests(self) -> bool:
        """True if new requests may go to it."""
        return self.health in (Health.READY, Health.LAGGING)

    @property
    def takes_updates(self) -> bool:
        """True if a weight update goes to it; a draining engine still serves, so it must keep the fleet's version."""
        return self.started and not self.failed

    @property
    def may_serve_soon(self) -> bool:
        """True if requests for it may wait: it serves, or will without another push."""
        return self.health in (
            Health.STARTING,
            Health.READY,
            Health.LAGGING,
            Health.PAUSED,
            Health.UPDATING,
        )

    def describe(self) -> str:
        """The health with its reason, such as ``stale (it joined and was not synced)``."""
        name: str = self.health.value
        return f"{name} ({self.why})" if self.why and self.health in EXPLAINED else name

    # Transitions -------------------------------------------------------------------------------------------------

    def start(self, version: str, update_id: str = "", *, stale: str = "") -> MemberStatus:
        """STARTING → READY, or STALE if ``stale`` says why its weights are not known to be the fleet's."""
        self._not_failed("start")
        if self.started:
            raise self._refuse("start", "it was started before")
        return replace(self, started=True, version=version, update_id=update_id, synced=not stale, why=stale)

    def pause(self) -> MemberStatus:
        """READY → PAUSED; idempotent."""
        self._open("pause")
        return replace(self, paused=True)

    def resume(self) -> MemberStatus:
        """PAUSED → READY; idempotent."""
        self._open("resume")
        return replace(self, paused=False)

    def begin_update(self) -> MemberStatus:
        """READY | PAUSED | STALE → UPDATING."""
        self._open("update")
        if self.updating:
            raise self._refuse("update", "an update is under way")
        return replace(self, updating=True)

    def commit(self, version: str, update_id: str = "") -> MemberStatus:
        """UPDATING → READY or PAUSED with the fleet's new version: the way out of STALE."""
        self._open("commit")
        if not self.updating:
            raise self._refuse("commit", "no update is under way")
        return replace(self, updating=False, synced=True, behind=0, version=version, update_id=update_id, why="")

    def relabel(self, version: str) -> MemberStatus:
        """Give the same weights another version."""
        self._open("relabel")
        return replace(self, version=version)

    def stale(self, why: str) -> MemberStatus:
        """Any but STARTING and FAILED → STALE."""
        self._open("be left behind")
        return replace(self, updating=False, synced=False, behind=0, why=why)

    def lag(self, why: str) -> MemberStatus:
        """READY | PAUSED | LAGGING → LAGGING, one version further behind."""
        self._open("lag")
        if self.updating or not self.servable:
            raise self._refuse("lag", "its weights are not known to be of a version that the fleet committed")
        return replace(self, synced=False, behind=self.behind + 1, why=why)

    def drain(self) -> MemberStatus:
        """Any but FAILED → DRAINING; idempotent."""
        self._open("drain")
        return replace(self, draining=True)

    def fail(self, why: str) -> MemberStatus:
        """Any → FAILED; the first reason stays."""
        return self if self.failed else replace(self, failed=True, updating=False, synced=False, behind=0, why=why)

    def _not_failed(self, action: str) -> None:
        if self.failed:
            raise self._refuse(action, "a failed engine does not come back; add a new one")

    def _open(self, action: str) -> None:
        self._not_failed(action)
        if not self.started:
            raise self._refuse(action, "it has not started")

    def _refuse(self, action: str, remedy: str) -> EngineStateError:
        return EngineStateError(
            f"an engine that is {self.describe()} cannot {action}: {remedy}", state=self.health.value
        )
