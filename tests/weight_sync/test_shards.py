"""An engine puts tensors together from parts that several ranks hold, and refuses parts that do not make them up."""

from __future__ import annotations

import pytest
import torch
from tests.weight_sync.models import Model, differing, tensors_of

from drivetrain.errors import DrivetrainError, InvalidRequest, WeightVerifyFailed
from drivetrain.types.weights import (
    BeginUpdate,
    CommitUpdate,
    LoadBuckets,
    PrepareUpdate,
    ShardsSource,
    VerifyUpdate,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import ModuleTarget, Receiver, digests, make_plan
from drivetrain_weight_sync.transports.shards import FlatPart, name_of, packed, plan_of_parts
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender

RANKS = 3


class Trainer:
    """Ranks that hold consecutive parts of a model's tensors; the last tensors are whole, on one rank each."""

    def __init__(self, model: Model) -> None:
        manifest = ModuleTarget(model).manifest()
        self.plan = make_plan(manifest.tensors, 4096)
        self.tensors = {spec.name: model.state_dict()[spec.name] for spec in self.plan.tensors}
        self.parts: list[list[FlatPart]] = [[] for _ in range(RANKS)]
        for index, tensor in enumerate(self.tensors.values()):
            bounds = [rank * tensor.numel() // RANKS for rank in range(RANKS + 1)]
            if tensor.dim() < 2:
                self.parts[index % RANKS].append(FlatPart(index, 0, tensor.numel()))
                continue
            for rank in range(RANKS):
                self.parts[rank].append(FlatPart(index, bounds[rank], bounds[rank + 1] - bounds[rank]))
        self.senders = [SharedMemorySender() for _ in range(RANKS)]

    def request(self, version: str = "v1") -> WeightUpdateRequest:
        held = list(self.tensors.values())
        for parts, sender in zip(self.parts, self.senders, strict=True):
            sender.begin(plan_of_parts(self.plan, parts))
            for part in parts:
                values = held[part.tensor].reshape(-1)[part.begin : part.begin + part.numel]
                sender.put(name_of(self.plan.tensors[part.tensor], part), values, held=True)
        source = ShardsSource(
            ranks=tuple(sender.source() for sender in self.senders), parts=tuple(map(packed, self.parts))
        )
        return WeightUpdateRequest(version=version, source=source, plan=self.plan, digests=digests(self.tensors))


def take(receiver: Receiver, request: WeightUpdateRequest) -> None:
    assert request.plan is not None
    receiver.handle(PrepareUpdate(request))
    receiver.handle(BeginUpdate())
    receiver.handle(LoadBuckets(tuple(range(len(request.plan.buckets)))))
    receiver.handle(VerifyUpdate())
    receiver.handle(CommitUpdate(request.version))


def test_tensors_are_put_together_from_the_ranks_parts() -> None:
    served, trained = Model(2), Trainer(Model(1))
    receiver = Receiver(ModuleTarget(served))
    for number in range(3):
        take(receiver, trained.request(f"v{number}"))
        assert differing({name: tensors_of(served)[name] for name in trained.tensors}, trained.tensors) == []
        for tensor in trained.tensors.values():
            if tensor.is_floating_point():
                with torch.no_grad():
                    tensor.mul_(-1.5)
        if number == 1:  # a rank's memory is made anew, and the parts are others
            trained.senders[1].close()
            first, second = trained.parts[0], trained.parts[1]
            trained.parts[0], trained.parts[1] = second, first
    receiver.close()


def test_what_changed_on_the_way_is_found() -> None:
    served, trained = Model(2), Trainer(Model(1))
    receiver, request = Receiver(ModuleTarget(served)), trained.request()
    name = next(iter(trained.senders[2].slots()))
    trained.senders[2].slots()[name].view(torch.uint8)[0] ^= 1
    with pytest.raises(WeightVerifyFailed, match=name.partition("[")[0]):
        take(receiver, request)


def change(parts: list[list[FlatPart]], how: str) -> None:
    part = parts[1][0]
    match how:
        case "a gap":
            del parts[1][0]
        case "twice":
            parts[2][0] = part
        case "outside":
            parts[1][0] = part._replace(numel=part.numel + 10**6)
        case "another tensor":
            parts[1][-1] = parts[1][-1]._replace(tensor=10**6)
        case "negative":
            parts[1][0] = part._replace(begin=-1)
        case "out of order":
            parts[1].reverse()
        case "a rank more":
            parts.append([])


@pytest.mark.parametrize(
    "how", ["a gap", "twice", "outside", "another tensor", "negative", "out of order", "a rank more", "cut off"]
)
def test_parts_that_do_not_make_up_the_tensors_are_refused(how: str) -> None:
    served, trained = Model(2), Trainer(Model(1))
    before, receiver, request = tensors_of(served), Receiver(ModuleTarget(served)), trained.request()
    change(trained.parts, how)
    data = tuple(map(packed, trained.parts)) if how != "cut off" else (packed(trained.parts[0])[:-1],) * RANKS
    wrong = request.model_copy(update={"source": request.source.model_copy(update={"parts": data})})
    with pytest.raises(InvalidRequest) as raised:
        receiver.handle(PrepareUpdate(wrong))
    assert raised.value.field == "source.parts"
    assert differing(tensors_of(served), before) == []
    take(receiver, request)


def test_memory_that_is_gone_is_refused() -> None:
    served, trained = Model(2), Trainer(Model(1))
    receiver, request = Receiver(ModuleTarget(served)), trained.request()
    trained.senders[0].close()
    with pytest.raises(DrivetrainError, match="cannot be opened"):
        receiver.handle(PrepareUpdate(request))
    take(receiver, trained.request("v2"))
