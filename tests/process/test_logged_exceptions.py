"""The exception that made an engine fail is found in the log that the engine wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.errors import EngineDied, EngineStateError
from drivetrain.process.host_log import HostLog, with_end_of_log
from drivetrain.process.logged_exceptions import first_exception


def log_of(program: str) -> list[str]:
    """The lines that a Python program prints; blank ones are left out, as of a host."""
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    return [line for line in done.stderr.splitlines() if line]


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("raise ValueError('no such model')", "ValueError: no such model"),
        ("raise NotImplementedError", "NotImplementedError"),
        ("import json; json.loads('}')", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (
            "try:\n    {}['qwen9']\nexcept KeyError as error:\n    raise ValueError('not supported') from error",
            "KeyError: 'qwen9', which led to ValueError: not supported",
        ),
        (
            "try:\n    raise OSError('disk full')\nexcept OSError:\n    raise EOFError",
            "OSError: disk full",
        ),
        (
            "try:\n    raise EOFError\nexcept EOFError as error:\n    raise RuntimeError('cannot read') from error",
            "RuntimeError: cannot read",
        ),
        (
            "raise RuntimeError('Error(s) in loading:\\n\\tsize mismatch for a\\n\\tsize mismatch for b')",
            "RuntimeError: Error(s) in loading: size mismatch for a size mismatch for b",
        ),
        ("raise ValueError('the first line\\n\\nand hints')", "ValueError: the first line"),
        ("raise ValueError('x' * 1000)", f"ValueError: {'x' * 388} …"),
        (
            "import concurrent.futures\n"
            "with concurrent.futures.ProcessPoolExecutor() as pool:\n    pool.submit(len, 5).result()",
            "TypeError: object of type 'int' has no len()",
        ),
        (
            "import asyncio\nasync def fail():\n    raise ValueError('in a task')\nasync def main():\n"
            "    async with asyncio.TaskGroup() as group:\n        group.create_task(fail())\nasyncio.run(main())",
            "ValueError: in a task",
        ),
        (
            "class Odd:\n    def __del__(self):\n        raise ValueError('unseen')\n"
            "odd = Odd()\ndel odd\nraise KeyError(1)",
            "KeyError: 1",
        ),
        (
            "import pydantic\nclass Model(pydantic.BaseModel):\n    size: int\nModel(size='big')",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for Model size Input should be a valid "
            "integer",
        ),
        ("import os; os.abort()", "Fatal Python error: Aborted"),
        ("import sys; sys.exit('no traceback')", ""),
        ("raise KeyboardInterrupt", ""),
    ],
)
def test_the_exception_of_a_python_program(program: str, found: str) -> None:
    result = first_exception(log_of(program))
    assert result == found or (found.endswith("integer") and result.startswith(found))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines() if line.strip()]


SGLANG_FAILS_TO_START = lines("""
[2026-11-26 02:20:08] WARNING server_args.py:2001: Attention backend not specified.
[2026-11-26 02:20:11 TP1] Load weight begin. avail mem=70.21 GB
[2026-11-26 02:20:14 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/site-packages/sglang/srt/managers/scheduler.py", line 6349, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/site-packages/sglang/srt/mem_cache/memory_pool.py", line 501, in _create_buffers
    torch.zeros(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 90.00 GiB. GPU 0 has a total capacity of 79.10 GiB.

[2026-11-26 02:20:14] Received sigquit from a child process. It usually means the child failed.
[rank1]:[W1126 02:20:15.110 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called
py-spy: command not found
Traceback (most recent call last):
  File "/site-packages/sglang/srt/entrypoints/engine.py", line 2030, in _wait_for_scheduler_ready
    raise EOFError
EOFError

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/site-packages/sglang/srt/entrypoints/engine.py", line 2041, in _wait_for_scheduler_ready
    raise RuntimeError(message) from error
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).
""")
VLLM_FAILS_TO_START = lines("""
(EngineCore pid=71) WARNING 11-25 18:02:04 [cpu.py:88] Environment variable is not set
(Worker_TP1 pid=93) WARNING 11-25 18:02:05 [worker.py:12] Traceback (most recent call last):
(Worker_TP1 pid=93) WARNING 11-25 18:02:05 [worker.py:12]   File "/site-packages/vllm/worker.py", line 7, in tune
(Worker_TP1 pid=93) WARNING 11-25 18:02:05 [worker.py:12] ImportError: no such kernel
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510] EngineCore failed to start.
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510]   File "/vllm/v1/engine/core.py", line 1477, in run
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510]     engine_core = EngineCoreProc(*args, **kwargs)
(Worker_TP1 pid=93) ERROR 11-25 18:02:06 [executor.py:9] shutting down
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510]                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510] pydantic_core.ValidationError: 1 validation error for Cache
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510]   Value error, the cache is too small
(EngineCore pid=71) ERROR 11-25 18:02:06 [core.py:1510]
(EngineCore pid=71) Process EngineCore:
(EngineCore pid=71) Traceback (most recent call last):
(EngineCore pid=71)   File "/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap
(EngineCore pid=71)     self.run()
(EngineCore pid=71) SystemExit: 1
Traceback (most recent call last):
  File "/site-packages/vllm/v1/engine/utils.py", line 1428, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
