"""The ranks of one engine take each call together: if one of them fails, all report it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from tests.weight_sync.models import Model, tensors_of

from drivetrain.errors import (
    DrivetrainError,
    EngineInternalError,
    EngineOutOfMemory,
    EngineStateError,
    InvalidRequest,
    WeightVerifyFailed,
)
from drivetrain.process.worker_calls import WorkerMethods
from drivetrain.types.modes import MemoryTag
from drivetrain.types.weights import (
    ApplyUpdate,
    DiskSource,
    PrepareUpdate,
    TensorData,
    TensorSpec,
    WeightManifest,
    WeightReply,
    WeightReport,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import ModuleTarget, Receiver
from drivetrain_weight_sync.receiver.rank_weights import RankWeights
from drivetrain_weight_sync.receiver.update import Update
from drivetrain_weight_sync.tracing.traced_target import TracedTarget

_T = TypeVar("_T")
WAIT_S = 20.0


class Meeting:
    """Lets two ranks, each in its own thread, exchange values; a rank that waits alone fails."""

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

    def load_held_adapters(self) -> None:
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
        return threading.Event()  # nothing is written, so nothing needs to stop

    def gather(self, own: _T) -> list[_T]:
        return self._meeting.gather(self._rank, own)

    def receive_weights(self, message: Any) -> WeightReply:
        return self.receiver.handle(message)

    def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        (reply, *_) = self.of_ranks(lambda: self.begin_weights(update))
        return replace(reply, seconds=self.commit_weights(update).seconds)

    def sleep(self, tags: frozenset[MemoryTag]) -> None:
        self.put_to_sleep(self.memory, tags)

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        self.awaken(self.memory, tags)

    @cached_property
    def memory(self) -> Memory:
        return Memory()


class Memory:
    """Memory that may run out."""

    is_scarce = False
    is_awake = True

    def keep(self, tags: frozenset[MemoryTag]) -> None:
        if self.is_scarce:
            raise RuntimeError("CUDA error: out of memory")

    def free(self, tags: frozenset[MemoryTag]) -> None:
        self.is_awake = False

    def wake_up(self, tags: frozenset[MemoryTag]) -> None:
        self.keep(tags)
        self.is_awake = True


methods = WorkerMethods(Rank.prepare_weights, Rank.prepared_weights, Rank.drop_adapter)


class Experts(torch.nn.Module):
    """A mixture's part on one of two ranks: half of the experts, part of each row of one tensor, all of another."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.experts = torch.nn.Parameter(torch.zeros(2, 3, 8))
        self.rows = torch.nn.Parameter(torch.zeros(4, 4))
        self.router = torch.nn.Parameter(torch.zeros(4, 3))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "router":
                self.router.data.copy_(tensor)
            elif name == "rows":
                self.rows.data.copy_(tensor[:, 4 * self._rank :][:, :4])
            elif int(name[-1]) // 2 == self._rank:
                self.experts.data[int(name[-1]) % 2].copy_(tensor)


SHAPES = {**{f"expert.{number}": (3, 8) for number in range(4)}, "rows": (4, 8), "router": (4, 3)}


class SpreadRank(Rank):
    """A rank whose own loader decides where weights go."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting)
        self.mixture = Experts(rank)

    @property
    def model(self) -> torch.nn.Module:
        return self.mixture

    @property
    def checkpoint(self) -> WeightManifest:
        return WeightManifest(tuple(TensorSpec(name, "float32", shape) for name, shape in SHAPES.items()), {})

    # Until Python 3.12 a cached property locks its class, so two ranks that create theirs together would deadlock.

    @property
    def target(self) -> TracedTarget:  # pyright: ignore[reportIncompatibleVariableOverride]
        record: Callable[[], TracedTarget] = partial(vars(RankWeights)["target"].func, self)
        return self._made("target", record)

    @property
    def receiver(self) -> Receiver:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._made("receiver", lambda: Receiver(self.target))

    def _made(self, name: str, make: Callable[[], _T]) -> _T:
        own = vars(self)
        if name not in own:
            own[name] = make()
        made: _T = own[name]
        return made


class Two:
    """Two ranks that are asked at the same time."""

    def __init__(self, kind: type[Rank] = Rank) -> None:
        meeting = Meeting()
        self.ranks = [kind(0, meeting), kind(1, meeting)]
        if kind is Rank:  # created on both ranks or on neither, as calls that all ranks take do
            _ = [rank.receiver for rank in self.ranks]

    def ask(self, method: str, *arguments: object) -> list[object]:
        """Call a method and return each rank's answer: a result, or an error."""
        payload = methods.call(method, arguments)

        def serve(rank: Rank) -> object:
            try:
                return methods.result_of(method, methods.answer(rank, payload, rank.gather))
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


