"""The kernel that copies and digests, in Triton's interpreter: on a GPU it is ``benchmarks/gpu/device_copies.py``'s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from drivetrain_weight_sync.device_copies import DeviceCopy, fits


def test_only_whole_contiguous_words_fit() -> None:
    words = torch.zeros(64, dtype=torch.bfloat16)
    assert fits(DeviceCopy("x", words, words.clone()))
    assert fits(DeviceCopy("x", words))
    assert not fits(DeviceCopy("x", words[:3]))
    assert not fits(DeviceCopy("x", words[1:5]))
    assert not fits(DeviceCopy("x", words.view(8, 8).T))
    assert not fits(DeviceCopy("x", words, words[:32]))
    assert not fits(DeviceCopy("x", words, words.to(torch.float16)))
    assert not fits(DeviceCopy("x", words[:0]))


def test_copies_and_digests_are_those_of_torch() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    script = Path(__file__).with_name("interpreted_copies.py")
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "all equal" in run.stdout
