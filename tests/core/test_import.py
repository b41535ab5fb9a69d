"""`import drivetrain` is cheap, and each of its names can be imported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

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


def test_every_error_is_exported() -> None:
    from drivetrain.errors import DrivetrainError, error_classes

    own = {cls.__name__ for cls in error_classes(DrivetrainError) if cls.__module__ == "drivetrain.errors"}
    assert own <= set(vars(drivetrain)["__all__"])


def test_dir_lists_the_names_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(vars(drivetrain)["__all__"]) <= set(dir(drivetrain))
    assert not hasattr(drivetrain, "InferenceEngin")


def test_version_is_the_distributions() -> None:
    assert drivetrain.__version__ == importlib.import_module("importlib.metadata").version("drivetrain")
