"""The commands ``drivetrain conformance``, ``matrix``, ``combine``, ``record`` and ``parity``."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import yaml
from rich.table import Table
from rich.text import Text

from drivetrain.checks.yaml_mappings import load_yaml
from drivetrain.cli.output import err, out, print_error, print_json
from drivetrain.errors import DrivetrainError, InvalidConfig
from drivetrain.types.config import Isolation
from drivetrain_conformance.harness.progress_bar import progress_bar
from drivetrain_conformance.harness.report_files import CaseEntry, write_json
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.routes.dialect import Dialect

if TYPE_CHECKING:
    from drivetrain_conformance.harness.case import Case
    from drivetrain_conformance.harness.runner import CaseResult, Runner
    from drivetrain_conformance.reports.report import Report
    from drivetrain_conformance.routes.material import Material
    from drivetrain_conformance.routes.run import RouteReport
    from drivetrain_conformance.routes.server_under_test import Access

_NEEDED = ("hypothesis", "pytest", "scipy", "torch", "transformers")
_NEEDED_FOR_ROUTES = ("httpx",)
_NEEDED_FOR_MATERIAL = ("safetensors", "torch", "transformers")
_OF_ROUTES: Final = frozenset(("url", "dialect", "api_key", "control_key", "timeout", "name"))
_OF_BOTH: Final = frozenset(("model", "group", "case", "report", "require_complete", "show", "json"))
"""Arguments of the command that mean the same for backends and for routes."""
_OF_MUTANTS: Final = frozenset(("mutants", "backend", "engine_fields", "group", "case", "json"))
_OF_DRAWN_MUTANTS: Final = frozenset(("drawn_mutants", "backend", "group", "case", "seed", "jobs"))
_OF_LIST: Final = frozenset(("show", "backend", "group", "case", "json"))
_ROUTES: Final = "routes"
"""Folder of kept reports of routes, beside those of backends."""
SetFields = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A field of every engine's configuration, as YAML; repeatable."),
]


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Print an error of the library, and exit with 2."""
    try:
        yield
    except DrivetrainError as error:
        print_error(str(error))
        raise typer.Exit(2) from None


