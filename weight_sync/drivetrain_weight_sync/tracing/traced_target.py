"""An engine's model whose own loader was watched once: from each checkpoint tensor to where its values go.

The copies that :func:`~drivetrain_weight_sync.tracing.loader_trace.trace_loader` saw are made again at the speed of
a copy, and backwards, to read what the engine holds by checkpoint name. What its loader computes with, it is given
again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from torch import nn

from drivetrain.errors import EngineStateError, WeightSyncError, WeightTransferFailed
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync.copying.device_copies import DeviceCopies, DeviceCopy, Launched, fits, window_of
from drivetrain_weight_sync.tensors.dtypes import dtype_name, dtype_of
from drivetrain_weight_sync.tensors.names import listed
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.derived_tensors import Derived
from drivetrain_weight_sync.tracing.loader_trace import Copy, LoaderTrace, LoadWeights, trace_loader
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts, held_by

_MOST_BATCHES: Final = 1024
"""Tables of addresses that are kept. One lists a bucket, or a whole update; arenas seldom move."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a checkpoint tensor, as ``torch.as_strided`` names it, with its values in CPU memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    values: torch.Tensor


class TracedTarget:
    """A :class:`~drivetrain_weight_sync.receiver.target.WeightTarget` that copies where the loader was seen to copy.

    Args:
        load_weights: The loader of the engine's model.
        checkpoint: Names, shapes and aliases of the checkpoint's tensors, as a trainer has them. Dtypes are the
            engine's own, whatever is said here, but for tensors that the loader computes with.
        split: Whether other ranks take the parts of tensors that this one's loader leaves out.
        at_once: Make copies within a GPU as one kernel, where tensors stay, and digest them on the way.
        converted: Parts that the engine keeps in another form; None: there are none.
        model: Where what the loader computes is held; None: what it computes is refused.

    Raises:
        WeightSyncError: the loader cannot be followed, or takes parts of some tensors and ``split`` is false.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        checkpoint: WeightManifest,
        *,
        split: bool = False,
        at_once: bool = False,
        converted: QuantisedParts | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self._at_once = at_once
        self._batches: dict[Hashable, DeviceCopies] = {}
        """By where the tensors lie that they copy."""
        self._addresses: tuple[int, ...] = ()
        """Of the engine's tensors, when the batches were made."""
        self._launched: list[Launched] = []
        self.derived: Derived | None = None
        """What the engine computes from what was loaded."""
        self._load_weights = load_weights
        self._converter = converted
        self._parts_of: dict[str, list[nn.Module]] = {}
        """Of each tensor that the engine keeps in another form."""
        self._computed: set[str] = set()
        """Of these, those with which its loader itself computes."""
        with nullcontext() if converted is None else converted.as_loaded():
            recording = trace_loader(load_weights, checkpoint.tensors)
            self._note_parts(recording, model)
        tensors = [
            replace(spec, dtype=dtype_name(recording.copies[spec.name][0].destination.dtype))
            if spec.name in recording.copies
            else spec
            for spec in checkpoint.tensors
            if spec.name in recording.names
        ]
        self._copies = {name: found for name, found in recording.copies.items() if name not in self._parts_of}
        self._specs = {spec.name: spec for spec in tensors}
        aliases = {name: main for name, main in checkpoint.aliases.items() if main in self._specs}
        self._manifest = WeightManifest(tuple(tensors), aliases)
        self._split = {name for name in self._copies if not self._is_whole(name)}
        if self._split and not split:
            raise WeightSyncError(
                f"the engine's loader takes only parts of {listed(sorted(self._split))}, and there is no other rank"
            )

    def share_with(self, manifests: Iterable[WeightManifest]) -> None:
        """Take in the tensors that other ranks alone hold, as experts that are spread over them: no part is here.

        Args:
            manifests: Of all ranks, this one's among them, in one order on every rank.
        """
        specs: dict[str, TensorSpec] = {}
        aliases: dict[str, str] = {}
        for manifest in manifests:
            specs = {spec.name: spec for spec in manifest.tensors} | specs
            aliases = dict(manifest.aliases) | aliases
        absent = specs.keys() - self._specs.keys()
        self._specs = specs
        self._manifest = WeightManifest(tuple(specs.values()), aliases)
        self._copies |= {name: [] for name in absent}
        self._split |= absent

    def _note_parts(self, recording: LoaderTrace, model: nn.Module | None) -> None:
        """Note what parts the tensors belong to that no copy brings to where they are used."""
        for name, copies in recording.copies.items():
            filled = [copy.destination for copy in copies if copy.destination.is_meta]
            if self._converter is not None and filled:
                self._parts_of[name] = list(dict.fromkeys(map(self._converter.part_of, filled)))
        holders = _holders(model) if recording.computed else {}
        for name, places in recording.computed.items():
            if self._converter is not None and any(place.is_meta for place in places):
                parts: list[nn.Module | None] = list(map(self._converter.part_of, places))
            else:
                parts = [holders.get(storage_of(place)) for place in places]
                self._computed.add(name)
            self._parts_of[name] = list(dict.fromkeys(part for part in parts if part is not None))
            if None in parts:
                raise WeightSyncError(
                    f"the engine's loader computes something of {name}, and it is not seen what the model has of it"
                )

    def _is_whole(self, name: str) -> bool:
        covered = sum(torch.Size(copy.size).numel() for copy in self._parts(name))
        return covered >= torch.Size(self._specs[name].shape).numel()

    def _parts(self, name: str) -> list[Copy]:
        """The copies of a tensor, each part once: those of tied tensors repeat them."""
        return list({(copy.size, copy.stride, copy.offset): copy for copy in self._copies[name]}.values())

    @cached_property
    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of all that an update brings, each piece once."""
        brought = [copy.destination for copies in self._copies.values() for copy in copies]
        for part in self.converted_parts:
            brought += held_by(part)
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in brought}
        return list(found.values())

    @cached_property
    def converted_parts(self) -> dict[nn.Module, list[str]]:
        """Parts that the engine keeps in another form, and the tensors that each is made of."""
        found: dict[nn.Module, list[str]] = {}
        for name, parts in self._parts_of.items():
            for part in parts:
                found.setdefault(part, []).append(name)
        return found

    @property
    def converted(self) -> Set[str]:
        """Names of tensors that the engine keeps in another form."""
        return self._parts_of.keys()

    @cached_property
    def _addresses_of(self) -> list[Callable[[], int]]:
        return [storage.data_ptr for storage in self.storages]

    def manifest(self) -> WeightManifest:
        """Name every tensor that a complete update must bring, in the engine's dtypes."""
        return self._manifest

    def check_ready(self) -> None:
        """Raise :class:`EngineStateError` if memory was given back."""
        for storage in self.storages:
            if storage.nbytes() == 0:
                raise EngineStateError(
                    "the memory of the weights was given back by sleep; call wake_up(tags=[MemoryTag.WEIGHTS]) first",
                    state="asleep",
                )

    def begin(self) -> None:
        """Forget the digests of the last update, and every batch if storage has moved since."""
        self._launched = []
        addresses = tuple([address() for address in self._addresses_of])
        if addresses != self._addresses:
            self._batches, self._addresses = {}, addresses

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, place: Hashable = None) -> None:
        """Make the recorded copies of these tensors, and have the engine load those that it keeps in another form."""
        own: dict[str, torch.Tensor] = {}

        def whole() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if self._own(name) in self._parts_of:
                    own[self._own(name)] = tensor
                else:
                    yield name, tensor.contiguous()

        if self._at_once and place is not None:
            self._load_at_once(list(whole()), place)
        else:
            for name, tensor in whole():
                for copy in self._ways(name):
                    copy.destination.copy_(copy.part_of(tensor))
        computed = {name: own.pop(name) for name in self._computed & own.keys()}
        if computed:
            self._load_weights(computed.items())
        if own:
            assert self._converter is not None
            parts = dict.fromkeys(part for name in own for part in self._parts_of[name])
            self._converter.load(list(parts), own)

    def load_again(self, place: Hashable, among: Set[str]) -> Set[str]:
        """Make again the copies of an earlier load from this place."""
        batch = self._batches.get(place)
        if batch is None or not among >= batch.names:
            return frozenset()
        self._launched.append(batch.launch())
        return batch.names

    def _ways(self, name: str) -> list[Copy]:
        own = self._own(name)
        if own not in self._copies:
            raise WeightTransferFailed(f"the model has no tensor {name!r}; names are those of weight_manifest()")
        return self._copies[own]

    def _load_at_once(self, tensors: list[tuple[str, torch.Tensor]], place: Hashable) -> None:
        fitting: list[DeviceCopy] = []
        for name, whole in tensors:
            copies = _at_once(name, whole, self._ways(name))
            fitting += copies
            if not copies:
                for copy in self._ways(name):
                    copy.destination.copy_(copy.part_of(whole))
        if fitting:
            if len(self._batches) >= _MOST_BATCHES:
                self._batches.clear()
            self._batches[place] = batch = DeviceCopies(fitting)
            self._launched.append(batch.launch())

    def expect(self, digests: Mapping[str, int]) -> Set[str]:
        """Say which digests tensors should have; return whose are seen by the copies that are made at once."""
        for launched in self._launched:
            launched.expect(digests)
        if len(self._launched) == 1:
            return self._launched[0].names
        return frozenset().union(*(launched.names for launched in self._launched))

    def differing(self) -> list[str]:
        """Of the tensors that were copied at once, those whose digests are not as expected."""
        return [name for launched in self._launched for name in launched.differing()]

    def finish(self) -> None:
        """Wait until copies to a GPU have been made, and what is derived from them."""
        self._synchronize()
        if self.derived is not None and self.derived.refresh():
            self._synchronize()

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    @cached_property
    def _devices(self) -> set[torch.device]:
        """The GPUs that hold the model."""
        devices = {copy.destination.device for copies in self._copies.values() for copy in copies}
        devices |= {held.device for part in self.converted_parts for held in held_by(part)}
        return {device for device in devices if device.type == "cuda"}

    def cancel(self) -> None:
        """Nothing to undo."""

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        """Return what the engine holds of a checkpoint tensor: a view where it lies in one piece, else a copy.

        Of a tensor that is split over ranks, the parts that this one holds, one after another, in one dimension.
        """
        own = self._readable(name)
        if own in self._split:
            return self._joined(own, [copy.destination.flatten() for copy in self._parts(own)])
        spec, copies = self._specs[own], self._copies[own]
        first = copies[0].destination
        if first.is_contiguous() and copies[0].is_all_of(spec):
            return first
        whole = torch.empty(spec.shape, dtype=first.dtype, device=first.device)
        for copy in copies:
            copy.part_of(whole).copy_(copy.destination)
        return whole

    @torch.no_grad()
    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of what the engine holds of a checkpoint tensor; zeros where other ranks hold it."""
        own = self._readable(name)
        spec, parts = self._specs[own], self._parts(own)
        device = parts[0].destination.device if parts else None
        whole = torch.zeros(spec.shape, dtype=dtype_of(spec), device=device)
        for copy in parts:
            copy.part_of(whole).copy_(copy.destination)
        return whole

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what this rank takes of a tensor, as :meth:`read` gives it; None if it takes all."""
        own = self._own(name)
        if own not in self._split:
            return None
        whole = tensor.contiguous()
        return self._joined(own, [copy.part_of(whole).flatten() for copy in self._parts(own)])

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*parts]) if parts else torch.empty(0, dtype=dtype_of(self._specs[name]))

    @torch.no_grad()
    def pieces(self, name: str) -> list[Piece]:
        """Return what this rank holds of a checkpoint tensor, and where it lies in the whole."""
        return [
            Piece(copy.size, copy.stride, copy.offset, copy.destination.to("cpu", copy=True))
            for copy in self._parts(self._readable(name))
        ]

    def assembled(self, name: str, pieces: Iterable[Piece]) -> torch.Tensor:
        """Return a whole checkpoint tensor, in CPU memory, made of the pieces of all ranks."""
        spec = self._specs[self._own(name)]
        whole = torch.empty(spec.shape, dtype=dtype_of(spec))
        for piece in pieces:
            whole.as_strided(piece.size, piece.stride, piece.offset).copy_(piece.values)
        return whole

    def _own(self, name: str) -> str:
        return self._manifest.aliases.get(name, name)

    def _readable(self, name: str) -> str:
        own = self._own(name)
        if own in self._parts_of:
            raise WeightSyncError(
                f"the engine keeps {own} in another form, quantised, packed or computed: it cannot be read back as a "
                "checkpoint has it"
            )
        return own

    def forms_of(self, name: str) -> list[torch.Tensor]:
        """What the engine holds of a tensor: the tensor, or what it made of it and of others."""
        parts = self._parts_of.get(self._own(name))
        return [self.read(name)] if parts is None else [held for part in parts for held in held_by(part)]


