"""Plans keep layers whole and tensors aligned, and name the tensors that do not fit an engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import InvalidConfig, WeightPlanMismatch
from drivetrain.types.weights import Bucket, PlacedTensor, TensorSpec, WeightManifest, WeightPlan
from drivetrain_weight_sync import check_plan, make_plan
from drivetrain_weight_sync.copying.plan import ALIGNMENT, bucket_offsets, check_geometry, layer_of, plan_nbytes

PREFIXES = ["model.layers.{}.", "transformer.h.{}.mlp.", "{}.", "model.layers.{}.experts.1."]


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(
        st.lists(
            st.one_of(
                st.builds(
                    lambda prefix, layer, leaf: prefix.format(layer) + leaf,
                    st.sampled_from(PREFIXES),
                    st.integers(0, 12),
                    st.sampled_from(["weight", "bias", "q.weight", "k.weight"]),
                ),
                st.sampled_from(["embed.weight", "norm.weight", "norm.bias", "lm_head.weight"]),
            ),
            unique=True,
            max_size=40,
        )
    )
    dtypes = st.sampled_from(["float32", "bfloat16", "int8", "float64"])
    shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    return [TensorSpec(name, draw(dtypes), draw(shapes)) for name in names]


def nbytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype.itemsize * math.prod(spec.shape)


@given(specs(), st.integers(1, 200_000))
def test_every_tensor_is_placed_once_aligned_and_with_its_layer(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    plan = make_plan(tensors, bucket_bytes)

    assert sorted(spec.name for spec in plan.tensors) == sorted(spec.name for spec in tensors)
    assert {spec.name: spec for spec in plan.tensors} == {spec.name: spec for spec in tensors}
    bucket_of: dict[str, int] = {}
    for index, bucket in enumerate(plan.buckets):
        end = 0
        for placed in bucket.tensors:
            assert placed.offset % ALIGNMENT == 0
            assert placed.offset >= end
            assert placed.nbytes == nbytes(placed.spec)
            end = placed.offset + placed.nbytes
            assert bucket_of.setdefault(layer_of(placed.spec.name), index) == index
        assert end <= bucket.nbytes
        assert bucket.nbytes % ALIGNMENT == 0
        layers = {layer_of(placed.spec.name) for placed in bucket.tensors}
        assert bucket.nbytes <= bucket_bytes or len(layers) == 1 or bucket.nbytes == 0
    check_geometry(plan)


@given(specs(), st.integers(1, 200_000))
def test_the_same_tensors_give_the_same_plan(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    one, other = make_plan(tensors, bucket_bytes), make_plan(iter(tensors), bucket_bytes)
    assert one == other
    assert one.hash == other.hash


@given(specs(), st.integers(1, 200_000))
def test_buckets_lie_one_after_another_in_an_arena(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    plan = make_plan(tensors, bucket_bytes)
    offsets = bucket_offsets(plan)
    assert len(offsets) == len(plan.buckets)
    ends = [offset + bucket.nbytes for offset, bucket in zip(offsets, plan.buckets, strict=True)]
    assert [0, *ends] == [*offsets, plan_nbytes(plan)]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3."),
        ("model.layers.12.mlp.experts.7.w1.weight", "model.layers.12."),
        ("0.weight", "0."),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.w1.weight", "model.w1.weight"),
    ],
)
def test_a_layer_is_the_name_up_to_its_index(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_layer_larger_than_a_bucket_has_its_own() -> None:
    small, large = TensorSpec("0.w", "int8", (100,)), TensorSpec("1.w", "int8", (5000,))
    more = TensorSpec("1.b", "int8", (5000,))
    plan = make_plan([small, large, more, replace(small, name="2.w")], 1024)
    assert [[placed.spec.name for placed in bucket.tensors] for bucket in plan.buckets] == [
        ["0.w"],
        ["1.w", "1.b"],
        ["2.w"],
    ]


def test_a_bucket_is_filled_to_the_last_byte_and_no_further() -> None:
    layers = [TensorSpec(f"{index}.w", "int8", (200,)) for index in range(4)]
    assert [len(bucket.tensors) for bucket in make_plan(layers, 512).buckets] == [2, 2]
    assert [len(bucket.tensors) for bucket in make_plan(layers, 511).buckets] == [1, 1, 1, 1]


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_size_that_is_not_positive_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(InvalidConfig, match=str(bucket_bytes)) as caught:
        make_plan([], bucket_bytes)
    assert caught.value.field == "bucket_bytes"


def test_a_dtype_that_torch_lacks_is_refused() -> None:
    with pytest.raises(WeightPlanMismatch, match=r"w has dtype 'float31'.*bfloat16"):
        make_plan([TensorSpec("w", "float31", (2,))])


def test_a_name_given_twice_is_refused() -> None:
    spec = TensorSpec("w", "float32", (2,))
    with pytest.raises(WeightPlanMismatch, match="w is given twice"):
        make_plan([spec, spec])


A, B, C = TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (4,)), TensorSpec("c", "int8", ())


def test_what_does_not_fit_is_named_with_both_sides_and_the_remedy() -> None:
    manifest = WeightManifest((A, B, C))
    offered = [replace(A, shape=(3, 2)), replace(B, dtype="float32"), TensorSpec("d", "int8", (1,))]
    with pytest.raises(WeightPlanMismatch) as caught:
        check_plan(offered, manifest)
    error = caught.value
    assert error.missing == ("c",)
    assert error.extra == ("d",)
    assert error.mismatched == ("a", "b")
    message = str(error)
    assert "a (got float32 [3, 2], expected float32 [2, 3])" in message
    assert "1 of float32, which would round to the engine's bfloat16 (b)" in message
    assert "c (expected int8 [])" in message
    assert "d (int8 [1])" in message
    assert "cast=True" in message


def test_hundreds_of_tensors_that_must_be_rounded_are_one_fact() -> None:
    held = tuple(TensorSpec(f"layers.{index}.w", "bfloat16", (2,)) for index in range(300))
    with pytest.raises(WeightPlanMismatch) as caught:
        check_plan([replace(spec, dtype="float32") for spec in held], WeightManifest(held))
    assert len(caught.value.mismatched) == 300
    assert "300 of float32, which would round to the engine's bfloat16 (layers.0.w, layers.1.w" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_wrong_shape_alone_does_not_advise_a_cast() -> None:
    with pytest.raises(WeightPlanMismatch) as caught:
        check_plan([replace(A, shape=(6,))], WeightManifest((A,)))
    assert "cast" not in str(caught.value)


def test_a_tied_tensor_may_come_under_either_name_but_not_under_both() -> None:
    manifest = WeightManifest((A, B), {"tied": "a"})
    check_plan([A, B], manifest)
    check_plan([replace(A, name="tied"), B], manifest)
    with pytest.raises(WeightPlanMismatch, match=r"tied \(given a second time, being tied to a\)") as caught:
        check_plan([A, B, replace(A, name="tied")], manifest)
    assert caught.value.extra == ("tied",)


@pytest.mark.parametrize(
    ("placed", "size", "problem"),
    [
        ([PlacedTensor(A, 0, 23)], 256, "has 23 bytes"),
        ([PlacedTensor(A, 8, 24)], 256, "not a multiple of 256"),
        ([PlacedTensor(A, 0, 24), PlacedTensor(B, 0, 8)], 256, "where the tensor before it ends at 24"),
        ([PlacedTensor(A, 256, 24)], 256, "ends at byte 280 of bucket 0, which has 256"),
    ],
)
def test_a_plan_with_impossible_geometry_is_refused(placed: list[PlacedTensor], size: int, problem: str) -> None:
    with pytest.raises(WeightPlanMismatch, match=problem):
        check_geometry(WeightPlan((Bucket(tuple(placed), size),)))


def test_names_that_share_a_wrong_beginning_are_one_fact() -> None:
    held = [TensorSpec(f"model.layers.{index}.up.weight", "float32", (2,)) for index in range(16)]
    manifest = WeightManifest((*held, A))
    with pytest.raises(WeightPlanMismatch) as caught:
        check_plan([A, *(replace(spec, name=f"actor.{spec.name}") for spec in held)], manifest)
    message = str(caught.value)
    assert "16 names begin with 'actor.', which the engine's do not, as actor.model.layers.0.up.weight" in message
    assert len(message) < 450
    assert len(caught.value.extra) == len(caught.value.missing) == 16
