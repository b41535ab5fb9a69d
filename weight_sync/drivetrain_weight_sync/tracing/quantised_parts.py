"""Layers that an engine quantises or repacks for its kernels after loading.

Their tensors are not copies of the trainer's, so an update cannot copy into them. It fills fresh memory of the form
that the engine's loader filled, has the engine convert that, and copies the results to the old addresses, which CUDA
graphs refer to. One layer is converted at a time: the extra memory is that of the largest. Layers from which the engine
derives tensors before it converts them are also kept as they were loaded, until the update ends; a CUDA graph that
fills them keeps their memory.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast

import torch
from torch import nn

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.loader_trace import LoadWeights
from drivetrain_weight_sync.tracing.rebuilt_objects import put_back

_ALIGNMENT: Final = 512
"""Bytes to which torch aligns GPU memory; kernels may choose other code for less."""
_SMALL: Final = 1 << 16
"""Bytes of a parameter whose first values are recorded, too: a scale that no checkpoint holds keeps them."""
_OWN: Final = frozenset({"_parameters", "_buffers", "_modules"})

Fresh = Callable[[torch.Tensor], torch.Tensor]
"""Finds the fresh memory of a part of a recorded parameter."""
Replaced = dict[tuple[int, str], tuple[object, object]]
"""The old and the new object, by owner and name."""
Trial = Callable[[], tuple[dict[str, torch.Tensor], Replaced]]
"""Converts a layer; returns the parameters that it has then, and what else was replaced."""


class LayerForm:
    """The parameters of a layer as its loader fills them, before the engine converts them.

    Args:
        parameters: Parameters by name; their classes, attributes and shapes are kept, and small ones' values.
        kept: Names of parameters that never belong to the form, such as a bias that is made later.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], kept: Collection[str] = ()) -> None:
        self.parameters: dict[str, torch.Tensor] = {name: _without_memory(held) for name, held in parameters.items()}
        """The same parameters on the meta device."""
        self.values: dict[str, torch.Tensor] = {
            name: held.detach().clone()
            for name, held in parameters.items()
            if not held.is_meta and held.nbytes <= _SMALL
        }
        """First values of small parameters."""
        self.kept: Set[str] = frozenset(kept)
        self._held = {name: weakref.ref(held) for name, held in parameters.items()}

    @classmethod
    def of(cls, layer: nn.Module) -> LayerForm:
        """Record a layer's own parameters."""
        return cls({name: held for name, held in layer._parameters.items() if held is not None})

    def is_of(self, layer: nn.Module) -> bool:
        """Return whether the layer has parameters of these names, dtypes and shapes."""
        held = {name: own for name, own in layer._parameters.items() if own is not None and name not in self.kept}
        return _forms(held) == _forms(self.parameters)

    def without_kept(self, layer: nn.Module) -> LayerForm:
        """Return the form without the parameters that the layer still has as the same objects."""
        return self.without(
            name
            for name, own in self._held.items()
            if (held := own()) is not None and held is layer._parameters.get(name)
        )

    def without(self, names: Iterable[str]) -> LayerForm:
        """Return the form without these parameters, which are kept."""
        kept = frozenset(names)
        form = LayerForm({}, self.kept | kept)
        form.parameters = {name: own for name, own in self.parameters.items() if name not in kept}
        form.values = {name: values for name, values in self.values.items() if name not in kept}
        return form

    def before_quantisation(self, scales: Mapping[str, str], dtype: torch.dtype) -> LayerForm:
        """Return the form that the layer would have if its quantised checkpoint were not quantised.

        Args:
            scales: For each quantised weight, the parameter of its scales, which the other form lacks.
            dtype: Dtype of the weights in the other form.
        """
        form = LayerForm({}, self.kept)
        form._held = {name: held for name, held in self._held.items() if name not in {*scales, *scales.values()}}
        for name, own in self.parameters.items():
            if name in scales:
                form.parameters[name] = as_of(
                    torch.empty_strided(own.shape, own.stride(), dtype=dtype, device="meta"), own
                )
            elif name not in scales.values():
                form.parameters[name] = own
        form.values = {name: values for name, values in self.values.items() if name in form.parameters}
        return form


