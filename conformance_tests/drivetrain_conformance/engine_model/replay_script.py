"""Write a history as a program that reproduces a failure."""

from __future__ import annotations

import textwrap
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from drivetrain_conformance.engine_model.actions import LONG
from drivetrain_conformance.engine_model.expected_answers import Style


@dataclass(slots=True)
class Script:
    """The program so far."""

    prompts: Sequence[Sequence[int]]
    weight_sets: int
    config: Mapping[str, object]
    """Fields of the engine's configuration, except backend and model."""
    tolerance: float
    styles: Sequence[Style] = (Style.PLAIN,)
    adapted: bool = False
    """Requests may use an adapter."""
    lines: list[str] = field(default_factory=list)
    _depth: int = 0

    def add(self, *lines: str) -> None:
        """Append statements to ``main``."""
        self.lines += [f"{'    ' * self._depth}{line}" for line in lines]

    @contextmanager
    def block(self, opening: str) -> Generator[None, None, None]:
        """Open a block, in which statements added within are indented."""
        self.add(opening)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def text(self, error: BaseException) -> str:
        """Return the whole program."""
        first = f"{type(error).__name__}: {error}".splitlines()[0].replace("\\", "\\\\").replace('"""', "'''")
        others = ", ".join(f"models.with_other_weights(Path(MODEL), {seed})" for seed in range(1, self.weight_sets))
        return _SCRIPT.format(
            error=textwrap.shorten(first, 300),
            prompts=",\n    ".join(str(list(prompt)) for prompt in self.prompts),
            config="".join(f", {name}={value!r}" for name, value in self.config.items()),
            folders=f"[{', '.join(filter(None, ['Path(MODEL)', others]))}]",
            tolerance=self.tolerance,
            styles=list(self.styles),
            adapter=textwrap.indent(_ADAPTER, " " * 8) if self.adapted else "",
            adapted=", adapted=adapted" if self.adapted else "",
            long=LONG,
            body=textwrap.indent("\n".join(self.lines), " " * 8),
        )


_ADAPTER: Final = """\
adapter = make_adapter(Path(MODEL), models.folder("adapter"), seed=1)
adapted = [merge(folder, adapter, models.folder("merged")) for folder in folders]
await engine.load_lora_adapter(ADAPTER, str(adapter.path))
"""
_SCRIPT: Final = '''\
"""Reproduces: {error}

Run it as: python SCRIPT.py BACKEND MODEL
"""

import asyncio
import contextlib
import sys
from pathlib import Path

from drivetrain import (
    EngineBusy,
    EngineStateError,
    SamplingParams,
    UnsupportedCapability,
    WeightTransferFailed,
    create_engine,
)
from drivetrain_conformance.assets.made_adapters import make_adapter, merge
from drivetrain_conformance.harness.testbench import until_idle
from drivetrain_conformance.assets.served_models import Models
from drivetrain_conformance.engine_model.expected_answers import ADAPTER, Answers, End, Fields, Style
from drivetrain_conformance.references.oracle import TransformersOracle
from drivetrain_conformance.engine_model.replay import (
    ended,
    from_disk,
    load,
    look,
    proceed,
    push,
    refused,
    settle,
    start,
)
from drivetrain_conformance.engine_model.strategies import WeightPlanChoice

BACKEND, MODEL = sys.argv[1:3]
PROMPTS = [
    {prompts},
]


async def main(models: Models) -> None:
    folders = {folders}
    async with create_engine(BACKEND, model=MODEL{config}) as engine:
{adapter}        answers = await Answers.note(
            engine, folders, PROMPTS, {long}, oracle=TransformersOracle, tolerance={tolerance}, styles={styles}{adapted}
        )
{body}


with contextlib.closing(Models()) as models:
    asyncio.run(main(models))
'''
