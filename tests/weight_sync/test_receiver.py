"""The receiver accepts messages in order, and never commits anything unverified."""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.weight_sync.models import Model, differing, tensors_of

from drivetrain.engine.weight_transaction import KeptPlan
from drivetrain.errors import (
    EngineStateError,
    InvalidRequest,
    UnsupportedCapability,
    WeightPlanMismatch,
    WeightSyncError,
    WeightTransferFailed,
    WeightVerifyFailed,
)
from drivetrain.types.weights import (
    AbortUpdate,
    BeginUpdate,
    BroadcastSource,
    Bucket,
    CommitUpdate,
    LoadBuckets,
    LoraSource,
    PrepareUpdate,
    SharedMemorySource,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightPlan,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import ModuleTarget, Phase, Receiver, make_plan
from drivetrain_weight_sync.trainer.source import Source
from drivetrain_weight_sync.trainer.staging import Staged, Stager, stage
from drivetrain_weight_sync.transports.base import Opened, Sender
from drivetrain_weight_sync.transports.disk import DiskReader, DiskSender
from drivetrain_weight_sync.transports.in_process import InProcessSender
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender


class Pair:
    """A trainer's model, staged by a sender, and an engine's model behind a receiver."""

    def __init__(self, sender: Sender) -> None:
        self.trained, self.served = Model(1), Model(2)
        self.target = ModuleTarget(self.served)
        self.receiver = Receiver(self.target)
        self.sender = sender
        self.plan = make_plan(self.target.manifest().tensors, 8192)
        self.before = tensors_of(self.served)

    def request(self, version: str = "v1") -> WeightUpdateRequest:
        staged = Staged()
        stage(Source(self.trained), self.sender, self.target.manifest(), self.plan, staged, Stager(), cast=False)
        return WeightUpdateRequest(version=version, source=self.sender.source(), plan=self.plan, digests=staged.digests)

    def send(self, *messages: WeightMessage) -> list[int]:
        return [self.receiver.handle(message).nbytes for message in messages]

    def everything(self) -> LoadBuckets:
        return LoadBuckets(tuple(range(len(self.plan.buckets))))

    def push(self) -> None:
        request = self.request()
        self.send(PrepareUpdate(request), BeginUpdate(), self.everything(), VerifyUpdate(), CommitUpdate("v1"))


@pytest.fixture(params=[InProcessSender, SharedMemorySender])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param())


def test_a_whole_update_makes_the_models_equal(pair: Pair) -> None:
    assert len(pair.plan.buckets) > 2
    prepared = pair.receiver.handle(PrepareUpdate(pair.request()))
    assert prepared.buckets == len(pair.plan.buckets)
    assert not differing(tensors_of(pair.served), pair.before)
    pair.send(BeginUpdate())
    loaded = [pair.send(LoadBuckets((index,)))[0] for index in range(prepared.buckets)]
    assert loaded == [sum(placed.nbytes for placed in bucket.tensors) for bucket in pair.plan.buckets]
    pair.send(VerifyUpdate())
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))
    pair.send(CommitUpdate("v1"))
    assert pair.receiver.phase is Phase.IDLE


ORDER: list[tuple[list[str], list[str]]] = [
    ([], ["begin", "load", "verify", "commit"]),
    (["prepare"], ["load", "verify", "commit"]),
    (["prepare", "begin"], ["begin", "commit"]),
    (["prepare", "begin", "load"], ["begin", "commit"]),
    (["prepare", "begin", "load", "verify"], ["begin", "load", "verify"]),
    (["prepare", "begin", "load", "verify", "commit"], ["begin", "load", "verify", "commit"]),
    (["prepare", "begin", "abort"], ["begin", "load", "verify", "commit"]),
]


