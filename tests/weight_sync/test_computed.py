"""Tensors that an engine's loader computes with go through that loader again, in the same transaction."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.weight_sync.receiver_engines import push_in_process
from torch import nn

from drivetrain.errors import WeightSyncError, WeightVerifyFailed
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync import Receiver
from drivetrain_weight_sync.receiver.checkpoint_comparison import require_as_stored, require_converted_alike
from drivetrain_weight_sync.tracing.traced_target import TracedTarget

SPECS = (TensorSpec("A_log", "float32", (4,)), TensorSpec("D", "bfloat16", (4,)), TensorSpec("norm", "float32", (4,)))
MANIFEST = WeightManifest(SPECS, {})


class Mixer(nn.Module):
    """A Mamba mixer as in vLLM or SGLang, which computes A from A_log on loading."""

    def __init__(self, *, adds: bool = False) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.D = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)
        self._adds = adds
        self.loads: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loads.append(name)
            if name == "A_log":
                if self._adds:
                    self.A.data.add_(tensor)
                else:
                    self.A.data.copy_(tensor)
                    self.A.data.copy_(-torch.exp(self.A.float()))
            else:
                getattr(self, name).data.copy_(tensor)


def target_of(mixer: Mixer) -> TracedTarget:
    target = TracedTarget(mixer.load_weights, MANIFEST, model=mixer)
    mixer.loads.clear()
    return target


def weights() -> dict[str, torch.Tensor]:
    return {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in SPECS}


def test_the_loader_computes_anew_of_what_was_pushed() -> None:
    mixer = Mixer()
    receiver = Receiver(target_of(mixer))
    for _ in range(2):
        pushed = weights()
        push_in_process(receiver, MANIFEST, pushed)
        fresh = Mixer()
        fresh.load_weights(pushed.items())
        for name, held in mixer.named_parameters():
            assert torch.equal(held, fresh.get_parameter(name)), name
    assert mixer.loads == ["A_log"] * 2, "the rest is copied"


@pytest.mark.parametrize("name", ["A_log", "D"])
def test_what_came_otherwise_than_sent_is_found(name: str) -> None:
    with pytest.raises(WeightVerifyFailed, match=name) as caught:
        push_in_process(Receiver(target_of(Mixer())), MANIFEST, weights(), spoil=name)
    assert caught.value.tensors == (name,)


def test_a_trainer_sends_it_as_it_has_it() -> None:
    target = target_of(Mixer())
    assert target.manifest().tensors == SPECS
    assert target.converted == {"A_log"}


def test_it_is_not_read_back() -> None:
    with pytest.raises(WeightSyncError, match="another form"):
        target_of(Mixer()).read("A_log")


def test_a_loader_that_comes_to_something_else_again_is_refused(tmp_path: Path) -> None:
    stored = weights()
    save_file(stored, tmp_path / "model.safetensors")
    for adds in (False, True):
        mixer = Mixer(adds=adds)
        mixer.load_weights(stored.items())
        before = mixer.A.clone()
        target = target_of(mixer)
        require_as_stored(target, tmp_path)
        if adds:
            with pytest.raises(WeightSyncError, match="converts A_log differently"):
                require_converted_alike(target, tmp_path)
        else:
            require_converted_alike(target, tmp_path)
        assert torch.equal(mixer.A, before), "it is as it was"
