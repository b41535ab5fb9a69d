"""The page of routes, made from reports of several servers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.errors import InvalidConfig
from drivetrain_conformance.harness.report_files import CaseEntry, write_json
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.routes.comparison_page import render_routes
from drivetrain_conformance.routes.run import RouteReport, read_route_report


def report(name: str, dialect: str = "vllm", **verdicts: Verdict) -> RouteReport:
    cases = [
        CaseEntry(f"vllm_tokens/{case}", verdict, f"{case} must hold.", 0.1, f"said\nof {case}")
        for case, verdict in verdicts.items()
    ]
    return RouteReport(1, "http://127.0.0.1:1", dialect, "m", "2026-11-28", 0.1, cases, name)


def row(page: str, case: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{case}`")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_each_server_has_a_column() -> None:
    first = report("one", a=Verdict.PASSED, b=Verdict.FAILED)
    page = render_routes([first, report("other", a=Verdict.REFUSED, b=Verdict.PASSED)])
    assert row(page, "a") == ["`a`", "yes", "refused", "a must hold."]
    assert row(page, "b") == ["`b`", "**no**", "yes", "b must hold."]
    assert "- `vllm_tokens/b`: failed: `said`" in page
    assert "- `vllm_tokens/a`: refused: `said`" in page


def test_a_case_that_an_older_report_lacks_is_not_run() -> None:
    page = render_routes([report("old", a=Verdict.PASSED), report("new", a=Verdict.PASSED, b=Verdict.PASSED)])
    assert row(page, "b") == ["`b`", "not run", "yes", "b must hold."]


def test_dialects_have_tables_of_their_own() -> None:
    page = render_routes([report("one", a=Verdict.PASSED), report("one", "sglang", b=Verdict.PASSED)])
    assert "## The dialect of vLLM" in page
    assert "## The dialect of SGLang" in page
    assert row(page, "a")[1:2] == row(page, "b")[1:2] == ["yes"]


def test_servers_of_a_dialect_have_different_names() -> None:
    with pytest.raises(InvalidConfig, match="'vllm' have the same name"):
        render_routes([report("one", a=Verdict.PASSED), report("one", a=Verdict.PASSED)])


def test_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(dataclasses.replace(report("one", a=Verdict.PASSED), format=7), file)
    with pytest.raises(InvalidConfig, match="format 7"):
        read_route_report(file)
    file.write_text("{}")
    with pytest.raises(InvalidConfig, match="no report of routes"):
        read_route_report(file)


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    write_json(report("one", a=Verdict.PASSED), tmp_path / "a.json")
    pages = tmp_path / "pages"
    command = [sys.executable, "-m", "drivetrain", "matrix", str(tmp_path / "a.json"), "--output", str(pages)]
    assert subprocess.run(command, check=False).returncode == 0
    assert [path.name for path in pages.iterdir()] == ["routes.md"]
    assert row((pages / "routes.md").read_text(), "a")[1] == "yes"
