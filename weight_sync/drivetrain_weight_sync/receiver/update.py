"""One weight update in one worker, from its opened source to its commit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence, Set
from enum import Enum

import torch

from drivetrain.errors import WeightTransferFailed, WeightVerifyFailed
from drivetrain.types.weights import WeightUpdateRequest
from drivetrain_weight_sync.copying.device_copies import (
    DeviceCopies,
    DeviceCopy,
    Launched,
    digests_at_once,
    fits,
    reaches,
)
from drivetrain_weight_sync.copying.digest import digest, digests
from drivetrain_weight_sync.receiver.kept_across_updates import HeldDigest, KeptAcrossUpdates
from drivetrain_weight_sync.receiver.weight_target import WeightTarget
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.transports.base import Opened, Patch, Reader


class Phase(Enum):
    """Progress of a weight update."""

    IDLE = "idle"
    PREPARED = "prepared"
    LOADING = "loading"
    VERIFIED = "verified"
    BROKEN = "broken"
    """A step failed after BeginUpdate. Only a new update leads to VERIFIED."""


class Update:
    """Copies the tensors of an opened source into ``target``, and verifies them.

    Raises:
        WeightBaseMismatch: the update is a delta whose base the engine does not hold.
    """

    def __init__(
        self,
        target: WeightTarget,
        kept: KeptAcrossUpdates,
        request: WeightUpdateRequest,
        reader: Reader,
        opened: Opened,
    ) -> None:
        self._target = target
        self._kept = kept
        self.request = request
        self.reader = reader
        self.plan = opened.plan
        self.phase = Phase.PREPARED
        self._digests = opened.digests
        self._base = kept.base(opened.base)
        self._is_ready = False
        self._begun = 0.0
        """When the update began, by ``time.perf_counter``."""
        self._loaded: set[int] = set()
        self._split = {name: (held.whole, held.part) for name, held in self._base.items() if held.part is not None}
        """For each tensor of which this worker holds a part: digests of the whole as received, and of the part."""
        self._converted: dict[str, int] = {}
        """Digests, as received, of tensors that the engine keeps in another form."""
        self._converting: list[Launched] = []
        """Launches that digest such tensors."""

    def get_ready(self) -> bool:
        """Do part of the slow preparations that need no pause; return True once they are complete."""
        # A target gets ready only for :meth:`WeightTarget.load` with a place.
        self._is_ready = self._is_ready or not self.reader.has_place or self._target.get_ready()
        return self._is_ready

    def begin(self) -> None:
        """Begin to overwrite the weights."""
        self._begun = time.perf_counter()
        self.phase = Phase.LOADING
        self._kept.held = {}
        self._target.begin()

    def load(self, indices: Sequence[int]) -> int:
        """Copy these buckets of the plan into the model; return their bytes."""
        reader = self.reader
        for index in indices:
            if not 0 <= index < len(self.plan.buckets):
                raise WeightTransferFailed(
                    f"bucket {index} is not in the plan, which has {len(self.plan.buckets)}, numbered from 0"
                )
        for brought in reader.bring(indices):
            if reader.place is None:
                for index in brought:
                    self._target.load(self._recording_digests(reader.tensors(index)))
                    self._loaded.add(index)
            else:
                self._load_in_place(reader, tuple(brought))
        return sum(placed.nbytes for index in indices for placed in self.plan.buckets[index].tensors)

    def _load_in_place(self, reader: Reader, indices: tuple[int, ...]) -> None:
        """Load buckets at fixed addresses; if an earlier load of them was verified, replay it in one launch."""
        place = (self._kept.plan_number, reader.place, indices)
        done = self._target.load_again(place, self._kept.proved)
        if len(done) < sum(len(self.plan.buckets[index].tensors) for index in indices):
            tensors = itertools.chain.from_iterable(reader.tensors(index) for index in indices)
            rest = [(name, tensor) for name, tensor in tensors if name not in done]
            fixed = {name: tensor for name, tensor in rest if isinstance(tensor, torch.Tensor)}
            digested = frozenset() if done else self._target.digests_converted(fixed, place)
            trusted = digested | self._kept.proved - self._target.converted
            self._target.load(self._recording_digests(iter(rest), trusted), place=None if done else place)
        self._loaded.update(indices)

    def _recording_digests(
        self, tensors: Iterator[tuple[str, torch.Tensor | Patch]], trusted: Set[str] = frozenset()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with patches applied; record digests of partial and converted ones for :meth:`verify`.

        The target digests those in ``trusted``. On a GPU, other converted tensors are filled once all tensors were
        asked for: one launch copies and digests them.
        """
        copies: list[DeviceCopy] = []
        for name, tensor in tensors:
            if isinstance(tensor, Patch):
                yield name, self._patched(name, tensor)
                continue
            if name in trusted:
                yield name, tensor
                continue
            if name in self._target.converted:
                # The engine's form of it cannot be compared with the sender's digest, so digest the very copy that it
                # receives.
                came = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                if reaches(tensor) and fits(copy := DeviceCopy(tensor, came, name)):
                    copies.append(copy)
                else:
                    self._converted[name] = digest(came.copy_(tensor))
                yield name, came
                continue
            part = self._target.part_of(name, tensor)
            if part is not None:
                found = digests({"whole": tensor, "part": part})
                self._split[name] = found["whole"], found["part"]
            yield name, tensor
        if copies:
            self._converting.append(DeviceCopies(copies).launch())

    def _patched(self, name: str, patch: Patch) -> torch.Tensor:
        """Return the whole tensor with its patch applied; only the part that this worker holds is meaningful."""
        whole = self._target.whole(name)
        part = self._target.part_of(name, whole)
        if part is not None:
            # A split tensor cannot be verified as a whole. Its part can: the part's base has the right digest, and the
            # patch arrived intact.
            if self._base[name].part != digest(part):
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

    def verify(self) -> None:
        """Compare the digest of every tensor in the model with the sender's."""
        absent = [index for index in range(len(self.plan.buckets)) if index not in self._loaded]
        if absent:
            raise WeightTransferFailed(
                f"buckets {absent} of {len(self.plan.buckets)} were not loaded; load every bucket before VerifyUpdate"
            )
        for launched in self._converting:
            self._converted |= launched.read()[0]
        # This does not wait for copies on a GPU.
        on_the_way = self._target.expect(self._digests)
        # The digest of a copy does not cover its destination: read each tensor back once, then trust that its copies
        # arrive.
        trusted = (self._kept.proved | self._target.converted) & on_the_way
        names = [name for name in self._digests if name not in trusted and name not in self._converted]
        self._target.finish()
        differ = self._target.differing()
        found = digests_at_once({name: self._target.read(name) for name in names})
        differ += [name for name, value in found.items() if not self._is_as_sent(name, value)]
        differ += [name for name, value in self._converted.items() if value != self._digests.get(name, value)]
        if differ:
            self._kept.proved = frozenset()
            wrong = sorted(set(differ))
            raise WeightVerifyFailed(
                f"{len(wrong)} of {len(self.plan.tensors)} tensors in the engine differ from what was sent: "
                f"{listed(wrong)}. They changed in transit, or the source was written to during the push; push all "
                "weights again",
                tensors=wrong,
            )
        self._kept.proved = frozenset(on_the_way)
        self.phase = Phase.VERIFIED

    def _is_as_sent(self, name: str, held: int) -> bool:
        if name not in self._split:
            return held == self._digests[name]
        # The sender has no digest of the part; compare the whole as received, and the part cut from it.
        came, part = self._split[name]
        return came == self._digests[name] and held == part

    def commit(self, version: str) -> float:
        """End the update, whose tensors were verified; return the seconds since it began."""
        if version != self.request.version:
            raise WeightTransferFailed(
                f"CommitUpdate names version {version!r}, but the update was prepared as {self.request.version!r}"
            )
        # Otherwise some parts have no digest, or a delta cannot change them.
        if self.reader.place is None and not self._target.converted:
            self._kept.held = {
                name: HeldDigest(value, self._split[name][1] if name in self._split else None)
                for name, value in self._digests.items()
            }
        self.reader.release()
        return time.perf_counter() - self._begun