@_usage_errors()
def conformance(
    context: typer.Context,
    backend: Annotated[
        str | None,
        typer.Argument(help="The backend's name; with --mutants the one to spoil, or transformers."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A model folder. With --url: the served one; adapters and checkpoints made from it are loaded into "
            "the server.",
            show_default="a tiny one, made on the spot; with --url none",
        ),
    ] = None,
    moe_model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of a mixture of experts.", show_default="a tiny one")
    ] = None,
    vision_model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of a model that takes images.", show_default="a tiny one")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the tiny models' weights, for engines whose kernels do not take float32.")
    ] = "float32",
    isolation: Annotated[
        Isolation | None,
        typer.Option(help="Processes of the engines.", show_default="the backend's choice"),
    ] = None,
    engine_fields: SetFields = None,
    group: Annotated[
        list[str] | None, typer.Option(help="Run only this group; repeatable.", show_default="all of them")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(metavar="GROUP/NAME", help="Run only this case; repeatable.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Amount of work: quick, smoke, ci or gpu.", show_default="the suite's: ci")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", show_default="the suite's: 0")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this file, as JSON.")] = None,
    fork_hosts: Annotated[
        bool,
        typer.Option("--fork-hosts", help="Start hosts faster, by forks of a process that has imported the engine."),
    ] = False,
    remote: Annotated[
        bool,
        typer.Option("--remote", help="Use each engine through create_engine('remote'), in a 'drivetrain host'."),
    ] = False,
    in_ray: Annotated[
        bool, typer.Option("--ray", help="Use each engine through a handle to a Ray actor, on a Ray of this machine.")
    ] = False,
    fleet: Annotated[bool, typer.Option("--fleet", help="Use fleets of two engines in the place of engines.")] = False,
    require_complete: Annotated[
        bool, typer.Option("--require-complete", help="Fail if any case could not be run here.")
    ] = False,
    mutants: Annotated[
        bool,
        typer.Option("--mutants", help="Run each wrong variant of the backend, and check that its case fails."),
    ] = False,
    drawn_mutants: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Draw this many wrong backends by --seed, and show which the suite catches. Takes hours.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work of --drawn-mutants.")] = 1,
    url: Annotated[
        str | None,
        typer.Option(help="Check the routes of the server at this address instead; its weights stay as they are."),
    ] = None,
    dialect: Annotated[
        Dialect | None,
        typer.Option(help="With --url: the routes to expect.", show_default="told by the server's models"),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(envvar="DRIVETRAIN_API_KEY", help="With --url: the key of requests.", show_default=False),
    ] = "",
    control_key: Annotated[
        str,
        typer.Option(
            envvar="DRIVETRAIN_CONTROL_KEY",
            help="With --url: the key of control routes.",
            show_default="that of requests",
        ),
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=1, max=86400, metavar="SECONDS", help="With --url: deadline of each request.")
    ] = 60.0,
    name: Annotated[
        str,
        typer.Option(help="With --url: name of the server in the report.", show_default="its address"),
    ] = "",
    show: Annotated[bool, typer.Option("--list", help="List the cases and what they need; run nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report, or the list, on stdout.")] = False,
) -> None:
    """Run the conformance suite on a backend, or with --url on the routes of a running server.

    A claimed capability must work, and an unclaimed one must be refused. Exits with 1 if a case failed, with 2 for a
    mistake in the arguments.
    """
    of_routes = url is not None or dialect is not None
    needed = _NEEDED if not of_routes else _NEEDED_FOR_ROUTES + (_NEEDED_FOR_MATERIAL if model is not None else ())
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        print_error(f"the suite needs {', '.join(lacking)}; run: pip install 'drivetrain[conformance]'")
        raise typer.Exit(2)
    logging.getLogger("drivetrain").setLevel(logging.CRITICAL)  # cases provoke errors; their verdicts report them
    if of_routes:
        if given := _given(context, lambda name: name not in _OF_ROUTES | _OF_BOTH):
            raise InvalidConfig(f"--url checks a running server: leave out {', '.join(given)}", field=given[0])
        if show:
            from drivetrain_conformance.routes.case import route_cases

            _list([{"case": one.id, "summary": one.summary} for one in route_cases(dialect)], as_json=json)
            return
        if url is None:
            raise InvalidConfig("--dialect says which routes --url has; give --url, or --list", field="--url")
        from drivetrain_conformance.routes.server_under_test import Access

        with _material(model) as material:
            access = Access(url, dialect, timeout, api_key, control_key, material)
            made_of_routes = asyncio.run(_run_routes(access, group, case, report, name or url))
        passed = _tell(made_of_routes, as_json=json, require_complete=require_complete)
    elif given := _given(context, lambda name: name in _OF_ROUTES):
        raise InvalidConfig(
            f"{', '.join(given)}: only for a running server; give --url, or leave it out", field=given[0]
        )
    elif drawn_mutants is not None:
        _require_only(context, _OF_DRAWN_MUTANTS, "--drawn-mutants")
        from drivetrain_conformance.mutants.drawn.run import run_drawn_mutants

        chosen = _chosen(group, case)
        passed = run_drawn_mutants(backend or "transformers", chosen, count=drawn_mutants, seed=seed or 0, jobs=jobs)
    elif mutants:
        _require_only(context, _OF_MUTANTS, "--mutants")
        from drivetrain_conformance.mutants.run import run_mutants

        fields = _fields(engine_fields or [])
        passed = run_mutants(backend or "transformers", _chosen(group, case), fields, as_json=json)
    elif given := _given(context, lambda name: name == "jobs"):
        raise InvalidConfig("--jobs is of --drawn-mutants; give that, or leave it out", field=given[0])
    elif show:
        _require_only(context, _OF_LIST, "--list")
        listed = [
            {"case": one.id, "needs": sorted(need.value for need in one.needs), "summary": one.summary}
            for one in _chosen(group, case)
        ]
        _list(listed, as_json=json)
        passed = True
    elif backend is None:
        raise InvalidConfig("name a backend; 'drivetrain backends' lists them", field="BACKEND")
    else:
        models = (model, moe_model, vision_model)
        runner = _runner(backend, isolation, engine_fields or [], profile, seed, models, dtype)
        with _where(runner, remote=remote, in_ray=in_ray, in_fleets=fleet, forked=fork_hosts):
            made = _run(runner, _chosen(group, case), complete=not (group or case), file=report)
        passed = _tell(made, as_json=json, require_complete=require_complete)
    if not passed:
        raise typer.Exit(1)


