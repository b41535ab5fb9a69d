"""Reports side by side: the capabilities that each backend was seen to have, as a page of Markdown and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from drivetrain.types.capability import Capability
from drivetrain_conformance.assets.page_templates import rendered
from drivetrain_conformance.harness.run_profile import LEFT_OUT
from drivetrain_conformance.harness.verdict import WORST_FIRST, Verdict
from drivetrain_conformance.reports.report import Report

SECTIONS: Final = {
    "Generation": "streaming abort seed priority deterministic embed reward_score moe",
    "Logprobs": "logprobs_raw logprobs_temperature logprobs_processed top_logprobs prompt_logprobs prompt_ranks "
    "score_tokens score_at",
    "Stops": "stop_token_ids stop_strings stop_regex ignore_eos min_new_tokens",
    "Sampling": "top_k top_p min_p repetition_penalty frequency_penalty presence_penalty logit_bias logit_processors",
    "Structured output": "structured_json structured_regex structured_ebnf",
    "Images and more": "images video audio hidden_states routed_experts prompt_routed_experts sampling_mask",
    "Sessions, cache, adapters": "sessions prefix_cache hicache_storage lora profile",
    "Pause": "pause_abort pause_wait pause_in_place pause_retract",
    "Sleep": "sleep_weights sleep_kv_cache sleep_cuda_graph sleep_keeps_weights",
    "Weight updates": "weights_in_process weights_shared_memory weights_cuda_ipc weights_broadcast weights_disk "
    "weights_plugin weights_lora weights_lora_tensors weight_staging "
    "weight_update_in_flight_in_place weight_update_in_flight_retract version_spans "
    "read_weights save_sharded save_remote",
    "Parallel": "tensor_parallel pipeline_parallel data_parallel expert_parallel",
}
"""Capabilities by topic, in the order in which they are shown; capabilities of no topic are under "Other"."""


class Mark(Enum):
    """Verdict on one capability of one backend, over all of its reports."""

    YES = "yes", "#2e7d32"
    SOME = "some", "#9ccc65"
    NO = "no", "#cfd8dc"
    UNKNOWN = "not run", "#eceff1"
    FAILS = "fails", "#c62828"

    def __init__(self, word: str, colour: str) -> None:
        self.word = word
        self.colour = colour


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix: a backend's verdict on a capability."""

    mark: Mark
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One capability across the backends."""

    name: str
    meaning: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class Section:
    """The capabilities of one topic."""

    title: str
    rows: list[Row]


def render_markdown(reports: Sequence[Report]) -> str:
    """The page."""
    return _render("matrix.md.j2", reports)


def render_svg(reports: Sequence[Report]) -> str:
    """The picture: a row for each backend, a square for each capability."""
    return _render("matrix.svg.j2", reports)


def differences(fresh: Report, kept: Report) -> list[str]:
    """Return the verdicts in which a fresh report differs from the kept one; empty if the kept one is current.

    Slow cases that the fresh report's profile left out are passed over.
    """
    left_out = {entry.case for entry in fresh.cases if entry.message == LEFT_OUT}
    now = {entry.case: entry.verdict for entry in fresh.cases if entry.case not in left_out}
    then = {entry.case: entry.verdict for entry in kept.cases if entry.case not in left_out}
    found = [
        f"{case}: {_shown(then.get(case))} in the kept report, {_shown(now.get(case))} now"
        for case in sorted(now.keys() | then.keys())
        if now.get(case) is not then.get(case)
    ]
    claimed = {entry.capability: f"claimed={entry.claimed}" for entry in fresh.capabilities}
    was_claimed = {entry.capability: f"claimed={entry.claimed}" for entry in kept.capabilities}
    found += [
        f"{name}: {was_claimed.get(name, 'absent')} in the kept report, {claimed.get(name, 'absent')} now"
        for name in sorted(claimed.keys() | was_claimed.keys())
        if claimed.get(name) != was_claimed.get(name)
    ]
    return found


def sections(reports: Sequence[Report]) -> list[Section]:
    """Every capability, by topic."""
    left = {capability.value: capability for capability in Capability}
    found = [(title, [left.pop(name) for name in names.split()]) for title, names in SECTIONS.items()]
    found += [("Other", list(left.values()))] if left else []
    return [Section(title, [_row(capability, reports) for capability in capabilities]) for title, capabilities in found]


def backends(reports: Iterable[Report]) -> list[str]:
    """The backends that were run, the one with most capabilities first."""
    seen: dict[str, set[str]] = {}
    for report in reports:
        passed = {entry.capability for entry in report.capabilities if entry.verdict is Verdict.PASSED}
        seen.setdefault(report.backend, set()).update(passed)
    return sorted(seen, key=lambda backend: (-len(seen[backend]), backend))


def _shown(verdict: Verdict | None) -> str:
    return verdict.value if verdict else "absent"


def _render(template: str, reports: Sequence[Report]) -> str:
    return rendered(template, reports=reports, backends=backends(reports), sections=sections(reports), marks=list(Mark))


def _row(capability: Capability, reports: Sequence[Report]) -> Row:
    cells = [
        _cell(capability.value, [report for report in reports if report.backend == backend])
        for backend in backends(reports)
    ]
    return Row(capability.value, capability.meaning, cells)


def _cell(capability: str, reports: Sequence[Report]) -> Cell:
    verdicts: dict[str, Verdict] = {}
    for report in reports:
        where = "GPU" if report.hardware.gpus else "CPU"
        found = [entry.verdict for entry in report.capabilities if entry.capability == capability]
        worst = [*found, verdicts.get(where, Verdict.NOT_RUN)]
        verdicts[where] = next(verdict for verdict in WORST_FIRST if verdict in worst)
    where_it = {kind: [where for where, verdict in verdicts.items() if verdict is kind] for kind in Verdict}
    for kind, words in ((Verdict.FAILED, "fails"), (Verdict.KNOWN_FAILURE, "known to fail")):
        if where_it[kind]:
            return Cell(Mark.FAILS, f"{words} on {' and '.join(where_it[kind])}")
    passed, unknown = where_it[Verdict.PASSED], where_it[Verdict.NOT_RUN]
    if len(passed) == len(verdicts):
        return Cell(Mark.YES, Mark.YES.word)
    if passed:
        return Cell(Mark.SOME, f"{passed[0]}; {unknown[0]} not run" if unknown else f"{passed[0]} only")
    if len(unknown) == len(verdicts):
        return Cell(Mark.UNKNOWN, Mark.UNKNOWN.word)
    return Cell(Mark.NO, f"no; {unknown[0]} not run" if unknown else Mark.NO.word)