@pytest.mark.parametrize(("sent", "refused"), [(s, r) for s, refusals in ORDER for r in refusals])
def test_a_message_out_of_order_is_refused_and_does_nothing(pair: Pair, sent: list[str], refused: str) -> None:
    messages: dict[str, WeightMessage] = {
        "prepare": PrepareUpdate(pair.request()),
        "begin": BeginUpdate(),
        "load": pair.everything(),
        "verify": VerifyUpdate(),
        "commit": CommitUpdate("v1"),
        "abort": AbortUpdate(),
    }
    pair.send(*(messages[name] for name in sent))
    phase, held = pair.receiver.phase, tensors_of(pair.served)
    with pytest.raises(EngineStateError, match=f"{type(messages[refused]).__name__} came while") as caught:
        pair.send(messages[refused])
    assert caught.value.state == phase.value
    assert pair.receiver.phase is phase
    assert not differing(tensors_of(pair.served), held)


def test_an_incomplete_load_cannot_be_verified_nor_committed(pair: Pair) -> None:
    pair.send(PrepareUpdate(pair.request()), BeginUpdate(), LoadBuckets((0,)))
    with pytest.raises(WeightTransferFailed, match=r"buckets \[1, .*were not loaded"):
        pair.send(VerifyUpdate())
    with pytest.raises(EngineStateError):
        pair.send(CommitUpdate("v1"))
    with pytest.raises(EngineStateError):
        pair.send(pair.everything())
    pair.push()
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))


@pytest.mark.parametrize("index", [-1, 99])
def test_a_bucket_that_is_not_in_the_plan_breaks_the_update(pair: Pair, index: int) -> None:
    pair.send(PrepareUpdate(pair.request()), BeginUpdate())
    with pytest.raises(WeightTransferFailed, match=f"bucket {index} is not in the plan"):
        pair.send(LoadBuckets((index,)))
    assert pair.receiver.phase is Phase.BROKEN


def test_loading_a_bucket_again_does_no_harm(pair: Pair) -> None:
    request = pair.request()
    pair.send(PrepareUpdate(request), BeginUpdate(), pair.everything(), LoadBuckets((1, 1)), VerifyUpdate())
    pair.send(CommitUpdate("v1"))
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))


def test_a_commit_under_another_version_is_refused(pair: Pair) -> None:
    pair.send(PrepareUpdate(pair.request()), BeginUpdate(), pair.everything(), VerifyUpdate())
    with pytest.raises(WeightTransferFailed, match=r"'v2'.*'v1'"):
        pair.send(CommitUpdate("v2"))
    assert pair.receiver.phase is Phase.BROKEN


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_after_an_abort_at_any_point_a_full_update_recovers(pair: Pair, steps: int) -> None:
    messages: list[WeightMessage] = [
        PrepareUpdate(pair.request()),
        BeginUpdate(),
        LoadBuckets((0,)),
        pair.everything(),
        VerifyUpdate(),
    ]
    pair.send(*messages[:steps], AbortUpdate(), AbortUpdate())
    assert pair.receiver.phase is Phase.IDLE
    pair.push()
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_new_update_takes_the_place_of_one_whose_sender_vanished(pair: Pair, steps: int) -> None:
    messages: list[WeightMessage] = [
        PrepareUpdate(pair.request()),
        BeginUpdate(),
        LoadBuckets((0,)),
        pair.everything(),
        VerifyUpdate(),
    ]
    pair.send(*messages[:steps])
    pair.push()
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))


def test_one_wrong_byte_in_the_arena_is_found_and_its_tensor_named() -> None:
    pair = Pair(SharedMemorySender())
    request = pair.request()
    source = request.source
    assert isinstance(source, SharedMemorySource)
    bucket, placed = next(
        (index, placed)
        for index, bucket in enumerate(pair.plan.buckets)
        for placed in bucket.tensors
        if placed.spec.name == "model.layers.1.down.weight"
    )
    pair.send(PrepareUpdate(request), BeginUpdate())
    with Path(source.path).open("r+b") as file, mmap.mmap(file.fileno(), source.nbytes) as arena:
        arena[source.bucket_offsets[bucket] + placed.offset + 17] ^= 4
    pair.send(pair.everything())
    with pytest.raises(WeightVerifyFailed, match=r"1 of \d+ tensors.*model\.layers\.1\.down\.weight") as caught:
        pair.send(VerifyUpdate())
    assert caught.value.tensors == ("model.layers.1.down.weight",)
    with pytest.raises(EngineStateError):
        pair.send(CommitUpdate("v1"))
    pair.push()
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))


