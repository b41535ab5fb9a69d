"""Trace how an engine's model loads a checkpoint.

An engine's tensors differ from the checkpoint's: fused, sharded, renamed. Only the model's ``load_weights`` knows the
mapping. :func:`trace_loader` runs it on meta tensors and records each copy that it would make. Tensors that are
rearranged first, by a transposition or concatenation, are loaded once more with integer labels in place of values,
which show where each element goes. For tensors that the loader computes with, only the destinations are recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from drivetrain.errors import WeightSyncError
from drivetrain.types.weights import TensorSpec
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.dtypes import dtype_of
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.operations import tensors_in, written_to

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
"""Operations that make new tensors from others without reading their values."""
_MAKES: Final = frozenset(
    {
        _aten.empty_like,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten.zeros_like,
        _aten.new_zeros,
        _aten.ones_like,
        _aten.new_ones,
        _aten.full_like,
        _aten.new_full,
    }
)
"""Operations that make new tensors and use only the shape and dtype of their inputs."""
_FILLS: Final = frozenset({_aten.zero_.default, _aten.fill_.Scalar})
_READ_NUMBER: Final = _aten._local_scalar_dense.default
"""``Tensor.item()``."""
_FIRST_NUMBER: Final = 0x5EED << 30
"""Placeholder for the value of the first tensor whose ``item()`` is read; later ones count up. Exact in a float64."""
_MARK: Final = 0x5A5A5
_SHIFT: Final = 20
"""A label is an element's index above ``_MARK`` in the low bits, which change if the label is computed with."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a checkpoint tensor, and the part of an engine's tensor that it is copied to."""

    destination: torch.Tensor
    """A view of the engine's tensor."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Arguments of ``torch.as_strided`` that select the part from a contiguous checkpoint tensor without storage
    offset."""

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copied part of a contiguous tensor that has the checkpoint tensor's shape."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def is_all_of(self, spec: TensorSpec) -> bool:
        """Return whether the copy takes the whole tensor unchanged; a square one could be transposed."""
        contiguous = torch.empty(spec.shape, device="meta").stride()
        return (self.size, self.stride, self.offset) == (spec.shape, contiguous, 0)


@dataclass(frozen=True, slots=True)
class LoaderTrace:
    """A loader's effects by checkpoint name; tensors that it leaves out appear in neither mapping."""

    copies: dict[str, list[Copy]]
    computed: dict[str, list[torch.Tensor]]
    """Destinations of tensors that the loader computes with, or rearranges in a way that no strided copy can."""

    @property
    def names(self) -> Set[str]:
        """Names of all tensors that it loads."""
        return self.copies.keys() | self.computed.keys()


def trace_loader(load_weights: LoadWeights, specs: Iterable[TensorSpec]) -> LoaderTrace:
    """Return what ``load_weights`` does with each tensor, without writing to the engine's tensors.

    Raises:
        WeightSyncError: the engine cannot load meta tensors, or a loaded tensor has no known destination.
    """
    known = {spec.name: spec for spec in specs}
    tensors = {name: torch.empty(spec.shape, dtype=dtype_of(spec), device="meta") for name, spec in known.items()}
    watch = _Watch(tensors)
    _load(load_weights, tensors, watch)
    copies: dict[str, list[Copy]] = {}
    for name, destination, source in watch.copied:
        source = source.expand(destination.shape)
        copies.setdefault(name, []).append(
            Copy(destination, tuple(source.shape), tuple(source.stride()), int(source.storage_offset()))
        )
    computed = set(watch.computed)
    for group in watch.moved_together():
        if computed.isdisjoint(group):
            try:
                found = _by_labels(load_weights, [known[name] for name in group])
            except WeightSyncError:
                computed |= set(group)
            else:
                copies |= found
    computed = watch.together_with(computed)
    lost = sorted(name for name in computed if not watch.destinations_of(name))
    if lost:
        raise _cannot(f"no destination of {listed(lost)} was found")
    return LoaderTrace(
        {name: found for name, found in copies.items() if name not in computed},
        {name: watch.destinations_of(name) for name in known if name in computed},
    )