class QuantisedParts:
    """The layers of a model that the engine converted.

    Args:
        forms: Layers as they were before the conversion; unchanged ones are left out.
        convert: Converts a layer whose parameters are as the engine loads them, as the engine does after loading.
        load_weights: The loader of the engine's model.
        quantise: Brings a layer from the recorded form to the one that the engine loads; None: they are the same.
        loaded: Layers as the engine loads them, where that is another form.
    """

    def __init__(
        self,
        forms: Mapping[nn.Module, LayerForm],
        convert: Callable[[nn.Module], object],
        load_weights: LoadWeights,
        *,
        quantise: Callable[[nn.Module], object] | None = None,
        loaded: Mapping[nn.Module, LayerForm] | None = None,
    ) -> None:
        self._forms = {layer: form.without_kept(layer) for layer, form in forms.items() if not form.is_of(layer)}
        self._loaded_forms = {
            layer: form.without(of_layer.kept)
            for layer, of_layer in self._forms.items()
            if not (form := (loaded or forms)[layer]).is_of(layer)
        }
        """Layers whose parameters the engine replaced after loading, as it loads them."""
        self.kept: set[nn.Module] = set()
        """Layers that are kept as they were loaded until :meth:`forget_loaded`, beside their converted form."""
        self.loaded: dict[nn.Module, dict[str, torch.Tensor]] = {}
        """Parameters of kept layers that were loaded since :meth:`forget_loaded`."""
        self._quantise = quantise
        self._convert = convert
        self._load_weights = load_weights
        self._places = {
            storage_of(own): (layer, name)
            for layer, form in self._forms.items()
            for name, own in form.parameters.items()
        }
        """Layer and parameter by the storage of its recorded form."""

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Restore, within the context, the parameters that the loader fills, as meta tensors."""
        with ExitStack() as stack:
            for layer, form in self._forms.items():
                stack.enter_context(_with_parameters(layer, form.parameters, form.kept))
            yield

    @contextmanager
    def before_conversion(self, layers: Collection[nn.Module] | None = None) -> Iterator[None]:
        """Restore, within the context, the parameters of layers as the engine loaded them.

        Those in :attr:`loaded` have their values, others are meta tensors.

        Args:
            layers: These layers; None: all whose parameters were replaced.
        """
        with ExitStack() as stack:
            for layer in self._loaded_forms if layers is None else layers:
                form = self._loaded_forms[layer]
                stack.enter_context(_with_parameters(layer, self.loaded.get(layer, form.parameters), form.kept))
            yield

    def storages_before_conversion(self) -> dict[int, nn.Module]:
        """Return the layer of each meta tensor of :meth:`before_conversion`, by its storage."""
        return {
            storage_of(own): layer for layer, form in self._loaded_forms.items() for own in form.parameters.values()
        }

    def forget_loaded(self) -> None:
        """Free what :attr:`loaded` holds."""
        self.loaded = {}

    def part_of(self, destination: torch.Tensor) -> nn.Module:
        """Return the layer that owns a meta tensor of :meth:`as_loaded`."""
        return self._places[storage_of(destination)][0]

    def nbytes(self, part: nn.Module) -> int:
        """Return the bytes of fresh memory that a layer's recorded form takes."""
        return sum(map(_padded_nbytes, self._forms[part].parameters.values()))

    def fresh(self, part: nn.Module, memory: torch.Tensor) -> Fresh:
        """Return where each part of the layer's recorded form lies in ``memory``, bytes on the layer's device."""
        held = _laid_out(self._forms[part], memory)
        return lambda destination: _same_part(held[self._places[storage_of(destination)][1]], destination)

    @contextmanager
    def anew(self, part: nn.Module, memory: torch.Tensor | None = None) -> Iterator[Fresh]:
        """Let the caller fill a layer's fresh memory, then convert it.

        Args:
            part: The layer.
            memory: At least :meth:`nbytes` bytes, which hold nothing afterwards; None: memory is allocated.

        Raises:
            WeightSyncError: the engine made tensors of another form than the first time; the layer keeps its own.
        """
        form = self._forms[part]
        if memory is None:
            memory = torch.empty(self.nbytes(part), dtype=torch.uint8, device=device_of(part))
        held = _laid_out(form, memory)
        for name, values in form.values.items():
            held[name].data.copy_(values)
        before = {name: own for name, own in part._parameters.items() if own is not None}
        with _Others(part) as others:
            with _with_parameters(part, held, form.kept):
                yield lambda destination: _same_part(held[self._places[storage_of(destination)][1]], destination)
                self._convert_filled(part, keep=part in self.kept)
                made = {name: own for name, own in part._parameters.items() if own is not None}
            if _forms(made) != _forms(before):
                raise WeightSyncError(
                    f"the engine converted a {type(part).__name__} to {_described(made)} instead of "
                    f"{_described(before)} when it was loaded again, which weight sync does not support"
                )
            for name, own in before.items():
                if made[name] is not own:
                    own.data.copy_(made[name].data)
            others.take_values()

    def _convert_filled(self, part: nn.Module, *, keep: bool) -> None:
        if self._quantise is not None:
            self._quantise(part)
        if keep:
            names = self._loaded_forms[part].parameters
            held = {name: cast("torch.Tensor", part._parameters[name]) for name in names}
            self.loaded[part] = {name: as_of(own.detach().clone(), own) for name, own in held.items()}
        self._convert(part)

    def form_of(self, part: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the parameters of a layer's recorded form, as meta tensors."""
        return self._forms[part].parameters

    def parameter_of(self, destination: torch.Tensor) -> str:
        """Return the name of the parameter to which a meta tensor of :meth:`as_loaded` belongs."""
        return self._places[storage_of(destination)][1]

    @contextmanager
    def tried(self, part: nn.Module, memory: torch.Tensor) -> Iterator[tuple[Mapping[str, torch.Tensor], Trial]]:
        """Let the caller fill memory of a layer's recorded form, and convert it; the layer keeps its own tensors.

        Args:
            part: The layer.
            memory: At least :meth:`nbytes` bytes.
        """
        form = self._forms[part]
        held = _laid_out(form, memory)
        for name, values in form.values.items():
            held[name].data.copy_(values)
        with _Others(part) as others:
            try:
                with _with_parameters(part, held, form.kept):

                    def convert() -> tuple[dict[str, torch.Tensor], Replaced]:
                        self._convert_filled(part, keep=False)
                        made: dict[str, torch.Tensor] = {
                            name: own for name, own in part._parameters.items() if own is not None
                        }
                        return made, others.replaced()

                    yield held, convert
            finally:
                others.restore()

    def load(self, parts: Sequence[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
        """Have the engine's loader fill layers from all their checkpoint tensors, and convert them."""
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(self.anew(part))
            self._load_weights(weights.items())


class _Others:
    """Buffers, and attributes of a layer and its quantisation: a conversion may replace them beside parameters."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        method: Any = getattr(part, "quant_method", None)
        owners = [part, method] if hasattr(method, "__dict__") else [part]
        self._attributes = [
            (owner, {name: value for name, value in vars(owner).items() if name not in _OWN}) for owner in owners
        ]
        self._buffers = dict(part._buffers)

    def __enter__(self) -> _Others:
        return self

    def take_values(self) -> None:
        """Give the old objects the values of the new ones."""
        for name, buffer in self._buffers.items():
            new = self._part._buffers.get(name)
            if buffer is not None and new is not None and new is not buffer:
                buffer.copy_(new)
        for owner, attributes in self._attributes:
            put_back(owner, attributes)

    def replaced(self) -> Replaced:
        """Return the old and the new object of each attribute and buffer that the conversion replaced."""
        found: Replaced = {}
        for number, (owner, attributes) in enumerate(self._attributes):
            for name, old in attributes.items():
                new = getattr(owner, name, old)
                if new is not old:
                    found[number, name] = old, new
        for name, buffer in self._buffers.items():
            if (new := self._part._buffers.get(name)) is not buffer:
                found[-1, name] = buffer, new
        return found

    def restore(self) -> None:
        """Give the owners the objects that they had."""
        for owner, attributes in self._attributes:
            vars(owner).update(attributes)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._part._buffers.clear()
        self._part._buffers.update(self._buffers)
        if kind is not None:
            self.restore()


def held_by(part: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a part computes with."""
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]


def device_of(part: nn.Module) -> torch.device:
    """Return the device of a layer's own parameters."""
    return next(part.parameters(recurse=False)).device


@contextmanager
def _with_parameters(layer: nn.Module, recorded: Mapping[str, torch.Tensor], kept: Set[str]) -> Iterator[None]:
    """Replace the parameters that are not kept by recorded ones; the layer has its own again afterwards."""
    before = dict(layer._parameters)
    for name, held in before.items():
        if held is not None and name not in kept:
            del layer._parameters[name]
    layer._parameters.update(cast("Mapping[str, nn.Parameter]", recorded))
    try:
        yield
    finally:
        layer._parameters.clear()
        layer._parameters.update(before)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return as_of(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), tensor)


def as_of(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Give a new tensor another one's class and attributes, such as the loader of a parameter."""
    own: Any = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
    own.__class__ = tensor.__class__
    vars(own).update(vars(tensor))
    return cast("torch.Tensor", own)


def _laid_out(form: LayerForm, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors of a form in memory, each aligned."""
    found: dict[str, torch.Tensor] = {}
    begin = 0
    for name, own in form.parameters.items():
        flat = memory[begin : begin + _nbytes(own)].view(own.dtype)
        found[name] = as_of(flat.as_strided(own.shape, own.stride(), flat.storage_offset()), own)
        begin += _padded_nbytes(own)
    return found


def _same_part(held: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    data = held.data
    offset = int(data.storage_offset()) + int(destination.storage_offset())
    return data.as_strided(destination.shape, destination.stride(), offset)


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _padded_nbytes(tensor: torch.Tensor) -> int:
    return math.ceil(_nbytes(tensor) / _ALIGNMENT) * _ALIGNMENT


def _forms(held: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    # A difference in strides alone needs no conversion: a copy handles it.
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in held.items()}


def _described(held: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(own.shape)} of {own.dtype}" for name, own in held.items())
