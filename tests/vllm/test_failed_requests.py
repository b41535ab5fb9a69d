"""Requests that failed, as vLLM's processes report them, and the cache blocks that they left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from drivetrain_sampling import NO_TOKEN, NOT_FINITE, failures_of
from drivetrain_vllm.in_engine.failed_requests import clean, tell, zero_blocks
from drivetrain_vllm.in_engine.sampler import Requests, settle

NAN, INF = float("nan"), float("inf")


def test_a_step_tells_which_requests_failed_and_draws_zeros_for_them() -> None:
    requests = Requests()
    top = torch.tensor([1.0, NAN, -INF, INF, -2.0])
    ids = requests.check(["a", "b", "c", "d", "e"], top, torch.tensor([[5], [6], [7], [8], [9]], dtype=torch.int32))
    assert ids.tolist() == [[5], [0], [0], [0], [9]]
    assert ids.dtype is torch.int32
    checked, output = requests.take_checked(), SimpleNamespace(num_nans_in_logits=None)
    assert checked is not None
    assert requests.take_checked() is None
    tell(output, *checked)
    assert output.num_nans_in_logits == {"b": NOT_FINITE, "c": NO_TOKEN, "d": NOT_FINITE}


def test_what_samples_sees_no_nan() -> None:
    logits = torch.tensor([[1.0, 2.0], [NAN, 2.0], [-INF, -INF], [-INF, 3.0]])
    top = settle(logits)
    assert failures_of(top).tolist() == [0, NOT_FINITE, NO_TOKEN, 0]
    assert logits.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [-INF, 3.0]]


def test_a_step_without_failures_says_nothing() -> None:
    output = SimpleNamespace(num_nans_in_logits=None)
    tell(output, ["a", "b"], torch.tensor([0.0, -1e30]))
    assert output.num_nans_in_logits is None


@pytest.mark.parametrize(("shape", "at"), [((2, 6, 4, 1, 3), 1), ((6, 2, 4, 1, 3), 0), ((2, 12, 2, 3), 1), ((6, 5), 0)])
def test_blocks_are_zeroed_in_every_layout_and_no_others(shape: tuple[int, ...], at: int) -> None:
    cache = torch.full(shape, NAN)
    # A state-space layer holds several tensors.
    zero_blocks([cache, [cache.clone()]], 6, [1, 4])
    rows = cache.movedim(at, 0).isnan().reshape(6, -1)
    assert rows.all(1).tolist() == [True, False, True, True, False, True]
    assert rows.any(1).tolist() == [True, False, True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_blocks_of_every_type_are_zeroed(dtype: torch.dtype) -> None:
    cache = torch.full((2, 4, 8), 0xFF, dtype=torch.uint8).view(dtype)
    zero_blocks([cache], 4, [3])
    held = cache.view(torch.uint8)
    assert not held[:, 3].any()
    assert (held[:, :3] == 0xFF).all()


def test_a_step_cleans_what_its_output_of_the_scheduler_names() -> None:
    runner = SimpleNamespace(kv_caches=[torch.ones(3, 2)], kv_cache_config=SimpleNamespace(num_blocks=3))
    clean(runner, SimpleNamespace())
    assert runner.kv_caches[0].all()
    clean(runner, SimpleNamespace(_drivetrain_unclean=[2]))
    assert runner.kv_caches[0].tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
