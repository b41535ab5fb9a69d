"""Every error that drivetrain raises.

    DrivetrainError
    ├── InvalidRequest              a request, prompt or sampling param that no engine could honour (also ValueError)
    ├── InvalidConfig               an engine configuration that cannot work (also ValueError)
    ├── UnsupportedCapability       a well-formed request for something this engine does not claim
    ├── MissingDependency           a package that an extra of drivetrain brings is not installed (also ImportError)
    ├── BackendError                the plugin seam
    │   ├── UnknownBackend          no plugin provides that name (also LookupError)
    │   ├── DuplicateBackend        two plugins provide the same name
    │   ├── BackendLoadError        the plugin is there, but importing it failed (also ImportError)
    │   └── BackendUnavailable      the plugin is there, the engine package that it adapts is not
    ├── EngineError                 a running engine
    │   ├── EngineStateError        the engine's state cannot serve the request; carries the state
    │   ├── EngineStartError        the engine did not start; carries the last log lines
    │   ├── EngineDied              the engine's process ended, froze or lost a child
    │   ├── EngineBusy              requests are in flight and the arguments do not say what to do with them
    │   ├── EngineOutOfMemory       recovery by retry was tried and failed; carries the batch size
    │   ├── NonFiniteLogits         the model gave NaN or infinite logits to a request, which ended with it
    │   ├── NoTokenAllowed          a request's own fields left no token to draw, and it ended with it
    │   └── EngineInternalError     the engine failed in a way that has no name of its own
    ├── DeadlineExceeded            a wait ended; says what was waited for (also TimeoutError)
    ├── WireError                   bytes on a socket that are not drivetrain's protocol, or another version of it
    └── WeightSyncError             a weight update
        ├── WeightPlanMismatch      missing, extra, wrong-shaped or wrong-dtype tensors; nothing was changed
        ├── WeightBaseMismatch      a delta against weights that the engine does not hold; nothing was changed
        ├── InvalidWeights          NaN or infinite tensors in the source; nothing was changed
        ├── WeightTransferFailed    the transfer broke after it began; the engine is dirty
        ├── WeightVerifyFailed      what arrived is not what was sent; the engine is dirty
        └── WeightProbeFailed       verified and served, but the engine's logprobs are not the trainer's

Errors say what was wrong, with the value, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_LONGEST: Final = 20_000
"""Characters of an error's text; room for an engine's last log lines, none for a value of megabytes."""


class DrivetrainError(Exception):
    """The root: catching it catches everything drivetrain raises on purpose."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            left_out = len(message) - _LONGEST
            half = _LONGEST // 2
            message = f"{message[:half]} … [{left_out} characters left out] … {message[-half:]}"
        super().__init__(message)


class InvalidRequest(DrivetrainError, ValueError):
    """A request that no engine could honour, refused before any work.

    ``field`` names the offending field in dotted form (``sampling_params.top_p``), or is empty when the
    request as a whole is wrong.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidConfig(DrivetrainError, ValueError):
    """An engine configuration that cannot work, refused before the engine starts."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class UnsupportedCapability(DrivetrainError):
    """A well-formed request for a capability that this engine does not claim, refused before any work."""

    def __init__(self, message: str, *, capability: str = "") -> None:
        super().__init__(message)
        self.capability = capability


class MissingDependency(DrivetrainError, ImportError):
    """A package that an extra of drivetrain brings is not installed; the message has the command that installs it.

    ``name`` is the package's import name.
    """


class BackendError(DrivetrainError):
    """Something is wrong with a backend plugin."""


class UnknownBackend(BackendError, LookupError):
    """No installed plugin provides the backend that was asked for."""


class DuplicateBackend(BackendError):
    """Two installed plugins provide a backend of the same name."""


class BackendLoadError(BackendError, ImportError):
    """A backend's plugin is installed, but importing it failed."""


class BackendUnavailable(BackendError):
    """A backend's plugin is installed, but the engine package that it adapts is missing or too old."""


