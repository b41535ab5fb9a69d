"""Packed experts."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain import RoutedExperts


@pytest.mark.parametrize(("most", "width"), [(4, 1), (256, 1), (257, 2), (2**16, 2)])
def test_ids_come_back_in_the_fewest_bytes(most: int, width: int) -> None:
    ids = np.random.default_rng(0).integers(0, most, (5, 3, 2))
    ids[1, 1, 1] = most - 1
    experts = RoutedExperts.of(ids)
    assert (experts.to_numpy() == ids).all()
    assert experts.tolist() == ids.tolist()
    assert (len(experts), experts.layers, experts.experts_per_token) == ids.shape
    assert len(experts.packed) == ids.size * width


def test_slices_and_sums_are_those_of_lists() -> None:
    listed = [[[1], [2]], [[3], [300]], [[5], [6]]]
    experts = RoutedExperts.of(listed)
    assert experts[:1] + experts[1:] == experts
    assert experts[:1] == RoutedExperts.of(listed[:1])  # its ids take one byte
    assert experts[-2:].tolist() == listed[-2:]
    assert RoutedExperts.join([]) == experts[3:] == RoutedExperts()
    assert RoutedExperts() + experts == experts
    assert len(RoutedExperts()) == 0
    assert RoutedExperts().to_numpy().shape == (0, 0, 0)


@pytest.mark.parametrize("wrong", [[[1, 2]], [[[0.5]]], [[[-1]]], [[[2**16]]]])
def test_what_is_no_experts_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        RoutedExperts.of(wrong)  # type: ignore[arg-type]


def test_one_token_is_no_slice() -> None:
    with pytest.raises(TypeError, match="take a slice"):
        RoutedExperts.of([[[1]]])[0]  # type: ignore[index]
