"""`import drivetrain` is cheap, and its table of names, its `__all__` and the names for type checkers agree."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import drivetrain

HEAVY = {"torch", "transformers", "numpy", "pydantic", "msgspec", "pluggy", "typer", "rich", "yaml", "asyncio"}


def loaded_by(statement: str) -> tuple[set[str], float]:
    """Return the top-level modules that ``statement`` loads in a fresh interpreter, and the seconds it takes."""
    code = (
        "import sys, time, json; before = set(sys.modules); begin = time.perf_counter()\n"
        f"{statement}\n"
        "seconds = time.perf_counter() - begin\n"
        "print(json.dumps([sorted({m.split('.')[0] for m in set(sys.modules) - before}), seconds]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, seconds = json.loads(done.stdout)
    return set(modules), float(seconds)


def test_import_loads_nothing_heavy() -> None:
    modules, seconds = loaded_by("import drivetrain")
    print(f"import drivetrain: {1000 * seconds:.1f} ms, {len(modules)} top-level modules")
    assert modules & HEAVY == set()


def test_the_whole_surface_loads_without_torch() -> None:
    modules, seconds = loaded_by("import drivetrain\nfor name in drivetrain.__all__: getattr(drivetrain, name)")
    print(f"every name of drivetrain: {1000 * seconds:.1f} ms")
    assert modules & {"torch", "transformers", "numpy", "ray", "sglang", "vllm", "pytest"} == set()


def test_a_name_loads_only_its_own_module() -> None:
    modules, _ = loaded_by("import drivetrain; drivetrain.Capability")
    assert modules & HEAVY == set()


def _imports_for_type_checkers() -> dict[str, str]:
    assert drivetrain.__file__ is not None
    tree = ast.parse(Path(drivetrain.__file__).read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found: dict[str, str] = {}
    for node in guard.body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            found.update({alias.asname or alias.name: node.module for alias in node.names})
    return found


def test_every_public_name_is_imported_for_type_checkers() -> None:
    assert len(drivetrain.__all__) == len(set(drivetrain.__all__))
    assert {*_imports_for_type_checkers(), "__version__"} == set(drivetrain.__all__)


def test_every_public_name_resolves_to_the_module_that_type_checkers_see() -> None:
    for name, module in _imports_for_type_checkers().items():
        assert getattr(drivetrain, name) is getattr(importlib.import_module(module), name)


def test_every_error_is_exported() -> None:
    from drivetrain.errors import DrivetrainError, error_classes

    own = {cls.__name__ for cls in error_classes(DrivetrainError) if cls.__module__ == "drivetrain.errors"}
    assert own <= set(drivetrain.__all__)


def test_dir_lists_the_names_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(drivetrain.__all__) <= set(dir(drivetrain))
    assert not hasattr(drivetrain, "InferenceEngin")


def test_version_is_the_distributions() -> None:
    assert drivetrain.__version__ == importlib.import_module("importlib.metadata").version("drivetrain")
