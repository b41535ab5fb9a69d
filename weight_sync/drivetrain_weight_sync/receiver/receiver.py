"""The engine's side of a weight update, identical in every worker of every engine."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Final

import torch

from drivetrain.errors import (
    DrivetrainError,
    EngineStateError,
    InvalidRequest,
    WeightBaseMismatch,
    WeightSyncError,
    WeightTransferFailed,
    WeightVerifyFailed,
)
from drivetrain.types.weights import (
    AbortUpdate,
    BeginUpdate,
    CommitUpdate,
    LoadBuckets,
    PrepareUpdate,
    ReleaseSources,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightPlan,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_weight_sync.copying.digest import digest, digests
from drivetrain_weight_sync.copying.plan import check_geometry, check_plan
from drivetrain_weight_sync.receiver.target import WeightTarget
from drivetrain_weight_sync.tensors.names import listed
from drivetrain_weight_sync.transports.base import Opened, Patch, Reader, hash_of
from drivetrain_weight_sync.transports.process_groups import Groups
from drivetrain_weight_sync.transports.readers import Readers


class Phase(Enum):
    """Progress of a weight update."""

    IDLE = "idle"
    PREPARED = "prepared"
    LOADING = "loading"
    VERIFIED = "verified"
    BROKEN = "broken"
    """A step failed after BeginUpdate. Only a new update leads to VERIFIED."""


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


class _Opening:
    """Opens a source, in a separate thread if the reader ``takes_long``."""

    def __init__(self, reader: Reader, request: WeightUpdateRequest, manifest: WeightManifest) -> None:
        self.reader = reader
        self.request = request
        self._manifest = manifest
        self._opened: Opened | None = None
        self._error: Exception | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if reader.takes_long:
            self._thread = threading.Thread(target=self._open, name="drivetrain-opens-source", daemon=True)
            self._thread.start()
        else:
            self._open()

    def _open(self) -> None:
        try:
            opened = self.reader.open(self.request, self._manifest)
        except Exception as error:
            self._error = error
        else:
            self._opened = opened
        with self._lock:
            if self._given_up:
                self.reader.close()

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def result(self) -> Opened:
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        return self._opened

    def give_up(self) -> bool:
        """Have the opening thread close the reader when it ends; return False if it has already ended."""
        with self._lock:
            self._given_up = self.under_way
        return self._given_up


class Receiver:
    """Applies weight updates to ``target``, message by message, in the engine's own thread."""

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self.groups = Groups()
        """Process groups through which a trainer broadcasts to this worker."""
        self._readers = Readers(self.groups)
        self._phase = Phase.IDLE
        self._begun = 0.0
        """Start of the update under way, by ``time.perf_counter``."""
        self._opening: _Opening | None = None
        self._request: WeightUpdateRequest | None = None
        self._reader: Reader | None = None
        self._plan = WeightPlan(())
        self._checked: tuple[WeightPlan, WeightManifest] | None = None
        """The last plan that passed the checks, with the manifest it was checked against."""
        self._checked_hash = ""
        """Hash of that plan."""
        self._checked_names: tuple[str, ...] = ()
        """Names of that plan's tensors."""
        self._plan_number = 0
        """Number of that plan; it increases with each different plan."""
        self._digests: Mapping[str, int] = {}
        self._loaded: set[int] = set()
        self._proved: frozenset[str] = frozenset()
        """Tensors that were once read back after a digested copy and matched, so that their copies need no further
        read."""
        self._split: dict[str, tuple[int, int]] = {}
        """For each tensor of which this worker holds a part: digests of the whole as received, and of the part."""
        self._converted: dict[str, int] = {}
        """Digests, as received, of tensors that the engine keeps in another form."""
        self._held: dict[str, tuple[int, int | None]] = {}
        """For each tensor of the last update: its digest, and the digest of the part if this worker holds only a part.
        """
        self._base: dict[str, tuple[int, int | None]] = {}
        """The same for the weights that a delta changes; empty if the update brings every tensor whole."""

    @property
    def phase(self) -> Phase:
        """Progress of the update under way."""
        return self._phase

    def handle(self, message: WeightMessage) -> WeightReply:
        """Take one step of an update.

        Raises:
            EngineStateError: the message is out of order; nothing is done.
            WeightPlanMismatch, InvalidWeights, InvalidRequest, UnsupportedCapability: PrepareUpdate was refused, and
                changed nothing.
            WeightTransferFailed: a step failed after BeginUpdate, or buckets are missing on VerifyUpdate.
            WeightVerifyFailed: digests of the loaded tensors differ from the sender's.
        """
        if self._phase not in _ALLOWED[type(message)]:
            allowed = " or ".join(sorted(phase.value for phase in _ALLOWED[type(message)]))
            raise EngineStateError(
                f"{type(message).__name__} came while the weight update is {self._phase.value}; it must be {allowed}. "
                "Send AbortUpdate and begin again with PrepareUpdate",
                state=self._phase.value,
            )
        match message:
            case PrepareUpdate():
                self.prepare(message)
                assert self._opening is not None
                self._opening.wait()
                reply = self.prepared()
                assert reply is not None
                return reply
            case AbortUpdate():
                self._withdraw()
                return WeightReply()
            case ReleaseSources():
                self._withdraw()
                self._readers.close()
                return WeightReply()
            case BeginUpdate() | LoadBuckets() | VerifyUpdate() | CommitUpdate():
                try:
                    return self._step(message)
                except Exception as error:
                    self._phase = Phase.BROKEN
                    if isinstance(error, DrivetrainError):
                        raise
                    raise WeightTransferFailed(
                        f"{type(message).__name__} failed: {type(error).__name__}: {error}; push all weights again"
                    ) from error

    def forget_held(self) -> None:
        """Forget the last update's digests, as its memory was freed: the next update must bring every tensor whole."""
        self._held = {}

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
            request = self._with_plan(request, message.kept_plan, message.digests)
        reader = self._readers.of(request.source)
        manifest = self._target.manifest()
        if request.plan is not None:
            self._check(request.plan, manifest)
            if message.kept_plan is None:
                _check_digests_given(request.plan, request.digests)
        self._target.check_ready()
        self._opening = _Opening(reader, request, manifest)

    def prepared(self) -> WeightReply | None:
        """Return the reply to the last :meth:`prepare`, or None while its source is still being opened.

        Raises:
            EngineStateError: no update is being prepared.
            DrivetrainError: the source cannot be opened or does not fit; nothing was changed.
        """
        if self._phase is Phase.PREPARED:
            return self._reply()
        opening = self._opening
        if opening is None:
            raise EngineStateError("no weight update is being prepared; send PrepareUpdate", state=self._phase.value)
        if opening.under_way:
            return None
        self._opening = None
        reader, request = opening.reader, opening.request
        try:
            opened = opening.result()
            if opened.base is not None:
                self._require_held(opened.base)
        except DrivetrainError:
            reader.release()
            raise
        except Exception as error:
            reader.release()
            raise WeightSyncError(
                f"the {request.source.kind} source cannot be read: {type(error).__name__}: {error}; nothing was changed"
            ) from error
        self._request, self._reader = request, reader
        self._plan, self._digests, self._loaded = opened.plan, opened.digests, set()
        self._split, self._converted = {}, {}
        self._base = {} if opened.base is None else self._held
        for name, (whole, part) in self._base.items():
            if part is not None:
                self._split[name] = whole, part
        self._phase = Phase.PREPARED
        return self._reply()

    def _reply(self) -> WeightReply:
        assert self._request is not None
        return WeightReply(buckets=len(self._plan.buckets), keeps_plan=self._request.plan is not None)

    def _with_plan(self, request: WeightUpdateRequest, kept: str, digests: bytes) -> WeightUpdateRequest:
        """Restore the plan and the digests' names, which the request left out because this worker keeps the plan."""
        if self._checked is None or self._checked_hash != kept:
            raise WeightSyncError(
                "the update refers to a plan that this worker does not hold; nothing was changed. Push again"
            )
        names = self._checked_names
        if len(digests) != 8 * len(names):
            raise InvalidRequest(
                f"the update has {len(digests)} bytes of digests for {len(names)} tensors; each takes 8",
                field="digests",
            )
        by_name = dict(zip(names, struct.unpack(f"<{len(names)}q", digests), strict=True))
        return request.model_copy(update={"plan": self._checked[0], "digests": by_name})

    def _check(self, plan: WeightPlan, manifest: WeightManifest) -> None:
        """Check a plan, unless it is the one that was checked last."""
        if (plan, manifest) != self._checked:
            check_plan(plan.tensors, manifest)
            check_geometry(plan)
            self._checked, self._checked_hash = (plan, manifest), plan.hash
            self._checked_names = tuple(spec.name for spec in plan.tensors)
            self._plan_number += 1

    def _step(self, message: BeginUpdate | LoadBuckets | VerifyUpdate | CommitUpdate) -> WeightReply:
        match message:
            case BeginUpdate():
                self._begun = time.perf_counter()
                self._phase = Phase.LOADING
                self._held = {}
                self._target.begin()
                return WeightReply()
            case LoadBuckets(indices):
                return WeightReply(nbytes=self._load(indices))
            case VerifyUpdate():
                self._verify()
                self._phase = Phase.VERIFIED
                return WeightReply()
            case CommitUpdate(version):
                self._check_version(version)
                # Otherwise some parts have no digest, or a delta cannot change them.
                if self._reader is not None and self._reader.place is None and not self._target.converted:
                    self._held = {
                        name: (value, self._split[name][1] if name in self._split else None)
                        for name, value in self._digests.items()
                    }
                self._forget()
                return WeightReply(seconds=time.perf_counter() - self._begun)

    def _load(self, indices: Sequence[int]) -> int:
        reader = self._reader
        assert reader is not None
        for index in indices:
            if not 0 <= index < len(self._plan.buckets):
                raise WeightTransferFailed(
                    f"bucket {index} is not in the plan, which has {len(self._plan.buckets)}, numbered from 0"
                )
        for brought in reader.bring(indices):
            if reader.place is None:
                for index in brought:
                    self._target.load(self._noted(reader.tensors(index)))
                    self._loaded.add(index)
            else:
                self._load_in_place(reader, tuple(brought))
        return sum(placed.nbytes for index in indices for placed in self._plan.buckets[index].tensors)

    def _load_in_place(self, reader: Reader, indices: tuple[int, ...]) -> None:
        """Load buckets at fixed addresses; if an earlier load of them was verified, replay it in one launch."""
        place = (self._plan_number, reader.place, indices)
        done = self._target.load_again(place, self._proved)
        if len(done) < sum(len(self._plan.buckets[index].tensors) for index in indices):
            tensors = itertools.chain.from_iterable(reader.tensors(index) for index in indices)
            rest = ((name, tensor) for name, tensor in tensors if name not in done)
            self._target.load(self._noted(rest, self._proved), place=None if done else place)
        self._loaded.update(indices)

    def _noted(
        self, tensors: Iterator[tuple[str, torch.Tensor | Patch]], proved: Set[str] = frozenset()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on: apply patches, and record digests of partial and converted tensors for :meth:`_verify`."""
        for name, tensor in tensors:
            if isinstance(tensor, Patch):
                yield name, self._patched(name, tensor)
                continue
            if name in proved:
                yield name, tensor
                continue
            if name in self._target.converted:
                # The engine's form of it cannot be compared with the sender's digest, so digest the very copy that it
                # receives.
                came = tensor.clone(memory_format=torch.contiguous_format)
                self._converted[name] = digest(came)
                yield name, came
                continue
            part = self._target.part_of(name, tensor)
            if part is not None:
                found = digests({"whole": tensor, "part": part})
                self._split[name] = found["whole"], found["part"]
            yield name, tensor

    def _patched(self, name: str, patch: Patch) -> torch.Tensor:
        """Return the whole tensor with its patch applied; only the part that this worker holds is meaningful."""
        whole = self._target.whole(name)
        part = self._target.part_of(name, whole)
        if part is not None:
            # The whole cannot be verified here, but the part can: its base matches, and the patch arrived as it was
            # sent.
            if self._base[name][1] != digest(part):
                raise WeightTransferFailed(
                    f"{name} was changed after the last update, by something else; push all weights again"
                )
            patch.apply(whole)
            part = self._target.part_of(name, whole)
            assert part is not None
            self._split[name] = self._digests[name], digest(part)
        else:
            patch.apply(whole)
        return whole

    def _require_held(self, base: str) -> None:
        held = {name: value for name, (value, _) in self._held.items()}
        if not held or hash_of(held) != base:
            raise WeightBaseMismatch(
                "the delta's base is not the engine's last update"
                f"{'' if held else ' (there is none, or it failed)'}; nothing was changed. Send every tensor whole"
            )

    def _verify(self) -> None:
        absent = [index for index in range(len(self._plan.buckets)) if index not in self._loaded]
        if absent:
            raise WeightTransferFailed(
                f"buckets {absent} of {len(self._plan.buckets)} were not loaded; load every bucket before VerifyUpdate"
            )
        # This does not wait for copies on a GPU.
        on_the_way = self._target.expect(self._digests)
        # The digest of a copy does not cover its destination: read each tensor back once, then trust that its copies
        # arrive.
        trusted = self._proved & on_the_way
        names = [name for name in self._digests if name not in trusted and name not in self._converted]
        self._target.finish()
        differ = self._target.differing()
        found = digests({name: self._target.read(name) for name in names})
        differ += [name for name, value in found.items() if not self._is_as_sent(name, value)]
        differ += [name for name, value in self._converted.items() if value != self._digests.get(name, value)]
        if differ:
            self._proved = frozenset()
            wrong = sorted(set(differ))
            raise WeightVerifyFailed(
                f"{len(wrong)} of {len(self._plan.tensors)} tensors in the engine differ from what was sent: "
                f"{listed(wrong)}. They changed in transit, or the source was written to during the push; push all "
                "weights again",
                tensors=wrong,
            )
        self._proved = frozenset(on_the_way)

    def _is_as_sent(self, name: str, held: int) -> bool:
        if name not in self._split:
            return held == self._digests[name]
        # The sender has no digest of the part; compare the whole as received, and the part cut from it.
        came, part = self._split[name]
        return came == self._digests[name] and held == part

    def _check_version(self, version: str) -> None:
        assert self._request is not None
        if version != self._request.version:
            raise WeightTransferFailed(
                f"CommitUpdate names version {version!r}, but the update was prepared as {self._request.version!r}"
            )

    def _withdraw(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            if opening.give_up():
                self._readers.give_up(opening.reader)
            else:
                opening.reader.release()
        begun = self._phase in (Phase.LOADING, Phase.VERIFIED, Phase.BROKEN)
        self._forget()
        if begun:
            self._target.cancel()

    def _forget(self) -> None:
        if self._reader is not None:
            self._reader.release()
        self._request, self._reader = None, None
        self._plan, self._digests, self._loaded = WeightPlan(()), {}, set()
        self._split, self._converted, self._base = {}, {}, {}
        self._phase = Phase.IDLE


def _check_digests_given(plan: WeightPlan, given: Mapping[str, int] | None) -> None:
    names = {spec.name for spec in plan.tensors}
    if given is not None and names != given.keys():
        differ = sorted(names ^ given.keys())
        raise InvalidRequest(
            f"digests and plan name different tensors: {listed(differ)}; give one digest per tensor of the plan",
            field="digests",
        )
