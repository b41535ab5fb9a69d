"""Write a program that reproduces the failure of a history."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from enum import Enum
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain_conformance.engine_model.actions import LONG, History
from drivetrain_conformance.engine_model.expected_answers import Answers


def script_of(
    error: BaseException,
    history: History,
    engine: InferenceEngine,
    answers: Answers,
    prompts: Sequence[Sequence[int]],
) -> str:
    """Return a program that plays ``history`` on an engine like ``engine``, whose expected answers it records first."""
    first = f"{type(error).__name__}: {error}".splitlines()[0].replace("\\", "\\\\").replace('"""', "'''")
    config = engine.config.model_dump(mode="json", exclude_unset=True, exclude={"backend", "model"})
    others = ", ".join(f"models.with_other_weights(Path(MODEL), {seed})" for seed in range(1, len(answers.folders)))
    return _SCRIPT.format(
        error=textwrap.shorten(first, 300),
        prompts="".join(f"    {list(prompt)},\n" for prompt in prompts),
        actions="".join(f"    {_code(action)},\n" for action in history.actions),
        ending=_code(history.ending),
        config="".join(f", {name}={value!r}" for name, value in config.items()),
        folders=f"[{', '.join(filter(None, ['Path(MODEL)', others]))}]",
        tolerance=answers.tolerance,
        styles=_code(tuple(answers.styles)),
        adapter=textwrap.indent(_ADAPTER, " " * 8) if answers.adapted else "",
        adapted=", adapted=adapted" if answers.adapted else "",
        long=LONG,
    )


def _code(value: object) -> str:
    """Return the expression that makes an action, or a value in one."""
    match value:
        case Enum():
            return f"{type(value).__name__}.{value.name}"
        case tuple():
            return f"({''.join(f'{_code(one)}, ' for one in value)})"
        case frozenset():
            return f"frozenset({_code(tuple(sorted(value, key=_code)))})"
        case _ if dataclasses.is_dataclass(value):
            given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return f"{type(value).__name__}({', '.join(f'{name}={_code(one)}' for name, one in given.items())})"
        case _:
            return repr(value)


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

from drivetrain import create_engine
from drivetrain_conformance.assets.made_adapters import make_adapter, merge
from drivetrain_conformance.assets.served_models import Models
from drivetrain_conformance.engine_model.actions import *
from drivetrain_conformance.engine_model.expected_answers import ADAPTER, Answers
from drivetrain_conformance.engine_model.history_player import Player
from drivetrain_conformance.references.oracle import TransformersOracle

BACKEND, MODEL = sys.argv[1:3]
PROMPTS = [
{prompts}]
ACTIONS = (
{actions})


async def main(models: Models) -> None:
    folders = {folders}
    async with create_engine(BACKEND, model=MODEL{config}) as engine:
{adapter}        answers = await Answers.note(
            engine, folders, PROMPTS, {long}, oracle=TransformersOracle, tolerance={tolerance}, styles={styles}{adapted}
        )
        await Player(engine, answers, PROMPTS).play(History(ACTIONS, {ending}))


with contextlib.closing(Models()) as models:
    asyncio.run(main(models))
'''
