"""The page of trainers' engine layers: its lines are in the released packages, and its tests and cases exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs/explanation/trainers-engine-layers.md").read_text()
LINES: dict[str, str] = json.loads((HERE / "cited_lines.json").read_text())
"""Part of each cited line, by ``package/path:line``."""
SECTIONS = {title.lower(): text for title, text in re.findall(r"^## (\w+) [\d.]+\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)}


def cited() -> set[str]:
    """``package/path:line`` of each citation."""
    return {f"{name}/{at}" for name, text in SECTIONS.items() for at in re.findall(r"`([\w/]+\.py:\d+)`", text)}


def test_every_citation_has_its_text_here() -> None:
    assert cited() == set(LINES)


@pytest.mark.parametrize("at", LINES)
def test_the_line_is_in_the_package(at: str) -> None:
    path, line = at.split(":")
    package, _, rest = path.partition("/")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    text = Path(found.submodule_search_locations[0], rest).read_text().splitlines()
    assert LINES[at] in text[int(line) - 1]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_test_that_is_named_exists_and_every_test_is_named(name: str) -> None:
    defined = set(re.findall(r"^def (test_\w+)", (HERE / f"{name}_layer.py").read_text(), re.M))
    assert set(re.findall(r"`(test_\w+)`", SECTIONS[name])) == defined


def test_every_case_exists() -> None:
    cases = {case for text in SECTIONS.values() for case in re.findall(r"^\| `(\w+/\w+)`", text, re.M)}
    suite = HERE.parents[2] / "conformance_tests"
    source = "\n".join(file.read_text() for file in suite.rglob("*.py"))
    assert not {case for case in cases if f"def {case.split('/')[1]}(" not in source}
