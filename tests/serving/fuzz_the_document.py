"""Requests that schemathesis makes from our OpenAPI document, to a real server: ``make test-openapi``.

No answer may be a 500, and each must have a status of the document, and the form that it describes. Routes that pause
the engine or change its weights come last, where nobody waits for them.

``fuzz_the_document.py SCHEMATHESIS CASES``: the program of that name, and the most cases of each route and phase.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch

from drivetrain import create_engine
from drivetrain.testing import tiny_model
from drivetrain_serving import Server, ServerConfig

SETTINGS: Final = Path(__file__).with_name("schemathesis.toml")
LEFT_OUT: Final = ("/start_profile", "/stop_profile")
"""Routes that write to folders of the machine."""
ROUNDS: Final = (("none", "api"), ("control",))
"""Tags of the routes that are asked in each round."""


async def fuzz(program: str, cases: int) -> bool:
    """Return whether each answer, in each dialect and round, was one of the document's."""
    sizes: dict[str, object] = {"enable_lora": True, "context_length": 64, "max_num_seqs": 16}
    bounds: dict[str, object] = {"weight_group_timeout": 1.0, "max_body_bytes": 1 << 20}
    ended: list[int] = []
    for dialect in ("vllm", "sglang"):
        config = ServerConfig.model_validate({"port": 0, "dialect": dialect, **bounds})
        async with create_engine("transformers", model=str(tiny_model("qwen2")), **sizes) as engine:
            async with Server(engine, config) as server:
                ended += [await _round(program, cases, server.url, tags) for tags in ROUNDS]
    return not any(ended)


async def _round(program: str, cases: int, url: str, tags: tuple[str, ...]) -> int:
    chosen = [part for tag in tags for part in ("--include-tag", tag)]
    left_out = [part for path in LEFT_OUT for part in ("--exclude-path", path)]
    options = ["--max-examples", str(cases), "--seed", "1", "--continue-on-failure", *chosen, *left_out]
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            program, "--config-file", str(SETTINGS), "run", f"{url}/openapi.json", *options, cwd=folder
        )
        return await process.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(not asyncio.run(fuzz(str(Path(sys.argv[1]).absolute()), int(sys.argv[2]))))
