"""``drivetrain conformance`` and ``drivetrain matrix``, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import warm_python
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.fleet_suite import ABOUT_ONE_ENGINE

CASE = "generate/at_most_max_new_tokens"


def drivetrain(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    return warm_python.run("-m", "drivetrain", *map(str, arguments), cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports") / "transformers.json"
    done = drivetrain("conformance", "transformers", "--case", CASE, "--profile", "smoke", "--report", path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(path.read_text())
    return path


def test_the_report_says_what_was_run_on_what(report: Path) -> None:
    made = json.loads(report.read_text())
    assert made["backend"] == "transformers"
    assert made["isolation"] == "inline"
    assert made["complete"] is False
    assert set(made["versions"]) == {"python", "drivetrain", "transformers"}
    assert [(case["case"], case["verdict"]) for case in made["cases"]] == [(CASE, "passed")]


def test_the_suite_runs_on_fleets(tmp_path: Path) -> None:
    of_one_engine = "faults/a_host_killed_while_it_generates"
    cases = [option for case in (CASE, of_one_engine) for option in ("--case", case)]
    done = drivetrain("conformance", "transformers", "--fleet", *cases, "--report", tmp_path / "fleet.json")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "fleet.json").read_text())
    assert made["isolation"] == "fleet"
    assert [case["verdict"] for case in made["cases"]] == ["passed", "not_run"]


def test_what_a_fleet_leaves_out_are_cases() -> None:
    assert ABOUT_ONE_ENGINE.keys() <= {case.id for case in all_cases()}


@pytest.mark.slow
def test_the_suite_runs_through_ray_actors(tmp_path: Path) -> None:
    killed = "faults/a_host_killed_while_it_generates"
    cases = [option for case in (CASE, killed, "lifecycle/two_in_a_row_leave_nothing") for option in ("--case", case)]
    done = drivetrain("conformance", "transformers", "--ray", *cases, "--report", tmp_path / "ray.json")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "ray.json").read_text())
    assert made["isolation"] == "ray"
    assert [case["verdict"] for case in made["cases"]] == ["passed"] * 3


def test_a_case_that_fails_ends_in_1_and_says_why() -> None:
    # The engine's context is too short for the case; the suite cannot know that, so the case must fail.
    done = drivetrain("conformance", "transformers", "--case", CASE, "--set", "context_length=6")
    assert done.returncode == 1
    assert CASE in done.stdout
    assert "InvalidRequest" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a backend"),
        (["nowhere"], "there is no backend named 'nowhere'"),
        (["transformers", "--ray", "--remote"], "leave out --remote and --fork-hosts"),
        (["transformers", "--fleet", "--remote"], "leave out --remote and --ray"),
        (["--url", "http://127.0.0.1:1", "--isolation", "process", "--seed", "3"], "leave out --isolation, --seed"),
        (["transformers", "--url", "http://127.0.0.1:1"], "leave out BACKEND"),
        (["--mutants", "--remote", "--seed", "3"], "--mutants heeds no --seed, --remote"),
        (["--drawn-mutants", "3", "--set", "dtype=bfloat16"], "--drawn-mutants heeds no --set"),
        (["--list", "--mutants"], "--mutants heeds no --list"),
        (["--list", "--profile", "ci"], "--list heeds no --profile"),
        (["transformers", "--jobs", "2"], "--jobs is of --drawn-mutants"),
        (["transformers", "--timeout", "5"], "--timeout: only for a running server"),
        (["transformers", "--group", "stops"], "there is no group 'stops'"),
        (["transformers", "--case", "stop/nothing"], "there is no case 'stop/nothing'"),
        (["transformers", "--profile", "huge"], "there is no profile 'huge'"),
        (["transformers", "--model", "nowhere"], "it holds no config.json"),
        (["transformers", "--set", "dtype"], "expected FIELD=VALUE"),
        (["transformers", "--set", "dtyp=float32"], "did you mean 'dtype'"),
    ],
)
def test_a_mistake_in_the_arguments_ends_in_2_before_any_case(arguments: list[str], says: str) -> None:
    done = drivetrain("conformance", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""


def test_list_shows_every_case_with_what_it_needs() -> None:
    done = drivetrain("conformance", "--list", "--json")
    listed = {case["case"]: case for case in json.loads(done.stdout)["cases"]}
    assert listed[CASE]["needs"] == []
    assert "abort" in {need for case in listed.values() for need in case["needs"]}


def test_the_matrix_is_written_and_checked(report: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / report.name).write_bytes(report.read_bytes())
    assert drivetrain("matrix", "--check", kept).returncode == 1
    assert drivetrain("matrix", kept / report.name, "--output", kept).returncode == 0
    assert drivetrain("matrix", "--check", kept, report).returncode == 0

    changed = json.loads(report.read_text())
    changed["cases"][0]["verdict"] = "failed"
    fresh = tmp_path / report.name
    fresh.write_text(json.dumps(changed))
    done = drivetrain("matrix", "--check", kept, fresh)
    assert done.returncode == 1
    assert f"{CASE}: passed in the kept report, failed now" in done.stderr

    pages = tmp_path / "pages"
    assert drivetrain("matrix", kept / report.name, "--output", pages).returncode == 0
    assert drivetrain("matrix", "--check", pages, "--kept", kept, report).returncode == 0
    for page in sorted(pages.iterdir()):
        page.write_text("old")
        done = drivetrain("matrix", "--check", pages, "--kept", kept)
        assert done.returncode == 1
        assert page.name in done.stderr


def test_a_file_that_is_no_report_ends_in_2(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert drivetrain("matrix", tmp_path / "x.json").returncode == 2
    assert drivetrain("matrix").returncode == 2
