"""Watches how an engine's model loads a checkpoint.

An engine keeps other tensors than the checkpoint: fused, sharded, under other names. Its model's ``load_weights`` knows
the way. :func:`record` runs it on tensors without memory and notes each copy that it would make. What it moves about
before it copies, as a transposition or two tensors put together do, it loads once more as whole numbers, each of which
says where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.errors import WeightSyncError
from drivetrain.weights import TensorSpec
from drivetrain_weight_sync.dispatch import storage_of, written_to
from drivetrain_weight_sync.dtypes import dtype_of
from drivetrain_weight_sync.names import listed

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's loader: takes (checkpoint name, tensor) pairs."""

_aten: Final = torch.ops.aten
_MOVES: Final = frozenset(
    {
        _aten.clone,
        _aten.copy_,
        _aten._to_copy,
        _aten._unsafe_view,
        _aten.cat,
        _aten.stack,
        _aten.repeat,
        _aten.index_select,
        _aten.empty_like,
        _aten.new_empty,
        _aten.zeros_like,
        _aten.new_zeros,
    }
)
"""What makes new tensors of others without looking at values."""
_MARK: Final = 0x5A5A5
_SHIFT: Final = 20
"""A label is an element's number, and below it bits that are others once anything was computed with it."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Part of a checkpoint tensor, and the part of an engine's tensor that it is copied to."""

    destination: torch.Tensor
    """A view of the engine's tensor."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """The part, as ``torch.as_strided`` names it on a contiguous checkpoint tensor that has its storage for itself."""

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a contiguous tensor of the checkpoint's shape."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def is_all_of(self, spec: TensorSpec) -> bool:
        """Whether it takes the whole tensor as it is; a square one may be transposed."""
        contiguous = torch.empty(spec.shape, device="meta").stride()
        return (self.size, self.stride, self.offset) == (spec.shape, contiguous, 0)


def record(load_weights: LoadWeights, specs: Iterable[TensorSpec]) -> dict[str, list[Copy]]:
    """Return, by checkpoint name, the copies that ``load_weights`` makes; tensors that it leaves out are not there.

    Raises:
        WeightSyncError: the engine computes something of weights while it loads them.
    """
    known = {spec.name: spec for spec in specs}
    tensors = {name: torch.empty(spec.shape, dtype=dtype_of(spec), device="meta") for name, spec in known.items()}
    watch = _Watch(tensors)
    _load(load_weights, tensors, watch)
    if watch.computed:
        raise _cannot(f"it computes something of {listed(sorted(watch.computed))}")
    copies: dict[str, list[Copy]] = {}
    for name, destination, source in watch.copied:
        source = source.expand(destination.shape)
        copies.setdefault(name, []).append(
            Copy(destination, tuple(source.shape), tuple(source.stride()), int(source.storage_offset()))
        )
    for group in watch.moved_together():
        for name in group:
            copies.pop(name, None)
        for name, found in _by_labels(load_weights, [known[name] for name in group]).items():
            copies[name] = found
    return copies


def _load(load_weights: LoadWeights, tensors: Mapping[str, torch.Tensor], watch: _Watch) -> None:
    try:
        with torch.no_grad(), watch:
            load_weights(iter(tensors.items()))
    except Exception as error:
        raise _cannot(f"{type(error).__name__}: {error}") from error


def _cannot(why: str) -> WeightSyncError:
    return WeightSyncError(
        f"the engine transforms weights while it loads them ({why}), which weight sync cannot follow yet; for "
        "this model, configure the engine to keep weights as the checkpoint has them: no quantisation, no packing"
    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees where given tensors go; what would be written to other tensors is noted instead."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {storage_of(tensor): name for name, tensor in tensors.items()}
        self._made_of: dict[int, frozenset[str]] = {storage: frozenset({name}) for storage, name in self._own.items()}
        """Of which given tensors there is something in each storage."""
        self._kept: list[torch.Tensor] = []
        """Or another storage could come to the same place."""
        self._fresh: set[int] = set()
        """Storages that were made meanwhile of anything else."""
        self.copied: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """Name, destination, and the part of the given tensor."""
        self.moved: list[tuple[frozenset[str], torch.Tensor, torch.Tensor]] = []
        """Names, destination, and what was made of them."""
        self.computed: set[str] = set()
        """Those of the given tensors that more was done with than to move them about."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = frozenset[str]().union(*(self._names(value) for value in tree_leaves((args, kwargs))))
        if not names:
            made = func(*args, **(kwargs or {}))
            given = {storage_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
            self._fresh |= {storage_of(value) for value in tree_leaves(made) if isinstance(value, torch.Tensor)} - given
            return made
        if func is _aten.copy_.default and not self._names(args[0]):
            destination, source = args[:2]
            if storage_of(destination) in self._fresh:
                raise NotImplementedError(f"it loads {listed(sorted(names))} into a tensor that it made for that")
            self._kept.append(source)
            name = self._own.get(storage_of(source))
            if name is None:
                self.moved.append((names, destination.detach(), source))
            else:
                self.copied.append((name, destination.detach(), source))
            return destination
        written = [value for value in written_to(func, args, kwargs) if isinstance(value, torch.Tensor)]
        made = func(*args, **(kwargs or {}))
        new = [value for value in tree_leaves(made) if isinstance(value, torch.Tensor) and not self._names(value)]
        moves = func.overloadpacket in _MOVES and not any(storage_of(value) in self._own for value in written)
        if (new or written) and not moves:
            self.computed |= names
        for value in (*new, *written):
            self._kept.append(value)
            self._made_of[storage_of(value)] = self._names(value) | names
        return made

    def _names(self, value: object) -> frozenset[str]:
        return self._made_of.get(storage_of(value), frozenset()) if isinstance(value, torch.Tensor) else frozenset()

    def moved_together(self) -> list[list[str]]:
        """Names of tensors that were moved about before they were copied, those together that one copy is made of."""
        groups: list[set[str]] = []
        for names, _, _ in self.moved:
            joined = {*names}.union(*(group for group in groups if group & names))
            groups = [group for group in groups if not group & names] + [joined]
        return [sorted(group) for group in groups]


def _by_labels(load_weights: LoadWeights, specs: list[TensorSpec]) -> dict[str, list[Copy]]:
    """The copies of tensors that are loaded together, found by where each of their elements comes to lie."""
    sizes = torch.tensor([torch.Size(spec.shape).numel() for spec in specs])
    ends = sizes.cumsum(0)
    labels = {
        spec.name: ((torch.arange(end - size, end) << _SHIFT) | _MARK).view(spec.shape)
        for spec, size, end in zip(specs, sizes.tolist(), ends.tolist(), strict=True)
    }
    watch = _Watch(labels)
    _load(load_weights, labels, watch)
    copies: dict[str, list[Copy]] = {}
    moved = [(destination, source) for _, destination, source in (*watch.copied, *watch.moved)]
    for destination, source in moved:
        found = source.expand(destination.shape).cpu()
        if found.dtype != torch.int64 or bool((found & ((1 << _SHIFT) - 1) != _MARK).any()):
            raise _cannot(f"it computes something of {listed([spec.name for spec in specs])}")
        for block, places in _of_one_each(destination, found >> _SHIFT, ends):
            index = int(torch.searchsorted(ends, places.flatten()[0], right=True))
            begin = int(ends[index] - sizes[index])
            copies.setdefault(specs[index].name, []).append(_strided(block, places - begin, specs[index]))
    return copies


def _of_one_each(
    destination: torch.Tensor, places: torch.Tensor, ends: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a destination into blocks that are each made of one tensor."""
    if not places.numel():
        return
    whose = torch.searchsorted(ends, places.contiguous(), right=True)
    if bool((whose == whose.flatten()[0]).all()):
        yield destination, places
        return
    for dim in range(places.ndim):
        cuts = (whose.diff(dim=dim) != 0).movedim(dim, 0).flatten(1)
        if bool((cuts.any(1) == cuts.all(1)).all()) and bool(cuts.any()):
            at = (cuts.any(1).nonzero()[:, 0] + 1).tolist()
            for block, part in zip(destination.tensor_split(at, dim), places.tensor_split(at, dim), strict=True):
                yield from _of_one_each(block, part, ends)
            return
    raise _cannot("it mixes tensors")


def _strided(destination: torch.Tensor, places: torch.Tensor, spec: TensorSpec) -> Copy:
    """The copy that fills ``destination`` with the elements at ``places`` of the flattened tensor."""
    steps: list[tuple[int, int]] = []
    for dim in range(places.ndim):
        steps += _steps(places[tuple(slice(None) if other == dim else 0 for other in range(places.ndim))])
    size, stride = tuple(many for many, _ in steps), tuple(step for _, step in steps)
    offset = int(places.flatten()[0])
    numbers = torch.arange(torch.Size(spec.shape).numel())
    last = offset + sum((many - 1) * step for many, step in steps)
    if last >= len(numbers) or not torch.equal(numbers.as_strided(size, stride, offset), places.reshape(size)):
        raise _cannot(f"it moves {spec.name} about")
    return Copy(destination.view(size), size, stride, offset)


def _steps(along: torch.Tensor) -> list[tuple[int, int]]:
    """How many numbers rise by which step, and how many of these by which, and so on; outermost first.

    Raises:
        WeightSyncError: they do not rise like that.
    """
    if len(along) == 1:
        return [(1, 0)]
    steps = along.diff()
    step = int(steps[0])
    other = (steps != step).nonzero()
    many = int(other[0]) + 1 if len(other) else len(along)
    if step < 0 or len(along) % many:
        raise _cannot("it moves elements about")
    if many == len(along):
        return [(many, step)]
    return [*_steps(along[::many]), (many, step)]
