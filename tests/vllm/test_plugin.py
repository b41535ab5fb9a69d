"""The hook that makes vLLM's processes load our code."""

from __future__ import annotations

import os

import pytest

from drivetrain_vllm import in_engine


@pytest.mark.parametrize(
    ("named", "then"),
    [
        (None, None),
        ("", "drivetrain"),
        ("mine", "mine,drivetrain"),
        ("mine,drivetrain", "mine,drivetrain"),
    ],
)
def test_it_is_loaded_beside_the_plugins_that_are_named(
    monkeypatch: pytest.MonkeyPatch, named: str | None, then: str | None
) -> None:
    monkeypatch.delenv(in_engine.SOCKET_VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with monkeypatch.context() as patched:
        patched.setenv(in_engine.SOCKET_VARIABLE, "before")
        patched.setenv("VLLM_PLUGINS", named or "")
        if named is None:
            patched.delenv("VLLM_PLUGINS")
        in_engine.invite("a socket")
        assert os.environ[in_engine.SOCKET_VARIABLE] == "a socket"
        assert os.environ.get("VLLM_PLUGINS") == then
