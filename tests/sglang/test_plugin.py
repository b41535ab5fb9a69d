"""The hook that makes SGLang's processes load our code."""

from __future__ import annotations

import os

import pytest

from drivetrain_sglang import in_engine


@pytest.mark.parametrize(
    ("named", "then"),
    [
        (None, None),
        ("", ""),
        ("mine", "mine,drivetrain"),
        ("mine,drivetrain", "mine,drivetrain"),
    ],
)
def test_it_is_loaded_beside_the_plugins_that_are_named(
    monkeypatch: pytest.MonkeyPatch, named: str | None, then: str | None
) -> None:
    monkeypatch.delenv(in_engine.SOCKET_VARIABLE, raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    with monkeypatch.context() as patched:
        patched.setenv(in_engine.SOCKET_VARIABLE, "before")
        patched.setenv("SGLANG_PLUGINS", named or "")
        if named is None:
            patched.delenv("SGLANG_PLUGINS")
        in_engine.invite("a socket")
        assert os.environ[in_engine.SOCKET_VARIABLE] == "a socket"
        assert os.environ.get("SGLANG_PLUGINS") == then
