"""The kernel that copies and digests, in Triton's interpreter: on a GPU it is ``benchmarks/gpu/device_copies.py``'s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drivetrain_weight_sync.device_copies import DeviceCopy, fits


def test_only_whole_contiguous_words_fit() -> None:
    words = torch.zeros(64, dtype=torch.bfloat16)
    assert fits(DeviceCopy(words, words.clone()))
    assert fits(DeviceCopy(words))
    assert not fits(DeviceCopy(words[:3]))
    assert not fits(DeviceCopy(words[1:5]))
    assert not fits(DeviceCopy(words.view(8, 8).T))
    assert not fits(DeviceCopy(words, words[:32]))
    assert not fits(DeviceCopy(words, words.to(torch.float16)))
    assert not fits(DeviceCopy(words[:0]))


@pytest.mark.parametrize("script", ["interpreted_copies.py", "interpreted_updates.py", "interpreted_staging.py"])
def test_copies_and_digests_are_those_of_torch(script: str) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "all equal" in run.stdout
