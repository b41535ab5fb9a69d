"""The ranks of a trainer tell each other how a rollout's steps ended, so that none waits for one that failed."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch.distributed

from drivetrain.engine.states import EngineState
from drivetrain.errors import (
    DeadlineExceeded,
    DrivetrainError,
    EngineStateError,
    TrainerRankLost,
    from_wire,
    to_wire,
)
from drivetrain_weight_sync.shards.links import Committed, Failed, Hello, Link
from drivetrain_weight_sync.shards.rank_discovery import Place, Ranks, new_key

_HELLO_S: Final = 10.0
"""Seconds in which a connection must show the key."""

Facts = dict[str, Any]
"""Plain values that a rank sends to the others."""


def rank_here() -> int:
    """Return this process's rank, also before the trainer has made its process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


class TrainerRanks:
    """The processes of a trainer, which go through the same steps and agree after each of them.

    At each agreement every other rank sends rank 0 one message, and rank 0 sends all of these back to each rank. A rank
    that fails before it calls :meth:`agree` calls :meth:`tell` instead.
    """

    def __init__(self) -> None:
        self._ranks = Ranks()
        self.rank = self._ranks.rank
        self.size = self._ranks.size
        self._links: dict[int, Link] = {}
        """By rank: on rank 0 to every other one, on others to rank 0."""
        self._unheard: Counter[int] = Counter()
        """Messages of each rank to agreements that are over."""
        self._told: BaseException | None = None
        """The last error that the other ranks know of."""
        self._closed = False

    def agree(self, mine: Mapping[str, Any] | None = None) -> list[Facts]:
        """Wait until every rank is here; return the facts that each one gives, by rank.

        Raises:
            DrivetrainError: another rank failed: its error, and the rank in its message.
            TrainerRankLost: another rank ended.
            DeadlineExceeded: a rank does not come within the timeout of the trainer's process group.
        """
        try:
            self._require_connected()
            facts = dict(mine or {})
            if self.rank == 0:
                return self._heard_by_all(facts)
            link = self._links[0]
            with suppress(DrivetrainError):  # a last word of rank 0 may have come before it went
                link.say(Committed(facts))
            while (message := self._heard(link)) is None:
                pass
            everyone: list[Facts] = _facts(message)["ranks"]
            return everyone
        except DrivetrainError as error:
            self._told = error
            raise
        except BaseException as error:  # interrupted: some messages may be lost
            self._told = error
            self.close()
            raise

    def tell(self, error: BaseException) -> None:
        """End the agreement that the other ranks come to next with this error, unless they know it already."""
        if error is self._told:
            return
        self._told = error
        with suppress(DrivetrainError):
            self._require_connected()
        self._say_to_all(_failure(error, self.rank))
        self._unheard.update(self._links.keys())

    def close(self) -> None:
        """Leave the other ranks."""
        self._closed = True
        for link in self._links.values():
            link.close()

    def _require_connected(self) -> None:
        if self._closed:
            raise EngineStateError(
                "this rank left the other ranks of the trainer; start all ranks again", state=EngineState.CLOSED.value
            )
        if not self._links:
            self._connect()

    def _connect(self) -> None:
        if self.rank:
            self._links = {0: self._ranks.reach()}
            return
        address, key = self._ranks.own_address(), new_key()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        ends = time.monotonic() + self._ranks.timeout
        with socket.create_server((address, 0), family=family, backlog=self.size) as listening:
            self._ranks.publish(Place(0, address, listening.getsockname()[1], key))
            while len(self._links) < self.size - 1:
                listening.settimeout(max(ends - time.monotonic(), 1e-3))
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    raise self._late({*range(1, self.size)} - self._links.keys()) from None
                with suppress(DrivetrainError):
                    hello = Link(connection, -1, _HELLO_S).hear()
                    if isinstance(hello, Hello) and hmac.compare_digest(hello.key, key):
                        self._links[hello.rank] = Link(connection, hello.rank, self._ranks.timeout)
                        continue
                connection.close()

    def _heard_by_all(self, mine: Facts) -> list[Facts]:
        try:
            found = {0: mine, **self._collected()}
        except DrivetrainError as error:
            self._say_to_all(Failed(*to_wire(error)))
            raise
        everyone = [found[rank] for rank in range(self.size)]
        self._say_to_all(Committed({"ranks": everyone}))
        return everyone

    def _collected(self) -> dict[int, Facts]:
        """Hear every other rank, whichever speaks first."""
        found: dict[int, Facts] = {}
        coming = set(self._links)
        ends = time.monotonic() + self._ranks.timeout
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link, selectors.EVENT_READ, link)
            try:
                while coming:
                    ready = selector.select(max(ends - time.monotonic(), 0))
                    if not ready:
                        raise self._late(coming)
                    for key, _ in ready:
                        rank = key.data.rank
                        if (message := self._heard(key.data)) is not None:
                            selector.unregister(key.data)
                            coming.remove(rank)
                            found[rank] = _facts(message)
            finally:
                self._unheard.update(coming)
        return found

    def _heard(self, link: Link) -> Committed | Failed | None:
        """Return a rank's message for this agreement; None if the message was for an earlier one.

        Raises:
            TrainerRankLost, DeadlineExceeded: the connection ended, or nothing comes.
        """
        message: Committed | Failed
        try:
            said = link.hear()
            assert isinstance(said, Committed)
            message = said
        except DrivetrainError as error:
            if isinstance(error, DeadlineExceeded) and error.__cause__ is not None:
                raise
            if error.__cause__ is not None:  # the connection's own failure, not one that was told
                raise TrainerRankLost(
                    f"rank {link.rank} of the trainer ended, or closed its rollouts; find out why, and start all ranks "
                    "again",
                    rank=link.rank,
                ) from error
            message = Failed(*to_wire(error))
        if self._unheard[link.rank]:
            self._unheard[link.rank] -= 1
            return None
        return message

    def _late(self, absent: Iterable[int]) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"timed out after {self._ranks.timeout:g} s waiting for ranks {', '.join(map(str, sorted(absent)))} of the "
            "trainer to generate; every rank makes the same rollouts"
        )

    def _say_to_all(self, message: Committed | Failed) -> None:
        for link in self._links.values():
            with suppress(DrivetrainError):  # a rank that is gone is noticed at the next agreement
                link.say(message)


def _facts(message: Committed | Failed) -> Facts:
    if isinstance(message, Failed):
        raise from_wire(message.error, message.message, message.fields)
    return message.result


def _failure(error: BaseException, rank: int) -> Failed:
    """Describe an error to other ranks, with the rank that it happened on."""
    if not isinstance(error, DrivetrainError):
        told = f"{type(error).__name__}: {error}"
        error = TrainerRankLost(f"it left the rollout with {told}; find out why, and start all ranks again", rank=rank)
    name, message, fields = to_wire(error)
    return Failed(name, f"on rank {rank} of the trainer: {message}", fields)
