"""Query of an engine's capabilities in another Python environment, without starting it."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from drivetrain.backend.base import Backend, StopKind
from drivetrain.backend.toolkit.hub_files import noting_missing_files
from drivetrain.backend.toolkit.launcher_variables import without_launcher_variables
from drivetrain.errors import DeadlineExceeded, DrivetrainError, EngineStartError, WireError
from drivetrain.process.handshake import check_version, drivetrain_version, installed, portable
from drivetrain.process.host_log import with_end_of_log
from drivetrain.process.host_python import cannot_run, command, why_not
from drivetrain.process.process_tree import MARK, ending, kill_family
from drivetrain.process.wire import WIRE_VERSION, Failure
from drivetrain.process.wire_errors import exception, failure
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation

_DEADLINE_S: Final = 120.0


class DescribedError(msgspec.Struct, frozen=True):
    """An error of the other environment, as the probe's answer carries it."""

    error: str
    message: str
    fields: dict[str, object]

    @classmethod
    def of(cls, error: BaseException) -> DescribedError:
        """Describe an error."""
        told = failure(0, error)
        return cls(told.error, told.message, told.fields)

    def exception(self) -> DrivetrainError:
        """Rebuild the error."""
        return exception(Failure(0, self.error, self.message, self.fields))


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a backend in its own environment."""

    backend: str
    capabilities: frozenset[Capability]
    native_stops: frozenset[StopKind]
    config_names: Mapping[str, str]
    """See :attr:`drivetrain.Backend.config_names`."""
    default_isolation: Isolation
    engine_distribution: str
    engine_version: str
    """Installed version of that distribution, or ``"not installed"``."""
    drivetrain_version: str
    python_version: str
    seen_working: tuple[str, str] | None = None
    """See :attr:`drivetrain.Backend.seen_working`."""
    refusal: DescribedError | None = None
    """Error by which :meth:`drivetrain.Backend.validate` refused the configuration."""
    missing_files: frozenset[str] = frozenset()
    """Names of files of a hub model that the backend looked for, and that are not in the hub's cache."""

    def require_valid(self) -> None:
        """Raise the error by which the backend refused the configuration, if it did."""
        if self.refusal is not None:
            raise self.refusal.exception()


class _Version(msgspec.Struct):
    """Leading fields of every version's answer."""

    wire_version: int
    drivetrain: str


class _Answer(_Version):
    """Answer on stdout, one JSON object with either ``result`` or ``failure``."""

    result: ProbeResult | None = None
    failure: DescribedError | None = None


def probe(config: EngineConfig, python: str | None = None, *, deadline: float = _DEADLINE_S) -> ProbeResult:
    """Query the configured backend's capabilities in the environment of ``python``. Blocks; starts no engine.

    Args:
        config: The engine's configuration, on which capabilities may depend.
        python: Python executable of the environment; None: ``config.python``, or this environment's.
        deadline: Timeout in seconds; importing an engine from a cold disk takes a while.

    Raises:
        EngineStartError: The interpreter cannot be run, or its environment lacks drivetrain.
        WireError: Its drivetrain speaks another version of the wire protocol.
        DeadlineExceeded: It did not answer in time.
        BackendError: The backend is unknown or unavailable there. Other errors of describing it are raised as well.
    """
    python = python or config.python
    mark = uuid.uuid4().hex
    try:
        process = subprocess.Popen(
            command(python, "--probe"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**without_launcher_variables(os.environ), MARK: mark},
            start_new_session=True,
        )
    except OSError as error:
        raise cannot_run(python, error) from error
    shown = python or sys.executable
    with process:
        try:
            answered, said = process.communicate(msgspec.json.encode(portable(config)), timeout=deadline)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"timed out after {deadline:g} s waiting for {shown!r} to say what its {config.backend} backend can do"
            ) from None
        finally:
            kill_family(process.pid, mark)
    if process.returncode != 0:
        log = said.decode(errors="replace").splitlines()
        remedy = why_not(python, log) or f"the probe of the {config.backend} backend with {shown!r}"
        raise EngineStartError(with_end_of_log(f"{remedy}; it {ending(process.returncode)}", log))
    return _understand(answered, shown)


def _understand(answered: bytes, shown: str) -> ProbeResult:
    try:
        version = msgspec.json.decode(answered, type=_Version)
        check_version(repr(shown), version.wire_version, version.drivetrain)
        answer = msgspec.json.decode(answered, type=_Answer)
    except msgspec.MsgspecError as error:
        raise WireError(f"{shown!r} answered the probe with {answered[:200]!r}: {error}") from error
    if answer.failure is not None:
        raise answer.failure.exception()
    if answer.result is None:
        raise WireError(f"{shown!r} answered the probe with neither a result nor a failure")
    return answer.result


def answer() -> int:
    """Answer a probe: read a configuration from stdin, write one JSON object to stdout; return the exit code."""
    with _stdout_kept() as write:
        reply = _Answer(WIRE_VERSION, drivetrain_version())
        try:
            reply.result = _describe(EngineConfig.model_validate_json(sys.stdin.buffer.read()))
        except Exception as error:  # any error is reported to the caller
            reply.failure = DescribedError.of(error)
        write(msgspec.json.encode(reply))
    return 0


def _describe(config: EngineConfig) -> ProbeResult:
    from drivetrain.backend.registry import check_engine_version, load_backend

    backend = load_backend(config.backend)
    engine_version = installed(backend.engine_distribution)
    check_engine_version(backend, engine_version)
    with noting_missing_files() as missing:
        capabilities, refusal = backend.capabilities(config), _refusal(backend, config)
    return ProbeResult(
        backend=backend.name,
        capabilities=capabilities,
        native_stops=backend.native_stops,
        config_names=backend.config_names,
        default_isolation=backend.default_isolation,
        engine_distribution=backend.engine_distribution,
        engine_version=engine_version,
        drivetrain_version=drivetrain_version(),
        python_version=platform.python_version(),
        seen_working=backend.seen_working,
        refusal=refusal,
        missing_files=frozenset(missing),
    )


def _refusal(backend: type[Backend], config: EngineConfig) -> DescribedError | None:
    try:
        backend.validate(config)
    except DrivetrainError as error:
        return DescribedError.of(error)
    return None


@contextlib.contextmanager
def _stdout_kept() -> Iterator[Callable[[bytes], object]]:
    """Reserve stdout for the answer; engines' output during import goes to stderr."""
    kept = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with kept:
        yield kept.write
