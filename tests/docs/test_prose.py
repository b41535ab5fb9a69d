"""No line holds a pattern that docs/contributing/style.md rules out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOOKS = [
    hook
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    for hook in repository["hooks"]
    if hook.get("alias") == "prose"
]
FOLDERS = (
    "core",
    "backends",
    "weight_sync",
    "sampling",
    "fleet",
    "serving",
    "trainers",
    "conformance_tests",
    "demo",
    "docs",
    "examples",
    "tests",
    "benchmarks",
)
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".md") and "build" not in path.relative_to(ROOT).parts
] + sorted(ROOT.glob("*.md"))  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_no_line_has_the_pattern(hook: dict[str, Any]) -> None:
    wrong, left_out = re.compile(hook["entry"]), re.compile(hook["exclude"])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in FILES
        if not left_out.search(str(path.relative_to(ROOT)))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if wrong.search(line)
    ]
    assert not found, f"{hook['name']}:\n" + "\n".join(found)


def test_there_are_patterns_and_files() -> None:
    assert len(HOOKS) >= 2
    assert len(FILES) > 500
