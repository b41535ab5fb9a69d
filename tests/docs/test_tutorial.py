"""The tutorial on writing a backend shows the files of ``examples/drivetrain-echo``, and they do what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import warm_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tutorial/write-a-backend.md"
EXAMPLE = ROOT / "examples/drivetrain-echo"
MISTAKE = re.compile(r"^\| `(.+)` \| `(.+)` \| `(\w+/\w+)` \|$", re.MULTILINE)
TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

Run = Callable[..., subprocess.CompletedProcess[str]]


def shown() -> dict[str, list[str]]:
    """The lines of each file of the page, from all of its blocks; blank lines, which part blocks too, do not count."""
    files: dict[str, list[str]] = {}
    for name, text in TITLED.findall(PAGE.read_text(encoding="utf-8")):
        files.setdefault(name, []).extend(filter(str.strip, text.splitlines()))
    return files


def files_of_the_example() -> set[str]:
    found = {path.relative_to(EXAMPLE) for pattern in ("*.py", "*.toml") for path in EXAMPLE.rglob(pattern)}
    return {str(path) for path in found}


def mistakes() -> list[tuple[str, str, str]]:
    """The table of mistakes to make in engine.py: what to replace, by what, and a case that then fails."""
    return MISTAKE.findall(PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which the example is installed; laid out as an installer does, which needs no network."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLE / "drivetrain_echo", folder / "drivetrain_echo")
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return folder


@pytest.fixture
def run(site: Path) -> Run:
    """Runs Python where the example is installed."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]

    def run(*arguments: str, text: str | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        return warm_python.run(*arguments, text=text, env=environment, cwd=site.parent, timeout=timeout)

    return run


@pytest.mark.parametrize("name", sorted(files_of_the_example()))
def test_the_page_shows_the_file(name: str) -> None:
    lines = (EXAMPLE / name).read_text(encoding="utf-8").splitlines()
    assert shown().get(name) == list(filter(str.strip, lines))


def test_the_page_shows_no_other_files() -> None:
    assert set(shown()) == files_of_the_example() | {"try_echo.py", "output of try_echo.py"}


def test_the_program_of_the_page_prints_what_the_page_says(run: Run) -> None:
    done = run("-", text="\n".join(shown()["try_echo.py"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == shown()["output of try_echo.py"]


def test_the_echo_is_listed(run: Run) -> None:
    done = run("-m", "drivetrain", "backends", "--json")
    assert '"name": "echo"' in done.stdout, done.stderr


def test_the_echo_is_as_short_as_the_page_says() -> None:
    sources = (EXAMPLE / "drivetrain_echo").glob("*.py")
    assert sum(len(list(filter(str.strip, path.read_text().splitlines()))) for path in sources) <= 150


@pytest.mark.parametrize(("right", "wrong", "case"), mistakes(), ids=[case for *_, case in mistakes()])
def test_a_mistake_of_the_table_is_found(run: Run, site: Path, right: str, wrong: str, case: str) -> None:
    engine = site / "drivetrain_echo/engine.py"
    source = engine.read_text(encoding="utf-8")
    assert source.count(right) == 1
    engine.write_text(source.replace(right, wrong), encoding="utf-8")
    done = run("-m", "drivetrain", "conformance", "echo", "--case", case)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"✗ {case}" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_passes_its_own_tests(run: Run) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE), timeout=870)
    assert done.returncode == 0, done.stdout