def spoil(
    part: Receiver | Update | None, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Make this method of a rank's receiver or update fail."""

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(part, method, failing)
    return monkeypatch.undo


def test_ranks_of_which_one_sleeps_or_has_another_version_are_told() -> None:
    two = Two()
    two.ranks[1].asleep.add(MemoryTag.KV_CACHE)
    told = "rank 0: the first weights, asleep: nothing; rank 1: the first weights, asleep: kv_cache"
    for answer in two.ask("drop_adapter", "none"):
        assert isinstance(answer, EngineInternalError)
        assert str(answer) == f"the ranks differ after drop_adapter: {told}"
    two.ranks[1].asleep.clear()
    two.ranks[0].committed = "v1"
    assert all("the weights 'v1'" in str(answer) for answer in two.ask("drop_adapter", "none"))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("method", ["prepare", "prepared"])
def test_what_one_rank_cannot_prepare_none_has_prepared(
    request_of: WeightUpdateRequest, which: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two()
    mend = spoil(
        two.ranks[which].receiver, method, InvalidRequest("the folder is not there", field="source"), monkeypatch
    )
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
    spoil(two.ranks[1].receiver.update, "verify", WeightVerifyFailed("a tensor differs", tensors=["up"]), monkeypatch)
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


# Tensors that one rank alone holds ---------------------------------------------------------------------------------


def mixture() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def apply(two: Two, folder: Path, tensors: dict[str, torch.Tensor]) -> list[object]:
    save_file(tensors, folder / "model.safetensors")
    (reply, _) = two.prepare(WeightUpdateRequest(version="v1", source=DiskSource(path=str(folder))))
    assert isinstance(reply, WeightReply)
    return two.ask("apply_weights", ApplyUpdate("v1", reply.buckets, True))


def test_an_update_brings_each_rank_the_experts_that_it_holds(tmp_path: Path) -> None:
    two, tensors = Two(SpreadRank), mixture()
    for answer in apply(two, tmp_path, tensors):
        assert isinstance(answer, WeightReply)
        assert answer.seconds > 0
    for number, rank in enumerate(two.ranks):
        assert isinstance(rank, SpreadRank)
        own = [tensors[f"expert.{2 * number + expert}"] for expert in range(2)]
        assert torch.equal(rank.mixture.experts, torch.stack(own))
        assert torch.equal(rank.mixture.rows, tensors["rows"][:, 4 * number :][:, :4])
        assert torch.equal(rank.mixture.router, tensors["router"])


def test_every_rank_names_all_tensors_and_reads_them(tmp_path: Path) -> None:
    two, tensors = Two(SpreadRank), mixture()
    tensors["expert.1"].zero_()
    for manifest in two.ask("weight_manifest"):
        assert isinstance(manifest, WeightManifest)
        assert {spec.name for spec in manifest.tensors} == SHAPES.keys()
    apply(two, tmp_path, tensors)
    for name, tensor in tensors.items():
        for held in two.ask("read_weight", name):
            assert isinstance(held, TensorData)
            assert torch.equal(torch.frombuffer(bytearray(held.data), dtype=torch.float32).view(tensor.shape), tensor)
    for report in two.ask("validate_weights"):
        assert report == WeightReport(checked=len(SHAPES), all_zero=("expert.1",))


@pytest.mark.parametrize("name", ["expert.0", "expert.3", "rows"])
def test_an_expert_that_is_not_what_was_sent_is_named_with_its_rank(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(SpreadRank)
    two.ask("weight_manifest")
    (holder,) = [rank for rank in two.ranks if rank.target.pieces(name)][:1]
    read = type(holder.target).read
    monkeypatch.setattr(
        holder.target, "read", lambda asked: read(holder.target, asked) + (1 if asked == name else 0), raising=True
    )
    for answer in apply(two, tmp_path, mixture()):
        assert isinstance(answer, WeightVerifyFailed)
        assert str(answer).startswith(f"rank {holder.rank}: 1 of {len(SHAPES)} tensors")
        assert answer.tensors == (name,)


def test_a_rank_without_memory_lets_all_ranks_stay_awake_or_asleep() -> None:
    two, tags = Two(), frozenset({MemoryTag.WEIGHTS})
    for scarce in two.ranks:
        for method, remedy in (("sleep", "call sleep"), ("wake_up", "call wake_up")):
            is_awake = method == "sleep"
            scarce.memory.is_scarce = True
            for answer in two.ask(method, tags):
                assert isinstance(answer, EngineOutOfMemory)
                assert remedy in str(answer)
            assert [rank.memory.is_awake for rank in two.ranks] == [is_awake] * 2
            assert [MemoryTag.WEIGHTS not in rank.asleep for rank in two.ranks] == [is_awake] * 2
            scarce.memory.is_scarce = False
            assert two.ask(method, tags) == [None, None]
            assert [rank.memory.is_awake for rank in two.ranks] == [not is_awake] * 2


def test_a_rank_frees_again_only_memory_that_slept_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wake-up that timed out and then succeeded, the engine asks for the same memory again."""
    two, weights, both = Two(), frozenset({MemoryTag.WEIGHTS}), frozenset(MemoryTag)
    assert two.ask("sleep", both) == [None, None]
    assert two.ask("wake_up", weights) == [None, None]
    freed: list[frozenset[MemoryTag]] = []
    two.ranks[0].memory.is_scarce = True
    monkeypatch.setattr(two.ranks[1].memory, "free", freed.append)
    assert {type(answer) for answer in two.ask("wake_up", both)} == {EngineOutOfMemory}
    assert freed == [both - weights]
    assert [rank.asleep for rank in two.ranks] == [both - weights] * 2
