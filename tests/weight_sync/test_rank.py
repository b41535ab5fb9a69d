"""Ranks of one engine take each call together: what one of them cannot do, all of them say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from tests.weight_sync.models import Model, tensors_of

from drivetrain.errors import DrivetrainError, EngineStateError, InvalidRequest, WeightVerifyFailed
from drivetrain.host.calls import Calls
from drivetrain.memory import MemoryTag
from drivetrain.weights import (
    ApplyUpdate,
    DiskSource,
    PrepareUpdate,
    WeightManifest,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import ModuleTarget, Receiver
from drivetrain_weight_sync.rank import RankWeights

_T = TypeVar("_T")
WAIT_S = 20.0


class Meeting:
    """Where two ranks, each in a thread of its own, exchange what they bring; one that waits alone fails."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._brought: list[Any] = [None, None]

    def gather(self, rank: int, own: _T) -> list[_T]:
        self._brought[rank] = own
        self._barrier.wait(WAIT_S)
        brought = list(self._brought)
        self._barrier.wait(WAIT_S)
        return brought


class Rank(RankWeights):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__()
        self._rank = rank
        self._meeting = meeting
        self.served = Model(2)

    @property
    def model(self) -> torch.nn.Module:
        return self.served

    @property
    def checkpoint(self) -> WeightManifest:
        raise NotImplementedError

    @property
    def folder(self) -> Path | None:
        return None

    @property
    def group(self) -> Any:
        return self._meeting

    @property
    def rank(self) -> int:
        return self._rank

    @cached_property
    def receiver(self) -> Receiver:
        return Receiver(ModuleTarget(self.served))

    @cached_property
    def writer(self) -> Any:
        return threading.Event()  # nothing is written: it need not stop

    def gather(self, own: _T) -> list[_T]:
        return self._meeting.gather(self._rank, own)

    def receive_weights(self, message: Any) -> WeightReply:
        return self.receiver.handle(message)

    def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        (reply, *_) = self.of_ranks(lambda: self.begin_weights(update))
        self.commit_weights(update)
        return reply


calls = Calls(Rank.prepare_weights, Rank.prepared_weights)


class Two:
    """Both ranks, asked at the same time."""

    def __init__(self) -> None:
        meeting = Meeting()
        self.ranks = [Rank(0, meeting), Rank(1, meeting)]

    def ask(self, method: str, *arguments: object) -> list[object]:
        """What each rank answers: a result, or an error."""
        question = calls.ask(method, arguments)

        def serve(rank: Rank) -> object:
            try:
                return calls.result_of(method, calls.serve(rank, question, rank.gather))
            except DrivetrainError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(serve, self.ranks))

    def prepare(self, request: WeightUpdateRequest) -> list[object]:
        answers = self.ask("prepare_weights", PrepareUpdate(request))
        while answers == [None, None]:
            answers = self.ask("prepared_weights")
        return answers


@pytest.fixture
def request_of(tmp_path: Path) -> WeightUpdateRequest:
    tensors = {name: tensor.clone() for name, tensor in tensors_of(Model(1)).items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    return WeightUpdateRequest(version="v1", source=DiskSource(path=str(tmp_path)))


def spoil(rank: Rank, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let this rank's receiver fail there."""

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank.receiver, method, failing)
    return monkeypatch.undo


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("method", ["prepare", "prepared"])
def test_what_one_rank_cannot_prepare_none_has_prepared(
    request_of: WeightUpdateRequest, which: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two()
    mend = spoil(two.ranks[which], method, InvalidRequest("the folder is not there", field="source"), monkeypatch)
    for answer in two.prepare(request_of):
        assert isinstance(answer, InvalidRequest)
        assert str(answer) == f"rank {which}: the folder is not there"
    mend()
    assert all(isinstance(answer, WeightReply) for answer in two.prepare(request_of))


def test_an_update_of_both_is_committed_by_both(request_of: WeightUpdateRequest) -> None:
    two = Two()
    (reply, other) = two.prepare(request_of)
    assert isinstance(reply, WeightReply)
    assert reply == other
    two.ask("apply_weights", ApplyUpdate("v1", reply.buckets, True))
    trained = tensors_of(Model(1))
    for rank in two.ranks:
        assert all(torch.equal(tensor, trained[name]) for name, tensor in tensors_of(rank.served).items())


def test_no_rank_commits_what_another_could_not_verify(
    request_of: WeightUpdateRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two()
    (reply, _) = two.prepare(request_of)
    assert isinstance(reply, WeightReply)
    spoil(two.ranks[1], "_verify", WeightVerifyFailed("a tensor differs", tensors=["up"]), monkeypatch)
    for answer in two.ask("apply_weights", ApplyUpdate("v1", reply.buckets, True)):
        assert isinstance(answer, WeightVerifyFailed)
        assert str(answer) == "rank 1: a tensor differs"
    assert two.ranks[0].receiver.phase.value == "verified"


def test_ranks_whose_weights_sleep_say_so_together(request_of: WeightUpdateRequest) -> None:
    two = Two()
    two.ranks[0].asleep.add(MemoryTag.WEIGHTS)
    for answer in two.prepare(request_of):
        assert isinstance(answer, EngineStateError)
        assert "given back by sleep" in str(answer)
