"""The documentation is run: every Python block, every relative link, every table that lists what code defines."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Capability, DrivetrainError, EngineState, InferenceEngine
from drivetrain.errors import _tree

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8") and page.name != "README.md"]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", WITH_CODE, ids=names(WITH_CODE))
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    scope: dict[str, object] = {"__name__": "__docs__"}

    async def run() -> None:
        for number, block in enumerate(python_blocks(page)):
            code = compile(block, f"{page.name}[{number}]", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, scope)
            if inspect.isawaitable(result):
                await result

    asyncio.run(run())


def test_the_code_of_the_readme_runs_as_a_script() -> None:
    for block in python_blocks(ROOT / "README.md"):
        subprocess.run([sys.executable, "-c", block], check=True, timeout=200)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_capability_reference_lists_each_capability_with_its_meaning() -> None:
    text = (ROOT / "docs/reference/capabilities.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, flags=re.MULTILINE)
    assert rows == [(capability.value, capability.meaning) for capability in Capability]


def test_the_error_reference_shows_the_tree_of_the_code() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"[├└]── (\w+)", text)) | {"DrivetrainError"} == {cls.__name__ for cls in _tree(DrivetrainError)}


def test_the_engine_reference_names_every_method_and_state() -> None:
    text = (ROOT / "docs/reference/engine.md").read_text(encoding="utf-8")
    public = {name for name in vars(InferenceEngine) if not name.startswith("_")} | {"capabilities", "versions", "isolation"}
    listed = {name for line in text.splitlines() if line.startswith("| ") for name in re.findall(r"`(\w+)`", line)}
    assert public <= listed
    assert {state.value for state in EngineState} <= listed


def test_every_public_name_has_a_docstring() -> None:
    for name in drivetrain.__all__:
        thing = getattr(drivetrain, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name
