"""The ranks of a sharded trainer push a policy with adapters: its merged weights, or the adapter alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from tests.weight_sync import adapted_ranks
from tests.weight_sync.adapted_policies import adapted
from tests.weight_sync.trainer_ranks import Ranks, ranks_of_a_trainer

from drivetrain_weight_sync.shards.inventory import Inventory
from drivetrain_weight_sync.shards.pieces import Piece, own_pieces
from drivetrain_weight_sync.trainer.source import Source


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with ranks_of_a_trainer(4) as started:
        yield started


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks_of_a_trainer(2) as started:
        yield started


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", adapted_ranks.KINDS)
def test_shards_are_merged_to_the_bits_of_a_whole_policy(four: Ranks, kind: str, dim: int) -> None:
    strategy = "shared_memory" if dim else "in_process"
    assert four.run(adapted_ranks.push_merged, kind, strategy, dim) == [[]] * 4


@pytest.mark.parametrize("strategy", ["disk", "broadcast", "shared_memory"])
def test_two_ranks_push_merged_shards_by_other_strategies(two: Ranks, strategy: str) -> None:
    assert two.run(adapted_ranks.push_merged, "dora", strategy, 0) == [[]] * 2


@pytest.mark.parametrize(
    ("strategy", "dim", "as_tensors"), [("in_process", 0, False), ("disk", 1, False), ("disk", 0, True)]
)
def test_the_adapter_alone_answers_as_one_of_a_whole_policy(
    two: Ranks, strategy: str, dim: int, as_tensors: bool
) -> None:
    first, second = two.run(adapted_ranks.push_adapter, strategy, dim, as_tensors)
    assert [result[:-1] for result in first] == [result[:-1] for result in second]
    assert [version for version, *_ in second] == ["step-0", "step-1"]
    assert [result[-1] for result in second] == asyncio.run(adapted_ranks.answers_unsharded())


REFUSED = {
    "NaN": "InvalidWeights: 1 tensors hold values that are not finite",
    "NaN in the adapter alone": "InvalidWeights: 1 tensors hold values that are not finite",
    "disabled on one rank": "WeightSyncError: the adapters of ",
    "cannot be read on the engine's rank": "WeightSyncError: the adapters of ",
    "cannot be read on the engine's rank, the adapter alone": "WeightSyncError: the model has no adapter 'default'",
    "cannot be merged": "WeightSyncError: peft cannot merge the adapters of ",
}


@pytest.mark.parametrize("how", REFUSED)
def test_every_rank_gets_the_error_of_a_push_that_is_refused_and_can_push_again(four: Ranks, how: str) -> None:
    for error, version in four.run(adapted_ranks.push_what_fails, how):
        assert error.startswith(REFUSED[how])
        assert version == "good"


def test_a_layers_tensors_are_gathered_in_one_bucket_and_the_model_in_many() -> None:
    source = Source(adapted(target_modules=["q_proj", "lm_head"], lora_alpha=3))
    pieces = own_pieces(source.shards())[0]
    inventory = Inventory({0: pieces}, 0, 1, source.gathered_with)
    assert len(inventory.buckets) > 3
    layers = [{source.gathered_with(placed.spec.name) for placed in bucket.tensors} for bucket in inventory.buckets]
    assert sum("base_model.model.lm_head" in found for found in layers) == 1
    plain = Inventory({0: pieces}, 0, 1)
    assert len(plain.buckets) > len(inventory.buckets)


def test_layers_with_a_tied_weight_are_gathered_in_one_bucket() -> None:
    def piece(*names: str) -> Piece:
        return Piece(names, "float32", (2,), (0,), (2,))

    pieces = [piece("embed.base.weight", "head.base.weight"), piece("embed.lora"), piece("norm"), piece("head.lora")]

    def layer_of(name: str) -> str | None:
        return None if name == "norm" else name.partition(".")[0]

    buckets = Inventory({0: pieces}, 0, 1, layer_of).buckets
    found = [sorted(placed.spec.name for placed in bucket.tensors) for bucket in buckets]
    assert found == [["embed.base.weight", "embed.lora", "head.lora"], ["norm"]]


def test_merging_gathered_tensors_leaves_them_and_the_policy_as_they_are() -> None:
    """A gathered tensor may be tied to one of another layer, so it is not merged in place."""
    source = Source(adapted())
    tensors = {name: tensor for name, tensor in source.shards() if isinstance(tensor, torch.Tensor)}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    whole = source.whole({name: tensor.detach() for name, tensor in tensors.items()})
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(whole[f"{name}.weight"], before[f"base_model.model.{name}.base_layer.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
