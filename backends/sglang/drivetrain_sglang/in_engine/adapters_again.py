# pyright: reportMissingImports=false
"""Load another adapter of a form that SGLang has loaded before, without its work for each tensor.

SGLang sorts an adapter's tensors by layer and concatenates those of fused layers: ten milliseconds and more for some
hundred tensors. The first load of a form is SGLang's own. Loading labels in place of values shows which tensors each
of its weights consists of; if that explains the weights, later loads put them together at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter
from drivetrain_weight_sync.tensors.dtypes import as_bits

_MOST_FORMS: Final = 8
"""Most forms remembered."""

Weights = MutableMapping[str, torch.Tensor]
Piece = str | int
"""Name of a tensor of the adapter, or a number of zeros."""


@dataclass(eq=False, slots=True)
class _Form:
    config: Mapping[str, object]
    tensors: Mapping[str, object]
    adapter: Any
    """SGLang's ``LoRAAdapter``, without weights."""
    weights: Sequence[Mapping[str, torch.Size]]
    """Shapes of its weights by name, in the order of :func:`holders`."""
    pieces: Sequence[Piece]
    """The contents of all of them, one after another."""


class LoadsAgain:
    """Wraps SGLang's ``load_lora_weights_from_tensors``.

    Args:
        manager: The ``LoRAManager``.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._forms: list[_Form] = []
        self._load = manager.load_lora_weights_from_tensors

    def load(self, reference: Any, held: HeldAdapter) -> Any:
        """Load an adapter, and return SGLang's answer."""
        manager, own = self._manager, self._load
        described = held.described()
        known = next((one for one in self._forms if one.config == held.config and one.tensors == described), None)

        def load_weights(reference: Any, tensors: Mapping[str, torch.Tensor]) -> None:
            if known is None:
                own(reference, {name: _staying(tensor) for name, tensor in tensors.items()})
            else:
                adapter = _filled(known, tensors)
                adapter.uid, adapter.config = reference.lora_id, manager.configs[reference.lora_id]
                manager.loras[reference.lora_id] = adapter

        manager.load_lora_weights_from_tensors = load_weights
        try:
            loaded = manager.load_lora_adapter_from_tensors(reference, held.tensors, held.config)
        finally:
            manager.load_lora_weights_from_tensors = own
        if loaded.success and known is None:
            adapter = manager.loras[reference.lora_id]
            _to_host(adapter)
            form = _explained(adapter, held)
            self._forms = [*self._forms[1 - _MOST_FORMS :], *([] if form is None else [form])]
        return loaded


def holders(adapter: Any) -> Iterator[Weights]:
    """Yield the mappings in which SGLang holds an adapter's weights."""
    for layer in adapter.layers:
        yield layer.weights
    yield adapter.embedding_layers
    yield adapter.added_tokens_embeddings


class _Staying(torch.Tensor):
    """A tensor on a GPU whose ``cpu()`` copies nothing: SGLang's copies wait for one tensor after another."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        """Return the tensor itself."""
        return self.as_subclass(torch.Tensor)


def _staying(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(_Staying) if tensor.is_cuda else tensor


def _to_host(adapter: Any) -> None:
    """Move the tensors that SGLang holds for an adapter from the GPU to the host, all at once."""
    found = [(holder, name, one) for holder in holders(adapter) for name, one in holder.items() if one.is_cuda]
    for dtype in {one.dtype for _, _, one in found}:
        some = [(holder, name, one) for holder, name, one in found if one.dtype == dtype]
        together = _on_host(torch.cat([one.reshape(-1) for _, _, one in some]))
        for (holder, name, one), part in zip(
            some, torch.split(together, [one.numel() for _, _, one in some]), strict=True
        ):
            holder[name] = part.view(one.shape)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in page-locked memory if it is on a GPU."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize(tensor.device)
    return host


@torch.no_grad()
def _filled(form: _Form, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return SGLang's adapter with the weights that these tensors make."""
    some = next(iter(tensors.values()))
    pieces = [tensors[piece].reshape(-1) if isinstance(piece, str) else some.new_zeros(piece) for piece in form.pieces]
    sizes = [shape.numel() for shapes in form.weights for shape in shapes.values()]
    parts = iter(torch.split(_on_host(torch.cat(pieces)), sizes))
    adapter = _copied(form.adapter)
    for holder, shapes in zip(holders(adapter), form.weights, strict=True):
        holder.update((name, next(parts).view(shape)) for name, shape in shapes.items())
    return adapter


def _copied(adapter: Any) -> Any:
    """Return a copy of an adapter, or of its layers, that shares no mapping with it and has no weights."""
    copied = adapter.__class__.__new__(adapter.__class__)
    for name, value in vars(adapter).items():
        if name == "_modules":
            vars(copied)[name] = {key: _copied(module) for key, module in value.items()}
        else:
            vars(copied)[name] = _empty(value) if not name.startswith("_") and type(value) is dict else value
    return copied


def _empty(held: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in held.items() if not isinstance(value, torch.Tensor)}


@torch.no_grad()
def _explained(adapter: Any, held: HeldAdapter) -> _Form | None:
    """Return the form of an adapter that SGLang has loaded; None if its weights are no rows of the tensors in order."""
    tensors = held.tensors
    if any(tensor.ndim != 2 for tensor in tensors.values()) or len({one.dtype for one in tensors.values()}) > 1:
        return None
    rows = [len(tensor) for tensor in tensors.values()]
    begins = list(itertools.accumulate(rows, initial=1))  # 0 labels zeros
    labels = {
        name: torch.arange(begin, begin + many).view(many, 1)
        for name, begin, many in zip(tensors, begins, rows, strict=False)
    }
    labelled = _copied(adapter)
    try:
        labelled.initialize_weights_from_tensors(labels)
    except Exception:  # a label has one column only
        return None
    names = dict(zip(begins, tensors, strict=False))
    weights = [{name: one.shape for name, one in holder.items()} for holder in holders(adapter)]
    found = [{name: one.reshape(-1).tolist() for name, one in holder.items()} for holder in holders(labelled)]
    if [list(one) for one in found] != [list(one) for one in weights]:
        return None
    pieces: list[Piece] = []
    for shapes, of_labels in zip(weights, found, strict=True):
        for name, shape in shapes.items():
            some = _pieces(of_labels[name], names, labels, shape[-1])
            if some is None:
                return None
            pieces += some
    form = _Form(dict(held.config), held.described(), _copied(adapter), weights, pieces)
    sizes = [tensors[piece].numel() if isinstance(piece, str) else piece for piece in pieces]
    if sum(sizes) != sum(shape.numel() for shapes in weights for shape in shapes.values()):
        return None
    made = _filled(form, tensors)
    pairs = [
        (one, other)
        for own, again in zip(holders(adapter), holders(made), strict=True)
        for one, other in zip(own.values(), again.values(), strict=True)
    ]
    same = all(one.dtype == other.dtype and torch.equal(as_bits(one), as_bits(other)) for one, other in pairs)
    return form if same else None


def _pieces(
    found: Sequence[int], names: Mapping[int, str], labels: Mapping[str, torch.Tensor], columns: int
) -> list[Piece] | None:
    """Return the tensors whose rows have these labels; None if they are cut or mixed."""
    pieces: list[Piece] = []
    at = 0
    while at < len(found):
        if found[at] == 0:
            pieces.append(columns)
            at += 1
            continue
        name = names.get(found[at])
        if name is None:
            return None
        rows = len(labels[name])
        if found[at : at + rows] != list(range(found[at], found[at] + rows)):
            return None
        pieces.append(name)
        at += rows
    return pieces
