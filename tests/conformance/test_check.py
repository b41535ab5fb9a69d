"""``drivetrain check``: a correct engine passes, and each wrong one fails in the row that is about its fault."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm_python
import wrong_engines
from drivetrain import EngineConfig
from drivetrain.backend.registry import register, unregister
from drivetrain.errors import InvalidConfig, UnknownBackend
from drivetrain.testing import tiny_model
from drivetrain_conformance.check import CheckReport, Outcome, check_engine
from wrong_engines import DROPPED, WRONG_LAYER

LOGPROBS = ("greedy", "sampled", "long prompt", "prompt logprobs", "batch", "cached prefix")
WEIGHTS = ("pushed weights", "first weights again")


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("qwen2", num_hidden_layers=6)


@pytest.fixture(autouse=True)
def _wrong_backends() -> Iterator[None]:
    register(wrong_engines)
    yield
    unregister(wrong_engines)


def check(backend: str, model: Path | str, **fields: object) -> CheckReport:
    config = EngineConfig.from_mapping({"backend": backend, "model": str(model), **fields})
    return asyncio.run(check_engine(config, long_prompt=200))


def failed(report: CheckReport) -> list[str]:
    return [row.name for row in report.rows if row.outcome is Outcome.FAILED]


def test_a_sound_engine_passes_every_row(model: Path) -> None:
    report = check("transformers", model)
    assert [row.outcome for row in report.rows] == [Outcome.PASSED] * 11
    assert all(0 < (report.row(name).worst or 0) < 1e-5 for name in (*LOGPROBS, *WEIGHTS, "sleep and wake"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_rounding_of_a_16_bit_engine_is_that_of_transformers(model: Path, dtype: str) -> None:
    report = check("transformers", model, dtype=dtype)
    assert [row.outcome for row in report.rows] == [Outcome.PASSED] * 12
    assert re.search(r"errors (0\.9\d|1\.0\d) times plain ones", report.row("rounding").seen)


@pytest.mark.slow
def test_a_model_that_rounding_alone_moves_too_far_is_refused(tmp_path: Path) -> None:
    steep = tiny_model("qwen2", directory=tmp_path / "steep", num_hidden_layers=6, initializer_range=0.4)
    with pytest.raises(InvalidConfig, match=r"rounding to bfloat16 alone .* check it with dtype=float32"):
        check("transformers", steep, dtype="bfloat16")
    assert check("transformers", steep).ok


@pytest.mark.slow
def test_a_fault_within_the_tolerance_of_bfloat16_is_more_than_rounding(model: Path) -> None:
    report = check("slightly-wrong-activation", model, dtype="bfloat16")
    assert failed(report) == ["rounding", "where it differs"]
    assert report.row("where it differs").seen.startswith(f"layer {WRONG_LAYER} of 0 to 5, mlp")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "part"), [("wrong-activation", "mlp"), ("no-rope", "self_attn")])
def test_the_layer_that_computes_otherwise_is_named(model: Path, backend: str, part: str) -> None:
    report = check(backend, model)
    assert set(failed(report)) >= {*LOGPROBS, *WEIGHTS, "where it differs"}
    assert report.row("loaded weights").outcome is Outcome.PASSED
    assert report.row("where it differs").seen.startswith(f"layer {WRONG_LAYER} of 0 to 5, {part}")


def test_a_fault_of_sliding_windows_is_told_by_the_context_that_is_still_right() -> None:
    place = check("ignores-windows", tiny_model("mistral")).row("where it differs").seen
    assert place.startswith("layer 0 of 0 to 1, self_attn")
    assert place.endswith("right with up to 32 tokens of context, and sliding windows hold 32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "place"), [("wrong-head", "the head"), ("wrong-norm", "the embedding or the final norm")]
)
def test_hidden_states_tell_the_head_from_what_comes_before_it(model: Path, backend: str, place: str) -> None:
    assert check(backend, model).row("where it differs").seen.startswith(f"{place}: without any layer")


def test_hidden_states_tell_the_head_of_an_engine_that_takes_no_weights(model: Path) -> None:
    report = check("wrong-head-without-updates", model)
    assert report.row("where it differs").seen.startswith("the head: hidden states")
    unclaimed = [report.row(name).outcome for name in (*WEIGHTS, "sleep and wake")]
    assert unclaimed == [Outcome.NOT_CLAIMED] * 3
    assert (report.row("versions").outcome, report.row("versions").seen) == (Outcome.NOT_RUN, "no weights were pushed")


def test_a_tensor_that_was_loaded_wrongly_is_named_and_a_push_mends_it(model: Path) -> None:
    report = check("wrong-loading", model)
    assert set(failed(report)) == {*LOGPROBS, "loaded weights", "where it differs"}
    assert DROPPED in report.row("where it differs").seen


def test_a_tensor_that_a_push_drops_is_named(model: Path) -> None:
    report = check("drops-a-tensor", model)
    assert failed(report) == ["pushed weights", "sleep and wake"]  # after which all weights are pushed again
    assert f"not as pushed: {DROPPED}" in report.row("pushed weights").seen


@pytest.mark.slow
def test_a_prefix_cached_by_older_weights_is_found(model: Path) -> None:
    report = check("keeps-a-stale-cache", model)
    assert failed(report)[0] == "pushed weights"
    assert "entries of older weights were used" in report.row("pushed weights").seen


def test_a_cache_that_is_claimed_and_never_hit_is_found(model: Path) -> None:
    report = check("claims-a-cache", model)
    assert failed(report) == ["cached prefix"]
    assert report.row("cached prefix").seen.startswith("0 of ")


def test_an_unclaimed_capability_has_a_row_that_says_so(model: Path) -> None:
    report = check("transformers", model, enable_prefix_caching=False)
    row = report.row("cached prefix")
    assert (row.outcome, row.seen) == (Outcome.NOT_CLAIMED, "prefix_cache")
    assert report.ok


def test_an_engine_that_does_not_start_is_a_failed_row(model: Path) -> None:
    report = check("does-not-start", model)
    assert [(row.name, row.outcome) for row in report.rows] == [("load", Outcome.FAILED)]
    assert report.row("load").seen == "EngineStartError: the engine ran into a wall"


def test_what_no_engine_could_be_made_of_is_raised(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownBackend, match="nowhere"):
        check("nowhere", model)
    with pytest.raises(InvalidConfig, match="no config"):
        check("transformers", tmp_path)
    with pytest.raises(InvalidConfig, match="only task='generate'"):
        check("transformers", model, task="embed")


def drivetrain(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return warm_python.run("-m", "drivetrain", "check", *map(str, arguments), env=os.environ | {"COLUMNS": "160"})


def test_the_command_prints_a_table_and_writes_the_report(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "reports" / "check.json"
    done = drivetrain(
        "transformers", "--model", model, "--json", file, "--long-prompt", "200", "--isolation", "process"
    )
    assert done.returncode == 0, done.stderr
    for row in json.loads(file.read_text())["rows"]:
        assert f"passed       {row['name']} " in done.stdout
        assert f"passed       {row['name']}: {row['seen']}" in done.stderr
    assert "transformers computes this model as transformers does" in done.stdout


def test_the_command_ends_in_1_if_a_row_failed(model: Path) -> None:
    done = drivetrain("transformers", "--model", model, "--set", "timeouts={start: 0.001}", "--json", "-")
    assert done.returncode == 1
    made = json.loads(done.stdout)
    assert not made["ok"]
    assert [(row["name"], row["outcome"]) for row in made["rows"]] == [("load", "failed")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument"),
        (["transformers"], "say which model"),
        (["nowhere", "--model", "."], "UnknownBackend: there is no backend named 'nowhere'"),
        (["transformers", "--model", "."], "InvalidConfig: model='.': it holds no config.json"),
        (["transformers", "--model", "./nowhere"], "there is no such folder"),
        (["transformers", "--model", ".", "--set", "dtyp=float32"], "did you mean 'dtype'"),
    ],
)
def test_a_mistake_in_the_arguments_ends_in_2(arguments: list[str], says: str) -> None:
    done = drivetrain(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