@_usage_errors()
def matrix(
    reports: Annotated[list[Path] | None, typer.Argument(help="Reports of 'drivetrain conformance'.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write can-i-use-it.md, matrix.svg, and for --url routes.md to this folder.",
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Fail unless the pages in this folder match the kept reports, and each REPORT has the verdicts of the "
            "kept report of the same name.",
        ),
    ] = None,
    kept: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --check: folder of kept reports.", show_default="the checked folder"),
    ] = None,
) -> None:
    """Put reports side by side: the capabilities that each backend was seen to have."""
    if check is not None:
        stale = _stale(check, kept or check, reports or [])
        for line in stale:
            print_error(line, kind="stale")
        if stale:
            raise typer.Exit(1)
        out.print(f"{check} is current")
        return
    if not reports:
        raise InvalidConfig("give at least one report, or --check", field="REPORTS")
    pages = _rendered(reports)
    if output is None:
        for name, rendered in pages.items():
            if name.endswith(".md"):
                out.print(Text(rendered), soft_wrap=True)
        return
    output.mkdir(parents=True, exist_ok=True)
    for name, rendered in pages.items():
        (output / name).write_text(rendered, encoding="utf-8")
        out.print(f"wrote {output / name}", soft_wrap=True)


@_usage_errors()
def combine(
    reports: Annotated[list[Path], typer.Argument(help="Reports of 'drivetrain conformance'.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Write the combined report to this file.")],
) -> None:
    """Combine the reports of parts of the suite, such as groups that were run one by one or in parallel."""
    from drivetrain_conformance.reports.report import combine_reports, read_report

    made = combine_reports([read_report(path) for path in reports])
    write_json(made, output)
    if not _tell(made, as_json=False, require_complete=False):
        raise typer.Exit(1)


@_usage_errors()
def record(
    backend: Annotated[str, typer.Argument(help="The backend's name.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Write the answers to this file, as JSON.")],
    dtype: Annotated[str, typer.Option(help="Dtype of the tiny model's weights.")] = "float32",
    engine_fields: SetFields = None,
) -> None:
    """Record a backend's answers to a fixed set of requests, for 'drivetrain parity'."""
    from drivetrain_conformance.reports import parity

    made = asyncio.run(parity.record(backend, dtype, _fields(engine_fields or [])))
    write_json(made, output, indent=-1)
    out.print(f"wrote {len(made.exchanges)} answers of {backend} to {output}", soft_wrap=True)


@_usage_errors()
def parity(
    recordings: Annotated[list[Path], typer.Argument(help="Files that 'drivetrain record' wrote.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page to this file.")] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Fail unless this page matches the recordings.")
    ] = None,
) -> None:
    """Compare the recorded answers of backends to the same requests. Exits with 1 if they differ."""
    from drivetrain_conformance.reports.parity import read_recording
    from drivetrain_conformance.reports.parity_page import columns_of, differences, render

    read = [read_recording(path) for path in recordings]
    page, found = render(read), differences(columns_of(read))
    if output is not None:
        output.write_text(page, encoding="utf-8")
    elif check is None:
        out.print(Text(page), soft_wrap=True)
    for line in found:
        print_error(line, kind="differs")
    if check is not None and (not check.is_file() or check.read_text(encoding="utf-8") != page):
        print_error(f"{check} does not match these recordings; write it anew with --output", kind="stale")
        raise typer.Exit(1)
    if found:
        raise typer.Exit(1)


