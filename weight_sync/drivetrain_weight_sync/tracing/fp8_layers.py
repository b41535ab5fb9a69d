"""Recognise layers that an engine quantises to fp8, so that one kernel can quantise them in place.

The engine's own code converts layers filled with made-up weights, and a formula is sought that gives the same bits. A
layer for which none is found keeps being converted by the engine's code.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from drivetrain_weight_sync.copying.device_copies import DeviceCopy
from drivetrain_weight_sync.copying.fp8_copies import (
    PER_ROW,
    PER_TENSOR,
    Formula,
    Fp8Copies,
    Fp8Piece,
    Group,
    fits,
    formulas,
)
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.loader_trace import Copy
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts, Replaced, device_of

_log = logging.getLogger(__name__)

_BLOCK: Final = 128
_MANTISSAS: Final = 128
"""Mantissas of bfloat16."""
_EXPONENTS: Final = 19
"""Exponents below that of the largest magnitude, down to numbers that become zero."""
_USUAL: Final = -6
"""Exponent of the largest magnitude in most trials."""
_UNUSUAL: Final = (0.0, 1.0, 2.0**-15, 2.0**-27, 2.0**9, 2.0**-10, 2.0**-40, 2.0**-34)
"""Magnitudes that meet the least scales of formulas."""
_UNUSUAL_GROUPS: Final = 32
_MOST_TRIALS: Final = 320
"""A layer so small that it needs more trials is left to the engine."""

MakesCopies = Callable[[str, torch.Tensor, Sequence[Copy]], list[DeviceCopy]]
"""Returns the copies of a tensor to given destinations, which also digest it; empty if no kernel can make them."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """How an engine quantises one parameter."""

    parameter: str
    scales: str
    """Parameter of its scales."""
    group: Group
    formula: Formula
    shape: tuple[int, int, int]
    """Matrices, rows and columns."""


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """How an engine makes a layer of what its loader filled: parameters are quantised, or taken as they are."""

    weights: Mapping[str, Fp8Weight]
    plain: frozenset[str]

    @property
    def quantised(self) -> frozenset[str]:
        """Names of the weights and their scales."""
        return frozenset({*self.weights, *(weight.scales for weight in self.weights.values())})

    def pieces(
        self,
        parts: QuantisedParts,
        tensors: Mapping[str, tuple[torch.Tensor, Sequence[Copy]]],
        into: Mapping[str, torch.Tensor],
        make_copies: MakesCopies,
    ) -> tuple[list[Fp8Piece], list[DeviceCopy]] | None:
        """Return pieces and copies that fill the layer from pushed tensors and digest these; None if no kernel can.

        Args:
            parts: Knows to which parameter a copy belongs.
            tensors: For each pushed tensor's name: the tensor, and its copies into the recorded form.
            into: The layer's own parameters, or others of the same form.
            make_copies: Makes the copies of parameters that are not quantised.
        """
        pieces: list[Fp8Piece] = []
        copies: list[DeviceCopy] = []
        covered = dict.fromkeys(self.weights, 0)
        for name, (tensor, ways) in tensors.items():
            of_parameters = {parts.parameter_of(way.destination) for way in ways}
            if of_parameters <= self.plain:
                moved = [
                    Copy(_part(into[parts.parameter_of(way.destination)], way), way.size, way.stride, way.offset)
                    for way in ways
                ]
                made = make_copies(name, tensor, moved)
                if not made:
                    return None
                copies += made
                continue
            if not of_parameters <= self.weights.keys():
                return None
            own: list[Fp8Piece] = []
            for way in ways:
                weight = self.weights[parts.parameter_of(way.destination)]
                found = _pieces(weight, tensor, way, into)
                if found is None:
                    return None
                own += found
                covered[weight.parameter] += math.prod(way.size)
            # Digested apart, blocks take less time.
            is_whole = len(own) == 1 and own[0].source.numel() == tensor.numel()
            if is_whole and own[0].group.columns is None:
                only = own[0]
                own = [Fp8Piece(only.source, only.destination, only.scales, only.group, only.formula, name)]
            else:
                copies.append(DeviceCopy(tensor, name=name))
            pieces += own
        if any(covered[name] != math.prod(weight.shape) for name, weight in self.weights.items()):
            return None
        return (pieces, copies) if all(map(fits, pieces)) else None


@dataclass(frozen=True, slots=True)
class FilledInPlace:
    """A layer whose quantisation is known, and the tensors that it is to be made of."""

    layer: Fp8Layer
    parts: QuantisedParts
    tensors: Mapping[str, tuple[torch.Tensor, Sequence[Copy]]]
    make_copies: MakesCopies

    def pieces(self, into: Mapping[str, torch.Tensor]) -> tuple[list[Fp8Piece], list[DeviceCopy]] | None:
        """As :meth:`Fp8Layer.pieces`."""
        return self.layer.pieces(self.parts, self.tensors, into, self.make_copies)


def _part(own: torch.Tensor, way: Copy) -> torch.Tensor:
    data = own.data
    offset = int(data.storage_offset()) + int(way.destination.storage_offset())
    return data.as_strided(way.destination.shape, way.destination.stride(), offset)


def _pieces(
    weight: Fp8Weight, tensor: torch.Tensor, way: Copy, into: Mapping[str, torch.Tensor]
) -> list[Fp8Piece] | None:
    """Return the pieces of one copy into a quantised parameter, one for each matrix; None if its rows are not whole."""
    _, rows, columns = weight.shape
    source, destination = way.part_of(tensor), way.destination
    if source.ndim < 2 or destination.ndim != source.ndim or source.shape[-1] != columns:
        return None
    if destination.stride()[-2:] != (columns, 1) or destination.storage_offset() % columns:
        return None
    own, scales = matrix_of(into[weight.parameter], weight.shape), scales_of(into[weight.scales], weight)
    if own is None or scales is None:
        return None
    found: list[Fp8Piece] = []
    for index in itertools.product(*map(range, source.shape[:-2])):
        first = int(destination[index].storage_offset()) // columns
        matrix, begin = divmod(first, rows)
        count = source.shape[-2]
        if begin + count > rows:
            return None
        of_rows = scales[matrix]
        if weight.group == PER_ROW:
            of_piece = of_rows[begin : begin + count, 0]
        elif weight.group == PER_TENSOR:
            of_piece = of_rows[0, 0]
        else:
            if begin % _BLOCK or (count % _BLOCK and begin + count != rows):
                return None
            of_piece = of_rows[begin // _BLOCK :]
        found.append(Fp8Piece(source[index], own[first : first + count], of_piece, weight.group, weight.formula))
    return found


def matrix_of(own: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor | None:
    """Return a quantised parameter as a matrix of all its rows, also if the engine keeps it transposed."""
    matrices, rows, columns = shape
    data = own.data
    for held in (data, data.transpose(-1, -2)) if data.ndim >= 2 else ():
        if tuple(held.shape[-2:]) == (rows, columns) and held.is_contiguous():
            return held.reshape(matrices * rows, columns) if held.numel() == math.prod(shape) else None
    return None


def scales_of(own: torch.Tensor, weight: Fp8Weight) -> torch.Tensor | None:
    """Return the scales as ``[matrices, groups along rows, groups along columns]``; None if they lie otherwise."""
    shape = _groups(weight.group, weight.shape)
    data = own.data
    if data.numel() != math.prod(shape):
        return None
    if data.is_contiguous():
        return data.view(shape)
    if data.ndim == 2 and data.t().is_contiguous() and 1 in data.shape:
        return data.t().view(shape)
    return (
        data.view(shape)
        if tuple(data.shape) in (shape, shape[1:]) and data.ndim == 3
        else (data[None] if tuple(data.shape) == shape[1:] else None)
    )


def _groups(group: Group, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    matrices, rows, columns = shape
    return matrices, -(-rows // (group.rows or rows)), -(-columns // (group.columns or columns))


class Fp8Layers:
    """Recognises how each layer of a model is quantised; layers that agree in code and form are tried once.

    Args:
        parts: The layers that the engine converts.
    """

    def __init__(self, parts: QuantisedParts) -> None:
        self._parts = parts
        self._known: dict[Hashable, Fp8Layer | None] = {}

    @torch.no_grad()
    def of(self, part: nn.Module, filled: frozenset[str]) -> Fp8Layer | None:
        """Return how a layer is quantised; None if it is not known.

        Args:
            part: The layer.
            filled: Parameters of its recorded form that pushes fill.
        """
        key = filled, self._key(part)
        if key not in self._known:
            try:
                self._known[key] = self._recognised(part, filled)
            except Exception as error:
                # No weights were touched, and the engine's own code can still convert the layer.
                _log.warning("how %s is quantised was not found out: %r", type(part).__name__, error)
                self._known[key] = None
            _log.info("%s is %s", type(part).__name__, self._known[key] or "converted by the engine's own code")
        return self._known[key]

    def _key(self, part: nn.Module) -> Hashable:
        return (
            type(part),
            type(getattr(part, "quant_method", None)),
            tuple((name, own.shape, own.stride(), own.dtype) for name, own in self._parts.form_of(part).items()),
            tuple((name, own.shape, own.stride(), own.dtype) for name, own in part.named_parameters(recurse=False)),
        )

    def _recognised(self, part: nn.Module, filled: frozenset[str]) -> Fp8Layer | None:
        live = {name: own for name, own in part._parameters.items() if own is not None}
        form = self._parts.form_of(part)
        plain: set[str] = set()
        candidates: dict[str, list[Fp8Weight]] = {}
        for name in filled:
            own, recorded = live.get(name), form[name]
            if own is None:
                return None
            if (own.dtype, own.shape, own.stride()) == (recorded.dtype, recorded.shape, recorded.stride()):
                plain.add(name)
                continue
            candidates[name] = list(_candidates(name, recorded, live))
        if not candidates or not all(candidates.values()):
            return None
        memory = torch.empty(self._parts.nbytes(part), dtype=torch.uint8, device=device_of(part))
        found: dict[str, Fp8Weight] = {}
        for name, possible in candidates.items():
            weight = next((one for one in possible if self._is_right(part, one, memory)), None)
            if weight is None:
                return None
            found[name] = weight
        scales = {weight.scales for weight in found.values()}
        if scales & filled or not self._rest_is_constant(part, plain, found, memory):
            return None
        return Fp8Layer(found, frozenset(plain))

    def _is_right(self, part: nn.Module, weight: Fp8Weight, memory: torch.Tensor) -> bool:
        """Return whether a formula gives the engine's bits in all trials."""
        live = part._parameters
        quantised, scales = (like(live[name]) for name in (weight.parameter, weight.scales))
        into = {weight.parameter: quantised, weight.scales: scales}
        own, of_groups = matrix_of(quantised, weight.shape), scales_of(scales, weight)
        if own is None or of_groups is None:
            return False
        matrices, rows, _ = weight.shape
        trials = _trials(weight)
        if trials > _MOST_TRIALS:
            return False
        for trial in range(trials):
            with self._parts.tried(part, memory) as (held, convert):
                source = held[weight.parameter].data.view(matrices * rows, -1)
                _fill(source, weight, trial)
                pieces = [
                    Fp8Piece(
                        source[rows * matrix : rows * (matrix + 1)],
                        own[rows * matrix : rows * (matrix + 1)],
                        of_groups[matrix, 0, 0]
                        if weight.group == PER_TENSOR
                        else of_groups[matrix, :, 0]
                        if weight.group == PER_ROW
                        else of_groups[matrix],
                        weight.group,
                        weight.formula,
                    )
                    for matrix in range(matrices)
                ]
                if not all(map(fits, pieces)):
                    return False
                Fp8Copies(pieces).enqueue()
                made, _ = convert()
                if not all(is_same(made[name], one) for name, one in into.items()):
                    return False
        return True

    def _rest_is_constant(
        self, part: nn.Module, plain: set[str], weights: Mapping[str, Fp8Weight], memory: torch.Tensor
    ) -> bool:
        """Return whether nothing but quantised parameters depends on weights, and plain ones are taken as they are."""
        seen: list[dict[Hashable, object]] = []
        quantised = {*weights, *(weight.scales for weight in weights.values())}
        for trial in range(2):
            with self._parts.tried(part, memory) as (held, convert):
                for name in (*plain, *weights):
                    held[name].data.normal_(generator=torch.Generator(memory.device).manual_seed(trial))
                given = {name: held[name].data.clone() for name in plain}
                made, replaced = convert()
                if any(not is_same(made[name], given[name]) for name in plain):
                    return False
                rest = {name: own.data.clone() for name, own in made.items() if name not in plain | quantised}
                leaves = dict(_leaves(replaced, made))
                seen.append(leaves)
            live = {name: own for name, own in part._parameters.items() if own is not None}
            if any(name not in live or not is_same(live[name], own) for name, own in rest.items()):
                return False
            if any(old != leaf for leaf, old in _aliases(replaced, made, live)):
                return False
        one, other = seen
        return one.keys() == other.keys() and all(_equal(one[path], other[path]) for path in one)


