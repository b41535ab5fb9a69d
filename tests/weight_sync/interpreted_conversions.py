"""Converted layers that a kernel fills and digests; run by test_device_copies.py with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Hashable, Set

import pytest
import torch
from tests.weight_sync.receiver_engines import push_in_process
from tests.weight_sync.test_quantised_parts import MANIFEST, Engine, quantise, weights

from drivetrain.errors import WeightVerifyFailed
from drivetrain_weight_sync import Receiver
from drivetrain_weight_sync.tracing.traced_target import TracedTarget
from drivetrain_weight_sync.transports.in_process import InProcessReader


class Steady(TracedTarget):
    """Counts how often each way was taken."""

    replayed = 0

    def load_again(self, place: Hashable, among: Set[str]) -> Set[str]:
        names = super().load_again(place, among)
        self.replayed += bool(names)
        return names


def main() -> None:
    engine = Engine()
    target = Steady(engine.load_weights, MANIFEST, converted=engine.parts, at_once=True)
    receiver = Receiver(target)
    pushed = weights()
    # The trainer's tensors stay where they are, and change.
    InProcessReader.place = property(lambda _: "here")  # type: ignore[method-assign,assignment]
    engine.loads, engine.conversions = [], 0
    for number in range(4):
        for tensor in pushed.values():
            tensor.copy_(torch.randn(tensor.shape))
        push_in_process(receiver, MANIFEST, pushed)
        quantised, scale = quantise(torch.cat([pushed["gate"], pushed["up"]]))
        assert torch.equal(engine.layer.quantised, quantised), number
        assert torch.equal(engine.layer.scale, scale), number
        assert torch.equal(engine.norm, pushed["norm"]), number
        assert torch.equal(engine.layer.bias, pushed["bias"]), number
    assert target.replayed == 3, "all pushes but the first replay its copies"
    assert (engine.loads, engine.conversions) == ([], 4)
    for name in ("gate", "norm"):
        with pytest.raises(WeightVerifyFailed) as failed:
            push_in_process(receiver, MANIFEST, pushed, spoil=name)
        assert failed.value.tensors == (name,)
    print("all equal")


if __name__ == "__main__":
    main()
