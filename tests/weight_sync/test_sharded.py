"""The ranks of a sharded trainer push together: whole tensors arrive, and nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from tests.weight_sync import trainer_ranks
from tests.weight_sync.models import Model
from tests.weight_sync.receiver_engines import InlineEngine
from tests.weight_sync.trainer_ranks import Ranks, ranks_of_a_trainer

from drivetrain.errors import InvalidRequest, WeightPlanMismatch, WeightSyncError
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import WeightShard, WeightSync
from drivetrain_weight_sync.shards.inventory import Inventory
from drivetrain_weight_sync.shards.pieces import own_pieces

SIZE = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of_a_trainer(SIZE) as started:
        yield started


@pytest.mark.parametrize("strategy", ["in_process", "shared_memory", "broadcast", "disk"])
def test_fsdp2_ranks_push_together(ranks: Ranks, strategy: str) -> None:
    (results, wrong), *others = ranks.run(trainer_ranks.push_thrice, strategy)
    nbytes = sum(tensor.nbytes for name, tensor in Model(1).state_dict().items() if name != "lm_head.weight")
    tensors = len(Model(1).state_dict()) - 1
    assert results == [(f"step-{step}", strategy, tensors, nbytes) for step in range(3)]
    assert wrong == []
    assert others == [(results, [])] * (SIZE - 1)


def test_ranks_meet_in_their_own_store_before_nccl_wants_gpus(ranks: Ranks) -> None:
    reasons = ranks.run(trainer_ranks.form_a_group_without_gpus)
    assert all("NCCL needs a GPU" in reason for reason in reasons), reasons


def test_ranks_stage_their_own_shards_where_the_engine_reads_them(ranks: Ranks) -> None:
    found = ranks.run(trainer_ranks.push_in_parts)
    full = "OutOfMemoryError: no room for the parts"
    there = f"WeightSyncError: the push failed on another rank: {full}"
    assert [errors for errors, _, _ in found] == [[there], [there], [full], [there]]
    assert found[1][1:] == (["shards"] * 3, [])


@pytest.mark.parametrize("strategy", ["in_process", "shared_memory"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_the_engine_answers_as_one_that_loaded_the_weights(ranks: Ranks, architecture: str, strategy: str) -> None:
    found, *_ = ranks.run(trainer_ranks.push_to_a_real_engine, architecture, strategy)
    assert found == asyncio.run(_fresh_answer(architecture))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("strategy", ["in_process", "shared_memory"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_stacks_of_experts_arrive_as_a_load_of_their_files(
    ranks: Ranks, architecture: str, strategy: str, dim: int
) -> None:
    for seed in range(2):
        tiny_model(architecture, seed=seed)  # otherwise all ranks would make it at once
    assert ranks.run(trainer_ranks.push_experts, architecture, strategy, dim) == [[]] * SIZE


async def _fresh_answer(architecture: str) -> tuple[list[int], list[float]]:
    from drivetrain import SamplingParams, create_engine
    from drivetrain.testing import tiny_model

    async with create_engine("transformers", model=str(tiny_model(architecture, seed=1))) as engine:
        params = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
        (output,) = (await engine.generate([[5, 6, 7]], params)).completions
        return output.token_ids, output.logprobs or []


def test_tensors_may_be_sharded_over_a_mesh_and_any_rank_may_push(ranks: Ranks) -> None:
    assert ranks.run(trainer_ranks.push_over_a_mesh) == [[]] * SIZE


def test_a_trainer_with_tensor_and_pipeline_parallelism_of_its_own_yields_its_shards(ranks: Ranks) -> None:
    torch.manual_seed(0)
    heads, groups, width, hidden = 4, 2, 3, 8
    whole: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.randn(10, hidden)}
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        whole |= {
            f"{attention}q_proj.weight": torch.randn(heads * width, hidden),
            f"{attention}k_proj.weight": torch.randn(groups * width, hidden),
            f"{attention}v_proj.weight": torch.randn(groups * width, hidden),
            f"{attention}o_proj.weight": torch.randn(hidden, heads * width),
            f"{mlp}gate_proj.weight": torch.randn(6, hidden),
            f"{mlp}up_proj.weight": torch.randn(6, hidden),
        }
    shards = [megatron_shards(whole, rank % 2, rank // 2, groups) for rank in range(SIZE)]
    assert ranks.run(trainer_ranks.push_shards, shards, whole) == [[]] * SIZE


def megatron_shards(
    whole: dict[str, torch.Tensor], tensor_rank: int, stage: int, groups: int
) -> dict[str, WeightShard]:
    """Return the shards of a rank of two by two: rows or columns of one layer, from fused parameters."""
    attention, mlp = f"model.layers.{stage}.self_attn.", f"model.layers.{stage}.mlp."
    q, k, v = (whole[f"{attention}{part}_proj.weight"] for part in "qkv")
    by_group = [part.view(groups, -1, part.shape[1]) for part in (q, k, v)]
    fused = torch.cat(by_group, dim=1)[tensor_rank]  # this rank's group: its queries, key and value
    sizes = [part.shape[1] for part in by_group]
    found = {
        f"{attention}{letter}_proj.weight": WeightShard(rows, tuple(part.shape), (tensor_rank * len(rows), 0))
        for letter, rows, part in zip("qkv", torch.split(fused, sizes), (q, k, v), strict=True)
    }
    gate_and_up = torch.cat([whole[f"{mlp}{part}_proj.weight"].chunk(2)[tensor_rank] for part in ("gate", "up")])
    for part, rows in zip(("gate", "up"), gate_and_up.chunk(2), strict=True):
        found[f"{mlp}{part}_proj.weight"] = WeightShard(
            rows, (2 * len(rows), rows.shape[1]), (tensor_rank * len(rows), 0)
        )
    o = whole[f"{attention}o_proj.weight"]
    columns = o.chunk(2, dim=1)[tensor_rank]
    found[f"{attention}o_proj.weight"] = WeightShard(columns, tuple(o.shape), (0, tensor_rank * columns.shape[1]))
    if stage == 0:
        embedding = whole["model.embed_tokens.weight"]
        rows = embedding.chunk(2)[tensor_rank]
        found["model.embed_tokens.weight"] = WeightShard(rows, tuple(embedding.shape), (tensor_rank * len(rows), 0))
    return found


REFUSED = {
    "dead engine": ("EngineDied", "the engine's process has ended"),
    "NaN": ("InvalidWeights", "layers.1.up.weight (NaN)"),
    "missing": ("WeightPlanMismatch", "up.bias"),
    "a rank cannot read its weights": ("WeightSyncError", "model.norm.bias is a str"),
    "a rank has an engine too": ("InvalidRequest", "ranks 0 and 1 of the trainer have an engine each"),
    "another version": ("InvalidRequest", "pass the same version on every rank"),
    "another version, and a late rank": ("InvalidRequest", "pass the same version on every rank"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_push_that_fails_raises_the_same_on_every_rank(ranks: Ranks, how: str) -> None:
    name, message = REFUSED[how]
    for error, text, changed, version, wrong in ranks.run(trainer_ranks.push_what_fails, how):
        if how == "a rank has an engine too" and "1 and 0" in text:  # either may come first
            message = "ranks 1 and 0 of the trainer have an engine each"
        assert (error, changed, version, wrong) == (name, [], "good", [])
        assert message in text


def test_a_sync_goes_on_after_a_push_that_was_refused(ranks: Ranks) -> None:
    outcomes = ["InvalidWeights", "v1.0", "InvalidWeights", "v2.0"]
    assert ranks.run(trainer_ranks.push_again_after_a_refusal) == [outcomes] * SIZE


FOLLOWER_DIES = [
    "before",
    "first shards asked for",
    "second shards asked for",
    "asked to stage its parts",
    "parts staged",
]
PUSHER_DIES = [
    "before",
    "first shards gathered",
    "second shards gathered",
    "asked to stage its parts",
    "all parts staged",
    "prepared",
    "updated",
    "committed",
]


@pytest.mark.parametrize("where", FOLLOWER_DIES)
def test_a_rank_that_dies_releases_all_others_and_changes_nothing(where: str) -> None:
    with ranks_of_a_trainer(3) as three:
        outcomes = three.run(trainer_ranks.push_while_one_dies, 2, where)
    assert outcomes[2] == "killed"
    for outcome, message, _ in outcomes[:2]:
        assert outcome == "TrainerRankLost"
        assert "rank 2 of the trainer was lost" in message
    assert outcomes[0][2] == "first"


@pytest.mark.parametrize("where", PUSHER_DIES)
def test_a_pushing_rank_that_dies_releases_all_others(where: str) -> None:
    with ranks_of_a_trainer(3) as three:
        outcomes = three.run(trainer_ranks.push_while_one_dies, 0, where)
    assert outcomes[0] == "killed"
    for outcome, message, _ in outcomes[1:]:
        assert outcome == "TrainerRankLost"
        assert "rank 0 of the trainer was lost" in message


def test_shards_that_do_not_make_up_the_tensor_are_refused_by_name() -> None:
    def offered(*offsets: int) -> dict[int, object]:
        return {
            rank: own_pieces([("w", WeightShard(torch.zeros(2, 3), (4, 3), (offset, 0)))])[0]
            for rank, offset in enumerate(offsets)
        }

    Inventory(offered(0, 2, 2), 0, 1024)  # type: ignore[arg-type]
    with pytest.raises(WeightPlanMismatch, match=r"shards of w \(\[4, 3\]\).*hold 6 of its 12 values"):
        Inventory(offered(0), 0, 1024)  # type: ignore[arg-type]
    with pytest.raises(WeightPlanMismatch, match=r"two overlap: \[2, 3\] at \[0, 0\] and \[2, 3\] at \[1, 0\]"):
        Inventory(offered(0, 1), 0, 1024)  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match=r"the shard of w has shape \[2, 3\] at offset \[3, 0\], outside"):
        offered(3)


def test_ranks_that_push_together_need_a_process_group() -> None:
    with pytest.raises(InvalidRequest, match=r"init_process_group"):
        WeightSync.connect(Model(1), None)


async def test_shards_without_a_group_are_refused_with_the_remedy() -> None:
    shard = WeightShard(torch.zeros(2), (4,), (0,))
    async with WeightSync.connect([("w", shard)], InlineEngine(Model(1))) as sync:
        with pytest.raises(WeightSyncError, match=r"w is a WeightShard.*group=torch\.distributed\.group\.WORLD"):
            await sync.push(version="step-1")
