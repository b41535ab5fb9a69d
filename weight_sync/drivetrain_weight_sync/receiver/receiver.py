"""The engine's side of a weight update, identical in every worker of every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from drivetrain.errors import DrivetrainError, EngineStateError, InvalidRequest, WeightSyncError, WeightTransferFailed
from drivetrain.types.weights import (
    AbortUpdate,
    BeginUpdate,
    CommitUpdate,
    LoadBuckets,
    PrepareUpdate,
    ReleaseSources,
    VerifyUpdate,
    WeightMessage,
    WeightPlan,
    WeightReply,
)
from drivetrain_weight_sync.receiver.kept_across_updates import KeptAcrossUpdates
from drivetrain_weight_sync.receiver.source_opening import SourceOpening
from drivetrain_weight_sync.receiver.update import Phase, Update
from drivetrain_weight_sync.receiver.weight_target import WeightTarget
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.transports.process_groups import Groups
from drivetrain_weight_sync.transports.readers import Readers

_ALLOWED: Final[Mapping[type[WeightMessage], frozenset[Phase]]] = {
    # Also while an update is open: its sender may have died without aborting it, and a full push must recover.
    PrepareUpdate: frozenset(Phase),
    BeginUpdate: frozenset({Phase.PREPARED}),
    LoadBuckets: frozenset({Phase.LOADING}),
    VerifyUpdate: frozenset({Phase.LOADING}),
    CommitUpdate: frozenset({Phase.VERIFIED}),
    AbortUpdate: frozenset(Phase),
    ReleaseSources: frozenset(Phase),
}


class Receiver:
    """Applies weight updates to ``target``, message by message, in the engine's own thread."""

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self.groups = Groups()
        """Process groups through which a trainer broadcasts to this worker."""
        self._readers = Readers(self.groups)
        self._kept = KeptAcrossUpdates()
        self._opening: SourceOpening | None = None
        self.update: Update | None = None
        """The update under way, once its source is open."""

    @property
    def phase(self) -> Phase:
        """Progress of the update under way."""
        return Phase.IDLE if self.update is None else self.update.phase

    def handle(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update.

        Raises:
            EngineStateError: the message is out of order; nothing is done.
            WeightPlanMismatch, InvalidWeights, InvalidRequest, UnsupportedCapability: PrepareUpdate was refused, and
                changed nothing.
            WeightTransferFailed: a step failed after BeginUpdate, or buckets are missing on VerifyUpdate.
            WeightVerifyFailed: digests of the loaded tensors differ from the sender's.
        """
        if self.phase not in _ALLOWED[type(message)]:
            allowed = " or ".join(sorted(phase.value for phase in _ALLOWED[type(message)]))
            raise EngineStateError(
                f"{type(message).__name__} came while the weight update is {self.phase.value}; it must be {allowed}. "
                "Send AbortUpdate and begin again with PrepareUpdate",
                state=self.phase.value,
            )
        match message:
            case PrepareUpdate():
                self.prepare(message)
                assert self._opening is not None
                self._opening.wait()
                while (reply := self.prepared()) is None:
                    pass
                return reply
            case AbortUpdate():
                self._withdraw()
                return WeightReply()
            case ReleaseSources():
                self._withdraw()
                self._readers.close()
                return WeightReply()
            case BeginUpdate() | LoadBuckets() | VerifyUpdate() | CommitUpdate():
                assert self.update is not None
                try:
                    return self._step(self.update, message)
                except Exception as error:
                    self.update.phase = Phase.BROKEN
                    if isinstance(error, DrivetrainError):
                        raise
                    raise WeightTransferFailed(
                        f"{type(message).__name__} failed: {type(error).__name__}: {error}; push all weights again"
                    ) from error

    def forget_held(self) -> None:
        """Forget the last update's digests, as its memory was freed: the next update must bring every tensor whole."""
        self._kept.held = {}

    def close(self) -> None:
        """Release every source, mapped ones included."""
        self._withdraw()
        self._readers.close()
        self.groups.close()

    def prepare(self, message: PrepareUpdate) -> None:
        """Start a PrepareUpdate without waiting until a slow source is open; poll :meth:`prepared` for the reply.

        Raises:
            WeightPlanMismatch, InvalidRequest, UnsupportedCapability: the update is refused before its source is
                opened.
        """
        self._withdraw()
        request = message.request
        if message.kept_plan is not None:
            request = self._kept.with_plan(request, message.kept_plan, message.digests)
        reader = self._readers.of(request.source)
        manifest = self._target.manifest()
        if request.plan is not None:
            self._kept.check(request.plan, manifest)
            if message.kept_plan is None:
                _check_digests_given(request.plan, request.digests)
        self._target.check_ready()
        self._opening = SourceOpening(reader, request, manifest)

    def prepared(self) -> WeightReply | None:
        """Return the reply to the last :meth:`prepare`, or None while its source is being opened or the target readied.

        Raises:
            EngineStateError: no update is being prepared.
            DrivetrainError: the source cannot be opened or does not fit; nothing was changed.
        """
        if self.update is not None and self.update.phase is Phase.PREPARED:
            return _reply_to_prepare(self.update) if self.update.get_ready() else None
        opening = self._opening
        if opening is None:
            raise EngineStateError("no weight update is being prepared; send PrepareUpdate", state=self.phase.value)
        if opening.under_way:
            return None
        self._opening = None
        reader, request = opening.reader, opening.request
        try:
            self.update = Update(self._target, self._kept, request, reader, opening.result())
        except DrivetrainError:
            reader.release()
            raise
        except Exception as error:
            reader.release()
            raise WeightSyncError(
                f"the {request.source.kind} source cannot be read: {type(error).__name__}: {error}; nothing was changed"
            ) from error
        return self.prepared()

    def _step(self, update: Update, message: BeginUpdate | LoadBuckets | VerifyUpdate | CommitUpdate) -> WeightReply:
        match message:
            case BeginUpdate():
                update.begin()
                return WeightReply()
            case LoadBuckets(indices):
                return WeightReply(nbytes=update.load(indices))
            case VerifyUpdate():
                update.verify()
                return WeightReply()
            case CommitUpdate(version):
                seconds = update.commit(version)
                self.update = None
                return WeightReply(seconds=seconds)

    def _withdraw(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            if opening.give_up():
                self._readers.give_up(opening.reader)
            else:
                opening.reader.release()
        update = self.update
        if update is not None:
            update.reader.release()
            self.update = None
            if update.phase is not Phase.PREPARED:
                self._target.cancel()


def _reply_to_prepare(update: Update) -> WeightReply:
    return WeightReply(buckets=len(update.plan.buckets), keeps_plan=update.request.plan is not None)


def _check_digests_given(plan: WeightPlan, given: Mapping[str, int] | None) -> None:
    names = {spec.name for spec in plan.tensors}
    if given is not None and names != given.keys():
        differ = sorted(names ^ given.keys())
        raise InvalidRequest(
            f"digests and plan name different tensors: {listed(differ)}; give one digest per tensor of the plan",
            field="digests",
        )
