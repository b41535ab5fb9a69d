"""Warnings about untested engine versions."""

from __future__ import annotations

import warnings

import pytest

from drivetrain.backend.toolkit.engine_versions import warn_if_unseen


@pytest.mark.parametrize(
    ("installed", "seen"),
    [
        ("5.17.0", ("5.17", "5.23")),
        ("5.23.9", ("5.17", "5.23")),
        ("0.5.17", ("0.5.17", "0.5.23")),
        ("0.5.23.post1", ("0.5.17", "0.5.23")),
        ("99", None),
    ],
)
def test_what_was_tested_is_used_in_silence(installed: str, seen: tuple[str, str] | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unseen("engine", installed, seen)


@pytest.mark.parametrize("installed", ["0.5.16", "0.5.24", "0.6.0", "1.0.0.dev0", "0.4", "nightly"])
def test_what_was_not_tested_is_named(installed: str) -> None:
    with pytest.warns(UserWarning, match=rf"engine {installed} is outside .* \(0\.5\.17 to 0\.5\.23\)"):
        warn_if_unseen("engine", installed, ("0.5.17", "0.5.23"))