# Running -------------------------------------------------------------------------------------------------------------


def _chosen(groups: list[str] | None, ids: list[str] | None) -> list[Case]:
    from drivetrain_conformance.cases import all_cases
    from drivetrain_conformance.harness.case import choose

    return choose(all_cases(), groups, ids)


def _runner(
    backend: str,
    isolation: Isolation | None,
    assignments: Sequence[str],
    profile: str | None,
    seed: int | None,
    models: tuple[Path | None, Path | None, Path | None],
    dtype: str,
) -> Runner:
    from drivetrain_conformance.assets.served_models import Models
    from drivetrain_conformance.harness.run_profile import PROFILES
    from drivetrain_conformance.harness.runner import Runner, gpu_count
    from drivetrain_conformance.harness.suite import suite_of

    for option, folder in zip(("--model", "--moe-model", "--vision-model"), models, strict=True):
        _require_model(option, folder)
    if profile is not None and profile not in PROFILES:
        raise InvalidConfig(f"there is no profile {profile!r}; profiles: {', '.join(PROFILES)}", field="--profile")
    suite = suite_of(backend)()
    chosen = PROFILES[profile or suite.profile]
    if chosen.needs_gpu and not gpu_count():
        raise InvalidConfig(f"the profile {chosen.name!r} needs a GPU, and torch sees none", field="--profile")
    suite.isolation = isolation or suite.isolation
    suite.fields = {**suite.fields, **_fields(assignments)}
    return Runner(suite, profile=chosen, seed=seed, models=Models(*models, dtype, suite.layers))


def _require_model(option: str, folder: Path | None) -> None:
    if folder is not None and not (folder / "config.json").is_file():
        raise InvalidConfig(f"{option} {folder}: it holds no config.json; give a model's folder", field=option)


