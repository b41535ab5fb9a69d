"""Code blocks that cannot run here say so in their title; they compile, and use only what the API has."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from drivetrain import (
    Completion,
    EngineConfig,
    GenerationOutput,
    InferenceEngine,
    MediaLimits,
    SamplingParams,
    Timeouts,
    create_engine,
)
from drivetrain_weight_sync import LogprobProbe, LoraSync, WeightSync, WeightSyncResult

ROOT = Path(__file__).parents[2]
TITLES = {f"not run here: needs {what}" for what in ("a GPU", "SGLang or vLLM", "several ranks", "TRL")}
TITLED = re.compile(r'^```python title="([^"]*)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
VARIABLES: dict[str, type] = {
    "engine": InferenceEngine,
    "batch": GenerationOutput,
    "completion": Completion,
    "sync": WeightSync,
    "result": WeightSyncResult,
}
"""Class of each name that every such block may use."""
MODELS: dict[str, type[BaseModel]] = {
    "EngineConfig": EngineConfig,
    "SamplingParams": SamplingParams,
    "Timeouts": Timeouts,
    "MediaLimits": MediaLimits,
}
CALLABLES: dict[str, Callable[..., object]] = {
    "LogprobProbe": LogprobProbe,
    "LoraSync": LoraSync,
    "WeightSync.connect": WeightSync.connect,
}


def blocks() -> Iterator[tuple[str, str, str]]:
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = page.read_text(encoding="utf-8")
        for block in TITLED.finditer(text):
            line = text[: block.start()].count("\n") + 1
            yield f"{page.relative_to(ROOT)}:{line}", block[1], block[2]


BLOCKS = list(blocks())


def tree_of(code: str, where: str) -> ast.Module:
    compile(code, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return ast.parse(code)


def test_there_are_some() -> None:
    assert BLOCKS


@pytest.mark.parametrize(("where", "title", "code"), BLOCKS, ids=[where for where, _, _ in BLOCKS])
class TestBlock:
    def test_the_title_says_why_it_is_not_run(self, where: str, title: str, code: str) -> None:
        assert title in TITLES

    def test_what_it_imports_of_ours_is_there(self, where: str, title: str, code: str) -> None:
        for node in ast.walk(tree_of(code, where)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drivetrain"):
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []

    def test_it_uses_only_what_the_api_has(self, where: str, title: str, code: str) -> None:
        for node in ast.walk(tree_of(code, where)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in VARIABLES:
                cls = VARIABLES[node.value.id]
                assert hasattr(cls, node.attr) or node.attr in cls.__annotations__, f"{cls.__name__}.{node.attr}"

    def test_its_calls_fit(self, where: str, title: str, code: str) -> None:
        for node in ast.walk(tree_of(code, where)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            owner, _, method = name.partition(".")
            if name == create_engine.__name__:
                assert given <= EngineConfig.model_fields.keys(), name
            elif name in MODELS:
                assert given <= MODELS[name].model_fields.keys(), name
            elif owner in VARIABLES and method and hasattr(VARIABLES[owner], method):
                fits(getattr(VARIABLES[owner], method), node, given, bound=True)
            elif name in CALLABLES:
                fits(CALLABLES[name], node, given, bound=False)


def fits(function: Callable[..., object], call: ast.Call, given: set[str], *, bound: bool) -> None:
    positional = [*([None] if bound else []), *call.args]
    inspect.signature(function).bind(*positional, **dict.fromkeys(given))
