"""The verdict law: what a body's end means, given what the engine claims. Pure values, no I/O."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from drivetrain.capability import Capability
from drivetrain.errors import UnsupportedCapability


class Verdict(Enum):
    """What became of one case, or of one capability."""

    PASSED = "passed"
    """Claimed, and the body ended normally."""
    REFUSED = "refused"
    """Not claimed, and the body ended in UnsupportedCapability for what is not claimed."""
    FAILED = "failed"
    KNOWN_FAILURE = "known_failure"
    """It failed as a listed known failure says that it does."""
    NOT_RUN = "not_run"
    """This machine lacks what the case needs. Never shown as supported."""

    @property
    def is_failure(self) -> bool:
        """Whether a run that holds this verdict has failed."""
        return self is Verdict.FAILED


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and why."""

    verdict: Verdict
    message: str = ""


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A case that is known to fail; when it passes, or fails in another way, the suite fails."""

    case: str
    """``group/name``."""
    reason: str
    issue: str
    """URL of the issue where it will be mended."""
    error: str
    """Class of the error, such as ``"AssertionError"``."""
    message: str
    """A part of the error's message."""


def judge(needs: Collection[Capability], missing: Collection[Capability], error: BaseException | None) -> Judgement:
    """Judge the end of a body.

    Args:
        needs: What the body uses.
        missing: Those of them that the engine does not claim.
        error: What the body raised; None if it ended normally.
    """
    lacking = ", ".join(sorted(capability.value for capability in missing))
    if error is None:
        if missing:
            return Judgement(Verdict.FAILED, f"works though unclaimed: {lacking}; claim it, or refuse it")
        return Judgement(Verdict.PASSED)
    if isinstance(error, UnsupportedCapability):
        if error.capability in {capability.value for capability in missing}:
            return Judgement(Verdict.REFUSED, str(error))
        if error.capability in {capability.value for capability in needs}:
            return Judgement(Verdict.FAILED, f"claims {error.capability}, and refuses it: {error}")
        return Judgement(
            Verdict.FAILED,
            f"refused for {error.capability or 'no capability'}, which this case does not need: {error}",
        )
    described = describe(error)
    if missing:
        return Judgement(
            Verdict.FAILED, f"expected UnsupportedCapability for one of {lacking}, which are unclaimed; got {described}"
        )
    return Judgement(Verdict.FAILED, described)


def apply_known_failures(
    case: str, judgement: Judgement, error: BaseException | None, known: Collection[KnownFailure]
) -> Judgement:
    """Turn an expected failure into ``known_failure``, and a listed case that does not fail so into a failure."""
    listed = next((item for item in known if item.case == case), None)
    if listed is None or judgement.verdict is Verdict.NOT_RUN:
        return judgement
    if judgement.verdict is not Verdict.FAILED:
        return Judgement(
            Verdict.FAILED,
            f"is listed as a known failure ({listed.reason}; {listed.issue}), but it is {judgement.verdict.value}: "
            "take it off the list",
        )
    name = type(error).__name__ if error is not None else ""
    if error is not None and name == listed.error and listed.message in describe(error):
        return Judgement(Verdict.KNOWN_FAILURE, f"{listed.reason} ({listed.issue})")
    return Judgement(
        Verdict.FAILED,
        f"is known to fail with {listed.error} ({listed.message!r}), but failed otherwise: {judgement.message}",
    )


def describe(error: BaseException) -> str:
    """Class, message and notes of an error; of an assertion without a message, its source."""
    notes: list[str] = list(getattr(error, "__notes__", ()))
    if isinstance(error.__cause__, AssertionError):  # a body's own, which came out of an engine's context manager
        notes.append(f"from {describe(error.__cause__)}")
    message = str(error) or (_source(error) if isinstance(error, AssertionError) else "")
    return "\n".join([f"{type(error).__name__}: {message}", *notes])


def _source(error: BaseException) -> str:
    """The code that raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].lineno is None:
        return ""
    frame, first = frames[-1], frames[-1].lineno
    lines = (linecache.getline(frame.filename, number) for number in range(first, (frame.end_lineno or first) + 1))
    return " ".join(line.strip() for line in lines)
