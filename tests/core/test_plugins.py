"""Plugins are found by entry point and loaded one at a time, and their faults are reported."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivetrain.backend import registry
from drivetrain.backend.base import Backend
from drivetrain.backend.hookspecs import hookimpl
from drivetrain.backend.plugin_classes import plugin_manager
from drivetrain.backend.registry import BackendInfo, BackendStatus, list_backends, load_backend
from drivetrain.create import create_engine
from drivetrain.errors import (
    BackendError,
    BackendLoadError,
    BackendUnavailable,
    DuplicateBackend,
    UnknownBackend,
)
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig

GOOD = """
    from drivetrain.backend.base import Backend
    from drivetrain.backend.hookspecs import hookimpl

    class Echo(Backend):
        name = "{name}"
        engine_distribution = "{engine}"

        @classmethod
        def capabilities(cls, config): return frozenset()
        async def start(self, report): ...
        async def close(self): ...
        async def generate(self, request): ...
        async def stats(self): ...

    @hookimpl
    def drivetrain_backends(): return [Echo]
"""


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_manager", plugin_manager())
    monkeypatch.delenv(registry.DISABLE_VARIABLE, raising=False)


class Site:
    """A folder on sys.path, into which distributions are written as an installer would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modules: list[str] = []

    def install(
        self,
        distribution: str,
        *,
        name: str,
        source: str = GOOD,
        engine: str = "pluggy",
        module: str | None = None,
        version: str = "1.0",
        extra: str | None = None,
    ) -> str:
        module = module or f"plugin_{distribution.replace('-', '_')}_{self.path.name}"
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        extras = f"Provides-Extra: {extra}\n" if extra else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{extras}")
        (info / "entry_points.txt").write_text(f"[drivetrain]\n{name} = {module}\n")
        (self.path / f"{module}.py").write_text(
            textwrap.dedent(source).replace("{name}", name).replace("{engine}", engine)
        )
        self.modules.append(module)
        return module

    def write(self, module: str, source: str) -> None:
        (self.path / f"{module}.py").write_text(textwrap.dedent(source))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(tmp_path)
    return Site(tmp_path)


def described(name: str) -> BackendInfo:
    (info,) = [info for info in list_backends() if info.name == name]
    return info


class Fake(Backend):
    name = "fake"
    engine_distribution = "pluggy"

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset()

    async def start(self, report: object) -> None:  # type: ignore[override]
        raise AssertionError("never started")

    async def close(self) -> None:
        raise AssertionError("never started")

    async def generate(self, request: object) -> None:  # type: ignore[override]
        raise AssertionError("never started")

    async def stats(self) -> None:  # type: ignore[override]
        raise AssertionError("never started")


def plugin_returning(*classes: object, name: str = "notebook") -> SimpleNamespace:
    @hookimpl
    def drivetrain_backends() -> list[object]:
        return list(classes)

    return SimpleNamespace(__name__=name, drivetrain_backends=drivetrain_backends)


def test_a_backend_is_loaded_by_its_name_and_only_once(site: Site) -> None:
    site.install("dt-echo", name="echo")
    backend = load_backend("echo")
    assert backend.name == "echo"
    assert issubclass(backend, Backend)
    assert load_backend("echo") is backend


def test_no_other_plugin_is_imported(site: Site) -> None:
    site.install("dt-echo", name="echo")
    other = site.install("dt-bomb", name="bomb", source="raise RuntimeError('imported')")
    load_backend("echo")
    assert other not in sys.modules
    assert "drivetrain_transformers.plugin" not in _modules_after_loading(site, "echo")


