"""Stage a push: check every tensor of a source, digest it, and hand it to the sender."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

import torch

from drivetrain.errors import InvalidWeights, WeightPlanMismatch
from drivetrain.types.weights import TensorSpec, WeightManifest, WeightPlan
from drivetrain_weight_sync.copying.device_copies import DeviceCopy, Looks, Pace, can_look, fits, reaches
from drivetrain_weight_sync.copying.digest import digest, digests
from drivetrain_weight_sync.copying.plan import check_plan
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.dtypes import dtype_of, nbytes_of, rounds, spec_of, widens
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.tensors.storages import place_of
from drivetrain_weight_sync.trainer.source import Source, by_name
from drivetrain_weight_sync.transports.base import Sender

Pairs = Sequence[tuple[str, torch.Tensor | DerivedTensor]]
_FORM: Final = attrgetter("dtype", "layout", "shape")


@dataclass(slots=True)
class Staged:
    """Progress and result of staging."""

    digests: dict[str, int] = field(default_factory=dict)
    """By name in the plan; computed over the values in the engine's dtype."""
    check_seconds: float = 0.0
    stage_seconds: float = 0.0
    nbytes: int = 0
    """Bytes of all tensors of the plan, each counted once."""
    put_nbytes: int = 0
    """Bytes that were staged so far."""
    _stopped: bool = False

    @property
    def fraction(self) -> float:
        """Share of the bytes that were staged, from 0 to 1."""
        return self.put_nbytes / self.nbytes if self.nbytes else 0.0

    def stop(self) -> None:
        """Make staging end soon with an error. Safe from any thread."""
        self._stopped = True

    def put(self, nbytes: int) -> None:
        """Count the bytes of a staged tensor; raises CancelledError if staging was stopped."""
        self.reached(self.put_nbytes + nbytes)

    def reached(self, nbytes: int) -> None:
        """Set the number of bytes staged so far; raises CancelledError if staging was stopped."""
        self.put_nbytes = nbytes
        if self._stopped:
            raise CancelledError

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Count the time spent within as checking."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.check_seconds += time.perf_counter() - begun

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Count the time spent within as staging."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.stage_seconds += time.perf_counter() - begun


def stage(
    source: Source,
    sender: Sender,
    manifest: WeightManifest,
    plan: WeightPlan,
    staged: Staged,
    stager: Stager,
    *,
    cast: bool,
    gpu_share: float = 1.0,
) -> None:
    """Put every tensor of ``source`` into ``sender``, and fill ``staged``.

    A held source's names, dtypes and shapes are checked before anything is staged; a streamed source is checked while
    it is read. ``stager`` keeps state that the next push can reuse. Copies of a held source within a GPU take at most
    ``gpu_share`` of its time.

    Raises:
        WeightPlanMismatch: tensors are missing, extra, or of another dtype or shape; or tied weights differ in value.
        InvalidWeights: tensors hold NaN or infinity.
    """
    if not source.held:
        staged.nbytes = nbytes_of_plan(plan)
        outline = source.outline(manifest)
        if outline is not None:
            require_fit(outline, manifest, cast=cast)
        _Streamed(manifest, staged, cast, stager, None).run(source, sender, plan)
        return
    pace = None if gpu_share >= 1 else Pace(gpu_share, lambda fraction: staged.reached(int(fraction * staged.nbytes)))
    with staged.checking():
        pairs = source.pairs(manifest)
    if not stager.put_again(pairs, sender, manifest, plan, staged, pace):
        staged.nbytes = nbytes_of_plan(plan)
        _Held(manifest, staged, cast, stager, pace).run(pairs, sender, plan)


def require_fit(outline: Mapping[str, torch.Tensor], manifest: WeightManifest, *, cast: bool) -> None:
    """Raise WeightPlanMismatch unless tensors of these names, dtypes and shapes can be pushed."""
    _Checks(manifest, Staged(), cast, Stager(), None).require_fit(outline)


