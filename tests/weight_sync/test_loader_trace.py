"""A loader that moves tensors around before copying them is traced; tensors that it computes are detected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch

from drivetrain.errors import WeightSyncError
from drivetrain.types.weights import TensorSpec
from drivetrain_weight_sync.tracing.loader_trace import LoaderTrace, trace_loader

HEADS, DIM, WIDTH = 3, 4, 5
SHAPES = {"qkv": (HEADS * 3 * DIM, WIDTH), "bias": (HEADS * 3 * DIM,), "a": (4, 6), "b": (2, 6), "scalar": ()}

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


class Engine:
    def __init__(self) -> None:
        self.qkv = torch.zeros(3 * HEADS * DIM, WIDTH)
        self.bias = torch.zeros(3 * HEADS * DIM)
        self.fused = torch.zeros(6, 8)
        self.scalar = torch.zeros(())

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sort interleaved heads as Bloom's are; concatenate, transpose and pad a and b."""
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in ("qkv", "bias"):
                by_head = tensor.view(HEADS, 3, DIM, *tensor.shape[1:])
                getattr(self, name).copy_(by_head.transpose(0, 1).reshape(tensor.shape))
            elif name == "scalar":
                self.scalar.copy_(tensor.clone())
            else:
                kept[name] = tensor
                if len(kept) == 2:
                    put_together = torch.cat([kept["a"], kept["b"]]).t()
                    both = torch.empty_like(put_together, memory_format=torch.contiguous_format)
                    both.copy_(put_together)
                    self.fused[:, :6].copy_(both)


def specs(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, "float32", SHAPES[name]) for name in names or SHAPES]


def test_what_is_moved_about_is_copied_from_where_it_was() -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    loaded, followed = Engine(), Engine()
    loaded.load(weights.items())
    copies = trace_loader(followed.load, specs()).copies
    assert not followed.qkv.any(), "recording changes nothing"
    assert set(copies) == set(SHAPES)
    for name, found in copies.items():
        for copy in found:
            copy.destination.copy_(copy.part_of(weights[name]))
    for own in ("qkv", "bias", "fused", "scalar"):
        assert torch.equal(getattr(followed, own), getattr(loaded, own)), own