def _load(load_weights: LoadWeights, tensors: Mapping[str, torch.Tensor], watch: _Watch) -> None:
    try:
        with torch.no_grad(), _in_this_thread(), watch:
            load_weights(iter(tensors.items()))
    except Exception as error:
        raise _cannot(f"{type(error).__name__}: {error}") from error
    if watch.numbers:
        raise _cannot(f"it computes with the value of {listed(sorted({name for name, _ in watch.numbers.values()}))}")


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Run work submitted to thread pools in this thread: a dispatch mode sees only the thread that entered it."""
    submit, watched = ThreadPoolExecutor.submit, threading.get_ident()

    def run(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != watched:
            return submit(pool, function, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = run  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _cannot(why: str) -> WeightSyncError:
    return WeightSyncError(
        f"the engine transforms weights while it loads them ({why}), which weight sync does not support yet; for "
        "this model, configure the engine to keep weights as in the checkpoint: no quantisation, no packing"
    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows given tensors through a loader; writes to the engine's own tensors are recorded and not made."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {storage_of(tensor): name for name, tensor in tensors.items()}
        self._made_of: dict[int, frozenset[str]] = {storage: frozenset({name}) for storage, name in self._own.items()}
        """By storage: the given tensors whose values it holds."""
        self._kept: list[torch.Tensor] = []
        """Keeps storages alive, so that no new one reuses an id."""
        self._fresh: set[int] = set()
        """Storages made during the trace that hold no given values."""
        self._written: dict[int, list[tuple[frozenset[str], torch.Tensor]]] = {}
        """By storage of the engine: each view that would be written to, and the given tensors whose values it would
        hold."""
        self.copied: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """Name, destination, and the part of the given tensor."""
        self.moved: list[tuple[frozenset[str], torch.Tensor, torch.Tensor]] = []
        """Names, destination, and the rearranged tensor."""
        self.computed: set[str] = set()
        """Given tensors that the loader computes with, rather than only moving them."""
        self.numbers: dict[float, tuple[str, torch.Tensor]] = {}
        """By placeholder: name and tensor of each value read with ``item()`` and not yet written."""
        self._numbers_read = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READ_NUMBER and self._names(args[0]):
            return self._number_for(args[0])
        given, written = tensors_in(args, kwargs), tensors_in(*written_to(func, args, kwargs))
        if any(self._is_the_engines(value) for value in written):
            self._write(func, args, given, written)
            return written[0] if len(written) == 1 else tuple(written)
        names = self._names(*given)
        made = _without_memory(func, args, kwargs) if names else func(*args, **(kwargs or {}))
        there = {storage_of(value) for value in given}
        new = [value for value in tensors_in(made) if storage_of(value) not in there]
        if new and func.overloadpacket not in _MAKES:
            # A tensor made from the engine's own depends on what the loader would have written there by now.
            read = self._to_be_in(*given)
            self.computed |= read
            names |= read
        if not names:
            self._fresh |= {storage_of(value) for value in new}
            return made
        self._fresh -= {storage_of(value) for value in new}  # a new storage may reuse the id of an earlier one
        moves = func.overloadpacket in _MOVES and not any(
            storage_of(value) in self._own or storage_of(value) in self._fresh for value in written
        )
        if (new or written) and not moves:
            self.computed |= names
        for value in (*new, *written):
            self._kept.append(value)
            self._made_of[storage_of(value)] = self._names(value) | names
        return written[0] if len(written) == 1 and not new else made

    def _write(self, func: Any, args: Any, given: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        names, destination = self._names(*given), written[0].detach()
        if func is _aten.copy_.default and names:
            source = args[1]
            self._kept.append(source)
            own = self._own.get(storage_of(source))
            if own is not None:
                self.copied.append((own, destination, source))
            else:
                self.moved.append((names, destination, source))
        elif func is _aten.fill_.Scalar and args[1] in self.numbers:
            own, source = self.numbers.pop(args[1])
            names = frozenset({own})
            self.copied.append((own, destination, source.reshape(())))
        elif func in _FILLS:
            # Constants were written when the engine started; only one that would overwrite a loaded value matters.
            there = self._written.get(storage_of(destination), ())
            over = [names for names, other in there if _overlap(other, destination)]
            self.computed |= frozenset[str]().union(*over)
            return
        else:
            names |= self._to_be_in(*given)
            self.computed |= names
        for value in written if names else ():
            self._written.setdefault(storage_of(value), []).append((names, value.detach()))

    def _number_for(self, value: torch.Tensor) -> float:
        """Return a placeholder for ``item()``, recognised when one of the engine's tensors is filled with it."""
        own = self._own.get(storage_of(value))
        if own is None:
            raise _cannot(f"it reads a value computed from {listed(sorted(self._names(value)))}")
        number = _FIRST_NUMBER + self._numbers_read
        self._numbers_read += 1
        self.numbers[number] = own, value.detach()
        return float(number) if value.is_floating_point() else number

    def _is_the_engines(self, value: torch.Tensor) -> bool:
        storage = storage_of(value)
        return storage not in self._fresh and storage not in self._made_of

    def _names(self, *values: torch.Tensor) -> frozenset[str]:
        return frozenset[str]().union(*(self._made_of.get(storage_of(value), frozenset()) for value in values))

    def _to_be_in(self, *values: torch.Tensor) -> frozenset[str]:
        """Return the given tensors whose values would be in these tensors of the engine by now."""
        there = (self._written.get(storage_of(value), ()) for value in values)
        return frozenset[str]().union(*(names for some in there for names, _ in some))

    def destinations_of(self, name: str) -> list[torch.Tensor]:
        """Return the destinations to which values of a given tensor would be written."""
        return [destination for there in self._written.values() for names, destination in there if name in names]

    def together_with(self, names: Iterable[str]) -> set[str]:
        """Return these names, and all names whose values share storages of the engine with them."""
        found = set(names)
        of_storages = [frozenset[str]().union(*(written for written, _ in there)) for there in self._written.values()]
        while more := {name for some in of_storages if some & found for name in some} - found:
            found |= more
        return found

    def moved_together(self) -> list[list[str]]:
        """Group the names of rearranged tensors, so that all inputs of one copy are in one group."""
        group_of: dict[str, set[str]] = {}
        for names, _, _ in self.moved:
            joined = set(names).union(*(group_of[name] for name in names if name in group_of))
            group_of.update(dict.fromkeys(joined, joined))
        return [sorted(group) for group in {id(group): group for group in group_of.values()}.values()]


