"""The documentation is true: its code runs, its links lead somewhere, its tables list what the code defines."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Capability, DrivetrainError, EngineState, InferenceEngine

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)

# One page is one program, whose blocks may await, as in a notebook, or call asyncio.run themselves, as in a script.
RUNNER = """
import ast, asyncio, inspect, sys
code = compile(sys.stdin.read(), sys.argv[1], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
value = eval(code, globals())
if inspect.iscoroutine(value):
    asyncio.run(value)
"""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def program_of(page: Path) -> str:
    """The page's Python blocks, each on its own lines of the page, so that a traceback points into it."""
    text = page.read_text(encoding="utf-8")
    lines: list[str] = []
    for block in BLOCK.finditer(text):
        first = text[: block.start(1)].count("\n")
        lines += [""] * (first - len(lines)) + block[1].splitlines()
    return "\n".join(lines)


def anchors_of(page: Path) -> set[str]:
    headings = HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if program_of(page)], ids=name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(page)],
        input=program_of(page),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    dead: list[str] = []
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            dead.append(link)
    assert dead == []


def test_the_capability_reference_lists_each_capability_with_its_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", read("docs/reference/capabilities.md"), flags=re.MULTILINE)
    assert rows == [(capability.value, capability.meaning) for capability in Capability]


def test_the_error_reference_shows_the_tree_of_the_code() -> None:
    def names(cls: type[DrivetrainError]) -> set[str]:
        own = [child for child in cls.__subclasses__() if child.__module__ == cls.__module__]
        return {cls.__name__}.union(*map(names, own))

    shown = re.findall(r"[├└]── (\w+)", read("docs/reference/errors.md"))
    assert {"DrivetrainError", *shown} == names(DrivetrainError)


def test_the_engine_reference_names_every_method_and_state() -> None:
    rows = [line for line in read("docs/reference/engine.md").splitlines() if line.startswith("| ")]
    listed = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    attributes = {"capabilities", "versions", "isolation"}
    assert {entry for entry in dir(InferenceEngine) if not entry.startswith("_")} | attributes <= listed
    assert {state.value for state in EngineState} <= listed


def test_every_public_name_has_a_docstring() -> None:
    public = {entry: getattr(drivetrain, entry) for entry in drivetrain.__all__}
    documented = [entry for entry, thing in public.items() if inspect.isclass(thing) or inspect.isfunction(thing)]
    assert [entry for entry in documented if not inspect.getdoc(public[entry])] == []