def test_a_rank_takes_its_part_of_what_is_moved_about() -> None:
    part = torch.zeros(2 * DIM, WIDTH)

    def second_and_third_head_of_q(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            sorted_by_kind = tensor.view(HEADS, 3, DIM, WIDTH).transpose(0, 1).reshape(3, HEADS * DIM, WIDTH)
            part.copy_(sorted_by_kind[0].narrow(0, DIM, 2 * DIM))

    (copy,) = trace_loader(second_and_third_head_of_q, specs("qkv")).copies["qkv"]
    tensor = torch.randn(SHAPES["qkv"])
    copy.destination.copy_(copy.part_of(tensor))
    assert torch.equal(part, tensor.view(HEADS, 3, DIM, WIDTH)[1:, 0].reshape(2 * DIM, WIDTH))


@pytest.mark.parametrize(
    "computes",
    [
        lambda tensor: tensor + 1,
        lambda tensor: 2 * tensor,
        lambda tensor: -torch.exp(tensor.float()),
        lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor.flip(0),
        lambda tensor: tensor[torch.randperm(len(tensor))],
        lambda tensor: tensor.mul_(3),
        lambda tensor: torch.where(tensor > 0, tensor, 0),
    ],
)
def test_of_what_is_computed_it_is_known_where_it_lies(computes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    held = torch.zeros(SHAPES["qkv"])

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            held.copy_(computes(tensor))

    require_computed(trace_loader(load, specs("qkv")), {"qkv": held})


def test_what_is_loaded_by_way_of_another_tensor_is_computed() -> None:
    held = torch.zeros(SHAPES["a"])

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            between = torch.full(SHAPES["a"], 7.0)
            between.copy_(tensor)
            held.copy_(between)

    require_computed(trace_loader(load, specs("a")), {"a": held})


def test_tensors_that_are_mixed_are_computed_together() -> None:
    held = torch.zeros(4, 6)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept = dict(weights)
        held.copy_(torch.where(torch.eye(4, 6).bool(), kept["a"], kept["b"][:1]))

    require_computed(trace_loader(load, specs("a", "b")), {"a": held, "b": held})


@pytest.mark.parametrize(
    "computes",
    [
        lambda held: held.copy_(-torch.exp(held.float())),
        lambda held: held.mul_(2),
        lambda held: torch.neg(held, out=held),
        lambda held: held[1:].fill_(7),
    ],
)
def test_what_is_computed_of_what_was_loaded_is_seen(computes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As vLLM's and SGLang's Mamba mixers do with A_log: copy it, then exponentiate in place."""
    held, beside = torch.full(SHAPES["a"], 3.0), torch.full(SHAPES["b"], 3.0)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "b":
                beside.copy_(tensor)
            else:
                held.copy_(tensor)
                computes(held)

    recording = trace_loader(load, specs("a", "b"))
    assert recording.copies.keys() == {"b"}
    assert bool((held == 3).all()), "recording changes nothing"
    assert {place.data_ptr() for place in recording.computed["a"]} >= {held.data_ptr()}


def test_what_shares_memory_with_what_is_computed_goes_with_it() -> None:
    held = torch.full((6, 6), 3.0)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "a":
                held[:4].copy_(tensor * 2)
            else:
                held[4:].copy_(tensor)

    recording = trace_loader(load, specs("a", "b"))
    assert not recording.copies
    assert recording.computed.keys() == {"a", "b"}


def test_constants_beside_what_is_loaded_stay() -> None:
    """As padding of embeddings is made; it is already in place."""
    held = torch.cat([torch.full((4, 6), 3.0), torch.zeros(2, 6)])

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            held.zero_()
            held[:4].copy_(tensor)
            held[4:].fill_(0)

    recording = trace_loader(load, specs("a"))
    assert recording.copies.keys() == {"a"}
    assert bool((held[:4] == 3).all()), "recording changes nothing"


@pytest.mark.parametrize("sees", [torch.Tensor.tolist, torch.Tensor.item])
def test_a_loader_that_must_see_values_is_refused(sees: Callable[[torch.Tensor], object]) -> None:
    """A value that becomes a Python number cannot be traced, as the engine may keep it."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            sees(tensor)

    with pytest.raises(WeightSyncError, match="which weight sync does not support"):
        trace_loader(load, specs("scalar"))


def require_computed(recording: LoaderTrace, places: dict[str, torch.Tensor]) -> None:
    assert not recording.copies
    assert recording.computed.keys() == places.keys()
    for name, held in places.items():
        (place,) = recording.computed[name]
        assert (place.data_ptr(), place.shape) == (held.data_ptr(), held.shape)
        assert not held.any(), "recording changes nothing"


def test_a_number_that_is_read_of_a_tensor_and_filled_in_is_a_copy() -> None:
    alpha, beta, codes = torch.zeros(1), torch.zeros(()), torch.zeros(1, dtype=torch.int64)
    shapes = {"alpha": ((), "float32"), "beta": ((1,), "bfloat16"), "codes": ((1,), "int64")}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load as the default loaders of SGLang and vLLM do for tensors of one element."""
        for name, tensor in weights:
            {"alpha": alpha, "beta": beta, "codes": codes}[name].fill_(tensor.item())

    found = trace_loader(load, [TensorSpec(name, dtype, shape) for name, (shape, dtype) in shapes.items()])
    assert not found.computed
    assert not alpha.any(), "recording changes nothing"
    pushed = {"alpha": torch.tensor(1.5), "beta": torch.tensor([2.5]).bfloat16(), "codes": torch.tensor([7])}
    for name, (copy,) in found.copies.items():
        copy.destination.copy_(copy.part_of(pushed[name]))
    assert (alpha.item(), beta.item(), codes.item()) == (1.5, 2.5, 7)


@pytest.mark.parametrize("takes", [lambda number: number + 1, lambda number: 0.0])
def test_a_loader_that_computes_with_a_number_is_refused(takes: Callable[[float], float]) -> None:
    held = torch.zeros(())

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            held.fill_(takes(tensor.item()))

    with pytest.raises(WeightSyncError, match="computes with the value of scalar"):
        trace_loader(load, specs("scalar"))


def test_a_loader_that_copies_in_threads_is_followed_there() -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    loaded, followed = Engine(), Engine()
    loaded.load(weights.items())

    def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(followed.load, [pair]) for pair in given if pair[0] in ("qkv", "scalar")]
            for future in as_completed(futures):
                future.result()

    copies = trace_loader(load, specs("qkv", "scalar")).copies
    assert not followed.qkv.any(), "recording changes nothing"
    for name, found in copies.items():
        for copy in found:
            copy.destination.copy_(copy.part_of(weights[name]))
    assert torch.equal(followed.qkv, loaded.qkv)
    assert torch.equal(followed.scalar, loaded.scalar)
