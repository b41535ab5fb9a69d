"""All exceptions that drivetrain raises.

    DrivetrainError
    ├── InvalidRequest              a request, prompt or sampling param that no engine could honour (also ValueError)
    │   └── TooManyAdapters         the engine has as many LoRA adapters loaded as fit; unload one
    ├── InvalidConfig               an engine configuration that cannot work (also ValueError)
    ├── UnsupportedCapability       a valid request for a capability that this engine does not claim
    ├── MissingDependency           a package of one of drivetrain's extras is not installed (also ImportError)
    ├── BackendError                a backend plugin
    │   ├── UnknownBackend          no plugin provides that name (also LookupError)
    │   ├── DuplicateBackend        two plugins provide the same name
    │   ├── BackendLoadError        the plugin is installed, but importing it failed (also ImportError)
    │   └── BackendUnavailable      the plugin is installed, but the engine that it adapts is not
    ├── EngineError                 a running engine
    │   ├── EngineStateError        the request is not possible in the engine's state; carries the state
    │   ├── EngineStartError        the engine did not start; carries the last log lines
    │   ├── EngineDied              the engine's process ended, froze or lost a child
    │   ├── MemberLost              one engine of a fleet was lost with a request; the others serve on
    │   ├── WeightVersionGone       the request is pinned to a weight version that is not served, or not to its end
    │   ├── EngineBusy              requests are in flight, and the arguments do not say how to handle them
    │   ├── EngineOutOfMemory       out of memory, also after retries; carries the batch size
    │   ├── NonFiniteLogits         the model gave NaN or infinite logits, and the request ended
    │   ├── NoTokenAllowed          the request's own fields left no token to draw, and it ended
    │   └── EngineInternalError     any other failure of the engine
    ├── DeadlineExceeded            a wait timed out; the message names what was waited for (also TimeoutError)
    ├── WireError                   bytes on a socket that are not drivetrain's protocol, or another version of it
    │   └── TlsError                the certificate is refused, or only one of the two sides speaks TLS
    └── WeightSyncError             a weight update
        ├── WeightPlanMismatch      missing, extra, wrong-shaped or wrong-dtype tensors; nothing was changed
        ├── WeightBaseMismatch      a delta against weights that the engine does not hold; nothing was changed
        ├── InvalidWeights          NaN or infinite tensors in the source; nothing was changed
        ├── WeightTransferFailed    the transfer broke after it began; the engine is dirty
        ├── TrainerRankLost         another rank of a sharded trainer ended or left during a push
        ├── WeightVerifyFailed      the received tensors differ from the sent ones; the engine is dirty
        └── WeightProbeFailed       verified and served, but the engine's logprobs are not the trainer's

Messages say what was wrong, with the value, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

_LONGEST: Final = 20_000
"""Maximum characters of a message: enough for an engine's last log lines, not for a value of megabytes."""


class DrivetrainError(Exception):
    """Base of all exceptions that drivetrain raises on purpose."""

    fields: ClassVar[tuple[str, ...]] = ()
    """Attributes beside the message, each also an argument of the constructor; they cross to other processes."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            left_out = len(message) - _LONGEST
            half = _LONGEST // 2
            message = f"{message[:half]} … [{left_out} characters left out] … {message[-half:]}"
        super().__init__(message)


class InvalidRequest(DrivetrainError, ValueError):
    """A request that no engine could honour; refused before any work.

    ``field`` names the offending field in dotted form (``sampling_params.top_p``), or is empty if the request as a
    whole is wrong.
    """

    fields: ClassVar[tuple[str, ...]] = ("field",)

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class TooManyAdapters(InvalidRequest):
    """The engine has ``max_loras`` LoRA adapters loaded, and takes another once one is unloaded."""


class InvalidConfig(DrivetrainError, ValueError):
    """An engine configuration that cannot work; refused before the engine starts."""

    fields: ClassVar[tuple[str, ...]] = ("field",)

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class UnsupportedCapability(DrivetrainError):
    """A valid request for a capability that this engine does not claim; refused before any work."""

    fields: ClassVar[tuple[str, ...]] = ("capability",)

    def __init__(self, message: str, *, capability: str = "") -> None:
        super().__init__(message)
        self.capability = capability


class MissingDependency(DrivetrainError, ImportError):
    """A package that an extra of drivetrain brings is not installed; the message has the command that installs it.

    ``name`` is the package's import name.
    """


class BackendError(DrivetrainError):
    """A backend plugin cannot be used."""


class UnknownBackend(BackendError, LookupError):
    """No installed plugin provides the requested backend."""


class DuplicateBackend(BackendError):
    """Two installed plugins provide a backend of the same name."""


class BackendLoadError(BackendError, ImportError):
    """A backend's plugin is installed, but importing it failed."""


class BackendUnavailable(BackendError):
    """A backend's plugin is installed, but the engine package that it adapts is missing or too old."""


class EngineError(DrivetrainError):
    """A running engine failed or refused a call."""


class EngineStateError(EngineError):
    """The engine's state does not allow the request; ``state`` is the state's name."""

    fields: ClassVar[tuple[str, ...]] = ("state",)

    def __init__(self, message: str, *, state: str = "") -> None:
        super().__init__(message)
        self.state = state