def _holders(model: nn.Module | None) -> dict[int, nn.Module]:
    """The module that holds each storage."""
    modules = () if model is None else model.modules()
    return {storage_of(held): module for module in modules for held in held_by(module)}


def _at_once(name: str, whole: torch.Tensor, ways: Sequence[Copy]) -> list[DeviceCopy]:
    """The copies of a tensor as one kernel makes them and digests the whole; none if it cannot."""
    parts = [_device_copy(whole, way) for way in ways] or [DeviceCopy(whole)]
    first = parts[0]
    if first.source.nbytes < whole.nbytes and len(ways) == 1:
        window = window_of(whole, ways[0].size, ways[0].stride, ways[0].offset)
        first = replace(first, source=whole, window=window)
    # Read once for both, if the whole is read for the copy.
    together = first.source.nbytes == whole.nbytes and fits(first)
    copies = [replace(first, name=name), *parts[1:]] if together else [DeviceCopy(whole, name=name), *parts]
    return copies if all(map(fits, copies)) else []


def _device_copy(whole: torch.Tensor, way: Copy) -> DeviceCopy:
    part = way.part_of(whole)
    if not part.is_contiguous():
        window = window_of(whole, way.size, way.stride, way.offset)
        if window is not None:
            return DeviceCopy(whole, way.destination, window=window)
    return DeviceCopy(part, way.destination)
