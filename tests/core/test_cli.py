"""The command line: results on stdout, the rest on stderr, and exit codes that scripts can rely on."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Capability, __version__
from drivetrain.backend.registry import DISABLE_VARIABLE
from drivetrain.cli import main
from drivetrain.cli.output import log_handler
from drivetrain.testing import tiny_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process; return (exit code, stdout, stderr)."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        code = exit_.value.code
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_model())


def generate(run: Run, model: str, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    return run("generate", "--model", model, "--isolation", "inline", *arguments, stdin=stdin)


def generated(run: Run, model: str, *arguments: str, stdin: str = "") -> list[dict[str, Any]]:
    code, out, err = generate(run, model, "--json", *arguments, stdin=stdin)
    assert code == 0, err
    completions: list[dict[str, Any]] = json.loads(out)["completions"]
    return completions


# drivetrain ----------------------------------------------------------------------------------------------------------


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"{__version__}\n", "")


@pytest.mark.slow
def test_the_module_and_the_script_are_the_same() -> None:
    script = Path(sys.executable).with_name("drivetrain")
    for arguments in (["--help"], ["backends", "--json"], ["no-such-command"]):
        by_script, by_module = (
            subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
            for command in ([str(script)], [sys.executable, "-m", "drivetrain"])
        )
        assert (by_script.returncode, by_script.stdout, by_script.stderr) == (
            by_module.returncode,
            by_module.stdout,
            by_module.stderr,
        )


def test_a_message_of_the_log_is_one_line_of_a_file() -> None:
    record = logging.LogRecord("drivetrain.serving", logging.ERROR, "", 0, "front-end %d " + "ended " * 40, (3,), None)
    line = log_handler().format(record)
    assert "\n" not in line
    assert " ERROR drivetrain.serving: front-end 3 ended" in line


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom drivetrain.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize("arguments", [["no-such-command"], ["backends", "--no-such-option"], []])
def test_wrong_usage_exits_2(run: Run, arguments: list[str]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert "Usage: drivetrain" in err or not arguments


def test_an_error_is_one_clean_message_without_a_traceback(run: Run, model: str) -> None:
    code, out, err = run("backends", "transformer", "--model", model)
    assert (code, out) == (1, "")
    assert err.startswith("UnknownBackend: there is no backend named 'transformer'; did you mean 'transformers'?\n")
    assert "Traceback" not in err


def test_an_unknown_backend_is_named_before_a_model_is_asked_for(run: Run) -> None:
    code, _, err = run("backends", "transformer")
    assert code == 1
    assert err.startswith("UnknownBackend: there is no backend named 'transformer'")


def test_traceback_is_shown_when_asked_for(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", "--traceback", "backends", "transformer", "--model", model],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert "UnknownBackend: there is no backend named 'transformer'" in done.stderr


# drivetrain backends -------------------------------------------------------------------------------------------------


def test_backends_lists_each_with_its_state(run: Run) -> None:
    code, out, _ = run("backends", "--json")
    (transformers,) = [one for one in json.loads(out)["backends"] if one["name"] == "transformers"]
    assert code == 0
    assert (transformers["status"], transformers["distribution"]) == ("available", "drivetrain")
    code, table, _ = run("backends")
    assert code == 0
    assert f"transformers {transformers['engine_version']}" in table


def test_backends_says_why_one_is_not_available(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "transformers")
    code, out, err = run("backends")
    assert code == 0
    assert "disabled" in out
    assert "switched off by DRIVETRAIN_DISABLED_PLUGINS='transformers'" in err


def test_backends_shows_every_capability_of_one(run: Run, model: str) -> None:
    code, out, _ = run("backends", "transformers", "--model", model, "--json")
    capabilities = {one["name"]: one for one in json.loads(out)["capabilities"]}
    assert code == 0
    assert set(capabilities) == {capability.value for capability in Capability}
    assert capabilities["streaming"] == {
        "name": "streaming",
        "claimed": True,
        "meaning": "Tokens can be streamed while they are generated.",
    }
    assert capabilities["weights_cuda_ipc"]["claimed"] is False
    code, table, _ = run("backends", "transformers", "--model", model)
    assert code == 0
    assert all(capability.value in table for capability in Capability)


@pytest.mark.parametrize("arguments", [["transformers"], ["--model", "x"]])
def test_backends_wants_a_name_and_a_model_together(run: Run, arguments: list[str]) -> None:
    code, _, err = run("backends", *arguments)
    assert code == 2
    assert "--model" in err


# drivetrain doctor ---------------------------------------------------------------------------------------------------


def checks_of(out: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_doctor_checks_this_machine_and_runs_each_backend(run: Run) -> None:
    code, out, err = run("doctor", "--run", "--json")
    checks = checks_of(out)
    assert code == 0, out
    assert json.loads(out)["ok"] is True
    assert {"python", "torch", "device", "memory", "shared memory", "backend transformers"} <= set(checks)
    assert checks["run transformers"]["verdict"] == "ok"
    assert "8 tokens" in checks["run transformers"]["detail"]
    assert "generating with transformers" in err


def test_doctor_fails_when_torch_does_not_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.cli.doctor.PROBE", "raise ImportError('libcudart.so.12 is not there')")
    code, out, _ = run("doctor", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert checks_of(out)["torch"]["verdict"] == "failed"
    assert checks_of(out)["torch"]["detail"].endswith("ImportError: libcudart.so.12 is not there")


def test_doctor_fails_without_an_available_backend_and_names_unknown_disabled_ones(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.cli.doctor._torch", list)
    monkeypatch.setenv(DISABLE_VARIABLE, "drivetrain,tronsformers")
    code, out, _ = run("doctor", "--json")
    assert code == 1
    assert checks_of(out)["backend transformers"]["verdict"] == "warning"
    assert checks_of(out)["backends"]["verdict"] == "failed"
    assert checks_of(out)[DISABLE_VARIABLE]["detail"] == "names nothing that is installed: tronsformers"


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (["--backend", "transformers"], 0, "ok"),
        (["--backend", "transformers", "--backend", "tronsformers"], 1, "failed"),
    ],
)
def test_doctor_fails_unless_the_backends_that_are_asked_for_can_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, verdict: str
) -> None:
    monkeypatch.setattr("drivetrain.cli.doctor._torch", list)
    ended, out, _ = run("doctor", "--json", *arguments)
    assert (ended, checks_of(out)[f"backend {arguments[-1]}"]["verdict"]) == (code, verdict)


def test_doctor_fails_for_a_backend_that_is_asked_for_and_switched_off(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.cli.doctor._torch", list)
    monkeypatch.setenv(DISABLE_VARIABLE, "vllm")
    code, out, _ = run("doctor", "--json", "--backend", "vllm")
    assert (code, checks_of(out)["backend vllm"]["verdict"]) == (1, "failed")


# drivetrain generate -------------------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_nothing_else_on_stdout(run: Run, model: str) -> None:
    arguments = ["--seed", "3", "--max-new-tokens", "6", "--set", "dtype=float32", "Hello"]
    (expected,) = generated(run, model, *arguments)
    code, out, err = generate(run, model, *arguments)
    assert (code, out) == (0, expected["text"] + "\n")
    assert "starting transformers: " in err


def test_generate_groups_samples_of_prompts_from_stdin(run: Run, model: str) -> None:
    completions = generated(run, model, "--n", "2", "--max-new-tokens", "3", stdin="one\n\ntwo\n")
    assert [(one["prompt_index"], one["sample_index"], one["prompt"]) for one in completions] == [
        (0, 0, "one"),
        (0, 1, "one"),
        (1, 0, "two"),
        (1, 1, "two"),
    ]
    assert all(len(one["token_ids"]) <= 3 for one in completions)
    code, out, _ = generate(run, model, "--n", "2", "--max-new-tokens", "3", stdin="one\ntwo\n")
    assert code == 0
    assert "prompt 2/2, sample 2: " in out


def test_generate_streams_the_same_text(run: Run, model: str) -> None:
    arguments = ["--seed", "3", "--max-new-tokens", "12", "Hello"]
    code, whole, _ = generate(run, model, *arguments)
    assert generate(run, model, "--stream", *arguments)[:2] == (code, whole)


def test_generate_renders_the_chat_template_and_reports_logprobs(run: Run, model: str) -> None:
    (plain,) = generated(run, model, "--max-new-tokens", "2", "Hi")
    (chat,) = generated(run, model, "--max-new-tokens", "2", "--chat", "--logprobs", "1", "Hi")
    assert plain["prompt_token_ids"] == list(b"Hi")
    assert chat["prompt_token_ids"] == [257, *b"user\nHi", 258, *b"\n", 257, *b"assistant\n"]
    assert len(chat["logprobs"]) == len(chat["token_ids"]) == len(chat["top_logprobs"])
    assert "logprobs" not in plain


def test_generate_stops_at_a_string(run: Run, model: str) -> None:
    arguments = ["--temperature", "0", "--max-new-tokens", "8", "Hello"]
    (whole,) = generated(run, model, *arguments)
    stop = next(character for character in whole["text"][1:] if character.isascii())
    (stopped,) = generated(run, model, "--stop", stop, *arguments)
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert (stopped["finish_reason"], stopped["matched_stop"]) == ("stop", stop)


def test_generate_reads_a_configuration_file_and_options_win(run: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"backend: transformers\nmodel: {model}\nisolation: inline\nweight_version: from-file\n")
    arguments = ["generate", "--config", str(file), "--max-new-tokens", "1", "--json", "x"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert json.loads(out)["completions"][0]["weight_versions"][0]["version"] == "from-file"
    code, out, _ = run(*arguments, "--set", "weight_version=from-option")
    assert code == 0
    assert json.loads(out)["completions"][0]["weight_versions"][0]["version"] == "from-option"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--set", "dtipe=float32", "x"],
            "InvalidConfig: dtipe: there is no such field; did you mean",
        ),
        (["--backend", "tronsformers", "x"], "UnknownBackend: there is no backend named 'tronsformers'"),
        (["--n", "0", "x"], "InvalidRequest: sampling_params.n=0: "),
        (["--max-new-tokens", "-1", "x"], "InvalidRequest: sampling_params.max_new_tokens=-1: "),
    ],
)
def test_generate_refuses_bad_values_before_the_engine_starts(
    run: Run, model: str, arguments: list[str], expected: str
) -> None:
    code, out, err = generate(run, model, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(expected)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "m", "--stream", "--json", "x"],
        ["--model", "m", "--stream", "x", "y"],
        ["--model", "m", "--stream", "--n", "2", "x"],
        ["--model", "m", "--logprobs", "1", "x"],
        ["--model", "m", "--set", "dtype", "x"],
        ["--model", "m", "--set", "dtype=[", "x"],
        ["--model", "m", "--set", "backend_options={a: 1, a: 2}", "x"],
        ["--model", "m", "--isolation", "jail", "x"],
        ["--model", "m"],
        ["x"],
    ],
)
def test_generate_refuses_contradictory_usage(run: Run, arguments: list[str]) -> None:
    code, out, err = run("generate", *arguments)
    assert (code, out) == (2, "")
    assert "Usage: drivetrain generate" in err


# drivetrain host -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["--listen", "nonsense"], "k" * 16, "listen='nonsense': expected HOST:PORT"),
        (["--listen", "no name:0"], "k" * 16, "'no name' is no host name"),
        (["--listen", "127.0.0.1:0"], "short", "key has 5 characters"),
    ],
)
def test_a_host_refuses_what_no_handle_can_have_before_it_loads_the_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str, arguments: list[str], key: str, said: str
) -> None:
    monkeypatch.setenv("DRIVETRAIN_KEY", key)
    code, out, err = run("host", "--model", model, *arguments)
    assert (code, out) == (1, "")
    assert said in err
    assert "starting transformers" not in err


# Commands of other packages ------------------------------------------------------------------------------------------


def install(folder: Path, distribution: str, name: str, value: str, source: str) -> None:
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[drivetrain.commands]\n{name} = {value}\n")
    (folder / f"{value.split(':')[0]}.py").write_text(source)


@pytest.fixture
def extended(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    install(tmp_path, "good", "hello", "good_command:hello", "def hello(name: str) -> None: print('hello', name)\n")
    group = (
        "import typer\napp = typer.Typer()\n@app.command()\ndef one(): print(1)\n@app.command()\ndef two(): print(2)\n"
    )
    install(tmp_path, "grouped", "count", "group_command:app", group)
    install(tmp_path, "bad", "crash", "bad_command:crash", "import a_module_that_is_not_there\n")
    install(tmp_path, "odd", "number", "odd_command:number", "number = 7\n")
    install(tmp_path, "thief", "doctor", "thief_command:doctor", "def doctor() -> None: print('stolen')\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "drivetrain", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        )

    return run


def test_a_command_of_another_package_runs(extended: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = extended("hello", "world")
    assert (done.returncode, done.stdout) == (0, "hello world\n")
    assert extended("count", "two").stdout == "2\n"


def test_a_broken_command_is_reported_and_breaks_no_other(
    extended: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    listed = extended("--help")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in ("hello", "count", "crash", "number", "generate"))
    assert "the command 'crash' is broken: bad_command:crash (bad) does not load: ModuleNotFoundError" in listed.stderr
    assert "the command 'number' is broken: odd_command:number (odd) is 7; expected a function" in listed.stderr

    crash = extended("crash", "--any", "thing")
    assert (crash.returncode, crash.stdout) == (1, "")
    assert "No module named 'a_module_that_is_not_there'" in crash.stderr
    assert "a_module_that_is_not_there" not in extended("hello", "x").stderr


def test_drivetrains_own_commands_cannot_be_replaced(
    extended: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = extended("doctor", "--help")
    assert "stolen" not in done.stdout
    assert "Check this machine" in done.stdout
    assert "the command 'doctor' of thief_command:doctor (thief) is ignored" in done.stderr