""")


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (
            SGLANG_FAILS_TO_START,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 90.00 GiB. GPU 0 has a total capacity of "
            "79.10 GiB.",
        ),
        (
            VLLM_FAILS_TO_START,
            "pydantic_core.ValidationError: 1 validation error for Cache Value error, the cache is too small",
        ),
        (SGLANG_FAILS_TO_START[8:], ""),
        (VLLM_FAILS_TO_START[-4:], ""),
        (
            ["[rank0]: Traceback (most recent call last):", "[rank0]: OSError: x"],
            "OSError: x",
        ),
        (["\x1b[31mTraceback (most recent call last):\x1b[0m", '  File "a.py"', "OSError: x"], "OSError: x"),
        (["Traceback (most recent call last):", '  File "a.py"', "INFO: loaded", "OSError: x"], "OSError: x"),
        (["Traceback (most recent call last):", '  File "a.py"'], ""),
        ([], ""),
    ],
)
def test_the_exception_that_ended_an_engine(log: list[str], found: str) -> None:
    assert first_exception(log) == found


ENGINE_LOGS = Path(__file__).parent / "engine_logs"
"""Ends of logs that SGLang 0.5.23 and vLLM wrote when they did not start; paths are shortened."""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sglang_unknown_architecture", "ValueError: Cannot find model module. 'NoSuchForCausalLM' is not"),
        ("vllm_wrong_shape", "RuntimeError: start (0) + length (128) exceeds dimension size (120)."),
        ("vllm_huge_cache", "ValueError: Available memory on node 0 (21.44/23.54 GiB) on kv cache allocation is less"),
    ],
)
def test_the_exception_in_the_log_of_a_real_engine(name: str, found: str) -> None:
    text = (ENGINE_LOGS / f"{name}.txt").read_text(encoding="utf-8")
    assert first_exception(lines(text)).startswith(found)


def test_a_message_names_the_exception_before_the_last_lines() -> None:
    message = with_end_of_log("the engine ended", SGLANG_FAILS_TO_START)
    first, second, *shown = message.splitlines()
    assert first.startswith("the engine ended; first exception in its log: torch.OutOfMemoryError: CUDA out of memory.")
    assert second == "last lines of its log:"
    assert shown == SGLANG_FAILS_TO_START


def test_an_exception_that_the_message_holds_is_not_repeated() -> None:
    log = ["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no such model"]
    message = with_end_of_log("SGLang failed to start: ValueError: no such model", log)
    assert message == "\n".join(["SGLang failed to start: ValueError: no such model", "last lines of its log:", *log])


def test_an_exception_is_searched_among_recent_lines() -> None:
    message = with_end_of_log("the engine ended", SGLANG_FAILS_TO_START, recent=SGLANG_FAILS_TO_START[:2])
    assert message.splitlines()[:2] == ["the engine ended", "last lines of its log:"]


def test_a_message_shows_the_beginning_of_long_lines() -> None:
    settings = "server_args=" + 2000 * "a=None, "
    shown = with_end_of_log("the engine ended", 100 * [settings]).splitlines()[2:]
    assert shown == 40 * [f"{settings[:300]} … [{len(settings)} characters]"]
    message = str(EngineDied(with_end_of_log("the engine ended", 100 * [settings])))
    assert message in str(EngineStateError(f"generate() is refused: the engine is failed ({message})", state="failed"))


def test_without_a_log_a_message_stays_as_it_is() -> None:
    assert with_end_of_log("the engine ended", []) == "the engine ended"


def test_a_log_keeps_its_newest_thousand_lines() -> None:
    log = HostLog()
    for number in range(1500):
        log.add(str(number))
    assert log.lines() == [str(number) for number in range(500, 1500)]
    assert log.lines(60) == log.lines()
    assert log.lines(0) == []