def _without_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the meta device if any of its inputs is a meta tensor."""
    if any(value.is_meta for value in tensors_in(args, kwargs)):
        args, kwargs = tree_map_only(torch.Tensor, _shape_of, (args, kwargs or {}))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
    return func(*args, **(kwargs or {}))


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the byte ranges of two tensors in one storage overlap."""
    if not one.numel() or not other.numel():
        return False
    (begin, end), (other_begin, other_end) = map(_range, (one, other))
    return begin < other_end and other_begin < end


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * tensor.itemsize


def _by_labels(load_weights: LoadWeights, specs: list[TensorSpec]) -> dict[str, list[Copy]]:
    """Find the copies of tensors that are loaded together, by tracing labelled elements."""
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
            raise _cannot(f"it computes with {listed([spec.name for spec in specs])}")
        for block, places in _of_one_each(destination, found >> _SHIFT, ends):
            index = int(torch.searchsorted(ends, places.flatten()[0], right=True))
            begin = int(ends[index] - sizes[index])
            copies.setdefault(specs[index].name, []).append(_strided(block, places - begin, specs[index]))
    return copies


def _of_one_each(
    destination: torch.Tensor, places: torch.Tensor, ends: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a destination into blocks, each from one checkpoint tensor."""
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
    raise _cannot("it interleaves tensors")


def _strided(destination: torch.Tensor, places: torch.Tensor, spec: TensorSpec) -> Copy:
    """Return the copy that fills ``destination`` with the elements at ``places`` of the flattened tensor."""
    steps: list[tuple[int, int]] = []
    for dim in range(places.ndim):
        steps += _steps(places[tuple(slice(None) if other == dim else 0 for other in range(places.ndim))])
    size, stride = tuple(many for many, _ in steps), tuple(step for _, step in steps)
    offset = int(places.flatten()[0])
    numbers = torch.arange(torch.Size(spec.shape).numel())
    last = offset + sum((many - 1) * step for many, step in steps)
    if last >= len(numbers) or not torch.equal(numbers.as_strided(size, stride, offset), places.reshape(size)):
        raise _cannot(f"it rearranges {spec.name} irregularly")
    return Copy(destination.view(size), size, stride, offset)


def _steps(along: torch.Tensor) -> list[tuple[int, int]]:
    """Factor a sequence of positions into (count, step) pairs, outermost first.

    Raises:
        WeightSyncError: the positions do not form such a regular pattern.
    """
    if len(along) == 1:
        return [(1, 0)]
    steps = along.diff()
    step = int(steps[0])
    other = (steps != step).nonzero()
    many = int(other[0]) + 1 if len(other) else len(along)
    if step < 0 or len(along) % many:
        raise _cannot("it rearranges elements irregularly")
    if many == len(along):
        return [(many, step)]
    return [*_steps(along[::many]), (many, step)]
