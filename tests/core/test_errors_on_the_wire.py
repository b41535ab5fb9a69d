"""Errors that cross to another process keep their class, message and fields."""

from __future__ import annotations

import pytest

from drivetrain.errors import (
    DrivetrainError,
    EngineInternalError,
    WeightPlanMismatch,
    WeightProbeFailed,
    error_classes,
    from_wire,
    to_wire,
)

OWN = [cls for cls in error_classes(DrivetrainError) if cls.__module__ == DrivetrainError.__module__]


@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_every_class_is_rebuilt(cls: type[DrivetrainError]) -> None:
    again = from_wire(*to_wire(cls("why")))
    assert type(again) is cls
    assert str(again) == "why"


def test_fields_are_kept() -> None:
    mismatch = from_wire(*to_wire(WeightPlanMismatch("why", missing=["a"], mismatched=("b", "c"))))
    assert isinstance(mismatch, WeightPlanMismatch)
    assert (mismatch.missing, mismatch.extra, mismatch.mismatched) == (("a",), (), ("b", "c"))
    probe = from_wire(*to_wire(WeightProbeFailed("why", gap=0.5)))
    assert isinstance(probe, WeightProbeFailed)
    assert probe.gap == 0.5


def test_an_unknown_class_and_fields_that_do_not_fit_are_internal_errors() -> None:
    unknown = from_wire("NoSuchError", "why", {})
    misfit = from_wire("WeightPlanMismatch", "why", {"missing": 5, "__class__": int})
    assert type(unknown) is type(misfit) is EngineInternalError
    assert str(unknown) == "NoSuchError: why"
    assert str(misfit).startswith("WeightPlanMismatch: why (")
