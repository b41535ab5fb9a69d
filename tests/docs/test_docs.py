"""The documentation is true: its code runs and its links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import pytest

import drivetrain
import warm_python

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CLUSTERS = [ROOT / "docs/how-to/ray.md"]
"""Pages that start a Ray cluster."""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r'^```text title="output"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
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


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] if page in CLUSTERS else [])
        for page in PAGES
        if program_of(page)
    ],
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = warm_python.run("-c", RUNNER, str(page), text=program_of(page), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    shown = "".join(OUTPUT.findall(page.read_text(encoding="utf-8")))
    if shown:
        assert done.stdout == shown


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


def test_the_guide_says_what_each_claim_asks_of_a_backend() -> None:
    guide = (ROOT / "docs/how-to/write-a-backend.md").read_text(encoding="utf-8")
    table = guide.partition("### From a claim to a method")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Z_]+)`", table)) == {capability.name for capability in drivetrain.Capability}


def test_every_public_name_has_a_docstring() -> None:
    public = {entry: getattr(drivetrain, entry) for entry in vars(drivetrain)["__all__"]}
    documented = [entry for entry, thing in public.items() if inspect.isclass(thing) or inspect.isfunction(thing)]
    assert [entry for entry in documented if not inspect.getdoc(public[entry])] == []


def test_every_room_is_on_the_architecture_page_and_every_package_in_the_guide_for_contributors() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    packages = [path.parent for path in ROOT.glob("*/drivetrain*/__init__.py")]
    assert len(packages) >= 8
    for package in packages:
        assert f"| `{package.parent.name}/` | `{package.name}` |" in guide
        rooms = {room.parent.name for room in package.glob("*/__init__.py")}
        table = page.partition(f"| `{package.name}.` |")[2].partition("\n\n")[0]
        assert {room for room in rooms if f"`{room}`" not in table} == set(), package.name


@pytest.mark.parametrize("folder", ["docs/how-to", "docs/reference"])
def test_an_index_links_every_page_of_its_folder(folder: str) -> None:
    index = ROOT / folder / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert [name(page) for page in sorted((ROOT / folder).rglob("*.md")) if page not in linked | {index}] == []