def _fields(assignments: Sequence[str]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidConfig(f"--set {assignment!r}: expected FIELD=VALUE", field="--set")
        try:
            fields[name] = load_yaml(value)
        except yaml.YAMLError as error:
            raise InvalidConfig(f"--set {assignment!r}: the value is no YAML: {error}", field="--set") from None
    return fields


def _where(
    runner: Runner, *, remote: bool, in_ray: bool, in_fleets: bool, forked: bool
) -> AbstractContextManager[object]:
    """Return a context that starts the run's engines in the processes that the options choose."""
    if in_ray and (remote or forked):
        raise InvalidConfig(
            "--ray: Ray starts the engines' processes; leave out --remote and --fork-hosts", field="--ray"
        )
    if in_fleets and (remote or in_ray):
        raise InvalidConfig("--fleet: its engines are of this process; leave out --remote and --ray", field="--fleet")
    if in_fleets:
        from drivetrain_conformance.harness.fleet_suite import FleetSuite

        runner.suite = FleetSuite(runner.suite)
    if in_ray:
        return _ray_actors(runner)
    return _remote_hosts(runner, forked=forked) if remote else _hosts(runner, forked=forked)


def _hosts(runner: Runner, *, forked: bool) -> AbstractContextManager[object]:
    """Return a context that starts the run's host processes, by a fork server if ``forked``."""
    if not forked:
        return nullcontext()
    from drivetrain_conformance.harness.fork_server import ForkServer

    python = runner.suite.fields.get("python")
    return ForkServer(runner.suite.backend, None if python is None else str(python))


@contextmanager
def _remote_hosts(runner: Runner, *, forked: bool) -> Iterator[None]:
    """Put a ``drivetrain host`` between the run and each of its engines."""
    from drivetrain_conformance.harness.fork_server import ForkServer
    from drivetrain_conformance.harness.remote_suite import RemoteSuite

    with ForkServer(runner.suite.backend, program="command") if forked else nullcontext() as server:
        runner.suite = suite = RemoteSuite(runner.suite, server)
        try:
            yield
        finally:
            suite.close()


@contextmanager
def _ray_actors(runner: Runner) -> Iterator[None]:
    """Put each engine of the run into a Ray actor."""
    if importlib.util.find_spec("ray") is None:
        raise InvalidConfig("--ray needs the package 'ray'; run: pip install 'drivetrain[ray]'", field="--ray")
    from drivetrain_conformance.harness.ray_suite import RaySuite

    runner.suite = suite = RaySuite(runner.suite)
    try:
        yield
    finally:
        suite.close()


def _run(runner: Runner, cases: list[Case], *, complete: bool, file: Path | None) -> Report:
    from drivetrain_conformance.assets.served_models import ModelKind
    from drivetrain_conformance.reports.report import make_report

    begun = time.monotonic()
    with runner:
        model = runner.models.path(ModelKind.TEXT)
        # Start with an engine, so that a wrong name or a broken plugin is one usage error instead of 200 failures.
        isolation = runner.suite.isolation_of({"model": str(model)})

        def made(results: Sequence[CaseResult]) -> Report:
            return make_report(
                runner,
                results,
                isolation=isolation,
                model=model.name.rpartition("-")[0] or model.name,
                seconds=time.monotonic() - begun,
                complete=complete and len(results) == len(cases),
            )

        results: list[CaseResult] = []
        report = made(results)
        for result in _with_progress(runner, cases):
            results.append(result)
            report = made(results)
            if file is not None:  # after each case, so that an interrupted run loses nothing
                write_json(report, file)
        return report


def _with_progress(runner: Runner, cases: list[Case]) -> Iterator[CaseResult]:
    with progress_bar(runner.suite.backend, len(cases)) as advance:
        for case in cases:
            advance(case.id, by=0)
            result = runner.execute(case)
            advance(case.id)
            _tell_case(case.id, result.verdict, result.seconds, result.judgement.message)
            yield result


def _tell_case(name: str, verdict: Verdict, seconds: float, message: str) -> None:
    if verdict.is_failure:
        err.print(Text(f"failed  {name}: {message}"), style="red", soft_wrap=True)
    elif not err.is_terminal:
        err.print(Text(f"{verdict.value:13} {seconds:6.2f} s  {name}"), soft_wrap=True)


def _given(context: typer.Context, chosen: Callable[[str], bool]) -> list[str]:
    """Return the arguments on the command line whose names are chosen, as they are written there."""
    found = []
    for one in context.command.params:
        source = context.get_parameter_source(one.name or "")
        if source is not None and source.name == "COMMANDLINE" and chosen(one.name or ""):
            found.append(one.opts[0] if one.param_type_name == "option" else "BACKEND")
    return found


def _require_only(context: typer.Context, taken: frozenset[str], option: str) -> None:
    """Raise if arguments are on the command line that the run ``option`` asks for would not heed."""
    if given := _given(context, lambda name: name not in taken):
        raise InvalidConfig(f"{option} heeds no {', '.join(given)}: leave that out", field=given[0])


# Routes --------------------------------------------------------------------------------------------------------------


def _material(model: Path | None) -> AbstractContextManager[Material | None]:
    """Return a context with the checkpoints and adapters that are made of the served model's folder."""
    if model is None:
        return nullcontext()
    _require_model("--model", model)
    from drivetrain_conformance.routes.material import made_of

    return made_of(model.absolute())


async def _run_routes(
    access: Access, groups: list[str] | None, ids: list[str] | None, file: Path | None, name: str
) -> RouteReport:
    from drivetrain_conformance.harness.case import choose
    from drivetrain_conformance.routes.case import route_cases
    from drivetrain_conformance.routes.run import route_report, run_routes
    from drivetrain_conformance.routes.server_under_test import connected

    choose(route_cases(access.dialect), groups, ids)  # so that a wrong name is found before the server is
    async with connected(access) as target:
        cases = choose(route_cases(target.dialect), groups, ids)
        entries: list[CaseEntry] = []
        with progress_bar(target.dialect.value, len(cases)) as advance:
            async for entry in run_routes(target, cases):
                advance(entry.case)
                _tell_case(entry.case, entry.verdict, entry.seconds, entry.message)
                entries.append(entry)
                if file is not None:
                    write_json(route_report(access.url, target, entries, name), file)
        return route_report(access.url, target, entries, name)


# Telling -------------------------------------------------------------------------------------------------------------


def _tell(report: Report | RouteReport, *, as_json: bool, require_complete: bool) -> bool:
    """Print the report's findings; return True if the run passed."""
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(report))
    else:
        _print_groups(report)
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in report.counts().items() if count)
        out.print(Text(f"{report.title}: {counts}; {report.seconds:.0f} s"), soft_wrap=True)
    failures = report.failures()
    for line in failures if not as_json else ():
        out.print(Text(f"✗ {line}"), style="red", soft_wrap=True)
    incomplete = report.not_run() if require_complete else []
    for line in incomplete:
        print_error(f"not run: {line}", kind="incomplete")
    return not failures and not incomplete and report.counts()[Verdict.FAILED] == 0


