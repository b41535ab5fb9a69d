"""From a source to a sender: check every tensor, digest it, and put it where the engine will take it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from drivetrain.errors import InvalidWeights, WeightPlanMismatch
from drivetrain.weights import TensorSpec, WeightManifest, WeightPlan
from drivetrain_weight_sync.digest import digest, digests
from drivetrain_weight_sync.dtypes import dtype_of, spec_of
from drivetrain_weight_sync.finite import non_finite
from drivetrain_weight_sync.names import listed
from drivetrain_weight_sync.plan import check_plan
from drivetrain_weight_sync.source import Source
from drivetrain_weight_sync.target import place_of
from drivetrain_weight_sync.transports.base import Sender


@dataclass(slots=True)
class Staged:
    """What staging made."""

    digests: dict[str, int] = field(default_factory=dict)
    """By the names of the plan, of the values as the engine will hold them."""
    check_seconds: float = 0.0
    stage_seconds: float = 0.0

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


def stage(source: Source, sender: Sender, manifest: WeightManifest, plan: WeightPlan, *, cast: bool) -> Staged:
    """Put every tensor of ``source`` into ``sender``.

    A held source is checked as a whole before anything is staged; a streamed one as it is read.

    Raises:
        WeightPlanMismatch: tensors are missing, extra, or of another dtype or shape; or names that the engine ties
            differ in value.
        InvalidWeights: tensors hold NaN or infinity.
    """
    run = _Held if source.held else _Streamed
    return run(manifest, cast).run(source, sender, plan)


class _Checks:
    """Collects what is wrong with a source's tensors, to say all of it at once."""

    def __init__(self, manifest: WeightManifest, cast: bool) -> None:
        self._manifest = manifest
        self._expected = {spec.name: spec for spec in manifest.tensors}
        self._cast = cast
        self._specs: dict[str, TensorSpec] = {}
        self._repeated: list[TensorSpec] = []
        self.differ: list[str] = []
        self.bad: dict[str, str] = {}
        self.staged = Staged()

    def main_name(self, name: str) -> str:
        """Return the name in the plan."""
        return self._manifest.aliases.get(name, name)

    def see(self, name: str, tensor: torch.Tensor) -> bool:
        """Note a tensor's name, dtype and shape, and return whether the engine wants it."""
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
        """Return the tensor in the dtype in which it is sent."""
        return tensor.to(dtype_of(self._specs[name]))

    def require_complete(self) -> None:
        """Raise if a tensor is missing, extra or mismatched. A second name of a tied tensor is neither."""
        first_names: dict[str, TensorSpec] = {}
        surplus: list[TensorSpec] = []
        for name, spec in self._specs.items():
            main = self.main_name(name)
            kept = first_names.setdefault(main, spec)
            if kept is not spec and main in self._expected and (spec.dtype, spec.shape) != (kept.dtype, kept.shape):
                surplus.append(spec)
        check_plan([*first_names.values(), *surplus, *self._repeated], self._manifest)

    def require_sound(self) -> None:
        """Raise if names that are tied differ, or if values are not finite."""
        if self.differ:
            pairs = listed([f"{name} and {self.main_name(name)}" for name in self.differ])
            raise WeightPlanMismatch(
                f"{pairs} differ in value, but the engine's model ties them; nothing was changed. Tie them in the "
                "trainer too, or load the engine with a model that does not tie them",
                mismatched=self.differ,
            )
        if self.bad:
            named = listed([f"{name} ({what})" for name, what in self.bad.items()])
            raise InvalidWeights(
                f"{len(self.bad)} tensors hold values that are not finite; nothing was changed: {named}. Check "
                "the step that made them (loss scale, learning rate, gradient clipping)",
                tensors=list(self.bad),
            )

    def _casts(self, tensor: torch.Tensor, wanted: TensorSpec) -> bool:
        return self._cast and tensor.is_floating_point() and dtype_of(wanted).is_floating_point


class _Held(_Checks):
    def run(self, source: Source, sender: Sender, plan: WeightPlan) -> Staged:
        staged = self.staged
        with staged.checking():
            tensors = source.tensors()
            for name, tensor in tensors.items():
                self.see(name, tensor)
            self.require_complete()
            found = self._digests(tensors)
            for name, value in found.items():
                if staged.digests.setdefault(self.main_name(name), value) != value:
                    self.differ.append(name)
            self.require_sound()
        with staged.staging():
            sender.begin(plan)
            put: set[str] = set()
            for name, tensor in tensors.items():
                main = self.main_name(name)
                if main not in put:
                    sender.put(main, tensor, held=True)
                    put.add(main)
        return staged

    def _digests(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        # A tied tensor comes under several names; it is read once.
        first_names: dict[Hashable, str] = {}
        for name, tensor in tensors.items():
            first_names.setdefault(place_of(tensor), name)
        unique = {name: tensors[name] for name in first_names.values()}
        as_is = {name: tensor for name, tensor in unique.items() if spec_of(name, tensor) == self._specs[name]}
        bad, found = non_finite(as_is), digests(as_is)
        for name in unique.keys() - as_is.keys():
            converted = self.sent(name, tensors[name])
            bad.update(non_finite({name: converted}))
            found[name] = digest(converted)
        self.bad = {name: bad[name] for name in unique if name in bad}
        return {name: found[first_names[place_of(tensor)]] for name, tensor in tensors.items()}


class _Streamed(_Checks):
    def run(self, source: Source, sender: Sender, plan: WeightPlan) -> Staged:
        staged = self.staged
        sender.begin(plan)
        for name, tensor in source.stream():
            with staged.checking():
                if not self.see(name, tensor):
                    continue
                tensor = self.sent(name, tensor)
                value = digest(tensor)
                self.bad.update(non_finite({name: tensor}))
                main = self.main_name(name)
                first = main not in staged.digests
                if staged.digests.setdefault(main, value) != value:
                    self.differ.append(name)
            if first:
                with staged.staging():
                    sender.put(main, tensor, held=False)
        self.require_complete()
        self.require_sound()
        return staged
