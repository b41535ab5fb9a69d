"""The host process ends with the trainer that launched it, and sees its GPU variables."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest


@pytest.mark.slow
def test_the_host_sees_the_gpu_variables_as_they_are_and_goes_when_the_trainer_is_killed(
    model: Path, tmp_path: Path
) -> None:
    script = textwrap.dedent(f"""
        import asyncio, pathlib
        from drivetrain import create_engine, SamplingParams

        async def main():
            engine = create_engine("transformers", model={str(model)!r}, isolation="process")
            await engine.start()
            params = SamplingParams(max_new_tokens=900, ignore_eos=True)
            task = asyncio.create_task(engine.generate("x", params))
            await asyncio.sleep(0.2)
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(engine.host_pid))
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "3,1"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as trainer:
        pid_file = tmp_path / "pid"
        for _ in range(600):
            if pid_file.exists() and pid_file.read_text():
                break
            time.sleep(0.1)
        host = psutil.Process(int(pid_file.read_text()))
        assert host.environ()["CUDA_VISIBLE_DEVICES"] == "3,1"
        trainer.kill()
        trainer.wait()
    gone, alive = psutil.wait_procs([host], timeout=60)
    assert not alive, alive
    assert gone
