"""drivetrain as ``pip install drivetrain`` brings it: no torch, no transformers.

Run in such an environment: ``make test-trainer-half``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import drivetrain
from drivetrain import (
    BackendStatus,
    BackendUnavailable,
    ChatPrompt,
    Completion,
    MissingDependency,
    SamplingParams,
    TextPrompt,
    create_engine,
    list_backends,
)

ModelFolder = Callable[..., Path]
BACKENDS = ["sglang", "sglang-server", "transformers", "vllm", "vllm-server"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "drivetrain", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_environment_lacks_it(package: str) -> None:
    assert importlib.util.find_spec(package) is None


def test_every_public_name_imports() -> None:
    for name in vars(drivetrain)["__all__"]:
        getattr(drivetrain, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_create_engine_names_the_command_that_installs_the_extra(backend: str, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=rf"pip install 'drivetrain\[{backend}\]'"):
        create_engine(backend, model=str(tmp_path))


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("drivetrain_weight_sync", "weight-sync"),
        ("drivetrain_sampling", "weight-sync"),
        ("drivetrain.testing", "transformers"),
        ("drivetrain_conformance.pytest_class", "conformance"),
    ],
)
def test_an_import_names_the_command_that_installs_the_extra(module: str, extra: str) -> None:
    with pytest.raises(MissingDependency, match=rf"pip install 'drivetrain\[{extra}\]'"):
        exec(f"from {module} import *", {})  # some import their names on first use


def test_the_groups_of_trainers_are_imported_without_torch() -> None:
    assert importlib.import_module("drivetrain_weight_sync.trainer_groups.weight_groups").WeightGroups
    assert "torch" not in sys.modules


def test_no_backend_is_called_broken() -> None:
    assert {info.name: info.status for info in list_backends()} == dict.fromkeys(BACKENDS, BackendStatus.ENGINE_MISSING)


def test_the_command_line_lists_the_backends_and_their_extras() -> None:
    listed = run("backends")
    assert listed.returncode == 0
    for backend in BACKENDS:
        assert f"pip install 'drivetrain[{backend}]'" in listed.stdout + listed.stderr


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    answer = run("doctor", "--json", *arguments)
    return answer.returncode, {check["name"]: check for check in json.loads(answer.stdout)["checks"]}


def test_doctor_finds_the_light_install_sound_and_says_what_the_extras_bring() -> None:
    code, checks = doctor()
    assert code == 0
    assert {checks[name]["verdict"] for name in ("python", "drivetrain", "backends")} == {"ok"}
    assert "python=PATH" in checks["backends"]["detail"]
    for name, extra in {"torch": "weight-sync", "transformers": "transformers", "backend vllm": "vllm"}.items():
        assert checks[name]["verdict"] == "warning"
        assert f"pip install 'drivetrain[{extra}]'" in checks[name]["detail"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_doctor_fails_for_a_backend_that_is_asked_for(backend: str) -> None:
    code, checks = doctor("--backend", backend)
    assert (code, checks[f"backend {backend}"]["verdict"]) == (1, "failed")
    assert f"pip install 'drivetrain[{backend}]'" in checks[f"backend {backend}"]["detail"]


def test_doctor_fails_if_an_engine_is_to_run() -> None:
    code, checks = doctor("--run")
    assert (code, checks["backends"]["verdict"]) == (1, "failed")


@pytest.mark.parametrize(("command", "extra"), [("demo", "demo"), ("conformance", "conformance")])
def test_commands_name_the_extra_that_they_need(command: str, extra: str) -> None:
    failed = run(command, *(["--no-plot"] if command == "demo" else []))
    assert failed.returncode != 0
    assert f"pip install 'drivetrain[{extra}]'" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_an_engine_in_another_environment_generates_from_text_and_messages(
    model_folder: ModelFolder, host_python: str
) -> None:
    async def generate() -> list[Completion]:
        async with create_engine("transformers", model=str(model_folder("llama")), python=host_python) as engine:
            prompts: list[TextPrompt | ChatPrompt] = [
                TextPrompt(text="Grüße"),
                ChatPrompt.model_validate({"messages": [{"role": "user", "content": "hi"}]}),
            ]
            batch = await engine.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=0))
            return list(batch.completions)

    text, messages = asyncio.run(generate())
    assert text.prompt_token_ids == list("Grüße".encode())
    assert bytes(one for one in messages.prompt_token_ids if one < 256).startswith(b"user\nhi")
    assert [len(completion.token_ids) for completion in (text, messages)] == [4, 4]


def test_a_host_whose_environment_lacks_the_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises((BackendUnavailable, MissingDependency), match=r"python.*run there: pip install 'drivetrain\["):
        create_engine("transformers", model=str(tmp_path), python=sys.executable)
