"""Reports of route cases side by side, as a page of Markdown: the servers that answer each route as trainers need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from drivetrain.errors import InvalidConfig
from drivetrain_conformance.assets.page_templates import rendered
from drivetrain_conformance.harness.verdict import Verdict
from drivetrain_conformance.routes.dialect import Dialect
from drivetrain_conformance.routes.run import RouteReport

_WORDS: Final = {
    Verdict.PASSED: "yes",
    Verdict.REFUSED: "refused",
    Verdict.FAILED: "**no**",
    Verdict.NOT_RUN: "not run",
}
_TITLES: Final = {Dialect.OPENAI: "OpenAI", Dialect.VLLM: "vLLM", Dialect.SGLANG: "SGLang"}


@dataclass(frozen=True, slots=True)
class Row:
    """One case across the servers of a dialect."""

    name: str
    summary: str
    cells: list[str]


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of one group."""

    name: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class DialectTable:
    """The servers that were asked in one dialect."""

    title: str
    reports: list[RouteReport]
    groups: list[Group]

    def counts(self) -> list[str]:
        """Return how many cases ended how, for each server."""
        return [
            ", ".join(f"{count} {_WORDS[verdict]}" for verdict, count in report.counts().items() if count)
            for report in self.reports
        ]


def render_routes(reports: Sequence[RouteReport]) -> str:
    """Return the page.

    Raises:
        InvalidConfig: two reports of a dialect have the same name.
    """
    tables = [_table(dialect, [one for one in reports if one.dialect == dialect.value]) for dialect in Dialect]
    return rendered("routes.md.j2", tables=[table for table in tables if table.reports])


def _table(dialect: Dialect, reports: list[RouteReport]) -> DialectTable:
    names = [report.name for report in reports]
    if len(set(names)) < len(names):
        raise InvalidConfig(f"two reports of the dialect {dialect.value!r} have the same name: {', '.join(names)}")
    by_case = [{entry.case: entry for entry in report.cases} for report in reports]
    groups: dict[str, list[Row]] = {}
    for case, entry in {case: entry for entries in reversed(by_case) for case, entry in entries.items()}.items():
        group, _, name = case.partition("/")
        verdicts = [entries[case].verdict if case in entries else Verdict.NOT_RUN for entries in by_case]
        cells = [_WORDS[verdict] for verdict in verdicts]
        groups.setdefault(group, []).append(Row(name, entry.summary, cells))
    return DialectTable(_TITLES[dialect], reports, [Group(name, rows) for name, rows in groups.items()])