class EngineError(DrivetrainError):
    """A running engine failed or refused."""


class EngineStateError(EngineError):
    """The engine is in a state that cannot serve the request; ``state`` is the state's name."""

    def __init__(self, message: str, *, state: str = "") -> None:
        super().__init__(message)
        self.state = state


class EngineStartError(EngineError):
    """The engine did not start."""


class EngineDied(EngineError):
    """The engine's process ended, stopped answering, or lost a child that it needs."""


class EngineBusy(EngineError):
    """Requests are in flight, and the arguments of the call do not say what should become of them."""


class EngineOutOfMemory(EngineError):
    """The engine ran out of memory, and retrying did not help; ``batch_size`` says how many requests ran."""

    def __init__(self, message: str, *, batch_size: int = 0) -> None:
        super().__init__(message)
        self.batch_size = batch_size


class NonFiniteLogits(EngineError):
    """The model gave NaN or infinite numbers to a request, which ended there. Its weights or its adapter diverged."""


class NoTokenAllowed(EngineError):
    """A request's grammar, masks and ``min_new_tokens`` together left no token to draw, and it ended there.

    ``field`` names them in dotted form.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class EngineInternalError(EngineError):
    """The engine failed in a way that has no name of its own; the message carries its own words."""


class DeadlineExceeded(DrivetrainError, TimeoutError):
    """A wait on another process reached its deadline; the message says what was waited for."""


class WireError(DrivetrainError):
    """What came over a socket is not drivetrain's wire protocol, or is another version of it."""


class WeightSyncError(DrivetrainError):
    """A weight update failed."""


class WeightPlanMismatch(WeightSyncError):
    """The tensors offered are not the tensors that the engine holds; nothing was changed.

    ``missing``, ``extra`` and ``mismatched`` name the tensors.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        mismatched: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.extra = tuple(extra)
        self.mismatched = tuple(mismatched)


class WeightBaseMismatch(WeightSyncError):
    """A delta was made against other weights than the engine is known to hold; nothing was changed."""


class InvalidWeights(WeightSyncError, ValueError):
    """The source holds NaN or infinite values; nothing was changed. ``tensors`` names them."""

    def __init__(self, message: str, *, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class WeightTransferFailed(WeightSyncError):
    """The transfer broke after it began; the engine is dirty until a complete push succeeds."""


class WeightVerifyFailed(WeightSyncError):
    """What arrived is not what was sent; the engine is dirty until a complete push succeeds.

    ``tensors`` names the tensors whose digests differ.
    """

    def __init__(self, message: str, *, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class WeightProbeFailed(WeightSyncError):
    """The weights are verified and served, and the engine gives other logprobs with them than the trainer.

    ``gap`` is the largest difference, in nats.
    """

    def __init__(self, message: str, *, gap: float = float("nan")) -> None:
        super().__init__(message)
        self.gap = gap


def _tree(root: type[DrivetrainError]) -> Iterable[type[DrivetrainError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_FIELDS: Final = ("field", "capability", "state", "batch_size", "missing", "extra", "mismatched", "tensors", "gap")


def to_wire(error: DrivetrainError) -> tuple[str, str, dict[str, object]]:
    """Return the error as (class name, message, its fields), ready to cross a process boundary."""
    fields = {name: getattr(error, name) for name in _FIELDS if hasattr(error, name)}
    return type(error).__name__, str(error), fields


def from_wire(name: str, message: str, fields: dict[str, object]) -> DrivetrainError:
    """Rebuild an error that :func:`to_wire` described; a class unknown here becomes :class:`EngineInternalError`."""
    for cls in _tree(DrivetrainError):
        if cls.__name__ == name:
            error = cls(message)
            for key, value in fields.items():
                if key in _FIELDS:
                    setattr(error, key, tuple(value) if isinstance(value, list) else value)
            return error
    return EngineInternalError(f"{name}: {message}")
