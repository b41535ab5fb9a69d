"""A weight target that replays the traced copies of an engine's own loader.

The copies found by :func:`~drivetrain_weight_sync.tracing.loader_trace.trace_loader` are replayed at the speed of a
copy, and reversed to read weights by checkpoint name. Tensors that the loader computes with are passed to the loader
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
from drivetrain_weight_sync.copying.device_copies import (
    DeviceCopies,
    DeviceCopy,
    Launched,
    compile_kernels,
    fits,
    is_available,
    reaches,
    window_of,
)
from drivetrain_weight_sync.copying.fp8_copies import Fp8Piece
from drivetrain_weight_sync.copying.waiting import wait_for
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.dtypes import dtype_name, dtype_of, nbytes_of
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.conversion import Conversion
from drivetrain_weight_sync.tracing.derived_tensors import Derived
from drivetrain_weight_sync.tracing.fp8_layers import Fp8Layers
from drivetrain_weight_sync.tracing.loader_trace import Copy, LoaderTrace, LoadWeights, trace_loader
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts, device_of, held_by

_MOST_BATCHES: Final = 1024
"""Most tables of addresses kept. One describes a bucket or a whole update, and arenas seldom move."""
_STEP_S: Final = 0.05
"""Seconds for which requests wait while :meth:`TracedTarget.get_ready` tries; compiling a kernel takes longer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a checkpoint tensor in CPU memory, placed by arguments of ``torch.as_strided``."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    values: torch.Tensor


