"""Adapters and converted tensors that one launch copies; run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set

import pytest
import torch

from drivetrain.errors import WeightVerifyFailed
from drivetrain.types.weights import (
    BeginUpdate,
    LoadBuckets,
    LoraTensors,
    PrepareUpdate,
    VerifyUpdate,
    WeightManifest,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import ModuleTarget, Receiver, digests, make_plan
from drivetrain_weight_sync.copying.device_copies import DeviceCopy
from drivetrain_weight_sync.receiver import received_adapters, update
from drivetrain_weight_sync.receiver.received_adapters import receive_adapter
from drivetrain_weight_sync.tensors.dtypes import spec_of
from drivetrain_weight_sync.transports.in_process import InProcessSender
from drivetrain_weight_sync.transports.process_groups import Groups

TENSORS = {
    "a": torch.randn(8, 16),
    "b": torch.randn(16, 8).bfloat16(),
    "odd": torch.randn(3),  # no whole words
    "turned": torch.randn(8, 4).t().contiguous(),
}
CONFIG = LoraTensors(lora_name="policy", config={"peft_type": "LORA", "r": 8})
copied: list[str | None] = []


def reaches(tensor: torch.Tensor) -> bool:
    return True


def noted_copy(source: torch.Tensor, destination: torch.Tensor | None, name: str | None) -> DeviceCopy:
    copied.append(name)
    return DeviceCopy(source, destination, name)


def sent(tensors: dict[str, torch.Tensor], lora: LoraTensors | None) -> tuple[InProcessSender, WeightUpdateRequest]:
    plan, sender = make_plan([spec_of(name, tensor) for name, tensor in tensors.items()], 1024), InProcessSender()
    sender.begin(plan)
    for name, tensor in tensors.items():
        sender.put(name, tensor, held=True)
    request = WeightUpdateRequest(version="v", source=sender.source(), plan=plan, digests=digests(tensors), lora=lora)
    return sender, request


def receive_adapters() -> None:
    """An adapter arrives in memory of its own, verified, and NaN in it is found."""
    sender, request = sent(TENSORS, CONFIG)
    given = receive_adapter(request, Groups())
    assert all(torch.equal(given.tensors[name], tensor) for name, tensor in TENSORS.items())
    own, theirs = ({one.untyped_storage().data_ptr() for one in some.values()} for some in (given.tensors, TENSORS))
    assert len(own) == 1
    assert not own & theirs
    assert given.is_own
    assert set(copied) == {"a", "b", "turned", "odd"}
    for name in TENSORS:
        wrong = request.model_copy(update={"digests": {**(request.digests or {}), name: 1}})
        with pytest.raises(WeightVerifyFailed) as caught:
            receive_adapter(wrong, Groups())
        assert caught.value.tensors == (name,)
    sender.close()
    strange = {**TENSORS, "b": torch.full((16, 8), torch.inf).bfloat16(), "odd": torch.full((3,), torch.nan)}
    sender, request = sent(strange, CONFIG)
    assert receive_adapter(request, Groups()).non_finite == {"b": "infinite", "odd": "NaN"}
    sender.close()


class Converting(ModuleTarget):
    """Keeps each tensor in another form, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module())
        self.given: dict[str, torch.Tensor] = {}

    def manifest(self) -> WeightManifest:
        return WeightManifest(tuple(spec_of(name, tensor) for name, tensor in TENSORS.items()))

    def check_ready(self) -> None:
        """It is."""

    @property
    def converted(self) -> Set[str]:
        return TENSORS.keys()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, place: Hashable = None) -> None:
        self.given |= dict(list(tensors))

    def expect(self, digests: Mapping[str, int]) -> Set[str]:
        return frozenset()


def digest_converted() -> None:
    """Tensors that an engine converts reach it as they came, and a wrong one of any size is named."""
    for spoilt in ("", *TENSORS):
        sender, request = sent(TENSORS, None)
        if spoilt:
            request = request.model_copy(update={"digests": {**(request.digests or {}), spoilt: 1}})
        target = Converting()
        receiver = Receiver(target)
        receiver.handle(PrepareUpdate(request))
        receiver.handle(BeginUpdate())
        assert request.plan is not None
        for index in range(len(request.plan.buckets)):
            receiver.handle(LoadBuckets((index,)))
        assert all(torch.equal(target.given[name], tensor) for name, tensor in TENSORS.items())
        if spoilt:
            with pytest.raises(WeightVerifyFailed) as caught:
                receiver.handle(VerifyUpdate())
            assert caught.value.tensors == (spoilt,)
        else:
            receiver.handle(VerifyUpdate())
        sender.close()


if __name__ == "__main__":
    received_adapters.reaches = update.reaches = reaches  # type: ignore[attr-defined]
    received_adapters.DeviceCopy = noted_copy  # type: ignore[attr-defined, assignment]
    receive_adapters()
    digest_converted()
    print("all equal")