def test_a_source_written_to_during_the_push_is_found() -> None:
    pair = Pair(InProcessSender())
    pair.send(PrepareUpdate(pair.request()), BeginUpdate(), LoadBuckets((0,)))
    with torch.no_grad():
        pair.trained.model.norm.weight.add_(1)
    pair.send(pair.everything())
    with pytest.raises(WeightVerifyFailed) as caught:
        pair.send(VerifyUpdate())
    assert caught.value.tensors == ("model.norm.weight",)


def test_a_plan_that_is_not_the_models_changes_nothing(pair: Pair) -> None:
    request = pair.request()
    cut = WeightPlan(tuple(Bucket(b.tensors[:-1], b.nbytes) for b in pair.plan.buckets))
    with pytest.raises(WeightPlanMismatch) as caught:
        pair.send(PrepareUpdate(request.model_copy(update={"plan": cut})))
    assert caught.value.missing == tuple(bucket.tensors[-1].spec.name for bucket in pair.plan.buckets)
    assert pair.receiver.phase is Phase.IDLE
    assert not differing(tensors_of(pair.served), pair.before)


def test_digests_of_other_tensors_are_refused(pair: Pair) -> None:
    request = pair.request()
    assert request.digests is not None
    fewer = dict(request.digests)
    fewer.pop("model.norm.bias")
    with pytest.raises(InvalidRequest, match=r"model\.norm\.bias") as caught:
        pair.send(PrepareUpdate(request.model_copy(update={"digests": fewer})))
    assert caught.value.field == "digests"


def test_a_model_whose_memory_was_given_back_is_refused_before_anything_changes(pair: Pair) -> None:
    request = pair.request()
    pair.served.model.norm.weight.untyped_storage().resize_(0)
    with pytest.raises(EngineStateError, match="wake_up"):
        pair.send(PrepareUpdate(request))
    pair.served.model.norm.weight.untyped_storage().resize_(24 * 4)
    pair.push()
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))


def test_an_arena_that_is_gone_is_refused() -> None:
    pair = Pair(SharedMemorySender())
    request = pair.request()
    pair.sender.close()
    with pytest.raises(InvalidRequest, match="cannot be opened") as caught:
        pair.send(PrepareUpdate(request))
    assert caught.value.field == "source.path"


def test_tensors_that_were_taken_back_are_refused() -> None:
    pair = Pair(InProcessSender())
    request = pair.request()
    pair.sender.close()
    with pytest.raises(InvalidRequest, match="no tensors are registered") as caught:
        pair.send(PrepareUpdate(request))
    assert caught.value.field == "source.key"


def test_an_arena_that_the_plan_does_not_fit_is_refused() -> None:
    pair = Pair(SharedMemorySender())
    request = pair.request()
    source = request.source
    assert isinstance(source, SharedMemorySource)
    for change in (
        {"bucket_offsets": source.bucket_offsets[:-1]},
        {"bucket_offsets": (*source.bucket_offsets[:-1], source.nbytes)},
        {"bucket_offsets": (1, *source.bucket_offsets[1:])},
        {"nbytes": 256},
    ):
        wrong = request.model_copy(update={"source": source.model_copy(update=change)})
        with pytest.raises(InvalidRequest, match="bucket"):
            pair.send(PrepareUpdate(wrong))
    larger = request.model_copy(update={"source": source.model_copy(update={"nbytes": source.nbytes + 1})})
    with pytest.raises(InvalidRequest, match=f"holds {source.nbytes} bytes"):
        pair.send(PrepareUpdate(larger))


def test_a_transport_that_is_not_there_is_refused_by_name(pair: Pair) -> None:
    source = LoraSource(lora_name="a", path="/nowhere")
    with pytest.raises(UnsupportedCapability, match="lora") as caught:
        pair.send(PrepareUpdate(pair.request().model_copy(update={"source": source})))
    assert caught.value.capability == "weights_lora"