def _sizes(weight: Fp8Weight) -> tuple[int, int]:
    """Return the rows and columns of a whole group."""
    _, rows, columns = weight.shape
    return min(weight.group.rows or rows, rows), min(weight.group.columns or columns, columns)


def _needed(weight: Fp8Weight) -> tuple[int, int]:
    """Return how many groups show all pairs of mantissas, and how many share one largest mantissa."""
    shared_by = -(-_MANTISSAS * _EXPONENTS // max(math.prod(_sizes(weight)) - 1, 1))
    return _MANTISSAS * shared_by, shared_by


def _trials(weight: Fp8Weight) -> int:
    return -(-(_needed(weight)[0] + _UNUSUAL_GROUPS) // len(list(_whole_groups(weight))))


def _whole_groups(weight: Fp8Weight) -> Iterator[tuple[slice, slice]]:
    """Yield the place of each group that is not cut off at the matrix's end, in the matrix of all rows."""
    matrices, rows, columns = weight.shape
    high, wide = _sizes(weight)
    for matrix, down, across in itertools.product(range(matrices), range(rows // high), range(columns // wide)):
        begin = matrix * rows + down * high
        yield slice(begin, begin + high), slice(across * wide, (across + 1) * wide)


def _fill(matrix: torch.Tensor, weight: Fp8Weight, trial: int) -> None:
    """Fill a weight with made-up numbers.

    All trials together show each mantissa of bfloat16 at each exponent, beside each largest mantissa. Powers of two
    change no rounding, so a formula's arithmetic depends on nothing else, except at a least scale: some groups have
    unusual magnitudes to show that.
    """
    source = torch.Generator(matrix.device).manual_seed(trial)
    matrix.normal_(0, 0.0 if weight.group == PER_TENSOR else 0.02, generator=source)
    needed, shared_by = _needed(weight)
    high, wide = _sizes(weight)
    mantissas = 1 + torch.arange(_MANTISSAS) / _MANTISSAS
    others = (mantissas[:, None] * 2.0 ** -torch.arange(_EXPONENTS)).flatten()
    places = list(_whole_groups(weight))
    # Unusual magnitudes first: most wrong formulas show there.
    for number, (rows, columns) in enumerate(places, trial * len(places) - _UNUSUAL_GROUPS):
        if number >= needed:
            break
        is_usual = number >= 0
        largest = mantissas[number // shared_by if is_usual else number * 37 % _MANTISSAS]
        begin = number % shared_by * (high * wide - 1) if is_usual else -number * 101
        many = min(high * wide - 1, len(others))
        some = others[(torch.arange(many) + begin) % len(others)]
        some = torch.where(some > largest, some / 2, some) * (1 - 2 * (torch.arange(many) % 2))
        magnitude = 2.0**_USUAL if is_usual else _UNUSUAL[number % len(_UNUSUAL)]
        lines = -(-(many + 1) // wide)
        values = torch.zeros(lines * wide)
        values[0], values[1 : many + 1] = largest, some
        group = matrix[rows, columns]
        group.zero_()
        group[:lines].copy_((values * magnitude).view(lines, wide))


@dataclass(frozen=True, slots=True)
class _Alias:
    """A tensor in the memory of a parameter."""

    parameter: str
    offset: int
    shape: tuple[int, ...]


def _leaf(value: object, parameters: Mapping[str, torch.Tensor]) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    for name, own in parameters.items():
        if value.numel() and storage_of(value) == storage_of(own):
            offset = int(value.storage_offset()) - int(own.storage_offset())
            return _Alias(name, offset, tuple(value.shape))
    return value.detach().clone()


def _walk(value: object, path: tuple[Hashable, ...], seen: set[int]) -> Iterator[tuple[tuple[Hashable, ...], object]]:
    if isinstance(value, torch.Tensor | bool | int | float | str):
        yield path, value
        return
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    elif hasattr(value, "__dict__"):
        children = list(vars(value).items())
    else:
        return
    for name, child in children:
        yield from _walk(child, (*path, name), seen)


def _leaves(replaced: Replaced, made: Mapping[str, torch.Tensor]) -> Iterator[tuple[Hashable, object]]:
    for key, (_, new) in replaced.items():
        for path, value in _walk(new, key, set()):
            yield path, _leaf(value, made)


def _aliases(
    replaced: Replaced, made: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> Iterator[tuple[object, object]]:
    """Yield each new object's leaf that lies in a parameter, with the leaf in its place of the old object."""
    for key, (old, new) in replaced.items():
        before = {path: value for path, value in _walk(old, key, set()) if isinstance(value, torch.Tensor)}
        for path, value in _walk(new, key, set()):
            leaf = _leaf(value, made) if isinstance(value, torch.Tensor) else None
            if isinstance(leaf, _Alias):
                yield leaf, _leaf(before[path], live) if path in before else None


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and is_same(one, other)
    return type(one) is type(other) and (one == other or one != one)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def like(own: torch.Tensor | None) -> torch.Tensor:
    """Return memory of a parameter's form."""
    assert own is not None
    return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)


def _candidates(name: str, recorded: torch.Tensor, live: Mapping[str, torch.Tensor]) -> Iterator[Fp8Weight]:
    """Yield the ways in which a parameter may be quantised."""
    own = live[name]
    is_matrix = recorded.ndim in (2, 3) and recorded.is_contiguous()
    if own.dtype != torch.float8_e4m3fn or recorded.dtype != torch.bfloat16 or not is_matrix:
        return
    rows, columns = recorded.shape[-2:]
    shape = math.prod(recorded.shape[:-2]), rows, columns
    for scales in (f"{name}_scale", f"{name}_scale_inv"):
        held = live.get(scales)
        if held is None or held.dtype != torch.float32:
            continue
        for group in (PER_ROW, PER_TENSOR, Group(_BLOCK, _BLOCK)):
            if held.numel() == math.prod(_groups(group, shape)):
                for formula in formulas(group):
                    yield Fp8Weight(name, scales, group, formula, shape)
