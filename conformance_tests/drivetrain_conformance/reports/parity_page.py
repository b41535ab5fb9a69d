"""Recordings side by side, as a page: each engine's answers compared with the transformers backend's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from drivetrain.errors import InvalidConfig
from drivetrain_conformance.assets.page_templates import rendered
from drivetrain_conformance.references.tolerances import TOLERANCE
from drivetrain_conformance.reports.parity import Agreement, Exchange, Recording, compare

REFERENCE: Final = "transformers"
"""The backend that the others are compared with."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A known reason for different answers to a request."""

    request: str
    engines: tuple[str, ...]
    """Beginnings of the titles of the columns in which they may."""
    why: str


CAUSES: Final = (
    Cause(
        "refused: a grammar that is none",
        ("sglang ", "vllm "),
        "engines parse grammars by libraries of their own, and the error holds what the library says; its type and its "
        "field are the same.",
    ),
    Cause(
        "held to a regex",
        ("vllm 0.26.",),
        "this vLLM lets a text that a grammar has completed end only by the tokenizer's own EOS token; later ones, and "
        "SGLang, by every id that ends the request.",
    ),
    Cause(
        "held to JSON",
        ("vllm 0.26.",),
        "SGLang 0.5.17, which it is compared with here, comes with xgrammar 0.2.1, for which a carriage return is no "
        "white space between the parts of JSON; later ones take it.",
    ),
)


@dataclass(frozen=True, slots=True)
class Column:
    """One recording compared with the reference's, on the same machine."""

    recording: Recording
    agreements: dict[str, Agreement]
    """Agreement by request; requests for which this recording is itself the reference are absent."""

    @property
    def title(self) -> str:
        """Backend, its engine's version, device and dtype."""
        recording = self.recording
        version = next((f" {text}" for name, text in recording.versions.items() if recording.backend in name), "")
        where = recording.hardware.gpus[0] if recording.hardware.gpus else "CPU"
        return f"{recording.backend}{version}, {where}, {recording.dtype}"

    @property
    def largest(self) -> float:
        """Largest difference of logprobs over all requests, in nats."""
        return max((agreement.largest for agreement in self.agreements.values()), default=0.0)

    def cause(self, name: str) -> Cause | None:
        """Return the known cause for a difference in this engine's answers to a request, if there is one."""
        return next((one for one in CAUSES if one.request == name and self.title.startswith(one.engines)), None)

    def cell(self, name: str) -> str:
        """Return the page's cell for one request."""
        agreement = self.agreements.get(name)
        if agreement is None:
            return f"what others are compared with, for want of {REFERENCE}"
        if agreement.unclaimed:
            return "not claimed"
        if agreement.difference and self.cause(name) is not None:
            return "differs: see below"
        if agreement.difference:
            return f"**{agreement.difference}**".replace("|", "\\|")
        if agreement.tie is not None:
            return f"equal up to token {agreement.tie}"
        return "equal"


def columns_of(recordings: Sequence[Recording]) -> list[Column]:
    """Each recording beside the reference's of the same machine, dtype and weights.

    Raises:
        InvalidConfig: there is none of the reference.
    """
    found: list[Column] = []
    for recording in recordings:
        if recording.backend == REFERENCE:
            continue
        here = [one for one in recordings if _circumstances(one) == _circumstances(recording)]
        if not any(one.backend == REFERENCE for one in here):
            raise InvalidConfig(
                f"there is no recording of {REFERENCE} beside that of {recording.backend} with the same GPU, dtype and "
                f"weights: {_circumstances(recording)}",
                field="RECORDINGS",
            )
        agreements: dict[str, Agreement] = {}
        for exchange in recording.exchanges:
            reference = _reference(here, exchange.name)
            if reference is not exchange:
                agreements[exchange.name] = compare(reference, exchange, TOLERANCE[recording.dtype])
        found.append(Column(recording, agreements))
    return found


def _reference(recordings: Sequence[Recording], name: str) -> Exchange:
    """Return the answers that others are compared with: the reference's, or those of the first engine that has any."""
    ordered = sorted(recordings, key=lambda recording: (recording.backend != REFERENCE, recording.backend))
    exchanges = [exchange for recording in ordered for exchange in recording.exchanges if exchange.name == name]
    claimed = [exchange for exchange in exchanges if exchange.refusal is None or not exchange.refusal.unclaimed]
    return (claimed or exchanges)[0]


def differences(columns: Sequence[Column]) -> list[str]:
    """Every difference without a known cause, in words."""
    return [
        f"{column.title}: {name}: {agreement.difference}"
        for column in columns
        for name, agreement in column.agreements.items()
        if agreement.difference and column.cause(name) is None
    ]


def render(recordings: Sequence[Recording]) -> str:
    """The page, as Markdown."""
    columns = columns_of(recordings)
    names = list(dict.fromkeys(exchange.name for column in columns for exchange in column.recording.exchanges))
    return rendered(
        "parity.md.j2",
        columns=columns,
        names=names,
        reference=REFERENCE,
        tolerance=TOLERANCE,
        causes=[cause for cause in CAUSES if any(_differs(column, cause) for column in columns)],
    )


def _differs(column: Column, cause: Cause) -> bool:
    agreement = column.agreements.get(cause.request)
    return agreement is not None and bool(agreement.difference) and column.cause(cause.request) is cause


def _circumstances(recording: Recording) -> tuple[str, str, str]:
    gpus = recording.hardware.gpus
    return gpus[0] if gpus else "CPU", recording.dtype, recording.weights
