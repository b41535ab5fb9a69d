"""Find the other ranks of a trainer through the store of its default process group."""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import torch.distributed

from drivetrain.errors import DeadlineExceeded, InvalidRequest, TrainerRankLost
from drivetrain_weight_sync.shards.links import Hello, Link, decoded_failure, encoded, failure

_dist: Any = torch.distributed
"""``Any``: its stores and groups are not declared."""
_numbers: Final[defaultdict[str, itertools.count[int]]] = defaultdict(itertools.count)
"""Numbers of a group's syncs; the ranks make them in the same order."""
_POLL_S: Final = 0.005


class Place(msgspec.Struct, frozen=True):
    """Address of the rank that pushes."""

    rank: int
    address: str
    port: int
    key: str
    """Shown by every rank that connects."""


class Ranks:
    """The ranks of a trainer that push together; one of them has the engine.

    Args:
        group: A process group of ``torch.distributed``; None: the default group.

    Raises:
        InvalidRequest: there is no such group, or this process is not in it.
    """

    def __init__(self, group: Any = None) -> None:
        if not _dist.is_available() or not _dist.is_initialized():
            raise InvalidRequest(
                "several ranks push together in a torch.distributed group, and there is none; call "
                "torch.distributed.init_process_group first",
                field="group",
            )
        self.rank: int = _dist.get_rank(group)
        self.size: int = _dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidRequest("this process is not in the group; pass a group that it is in", field="group")
        members = _dist.get_process_group_ranks(group or _dist.group.WORLD)
        name = f"drivetrain/{(group or _dist.group.WORLD).group_name}-{members[0]}"
        self._base = _dist.distributed_c10d._get_default_store()
        self.store = _dist.PrefixStore(f"{name}/{next(_numbers[name])}", self._base)
        self.timeout: float = self._base.timeout.total_seconds()
        """Timeout in seconds of the ranks' waits for each other: ``init_process_group``'s."""
        self._counted = False

    def own_address(self) -> str:
        """Return this host's address for the other ranks: the local one of its route to the group's store."""
        store = self._base
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if not hasattr(store, "host"):
            return "127.0.0.1"  # a store of files, which ranks of one host use
        family, kind, protocol, _, there = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as route:
            route.connect(there)  # sends nothing
            return str(route.getsockname()[0])

    def publish(self, place: Place) -> None:
        """Tell the other ranks that this one pushes.

        Raises:
            InvalidRequest: another rank does already; it is told.
        """
        mine = msgspec.json.encode(place).decode()
        with self._reaching():
            found = self.store.compare_set("pushes", "", mine)
        other = msgspec.json.decode(found, type=Place)
        if other != place:
            error = InvalidRequest(
                f"ranks {other.rank} and {self.rank} of the trainer have an engine each; pass engine=None on others",
                field="engine",
            )
            link = self.reach()
            link.say(failure(error))
            link.close()
            raise error

    def reach(self) -> Link:
        """Connect to the rank that pushes, waiting until it listens.

        Raises:
            InvalidRequest: every rank passed ``engine=None``.
            DeadlineExceeded: no rank began to push in time.
            TrainerRankLost: the rank that pushes is gone.
            DrivetrainError: the error with which its push failed before this rank was connected.
        """
        with self._reaching():
            if not self._counted:
                self._counted = True
                self.store.add("without an engine", 1)
            ends = time.monotonic() + self.timeout
            while not self.store.check(["pushes"]):
                if self.store.add("without an engine", 0) >= self.size:
                    raise InvalidRequest("every rank passed engine=None; pass the engine on one", field="engine")
                if time.monotonic() > ends:
                    raise DeadlineExceeded(
                        f"timed out after {self.timeout:g} s waiting for the rank with an engine to push"
                    )
                time.sleep(_POLL_S)
            place = msgspec.json.decode(self.store.get("pushes"), type=Place)
        self.require_none_failed()
        try:
            return self._connect(place)
        except TrainerRankLost:
            self.require_none_failed()  # it may have failed, and have been closed, since
            raise

    def _connect(self, place: Place) -> Link:
        try:
            connection = socket.create_connection((place.address, place.port), timeout=self.timeout)
        except OSError as error:
            raise TrainerRankLost(
                f"rank {place.rank} of the trainer, which pushes, cannot be reached at {place.address}:{place.port} "
                f"({error}); its WeightSync was closed, or it ended",
                rank=place.rank,
            ) from error
        link = Link(connection, place.rank, self.timeout)
        link.say(Hello(place.key, self.rank))
        return link

    def tell_late_ranks(self, ranks: Iterable[int], error: BaseException) -> None:
        """Leave the error of a failed push for ranks that come too late to be told; each reads it once."""
        with self._reaching():
            for rank in ranks:
                self.store.set(f"failed for {rank}", encoded(failure(error)))

    def forget_late_ranks(self, ranks: Iterable[int]) -> None:
        """Take back what these ranks did not read: a new push begins."""
        with self._reaching():
            for rank in ranks:
                self.store.delete_key(f"failed for {rank}")

    def require_none_failed(self) -> None:
        """Raise the error of a push that failed before this rank joined it."""
        key = f"failed for {self.rank}"
        with self._reaching():
            left = self.store.get(key) if self.store.check([key]) else None
            if left is not None:
                self.store.delete_key(key)
        if left is not None:
            raise decoded_failure(left)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the errors of stores
            raise TrainerRankLost(f"the store of the trainer's process group is gone: {error}") from error


def new_key() -> str:
    """Return a secret that ranks show when they connect."""
    return secrets.token_hex(16)
