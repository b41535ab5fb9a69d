"""Mark prefix-cache keys with the reset that they follow."""

from __future__ import annotations

import pytest

from drivetrain_weight_sync.receiver.cache_epochs import OF_EXPERTS, CacheEpochs


@pytest.mark.parametrize("key", ["drivetrain-0", "drivetrain-0-1:2", "", None])
def test_a_key_from_before_a_reset_is_marked_anew(key: str | None) -> None:
    epochs = CacheEpochs()
    before = epochs.marked(key)
    assert epochs.is_current(before)
    epochs.renew()
    assert not epochs.is_current(before)
    again = epochs.marked_again(before)
    assert again == epochs.marked(key) != before
    assert epochs.is_current(again)
    assert epochs.marked_again(again) == again


def test_what_an_engine_adds_to_a_key_is_kept() -> None:
    epochs = CacheEpochs()
    with_an_adapter = epochs.marked("drivetrain-0") + "adapter"
    epochs.renew()
    assert epochs.marked_again(with_an_adapter) == epochs.marked("drivetrain-0") + "adapter"


def test_one_reset_is_not_taken_for_another() -> None:
    epochs = CacheEpochs()
    marked = set[str]()
    for _ in range(30):
        epochs.renew()
        marked.add(epochs.marked("1"))
        assert sum(map(epochs.is_current, marked)) == 1


def test_new_weights_renew_the_keys_of_those_who_ask_for_experts() -> None:
    epochs = CacheEpochs()
    plain, experts = epochs.marked("drivetrain-0"), epochs.marked(f"drivetrain-0{OF_EXPERTS}")
    epochs.renew_experts()
    assert epochs.is_current(plain)
    assert not epochs.is_current(experts)
    again = epochs.marked_again(experts)
    assert again == epochs.marked(f"drivetrain-0{OF_EXPERTS}") != experts
    assert epochs.is_current(again)
    epochs.renew()
    assert not epochs.is_current(again)


def test_a_key_that_is_not_marked_is_of_no_reset() -> None:
    assert not CacheEpochs().is_current(None)
    assert not CacheEpochs().is_current("drivetrain-0")