def test_a_group_that_the_worker_is_not_in_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="no group 'g'"):
        pair.send(PrepareUpdate(pair.request().model_copy(update={"source": BroadcastSource(group_name="g")})))


def test_a_source_that_takes_long_is_opened_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, opening = threading.Event(), threading.Event()
    original = DiskReader.open

    def slowly(reader: DiskReader, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        opening.set()
        assert gate.wait(20)
        return original(reader, request, manifest)

    monkeypatch.setattr(DiskReader, "open", slowly)
    pair = Pair(DiskSender(tmp_path))
    pair.receiver.prepare(PrepareUpdate(pair.request()))
    assert opening.wait(20)
    assert pair.receiver.prepared() is None
    with pytest.raises(EngineStateError, match="BeginUpdate came while the weight update is idle"):
        pair.send(BeginUpdate())
    # The next update replaces it, and does not get the reader that is still busy.
    pair.receiver.prepare(PrepareUpdate(pair.request()))
    pair.send(AbortUpdate())
    with pytest.raises(EngineStateError, match="no weight update is being prepared"):
        pair.receiver.prepared()
    request = pair.request()
    pair.receiver.prepare(PrepareUpdate(request))
    gate.set()
    while (reply := pair.receiver.prepared()) is None:
        time.sleep(0.01)
    assert reply == pair.receiver.prepared() == WeightReply(buckets=len(pair.plan.buckets), keeps_plan=True)
    pair.send(BeginUpdate(), pair.everything(), VerifyUpdate(), CommitUpdate("v1"))
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))
    pair.sender.close()


def test_a_plan_that_is_not_kept_is_refused(pair: Pair) -> None:
    request = pair.request()
    kept = KeptPlan()
    kept.keep(pair.plan)
    left_out = kept.left_out_of(request)
    assert left_out.request.plan == WeightPlan(())
    assert left_out.request.digests == {}
    with pytest.raises(WeightSyncError, match="refers to a plan that this worker does not hold"):
        pair.send(left_out)
    assert pair.receiver.handle(PrepareUpdate(request)).keeps_plan
    assert pair.receiver.handle(left_out).buckets == len(pair.plan.buckets)
    with pytest.raises(WeightSyncError, match="refers to a plan that this worker does not hold"):
        pair.send(replace(left_out, kept_plan="another"))
    with pytest.raises(InvalidRequest, match="each takes 8"):
        pair.send(replace(left_out, digests=left_out.digests[8:]))
    pair.send(replace(left_out, digests=left_out.digests[:-8] + bytes(8)), BeginUpdate(), pair.everything())
    with pytest.raises(WeightVerifyFailed) as failed:
        pair.send(VerifyUpdate())
    assert failed.value.tensors == (pair.plan.tensors[-1].name,)
    pair.send(left_out, BeginUpdate(), pair.everything(), VerifyUpdate(), CommitUpdate("v1"))
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))


@pytest.mark.parametrize("change", [{}, {"more": 1}, {"model.embed.weight": 2**64}])
def test_digests_that_are_not_of_the_plan_travel_by_name(pair: Pair, change: dict[str, int]) -> None:
    request = pair.request()
    assert request.digests is not None
    name = pair.plan.tensors[0].name
    others = {other: value for other, value in request.digests.items() if change or other != name} | change
    kept = KeptPlan()
    kept.keep(pair.plan)
    message = kept.left_out_of(request.model_copy(update={"digests": others}))
    assert (message.kept_plan, message.digests, message.request.digests) == (None, b"", others)


def test_a_new_arena_is_mapped_though_it_has_the_old_ones_path() -> None:
    pair = Pair(SharedMemorySender())
    pair.push()
    first = pair.request().source
    pair.sender.close()
    with torch.no_grad():
        pair.trained.model.norm.weight.add_(1)
    second = pair.request().source
    assert first == second
    pair.push()
    assert not differing(tensors_of(pair.served), tensors_of(pair.trained))