class TracedTarget:
    """A :class:`~drivetrain_weight_sync.WeightTarget` that replays the copies of a traced loader.

    Args:
        load_weights: The loader of the engine's model.
        checkpoint: Names, shapes and aliases of the checkpoint's tensors, as a trainer has them. Its dtypes count only
            for tensors that the loader computes with; others have the engine's.
        split: True if other ranks hold the parts of tensors that this rank's loader leaves out.
        at_once: Copy tensors at stable addresses in one kernel on a GPU, which also digests them.
        converted: Parts that the engine quantises or repacks; None: there are none.
        model: The model, searched for the tensors that the loader computes; None: such tensors are refused.

    Raises:
        WeightSyncError: the loader cannot be traced, or takes parts of some tensors and ``split`` is false.
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
        """Batches of copies, by the stable-address key of the tensors that they copy."""
        self._is_compiled = False
        """True once the copy kernels were compiled."""
        self._addresses: tuple[int, ...] = ()
        """Addresses of the engine's tensors when the batches were made."""
        self._launched: list[Launched] = []
        self._conversions: dict[Hashable, Conversion] = {}
        """Conversions, by the stable-address key of the tensors that they read."""
        self.derived: Derived | None = None
        """Tensors that the engine computes from its weights; recomputed after each update."""
        self._load_weights = load_weights
        self.converter = converted
        """Converts the parts that the engine quantises or repacks."""
        self._parts_of: dict[str, list[nn.Module]] = {}
        """For each tensor that the engine keeps in another form, the modules made from it."""
        self._computed: set[str] = set()
        """Tensors of ``_parts_of`` that the loader itself computes with."""
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
        self._fills = {name: recording.copies[name] for name in self._parts_of if name in recording.copies}
        """Copies into the recorded form of converted parts."""
        self._specs = {spec.name: spec for spec in tensors}
        aliases = {name: main for name, main in checkpoint.aliases.items() if main in self._specs}
        self._manifest = WeightManifest(tuple(tensors), aliases)
        self._split = {name for name in self._copies if not self._is_whole(name)}
        if self._split and not split:
            raise WeightSyncError(
                f"the engine's loader takes only parts of {listed(sorted(self._split))}, although it has one rank"
            )

    def share_with(self, manifests: Iterable[WeightManifest]) -> None:
        """Add tensors that only other ranks hold, such as distributed experts; this rank has no part of them.

        Args:
            manifests: Manifests of all ranks, this one's included, in one order on every rank.
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
        """Record the modules of tensors that the loader computes with or the engine converts."""
        for name, copies in recording.copies.items():
            filled = [copy.destination for copy in copies if copy.destination.is_meta]
            if self.converter is not None and filled:
                self._parts_of[name] = list(dict.fromkeys(map(self.converter.part_of, filled)))
        holders = _holders(model) if recording.computed else {}
        for name, places in recording.computed.items():
            if self.converter is not None and any(place.is_meta for place in places):
                parts: list[nn.Module | None] = list(map(self.converter.part_of, places))
            else:
                parts = [holders.get(storage_of(place)) for place in places]
                self._computed.add(name)
            self._parts_of[name] = list(dict.fromkeys(part for part in parts if part is not None))
            if None in parts:
                raise WeightSyncError(
                    f"the engine's loader computes with {name}, and no module was found that holds the result"
                )

    def _is_whole(self, name: str) -> bool:
        covered = sum(torch.Size(copy.size).numel() for copy in self._parts(name))
        return covered >= torch.Size(self._specs[name].shape).numel()

    def _parts(self, name: str) -> list[Copy]:
        """Return the copies of a tensor, each part once; tied tensors have the same copies several times."""
        return list({(copy.size, copy.stride, copy.offset): copy for copy in self._copies[name]}.values())

    @cached_property
    def storages(self) -> list[torch.UntypedStorage]:
        """Storages of all tensors that an update fills, each once."""
        brought = [copy.destination for copies in self._copies.values() for copy in copies]
        for part in self.converted_parts:
            brought += held_by(part)
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in brought}
        return list(found.values())

    @cached_property
    def converted_parts(self) -> dict[nn.Module, list[str]]:
        """Modules that the engine keeps in another form, with the checkpoint tensors that each is made from."""
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
        """Return the tensors that a complete update must bring, in the engine's dtypes."""
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
        if self.converter is not None:
            self.converter.forget_loaded()  # of an update that failed
        addresses = tuple([address() for address in self._addresses_of])
        if addresses != self._addresses:
            self._batches, self._conversions, self._addresses = {}, {}, addresses

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, place: Hashable = None) -> None:
        """Replay the copies of these tensors, and have the engine load those that it keeps in another form."""
        own: dict[str, torch.Tensor] = {}
        conversion = self._conversions.get(place)
        itself: Set[str] = frozenset() if conversion is None else conversion.names

        def whole() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if self._own(name) not in self._parts_of:
                    yield name, tensor.contiguous()
                elif name not in itself:
                    own[self._own(name)] = tensor

        if self._at_once and place is not None:
            self._load_at_once(list(whole()), place)
        else:
            for name, tensor in whole():
                for copy in self._ways(name):
                    copy.destination.copy_(copy.part_of(tensor))
        if conversion is not None:
            self._launched.append(conversion.launch())
        computed = {name: own.pop(name) for name in self._computed & own.keys()}
        if computed:
            self._load_weights(computed.items())
        if own:
            self._convert(own)

    def _convert(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill the parts that are made from these tensors, and have the engine convert them."""
        assert self.converter is not None
        parts = list(dict.fromkeys(part for name in tensors for part in self._parts_of[name]))
        if not self._fills.keys() >= tensors.keys():
            self.converter.load(parts, tensors)
            return
        for part in parts:
            with self.converter.anew(part) as fresh:
                for name in self.converted_parts[part]:
                    whole = tensors[name].contiguous()
                    for copy in self._fills_of(name, part):
                        fresh(copy.destination).copy_(copy.part_of(whole))

    def _fills_of(self, name: str, part: nn.Module) -> list[Copy]:
        assert self.converter is not None
        return [copy for copy in self._fills[name] if self.converter.part_of(copy.destination) is part]

    def digests_converted(self, tensors: Mapping[str, torch.Tensor], place: Hashable) -> Set[str]:
        """Return the converted tensors that one kernel for each part can copy and digest on a GPU."""
        self._conversions.pop(place, None)
        converter = self.converter
        if converter is None or not self._at_once or not self._filled_parts:
            return frozenset()
        pieces: list[Fp8Piece] = []
        plain: list[DeviceCopy] = []
        rest: list[nn.Module] = []
        for part, of_part in self._filled_parts.items():
            if tensors.keys() >= of_part.keys():
                layer = self._fp8_layers.known.get(part)
                ways = {name: (tensors[name], some) for name, (_, some) in of_part.items()}
                own = dict(part.named_parameters(recurse=False, remove_duplicate=False))
                made = None if layer is None else layer.pieces(converter, ways, own, _at_once)
                if made is None:
                    rest.append(part)
                else:
                    pieces += made[0]
                    plain += made[1]
        of_rest = max(map(converter.nbytes, rest), default=0)
        memory = torch.empty(of_rest, dtype=torch.uint8, device=device_of(next(iter(self._filled_parts))))
        copies: dict[nn.Module, list[DeviceCopy]] = {}
        for part in rest:
            fresh = converter.fresh(part, memory)
            of_names = [
                _at_once(name, tensors[name], [replace(way, destination=fresh(way.destination)) for way in ways])
                for name, (_, ways) in self._filled_parts[part].items()
            ]
            if all(of_names):
                copies[part] = [copy for of_name in of_names for copy in of_name]
        if not copies and not pieces:
            return frozenset()
        if len(self._conversions) >= _MOST_BATCHES:
            self._conversions.clear()
        self._conversions[place] = conversion = Conversion(converter, copies, memory, pieces, plain)
        return conversion.names

    @cached_property
    def _filled_parts(self) -> dict[nn.Module, dict[str, tuple[torch.Tensor, list[Copy]]]]:
        """Converted modules that copies fill: for each tensor, one of its form, and its copies into the module."""
        return {
            part: {
                name: (
                    torch.empty(self._specs[name].shape, dtype=dtype_of(self._specs[name]), device="meta"),
                    self._fills_of(name, part),
                )
                for name in names
            }
            for part, names in self.converted_parts.items()
            if self._fills.keys() >= set(names) and all(len(self._parts_of[name]) == 1 for name in names)
        }

    @cached_property
    def _fp8_layers(self) -> Fp8Layers:
        assert self.converter is not None
        quantised = {part: of for part, of in self._filled_parts.items() if part not in self.converter.kept}
        return Fp8Layers(self.converter, quantised, _at_once)

    def get_ready(self) -> bool:
        """Compile kernels and look for the engine's quantisation of layers, a twentieth of a second per call."""
        if not self._is_compiled:
            self._is_compiled = True
            if self._at_once and is_available():
                largest = max(map(nbytes_of, self._specs.values()), default=0)
                parts = any(not copy.is_all_of(self._specs[name]) for name, own in self._copies.items() for copy in own)
                for device in self._devices:
                    compile_kernels(device, largest, windows=parts)
                return False
        held = next((own for part in self._filled_parts for own in part.parameters(recurse=False)), None)
        if held is None or not reaches(held):
            return True
        known = len(self._fp8_layers.known)
        is_ready = self._fp8_layers.find(_STEP_S)
        if len(self._fp8_layers.known) > known:
            self._addresses = ()  # conversions of all layers are rebuilt, with the new ones
        return is_ready

    def load_again(self, place: Hashable, among: Set[str]) -> Set[str]:
        """Replay the copies and conversions of an earlier load with this key; return the names of their tensors."""
        batch, conversion = self._batches.get(place), self._conversions.get(place)
        names: Set[str] = frozenset() if batch is None else batch.names
        if conversion is not None:
            names |= conversion.names
        if not names or not among >= names:
            return frozenset()
        if batch is not None:
            self._launched.append(batch.launch())
        if conversion is not None:
            self._launched.append(conversion.launch())
        return names

    def _ways(self, name: str) -> list[Copy]:
        own = self._own(name)
        if own not in self._copies:
            raise WeightTransferFailed(f"the model has no tensor {name!r}; weight_manifest() lists the names")
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
        """Set the expected digests; return the names of tensors that the copy kernel digests."""
        for launched in self._launched:
            launched.expect(digests)
        if len(self._launched) == 1:
            return self._launched[0].names
        return frozenset().union(*(launched.names for launched in self._launched))

    def differing(self) -> list[str]:
        """Return the tensors whose digest, as the copy kernel computed it, is not the expected one."""
        return [name for launched in self._launched for name in launched.differing()]

    def finish(self) -> None:
        """Wait for copies to a GPU, then recompute derived tensors."""
        self._synchronize()
        if self.derived is not None and self.derived.refresh():
            self._synchronize()

    def _synchronize(self) -> None:
        for device in self._devices:
            wait_for(device)

    @cached_property
    def _devices(self) -> set[torch.device]:
        """The GPUs that hold the model."""
        devices = {copy.destination.device for copies in self._copies.values() for copy in copies}
        devices |= {held.device for part in self.converted_parts for held in held_by(part)}
        return {device for device in devices if device.type == "cuda"}

    def cancel(self) -> None:
        """Do nothing: there is nothing to undo."""

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        """Return the engine's values of a checkpoint tensor: a view if they lie in one piece, else a copy.

        If the tensor is split over ranks, return this rank's parts, flattened and concatenated.
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
        """Return a copy of a checkpoint tensor; elements that other ranks hold are zero."""
        own = self._readable(name)
        spec, parts = self._specs[own], self._parts(own)
        device = parts[0].destination.device if parts else None
        whole = torch.zeros(spec.shape, dtype=dtype_of(spec), device=device)
        for copy in parts:
            copy.part_of(whole).copy_(copy.destination)
        return whole

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a tensor in the form of :meth:`read`; None if it takes all of it."""
        own = self._own(name)
        if own not in self._split:
            return None
        whole = tensor.contiguous()
        return self._joined(own, [copy.part_of(whole).flatten() for copy in self._parts(own)])

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*parts]) if parts else torch.empty(0, dtype=dtype_of(self._specs[name]))

    @torch.no_grad()
    def pieces(self, name: str) -> list[Piece]:
        """Return this rank's pieces of a checkpoint tensor, with their places in the whole."""
        return [
            Piece(copy.size, copy.stride, copy.offset, copy.destination.to("cpu", copy=True))
            for copy in self._parts(self._readable(name))
        ]

    def assembled(self, name: str, pieces: Iterable[Piece]) -> torch.Tensor:
        """Assemble a whole checkpoint tensor, in CPU memory, from the pieces of all ranks."""
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
                f"the engine keeps {own} in another form, quantised, packed or computed: it cannot be read back as in "
                "the checkpoint"
            )
        return own

    def forms_of(self, name: str) -> list[torch.Tensor]:
        """Return the tensors that hold a checkpoint tensor's values: itself, or the engine's forms made from it."""
        parts = self._parts_of.get(self._own(name))
        return [self.read(name)] if parts is None else [held for part in parts for held in held_by(part)]


def _holders(model: nn.Module | None) -> dict[int, nn.Module]:
    """Return the module that holds each storage."""
    modules = () if model is None else model.modules()
    return {storage_of(held): module for module in modules for held in held_by(module)}


def _at_once(name: str, whole: torch.Tensor, ways: Sequence[Copy]) -> list[DeviceCopy]:
    """Return a tensor's copies for a kernel launch that also digests the whole; empty if no kernel can make them."""
    parts = [_device_copy(whole, way) for way in ways] or [DeviceCopy(whole)]
    first = parts[0]
    if first.source.nbytes < whole.nbytes and len(ways) == 1:
        window = window_of(whole, ways[0].size, ways[0].stride, ways[0].offset)
        first = replace(first, source=whole, window=window)
    # Read the tensor once for copy and digest, if the copy reads all of it.
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
