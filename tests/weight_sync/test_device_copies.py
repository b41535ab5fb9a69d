"""The kernel that copies and digests, in Triton's interpreter; ``benchmarks/gpu/device_copies.py`` runs it on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from asyncio import CancelledError
from pathlib import Path

import pytest
import torch

from drivetrain_weight_sync.copying.device_copies import DeviceCopy, Pace, Window, fits, window_of
from drivetrain_weight_sync.copying.waiting import WAITING, wait_for


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


def test_a_window_is_a_part_of_every_line() -> None:
    matrix = torch.zeros(8, 64, dtype=torch.bfloat16)

    def window(part: torch.Tensor) -> Window | None:
        return window_of(matrix, part.shape, part.stride(), int(part.storage_offset()))

    assert window(matrix[:, 16:32]) == Window(16, 4, 4)
    assert window(matrix[2:4]) == Window(128, 32, 32)
    assert window(matrix[3, 8:24]) == Window(128, 50, 4)
    assert window(matrix) == Window(128, 0, 128)
    assert window(matrix[:, 1:5]) is None, "it begins within a word"
    assert window(matrix[:, :6]) is None, "it ends within a word"
    assert window(matrix[:4, :32]) is None, "not of every line"
    assert window(matrix[::2]) == Window(32, 0, 16)
    assert window(matrix.t()) is None
    half = window(matrix[:, 32:])
    assert fits(DeviceCopy(matrix, torch.zeros(8, 32, dtype=torch.bfloat16), window=half))
    assert not fits(DeviceCopy(matrix, torch.zeros(8, 64, dtype=torch.bfloat16), window=half))


def test_a_pace_rests_between_parts_and_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    rests: list[float] = []
    monkeypatch.setattr("drivetrain_weight_sync.copying.device_copies.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("drivetrain_weight_sync.copying.device_copies.time.sleep", rests.append)
    takes = [9.0, 1.0, 2.0, 1.0]  # the first launch compiles, and the third waits for other work

    def work(part: int) -> None:
        clock[0] += takes[part]

    reached: list[float] = []
    Pace(0.25, reached.append).run(4, work)
    assert reached == [0.25, 0.5, 0.75, 1.0]
    assert rests == [27.0, 3.0, 3.0]

    def enough(fraction: float) -> None:
        if fraction > 0.3:
            raise CancelledError

    done: list[int] = []
    with pytest.raises(CancelledError):
        Pace(0.5, enough).run(4, done.append)
    assert done == [0, 1]


def test_no_thread_waits_for_a_gpu_while_another_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    thread = threading.Thread(target=wait_for, args=[torch.device("cuda", 0)])
    with WAITING:  # as a capture holds it
        thread.start()
        thread.join(0.05)
        assert not waited
    thread.join()
    assert waited == [torch.device("cuda", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "interpreted_adapters.py",
        "interpreted_conversions.py",
        "interpreted_fp8.py",
        "interpreted_copies.py",
        "interpreted_updates.py",
        "interpreted_staging.py",
    ],
)
def test_copies_and_digests_are_those_of_torch(script: str) -> None:
    """Run in a new process, as Triton decides at import if it interprets."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "all equal" in run.stdout
