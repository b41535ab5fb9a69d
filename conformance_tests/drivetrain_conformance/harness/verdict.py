"""The verdict law: judge the end of a case's body by the engine's claims. Pure values, no I/O."""

from __future__ import annotations

import ast
import linecache
import reprlib
import traceback
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final

from drivetrain.errors import DrivetrainError, UnsupportedCapability
from drivetrain.types.capability import Capability

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 24
_SHORT.maxstring = _SHORT.maxother = 200


class Verdict(Enum):
    """The outcome of one case, or the conclusion about one capability."""

    PASSED = "passed"
    """Claimed, and the body ended normally."""
    REFUSED = "refused"
    """Unclaimed, and the body ended in UnsupportedCapability for an unclaimed capability."""
    FAILED = "failed"
    KNOWN_FAILURE = "known_failure"
    """Failed in the way that a listed known failure describes."""
    NOT_RUN = "not_run"
    """The machine lacks hardware that the case needs, the suite lacks an oracle, or the case says nothing about its
    engines. Never shown as supported.
    """

    @property
    def is_failure(self) -> bool:
        """True if a run with this verdict has failed."""
        return self is Verdict.FAILED


WORST_FIRST: Final = (Verdict.FAILED, Verdict.KNOWN_FAILURE, Verdict.PASSED, Verdict.REFUSED, Verdict.NOT_RUN)
"""The verdict that counts where a case, or a capability, has several: with other settings an engine may claim less."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason."""

    verdict: Verdict
    message: str = ""


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A case that is known to fail; if it passes, or fails in another way, the suite fails."""

    case: str
    """``group/name``."""
    reason: str
    issue: str
    """URL of the issue about it; empty for a difference that is intended."""
    error: str
    """Class of the error, such as ``"AssertionError"``."""
    message: str
    """Part of the error's message."""

    @property
    def why(self) -> str:
        """The reason, and the issue if there is one."""
        return f"{self.reason} ({self.issue})" if self.issue else self.reason


def judge(needs: Collection[Capability], missing: Collection[Capability], error: BaseException | None) -> Judgement:
    """Judge the end of a body.

    Args:
        needs: The capabilities that the body uses.
        missing: Capabilities in ``needs`` that the engine does not claim.
        error: The error that the body raised; None if it ended normally.
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
    """Turn an expected failure into ``known_failure``, and any other outcome of a listed case into a failure."""
    listed = next((item for item in known if item.case == case), None)
    if listed is None or judgement.verdict is Verdict.NOT_RUN:
        return judgement
    if judgement.verdict is not Verdict.FAILED:
        return Judgement(
            Verdict.FAILED,
            f"is listed as a known failure ({listed.why}), but it is {judgement.verdict.value}: take it off the list",
        )
    name = type(error).__name__ if error is not None else ""
    if error is not None and name == listed.error and listed.message in describe(error):
        return Judgement(Verdict.KNOWN_FAILURE, listed.why)
    return Judgement(
        Verdict.FAILED,
        f"is known to fail with {listed.error} ({listed.message!r}), but failed otherwise: {judgement.message}",
    )


def describe(error: BaseException) -> str:
    """Describe an error by class, message and notes; an assertion without message by its source and values."""
    notes: list[str] = list(getattr(error, "__notes__", ()))
    if isinstance(error.__cause__, AssertionError):  # raised by the body, and wrapped by an engine's context manager
        notes.append(f"from {describe(error.__cause__)}")
    message = str(error) or (_source(error) if isinstance(error, AssertionError) else "")
    return "\n".join([f"{type(error).__name__}: {message}", *notes])


def _source(error: BaseException) -> str:
    """Return the statement that raised, on one line, with the values of its names."""
    frames = list(traceback.walk_tb(error.__traceback__))
    summary = traceback.extract_tb(error.__traceback__)
    if not summary or summary[-1].lineno is None:
        return ""
    raised, first = summary[-1], summary[-1].lineno
    lines = (linecache.getline(raised.filename, number) for number in range(first, (raised.end_lineno or first) + 1))
    source = " ".join(line.strip() for line in lines)
    values = _values(source, frames[-1][0].f_locals)
    return f"{source}  # {values}" if values else source


def _values(source: str, variables: Mapping[str, object]) -> str:
    """Return ``name = value`` of each variable and attribute in a statement. No call is repeated."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    found: dict[str, str] = {}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called:
            with suppress(LookupError, AttributeError, DrivetrainError):
                found.setdefault(ast.unparse(node), _SHORT.repr(_looked_up(node, variables)))
    return ", ".join(f"{name} = {value}" for name, value in found.items())


def _looked_up(node: ast.expr, variables: Mapping[str, object]) -> object:
    match node:
        case ast.Name(id=name):
            return variables[name]
        case ast.Attribute(value=owner, attr=name):
            return getattr(_looked_up(owner, variables), name)
        case _:
            raise LookupError