def _print_groups(report: Report | RouteReport) -> None:
    groups: dict[str, list[CaseEntry]] = {}
    for entry in report.cases:
        groups.setdefault(entry.case.partition("/")[0], []).append(entry)
    table = Table("group", box=None, pad_edge=False)
    for heading in (*(verdict.value.replace("_", " ") for verdict in Verdict), "seconds"):
        table.add_column(heading, justify="right")
    for name, entries in groups.items():
        counts = [sum(entry.verdict is verdict for entry in entries) for verdict in Verdict]
        seconds = sum(entry.seconds for entry in entries)
        table.add_row(name, *(str(count or "") for count in counts), f"{seconds:.1f}")
    out.print(table)


def _list(cases: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"cases": cases})
        return
    for case in cases:
        needs = f"  (needs {', '.join(case['needs']) or 'nothing'})" if "needs" in case else ""
        out.print(Text.assemble((case["case"], "bold"), f"{needs}\n  {case['summary']}"), soft_wrap=True)
    out.print(f"{len(cases)} cases")


def _rendered(paths: Sequence[Path]) -> dict[str, str]:
    """The pages and the picture of reports, by the names of their files."""
    from drivetrain_conformance.reports.matrix import render_markdown, render_svg
    from drivetrain_conformance.reports.report import read_report
    from drivetrain_conformance.routes.comparison_page import render_routes
    from drivetrain_conformance.routes.run import is_route_report, read_route_report

    routes = [path for path in paths if is_route_report(path)]
    reports = [read_report(path) for path in paths if path not in routes]
    pages = {"can-i-use-it.md": render_markdown(reports), "matrix.svg": render_svg(reports)} if reports else {}
    return pages | ({"routes.md": render_routes([read_route_report(path) for path in routes])} if routes else {})


def _stale(pages: Path, folder: Path, fresh: Sequence[Path]) -> list[str]:
    """List the pages and kept reports in ``folder`` that are not current."""
    from drivetrain_conformance.reports.matrix import differences
    from drivetrain_conformance.reports.report import read_report

    paths = sorted(folder.glob("*.json"))
    kept = {path.stem: read_report(path) for path in paths}
    if not kept:
        raise InvalidConfig(f"{folder} holds no reports", field="--kept")
    found: list[str] = []
    for name, rendered in _rendered([*paths, *sorted(folder.glob(f"{_ROUTES}/*.json"))]).items():
        file = pages / name
        if not file.is_file() or file.read_text(encoding="utf-8") != rendered:
            remedy = f"drivetrain matrix {folder}/*.json {folder}/{_ROUTES}/*.json --output {pages}"
            found.append(f"{file} differs from what the reports in {folder} give; run: {remedy}")
    for path in fresh:
        if path.stem not in kept:
            found.append(f"{folder}/{path.name} is missing; copy {path} there")
            continue
        found += [f"{folder}/{path.name}: {line}" for line in differences(read_report(path), kept[path.stem])]
    return found
