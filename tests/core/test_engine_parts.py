"""An engine is a page over parts: each owns its state, and no mutant overrides or reads its private members."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from drivetrain.engine.parts import PartKinds, Parts

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "core/drivetrain/engine"
MUTANTS = ROOT / "conformance_tests/drivetrain_conformance/mutants"
SPOILED = {"InferenceEngine", *(kind.__name__ for kind in dataclasses.asdict(PartKinds()).values())}
"""Classes of the engine that a mutant derives from."""
MOST_LINES = 350


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    """Private attributes that are read or set within ``node``."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and is_private(child.attr):
            yield child


def is_own(attribute: ast.Attribute) -> bool:
    """Return True for ``self._x`` and ``cls._x``."""
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def owned(node: ast.AST) -> set[str]:
    """Private members that the classes within ``node`` define: their methods, and what they set on themselves."""
    methods = {child.name for child in ast.walk(node) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    fields = {one.attr for one in private_attributes(node) if is_own(one) and isinstance(one.ctx, ast.Store)}
    return fields | {name for name in methods if is_private(name)}


def shown(path: Path, attributes: list[ast.Attribute]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{one.lineno}: {ast.unparse(one)}" for one in attributes]


def owned_by(paths: Iterable[Path]) -> set[str]:
    return set[str]().union(*(owned(tree(path)) for path in paths))


PRIVATE = owned_by(modules(ENGINE))
"""Private members of the engine and its parts."""


def test_the_engine_itself_is_short() -> None:
    assert len((ENGINE / "engine.py").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", modules(MUTANTS), ids=lambda path: path.name)
def test_a_wrong_engine_uses_no_private_member_of_the_sound_one(path: Path) -> None:
    """A subclass could read them through ``self``, so those that it does not define itself are forbidden."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef) and SPOILED.intersection(map(ast.unparse, node.bases)):
            assert shown(path, [one for one in private_attributes(node) if one.attr not in owned(node)]) == []
            assert owned(node).isdisjoint(PRIVATE), f"{node.name} overrides a private member"


def test_each_part_has_a_kind() -> None:
    kinds = {field.name for field in dataclasses.fields(PartKinds)}
    assert {field.name for field in dataclasses.fields(Parts)} == kinds | {"backend"}
