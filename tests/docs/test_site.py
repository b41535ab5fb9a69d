"""The documentation site builds strictly, and its reference names everything that is public.

``make site`` gives the folder that it has built in ``SITE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
import drivetrain_weight_sync
from drivetrain import Backend, Capability, DrivetrainError, EngineConfig, InferenceEngine, SamplingParams
from drivetrain.cli.app import BUILT_IN

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("SITE"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def members(cls: type) -> set[str]:
    return {entry for base in cls.__mro__[:-1] for entry in vars(base) if not entry.startswith("_")}


def without(html: str, cls: str, names: set[str]) -> set[str]:
    """Names that have no heading in a page."""
    return {name for name in names if f'id="{cls}.{name}"' not in html}


@pytest.mark.parametrize(
    ("name", "cls"), [("reference/engine", InferenceEngine), ("reference/backend", Backend)], ids=["engine", "backend"]
)
def test_the_reference_has_every_public_member(site: Path, name: str, cls: type) -> None:
    assert without(page(site, name), f"drivetrain.{cls.__name__}", members(cls)) == set()


@pytest.mark.parametrize(
    ("name", "model"), [("reference/config", EngineConfig), ("reference/sampling-params", SamplingParams)]
)
def test_the_reference_has_every_field(site: Path, name: str, model: type[EngineConfig] | type[SamplingParams]) -> None:
    html = page(site, name)
    assert [field for field in model.model_fields if f"<td><code>{field}</code></td>" not in html] == []


def test_every_error_is_described(site: Path) -> None:
    def names(cls: type[DrivetrainError]) -> set[str]:
        own = [child for child in cls.__subclasses__() if child.__module__ == cls.__module__]
        return {cls.__name__}.union(*map(names, own))

    html, advice = page(site, "reference/errors"), page(site, "troubleshooting")
    assert without(html, "drivetrain.errors", names(DrivetrainError)) == set()
    assert [name for name in names(DrivetrainError) if name not in html.partition("</pre>")[0]] == []
    assert [name for name in names(DrivetrainError) - {"DrivetrainError"} if name not in advice] == []


def test_every_capability_is_listed(site: Path) -> None:
    html = page(site, "reference/capabilities")
    assert [one.value for one in Capability if f"<code>{one.value}</code>" not in html] == []


def test_every_public_name_is_somewhere_in_the_reference(site: Path) -> None:
    html = "".join(file.read_text(encoding="utf-8") for file in (site / "reference").rglob("*.html"))
    public = {*vars(drivetrain)["__all__"], *vars(drivetrain_weight_sync)["__all__"]} - {"__version__"}
    assert sorted(name for name in public if name not in html) == []


def test_every_command_is_described(site: Path) -> None:
    html = page(site, "reference/command-line")
    assert [name for name in [*BUILT_IN, "conformance", "demo", "matrix"] if f"drivetrain {name}" not in html] == []