def _modules_after_loading(site: Site, name: str) -> list[str]:
    code = (
        f"import sys; sys.path.insert(0, {str(site.path)!r})\n"
        f"from drivetrain.backend.registry import load_backend; load_backend({name!r}); print(*sys.modules, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_unknown_name_lists_the_known_with_their_state_and_a_close_match(site: Site) -> None:
    site.install("dt-echo", name="echo")
    site.install("dt-bomb", name="bomb", source="import a_module_that_is_not_there")
    site.install("dt-far", name="far", engine="an-engine-nobody-has")
    with pytest.raises(UnknownBackend) as caught:
        load_backend("Ecko")
    message = str(caught.value)
    assert "'Ecko'; did you mean 'echo'?" in message
    assert "echo: available (pluggy " in message
    assert "bomb: broken (" in message
    assert "No module named 'a_module_that_is_not_there'" in message
    assert "far: engine missing (" in message
    assert "pip install an-engine-nobody-has" in message


@pytest.mark.parametrize(
    ("source", "words", "cause"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError", ModuleNotFoundError),
        ("1 / 0", "ZeroDivisionError", ZeroDivisionError),
        ("raise SystemExit(3)", "SystemExit: 3", SystemExit),
        ("def broken(:", "SyntaxError", SyntaxError),
    ],
)
def test_a_plugin_that_does_not_import_says_so_and_breaks_no_other(
    site: Site, source: str, words: str, cause: type[BaseException]
) -> None:
    site.install("dt-echo", name="echo")
    module = site.install("dt-bomb", name="bomb", source=source)
    with pytest.raises(BackendLoadError, match=re.escape(words)) as caught:
        load_backend("bomb")
    assert isinstance(caught.value.__cause__, cause)
    assert isinstance(caught.value, ImportError)
    assert "'dt-bomb' 1.0" in str(caught.value)
    assert module in str(caught.value)
    assert load_backend("echo").name == "echo"
    assert described("bomb").status is BackendStatus.BROKEN
    assert described("echo").status is BackendStatus.AVAILABLE


def test_a_mended_plugin_loads_without_a_restart(site: Site) -> None:
    module = site.install("dt-bomb", name="bomb", source="raise RuntimeError('not yet')")
    with pytest.raises(BackendLoadError, match="not yet"):
        load_backend("bomb")
    (site.path / f"{module}.py").write_text(
        textwrap.dedent(GOOD).replace("{name}", "bomb").replace("{engine}", "pluggy")
    )
    assert load_backend("bomb").name == "bomb"


def test_two_distributions_with_one_name_are_both_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("dt-first", name="twin")
    site.install("dt-second", name="twin", version="2.5")
    site.install("dt-echo", name="echo")
    with pytest.raises(DuplicateBackend) as caught:
        load_backend("twin")
    assert "'dt-first' 1.0" in str(caught.value)
    assert "'dt-second' 2.5" in str(caught.value)
    assert load_backend("echo").name == "echo"
    info = described("twin")
    assert (info.status, info.distribution) == (BackendStatus.BROKEN, "dt-first, dt-second")

    monkeypatch.setenv(registry.DISABLE_VARIABLE, "Dt_Second")
    assert load_backend("twin").__module__ == site.modules[0]


def test_one_distribution_found_twice_is_no_duplicate(
    site: Site, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path_factory.mktemp("again")
    monkeypatch.syspath_prepend(again)
    site.install("dt-echo", name="echo", module="echo_found_twice")
    Site(again).install("dt-echo", name="echo", module="echo_found_twice")
    assert load_backend("echo").name == "echo"
    assert described("echo").status is BackendStatus.AVAILABLE


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (GOOD.replace('"{name}"', '"other"'), "no backend with name = 'odd' (it returned: 'other')"),
        (GOOD.replace("return [Echo]", "return []"), "it returned: none"),
        (GOOD.replace("return [Echo]", "return [Echo()]"), "TypeError"),
        (GOOD.replace("return [Echo]", "return [int]"), "expected subclasses of drivetrain.Backend"),
        (GOOD.replace("return [Echo]", "return 7"), "'int' object is not iterable"),
        (GOOD.replace("return [Echo]", "raise ValueError('no luck')"), "ValueError: no luck"),
        (GOOD.replace("async def close(self): ...", ""), "Echo of"),
        (GOOD.replace("async def close(self): ...", ""), "does not implement: close"),
        (GOOD.replace("async def generate(self, request): ...", ""), "implement stream or generate"),
        (GOOD.replace('engine_distribution = "{engine}"', ""), "Echo.engine_distribution"),
        (GOOD.replace('"{name}"', '""'), "Echo.name"),
        (GOOD.replace("@hookimpl", ""), "no drivetrain_backends function marked @drivetrain.hookimpl"),
        (GOOD.replace("drivetrain_backends()", "drivetrain_backend()"), "drivetrain_backend"),
        (GOOD.replace("drivetrain_backends()", "drivetrain_backends(config)"), "config"),
    ],
)
def test_a_plugin_that_returns_the_wrong_thing_is_told_what_was_expected(
    site: Site, source: str, expected: str
) -> None:
    site.install("dt-odd", name="odd", source=source)
    with pytest.raises(BackendLoadError, match=re.escape(expected)) as caught:
        load_backend("odd")
    assert "dt-odd" in str(caught.value)


def test_a_disabled_backend_is_refused_and_the_error_says_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    module = site.install("dt-echo", name="echo")
    site.install("dt-other", name="other")
    monkeypatch.setenv(registry.DISABLE_VARIABLE, "nothing, echo")
    with pytest.raises(BackendError, match=re.escape("DRIVETRAIN_DISABLED_PLUGINS='nothing, echo'; take 'echo' out")):
        load_backend("echo")
    assert module not in sys.modules
    assert described("echo").status is BackendStatus.DISABLED
    assert described("other").status is BackendStatus.AVAILABLE
    with pytest.raises(UnknownBackend, match="echo: disabled"):
        load_backend("ekho")