class EngineStartError(EngineError):
    """The engine did not start."""


class EngineDied(EngineError):
    """The engine's process ended, stopped answering, or lost a child that it needs.

    Calls that were under way raise it, and later ones too, also after the engine was closed.
    """


class ConnectionLost(EngineError):
    """The connection to an engine's owner broke during a call, and was made again; the call may have taken effect."""


class MemberLost(EngineError):
    """An engine of a fleet was lost or missed an update while it held a request; the other engines serve on.

    ``member`` is the engine's name in the fleet.
    """

    fields: ClassVar[tuple[str, ...]] = ("member",)

    def __init__(self, message: str, *, member: str = "") -> None:
        super().__init__(message)
        self.member = member


class WeightVersionGone(EngineError):
    """A request is pinned to a weight version that no engine serves, or that an update replaced before its end."""


class EngineBusy(EngineError):
    """Requests are in flight, and the call's arguments do not say how to handle them; or a fleet's queue is full."""


class EngineOutOfMemory(EngineError):
    """The engine ran out of memory, and retrying did not help; ``batch_size`` says how many requests ran."""

    fields: ClassVar[tuple[str, ...]] = ("batch_size",)

    def __init__(self, message: str, *, batch_size: int = 0) -> None:
        super().__init__(message)
        self.batch_size = batch_size


class NonFiniteLogits(EngineError):
    """The model gave NaN or infinite logits, and the request ended. The weights or the adapter have diverged."""


class NoTokenAllowed(EngineError):
    """A request's grammar, masks and ``min_new_tokens`` together left no token to draw, so it ended.

    ``field`` names them in dotted form.
    """

    fields: ClassVar[tuple[str, ...]] = ("field",)

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class EngineInternalError(EngineError):
    """Any other failure of the engine; the message quotes the engine's own."""


class DeadlineExceeded(DrivetrainError, TimeoutError):
    """A wait on another process reached its deadline; the message says what was waited for."""


class WireError(DrivetrainError):
    """Data on a socket is not drivetrain's wire protocol, or is another version of it."""


class TlsError(WireError):
    """A TLS connection to an engine was refused: its certificate, or only one of the two sides speaks TLS."""


class WeightSyncError(DrivetrainError):
    """A weight update failed."""


class WeightPlanMismatch(WeightSyncError):
    """The offered tensors are not those of the engine's model; nothing was changed.

    ``missing``, ``extra`` and ``mismatched`` name the tensors.
    """

    fields: ClassVar[tuple[str, ...]] = ("missing", "extra", "mismatched")

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
    """A delta is based on other weights than the engine holds; nothing was changed."""


class InvalidWeights(WeightSyncError, ValueError):
    """The source holds NaN or infinite values; nothing was changed. ``tensors`` names them."""

    fields: ClassVar[tuple[str, ...]] = ("tensors",)

    def __init__(self, message: str, *, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class WeightTransferFailed(WeightSyncError):
    """The transfer broke after it began; the engine is dirty until a complete push succeeds."""


class TrainerRankLost(WeightSyncError):
    """Another rank of a sharded trainer ended or left during a push; ``rank`` is its number in the group.

    The engine keeps its weights, unless the rank that has the engine was lost after the update began.
    """

    fields: ClassVar[tuple[str, ...]] = ("rank",)

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class WeightVerifyFailed(WeightSyncError):
    """The received tensors differ from the sent ones; the engine is dirty until a complete push succeeds.

    ``tensors`` names the tensors with different digests.
    """

    fields: ClassVar[tuple[str, ...]] = ("tensors",)

    def __init__(self, message: str, *, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class WeightProbeFailed(WeightSyncError):
    """The weights are verified and served, but the engine's logprobs differ from the trainer's.

    ``gap`` is the largest difference, in nats.
    """

    fields: ClassVar[tuple[str, ...]] = ("gap",)

    def __init__(self, message: str, *, gap: float = float("nan")) -> None:
        super().__init__(message)
        self.gap = gap


def error_classes(root: type[DrivetrainError]) -> Iterable[type[DrivetrainError]]:
    """Yield an error class and all of its subclasses, third parties' included."""
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


def to_wire(error: DrivetrainError) -> tuple[str, str, dict[str, object]]:
    """Return the error as (class name, message, fields), for sending to another process."""
    return type(error).__name__, str(error), {name: getattr(error, name) for name in error.fields}


def from_wire(name: str, message: str, fields: Mapping[str, object]) -> DrivetrainError:
    """Rebuild an error from :func:`to_wire`'s result.

    It becomes :class:`EngineInternalError` if no class has its name, or the class does not take the fields.
    """
    for cls in error_classes(DrivetrainError):
        if cls.__name__ == name:
            known: dict[str, Any] = {field: fields[field] for field in cls.fields if field in fields}
            try:
                return cls(message, **known)
            except TypeError as error:
                return EngineInternalError(f"{name}: {message} ({error})")
    return EngineInternalError(f"{name}: {message}")