def require_finite(bad: Mapping[str, str], what: str = "tensors") -> None:
    """Raise InvalidWeights if there are tensors with values that are not finite; ``bad`` says which, by name."""
    if bad:
        named = listed([f"{name} ({what})" for name, what in bad.items()])
        raise InvalidWeights(
            f"{len(bad)} {what} hold values that are not finite; nothing was changed: {named}. Check "
            "the step that made them (loss scale, learning rate, gradient clipping)",
            tensors=list(bad),
        )


def nbytes_of_plan(plan: WeightPlan) -> int:
    """Return the bytes of the plan's tensors, without the gaps between them."""
    return sum(placed.nbytes for bucket in plan.buckets for placed in bucket.tensors)


class _Checks:
    """Collects all faults of a source's tensors, to report them in one error."""

    def __init__(self, manifest: WeightManifest, staged: Staged, cast: bool, stager: Stager, pace: Pace | None) -> None:
        self.staged = staged
        self.nbytes = {spec.name: nbytes_of(spec) for spec in manifest.tensors}
        self._stager = stager
        self._pace = pace
        self._in_one = False
        """True if one kernel launch has checked every tensor."""
        self._found: dict[str, int] = {}
        """Digests, by the first name of each tensor."""
        self._manifest = manifest
        self._expected = {spec.name: spec for spec in manifest.tensors}
        self._cast = cast
        self._specs: dict[str, TensorSpec] = {}
        self._repeated: list[TensorSpec] = []
        self.differ: list[str] = []
        self.bad: dict[str, str] = {}

    def main_name(self, name: str) -> str:
        """Return the name in the plan."""
        return self._manifest.aliases.get(name, name)

    def see(self, name: str, tensor: torch.Tensor) -> bool:
        """Record a tensor's name, dtype and shape; return whether the engine wants it."""
        spec = spec_of(name, tensor)
        wanted = self._expected.get(self.main_name(name))
        if wanted is not None and self._casts(tensor, wanted):
            spec = replace(spec, dtype=wanted.dtype)
        if name in self._specs:
            self._repeated.append(spec)
            return False
        self._specs[name] = spec
        return wanted is not None and (spec.dtype, spec.shape) == (wanted.dtype, wanted.shape)

    def sent(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the dtype of the push."""
        return tensor.to(dtype_of(self._specs[name]))

    def digest_of(self, name: str, tensor: torch.Tensor) -> bool:
        """Check and digest a tensor as it is sent; return whether it is the first of its name in the plan."""
        main, value = self.main_name(name), digest(tensor)
        self.bad.update(non_finite({name: tensor}))
        first = main not in self.staged.digests
        if self.staged.digests.setdefault(main, value) != value:
            self.differ.append(name)
        return first

    def require_fit(self, *tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise if a tensor is missing, extra or mismatched; do not look at values."""
        for some in tensors:
            for name, tensor in some.items():
                self.see(name, tensor)
        self.require_complete()

    def require_complete(self) -> None:
        """Raise if a tensor is missing, extra or mismatched. A second name of a tied tensor counts as neither."""
        first_names: dict[str, TensorSpec] = {}
        surplus: list[TensorSpec] = []
        for name, spec in self._specs.items():
            main = self.main_name(name)
            kept = first_names.setdefault(main, spec)
            if kept is not spec and main in self._expected and (spec.dtype, spec.shape) != (kept.dtype, kept.shape):
                surplus.append(spec)
        check_plan([*first_names.values(), *surplus, *self._repeated], self._manifest)

    def require_sound(self) -> None:
        """Raise if tied weights differ, or if values are not finite."""
        if self.differ:
            pairs = listed([f"{name} and {self.main_name(name)}" for name in self.differ])
            raise WeightPlanMismatch(
                f"{pairs} differ in value, but the engine's model ties them; nothing was changed. Tie them in the "
                "trainer too, or load the engine with a model that does not tie them",
                mismatched=self.differ,
            )
        require_finite(self.bad)

    def _casts(self, tensor: torch.Tensor, wanted: TensorSpec) -> bool:
        dtype, engines = tensor.dtype, dtype_of(wanted)
        return widens(dtype, engines) or (self._cast and rounds(dtype, engines))

    def _look_and_put(
        self, tensors: Mapping[str, torch.Tensor], mains: Mapping[str, str], slots: Mapping[str, torch.Tensor]
    ) -> set[str]:
        """Check, digest and, where there are slots, copy GPU tensors in one launch; return the plan names copied."""
        put: set[str] = set()
        copies: list[DeviceCopy] = []
        for name, tensor in tensors.items():
            if not (reaches(tensor) and can_look(tensor.dtype) and self._is_as_sent(name, tensor)):
                continue
            main = mains.get(name)
            copy = DeviceCopy(tensor, None if main is None else slots.get(main), name)
            if not fits(copy):
                copy = replace(copy, destination=None)
            if fits(copy):
                copies.append(copy)
                if copy.destination is not None and main is not None:
                    put.add(main)
        if copies:
            digests, strange = self._stager.looks(copies, self._pace)
            self._in_one = len(copies) == len(tensors)
            self._found.update(digests)
            self.bad.update(non_finite({name: tensors[name] for name in strange}))
        return put

    def _look(self, tensors: Mapping[str, torch.Tensor]) -> None:
        as_is = {name: tensor for name, tensor in tensors.items() if self._is_as_sent(name, tensor)}
        self.bad.update(non_finite(as_is))
        self._found.update(digests(as_is))
        for name in tensors.keys() - as_is.keys():
            converted = self.sent(name, tensors[name])
            self.bad.update(non_finite({name: converted}))
            self._found[name] = digest(converted)

    def _is_as_sent(self, name: str, tensor: torch.Tensor) -> bool:
        return tensor.dtype == dtype_of(self._specs[name])


class Stager:
    """Stages successive pushes and reuses checks and launches for tensors that have not moved."""

    def __init__(self) -> None:
        self.looks = Looks()
        self.known: _Known | None = None

    def put_again(
        self,
        pairs: Pairs,
        sender: Sender,
        manifest: WeightManifest,
        plan: WeightPlan,
        staged: Staged,
        pace: Pace | None,
    ) -> bool:
        """Repeat the last push's staging in one launch; return False if a tensor moved or fails a check."""
        known = self.known
        with staged.checking():
            if known is None or (known.plan, known.manifest) != (plan, manifest) or not known.seen.are(pairs):
                self.known = None
                return False
        with staged.staging():
            sender.begin(plan)
            if sender.slots() is not known.slots:
                self.known = None
                return False
            staged.nbytes = known.nbytes
            digests, strange = self.looks.again(pace)
            for name, value in digests.items():
                if strange or staged.digests.setdefault(known.mains[name], value) != value:
                    staged.digests.clear()
                    self.known = None
                    return False  # leave the faulty tensor to the full check, which reports it by name
            if not sender.copies and not sender.keeps:
                tensors = by_name(pairs)
                for main, first in known.firsts.items():
                    sender.put(main, tensors[first], held=True)
            staged.reached(staged.nbytes)
        return True


@dataclass(frozen=True, slots=True)
class _Known:
    """A held source whose last push can be staged again by the same launch."""

    plan: WeightPlan
    manifest: WeightManifest
    seen: Seen
    """The source's tensors."""
    slots: Mapping[str, torch.Tensor]
    firsts: Mapping[str, str]
    """First name under which each tensor of the plan came."""
    mains: Mapping[str, str]
    """Name in the plan of each digested tensor."""
    nbytes: int
    """Bytes of the plan."""


class Seen:
    """Types, forms, addresses and strides of tensors, without keeping the tensors.

    Built for speed: there may be thousands, compared at every push.
    """

    def __init__(self, pairs: Pairs) -> None:
        tensors = [tensor for _, tensor in pairs if isinstance(tensor, torch.Tensor)]
        self._names = [name for name, _ in pairs]
        self._types = [*map(type, tensors)]
        self._forms = [*map(_FORM, tensors)]
        self._addresses = [*map(torch.Tensor.data_ptr, tensors)]
        self._strides = [*map(torch.Tensor.stride, tensors)]

    def are(self, pairs: Pairs) -> bool:
        """Return whether ``pairs`` are the same tensors at the same addresses."""
        tensors = [tensor for _, tensor in pairs if isinstance(tensor, torch.Tensor)]
        return (
            [name for name, _ in pairs] == self._names
            and [*map(type, tensors)] == self._types
            and [*map(_FORM, tensors)] == self._forms
            and [*map(torch.Tensor.data_ptr, tensors)] == self._addresses
            and [*map(torch.Tensor.stride, tensors)] == self._strides
        )


class _Held(_Checks):
    def run(self, pairs: Pairs, sender: Sender, plan: WeightPlan) -> None:
        staged = self.staged
        with staged.checking():
            tensors = by_name(pairs)
            derived = {name: value for name, value in pairs if isinstance(value, DerivedTensor)}
            self.require_fit(tensors, {name: value.outline for name, value in derived.items()})
        with staged.staging():
            sender.begin(plan)
        # Under tied names, only the first is put; the others are digested too if they have memory of their own.
        firsts: dict[str, str] = {}
        places: dict[Hashable, str] = {}
        for name, tensor in tensors.items():
            firsts.setdefault(self.main_name(name), name)
            places.setdefault(place_of(tensor), name)
        unique = {name: tensors[name] for name in places.values()}
        with staged.staging():
            put = self._look_and_put(unique, {first: main for main, first in firsts.items()}, sender.slots())
        with staged.checking():
            self._look({name: tensor for name, tensor in unique.items() if name not in self._found})
            for name, tensor in tensors.items():
                value = self._found[places[place_of(tensor)]]
                if staged.digests.setdefault(self.main_name(name), value) != value:
                    self.differ.append(name)
            self.bad = {name: self.bad[name] for name in unique if name in self.bad}
            self.require_sound()
        with staged.staging():
            staged.reached(0)
            for main, first in firsts.items():
                if main not in put:
                    sender.put(main, tensors[first], held=True)
                staged.put(self.nbytes[main])
        if derived:
            self._put_derived(derived, sender)
        elif self._in_one and (not sender.copies or len(put) == len(firsts)):
            mains = {name: self.main_name(name) for name in unique}
            self._stager.known = _Known(plan, self._manifest, Seen(pairs), sender.slots(), firsts, mains, staged.nbytes)

    def _put_derived(self, derived: Mapping[str, DerivedTensor], sender: Sender) -> None:
        """Compute, check and put one tensor after another."""
        staged = self.staged
        for name, value in derived.items():
            with staged.checking():
                tensor = self.sent(name, value.compute())
                first = self.digest_of(name, tensor)
            if first:
                with staged.staging():
                    sender.put_derived(self.main_name(name), tensor, value)
                    staged.put(self.nbytes[self.main_name(name)])
        self.require_sound()


class _Streamed(_Checks):
    def run(self, source: Source, sender: Sender, plan: WeightPlan) -> None:
        staged = self.staged
        sender.begin(plan)
        for group in source.stream(self._manifest):
            with staged.checking():
                tensors = {name: self.sent(name, tensor) for name, tensor in group if self.see(name, tensor)}
                firsts: dict[str, str] = {}
                for name in tensors:
                    if self.main_name(name) not in staged.digests:
                        firsts.setdefault(self.main_name(name), name)
            with staged.staging():
                put = self._look_and_put(tensors, {first: main for main, first in firsts.items()}, sender.slots())
            with staged.checking():
                self._look({name: tensor for name, tensor in tensors.items() if name not in self._found})
                for name in tensors:
                    value = self._found[name]
                    if staged.digests.setdefault(self.main_name(name), value) != value:
                        self.differ.append(name)
            with staged.staging():
                for main, first in firsts.items():
                    if main not in put:
                        sender.put(main, tensors[first], held=False)
                    staged.put(self.nbytes[main])
        self.require_complete()
        self.require_sound()