def test_a_backend_can_be_switched_off_after_it_was_loaded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("dt-echo", name="echo")
    load_backend("echo")
    monkeypatch.setenv(registry.DISABLE_VARIABLE, "dt-echo")
    with pytest.raises(BackendError, match="switched off"):
        load_backend("echo")


def test_a_missing_engine_is_named_with_what_to_install(site: Site) -> None:
    site.install("dt-far", name="far", engine="an-engine-nobody-has", extra="far")
    backend = load_backend("far")
    with pytest.raises(BackendUnavailable, match=re.escape("pip install 'dt-far[far]'")):
        registry.require_engine(backend)
    with pytest.raises(BackendUnavailable, match="an-engine-nobody-has"):
        create_engine("far", model="organisation/name")
    info = described("far")
    assert info.status is BackendStatus.ENGINE_MISSING
    assert (info.engine_distribution, info.engine_version) == ("an-engine-nobody-has", None)


def test_an_available_backend_is_described_with_its_versions(site: Site) -> None:
    import pluggy

    site.install("dt-echo", name="echo", version="0.3")
    assert described("echo") == BackendInfo(
        "echo", "dt-echo", "0.3", "pluggy", pluggy.__version__, BackendStatus.AVAILABLE, ""
    )


def test_a_plugin_can_be_registered_by_the_program_and_taken_away_again() -> None:
    plugin = plugin_returning(Fake)
    registry.register(plugin)
    assert load_backend("fake") is Fake
    assert described("fake").distribution is None
    registry.unregister(plugin)
    with pytest.raises(UnknownBackend):
        load_backend("fake")
    with pytest.raises(BackendError, match="is not registered"):
        registry.unregister(plugin)


def test_registering_a_name_twice_changes_nothing(site: Site) -> None:
    site.install("dt-fake", name="fake")

    class New(Fake):
        name = "new"

    with pytest.raises(DuplicateBackend, match="dt-fake"):
        registry.register(plugin_returning(New, Fake))
    with pytest.raises(UnknownBackend):
        load_backend("new")
    registry.register(plugin_returning(New, name="first"))
    with pytest.raises(DuplicateBackend, match=r"second .*; first "):
        registry.register(plugin_returning(New, name="second"))
    assert load_backend("new") is New


def test_a_refused_plugin_can_be_registered_once_it_is_mended() -> None:
    plugin = plugin_returning(Fake)
    blocking = plugin_returning(Fake, name="blocking")
    registry.register(blocking)
    with pytest.raises(DuplicateBackend):
        registry.register(plugin)
    registry.unregister(blocking)
    registry.register(plugin)
    assert load_backend("fake") is Fake


def test_registering_a_plugin_twice_is_refused_and_keeps_it_registered() -> None:
    plugin = plugin_returning(Fake)
    registry.register(plugin)
    with pytest.raises(DuplicateBackend):
        registry.register(plugin)
    assert load_backend("fake") is Fake
    registry.unregister(plugin)


def test_one_module_may_provide_several_backends(site: Site) -> None:
    both = GOOD.replace("return [Echo]", "return [Echo, type('Other', (Echo,), {'name': 'other'})]")
    module = site.install("dt-echo", name="echo", source=both)
    (site.path / "dt_echo-1.0.dist-info" / "entry_points.txt").write_text(
        f"[drivetrain]\necho = {module}\nother = {module}\n"
    )
    assert (load_backend("echo").name, load_backend("other").name) == ("echo", "other")


def test_loading_a_plugin_calls_no_other_plugins_hook(site: Site) -> None:
    calls: list[str] = []

    class Counting(Fake):
        name = "counting"

    class Plugin:
        @hookimpl
        def drivetrain_backends(self) -> list[object]:
            calls.append("called")
            return [Counting]

    registry.register(Plugin())
    site.install("dt-echo", name="echo")
    load_backend("echo")
    assert calls == ["called"]


def test_a_registered_plugin_is_checked_like_an_installed_one() -> None:
    with pytest.raises(BackendLoadError, match="expected subclasses"):
        registry.register(plugin_returning("fake"))
    with pytest.raises(BackendLoadError, match="returned no backend"):
        registry.register(plugin_returning())
    with pytest.raises(BackendLoadError, match="no drivetrain_backends function"):
        registry.register(SimpleNamespace(__name__="empty"))
