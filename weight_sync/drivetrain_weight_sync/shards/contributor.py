"""The other ranks of a trainer: they send their shards to the rank that pushes, when it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from drivetrain.errors import DrivetrainError, TrainerRankLost, WeightSyncError
from drivetrain_weight_sync.shards.carriers import Carrier, NcclCarrier, SocketCarrier, gpu_of
from drivetrain_weight_sync.shards.links import (
    Committed,
    FormGroup,
    Link,
    Message,
    Offer,
    Send,
    Staged,
    StageParts,
    failure,
    lost,
)
from drivetrain_weight_sync.shards.part_staging import PartStager, this_host
from drivetrain_weight_sync.shards.pieces import Piece, own_pieces
from drivetrain_weight_sync.shards.rank_discovery import Ranks


class Contributor:
    """Takes part in another rank's pushes. Used by one thread at a time; :meth:`close` is safe from any."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._link: Link | None = None
        self._offered: tuple[Piece, ...] | None = None
        """Pieces that the rank that pushes knows."""
        self._carrier: Carrier = SocketCarrier()
        self._parts = PartStager()
        self._waiting = False
        """True if the end of a staged push was not heard."""

    def stage(self, version: str, pairs: Callable[[], Iterable[tuple[str, object]]]) -> None:
        """Send this rank's shards on request, until every tensor is staged.

        Raises:
            DrivetrainError: the error that ended the push on the rank that pushes, or an error of reading ``pairs``.
            TrainerRankLost: the rank that pushes is gone.
        """
        new = self._link is None or self._link.broken
        if new:
            self._link, self._offered = self._ranks.reach(), None
        link = self._link
        assert link is not None
        with self._telling(link):
            pieces, tensors = own_pieces(pairs())
        try:
            self._forget_last_push(link)
            link.say(Offer(version, gpu_of(tensors), this_host(), None if pieces == self._offered else pieces))
            self._offered = pieces
            self._follow(tensors, link)
        except TrainerRankLost:
            if new and link.broken:
                self._ranks.require_none_failed()
            raise

    def _forget_last_push(self, link: Link) -> None:
        """Pass over the end of a push that was staged and then cancelled on this rank."""
        if self._waiting:
            self._waiting = False
            with suppress(DrivetrainError):
                link.hear()
            if link.broken:
                raise lost(link.rank, ConnectionError("it ended"))

    def _follow(self, tensors: Sequence[torch.Tensor], link: Link) -> None:
        while True:
            message = link.hear()
            if isinstance(message, Staged):
                self._waiting = True
                return
            try:
                self._serve(message, tensors, link)
            except BaseException:
                self._leave_group()
                raise

    def _serve(self, message: Message, tensors: Sequence[torch.Tensor], link: Link) -> None:
        match message:
            case Send(indices):
                self._carrier.send([tensors[index] for index in indices], link)
            case StageParts():
                with self._telling(link):
                    staged = self._parts.stage(message, tensors)
                link.say(staged)
            case FormGroup(name):
                self._leave_group()
                self._carrier = NcclCarrier(self._ranks, name, tensors[0].device)
            case _:
                raise WeightSyncError(f"the rank that pushes sent {type(message).__name__} out of turn")

    @contextmanager
    def _telling(self, link: Link) -> Iterator[None]:
        """Tell the rank that pushes of an error, and leave it."""
        try:
            yield
        except BaseException as error:
            with suppress(TrainerRankLost):  # then it knows that the push has failed
                link.say(failure(error))
            self.close()
            raise

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the push; return its result.

        Raises:
            DrivetrainError: the error with which it failed.
            TrainerRankLost: the rank that pushes is gone.
        """
        assert self._link is not None
        self._waiting = False
        message = self._link.hear()
        assert isinstance(message, Committed)
        return message.result

    def close(self) -> None:
        """Leave the rank that pushes."""
        self._waiting = False
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._leave_group()
        self._parts.close()

    def _leave_group(self) -> None:
        self._carrier.close()
        self._carrier = SocketCarrier()
