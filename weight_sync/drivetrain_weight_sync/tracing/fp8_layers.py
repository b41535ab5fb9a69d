"""Recognise layers that an engine quantises to fp8, so that one kernel can quantise them in place.

The engine's own code converts layers filled with made-up weights, and a formula is sought that gives the same bits.
Then the layer is filled as a push fills it, from tensors of its checkpoint's form, by the kernels of a push. A layer
for which none is found keeps being converted by the engine's code. This happens before an update begins.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from drivetrain.errors import WeightSyncError
from drivetrain_weight_sync.copying.device_copies import DeviceCopy
from drivetrain_weight_sync.copying.fp8_copies import Fp8Copies, Fp8Piece, fits
from drivetrain_weight_sync.copying.fp8_formulas import PER_ROW, PER_TENSOR, Formula, Group, formulas
from drivetrain_weight_sync.tensors.storages import storage_of
from drivetrain_weight_sync.tracing.conversion import Conversion
from drivetrain_weight_sync.tracing.loader_trace import Copy
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts, Replaced, Trial, device_of

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
"""A layer so small that it needs more trials shows no formula."""
_SPREAD: Final = 0.02
"""Standard deviation of made-up weights."""
_APART: Final = 16
"""Bytes by which made-up tensors begin after each other in one memory; kernels read 8 or 16 bytes at once."""

MakesCopies = Callable[[str, torch.Tensor, Sequence[Copy]], list[DeviceCopy]]
"""Returns the copies of a tensor to given destinations, which also digest it; empty if no kernel can make them."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The quantisation of one parameter, found by trials."""

    parameter: str
    scales: str
    """Parameter of its scales."""
    group: Group
    formula: Formula
    shape: tuple[int, int, int]
    """Matrices, rows and columns."""


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """An engine's conversion of a loaded layer: which parameters it quantises, and which it keeps as they are."""

    weights: Mapping[str, Fp8Weight]
    plain: frozenset[str]

    def pieces(
        self,
        parts: QuantisedParts,
        tensors: Mapping[str, tuple[torch.Tensor, Sequence[Copy]]],
        into: Mapping[str, torch.Tensor],
        make_copies: MakesCopies,
    ) -> tuple[list[Fp8Piece], list[DeviceCopy]] | None:
        """Return pieces and copies that fill the layer from pushed tensors and digest these; None if no kernel can.

        Args:
            parts: Tells to which parameter a copy belongs.
            tensors: For each pushed tensor's name: the tensor, and its copies into the recorded form.
            into: The layer's own parameters.
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
            if _is_digested(own[0].group, tensor, ways):
                own = [replace(own[0], name=name)]
            else:
                copies.append(DeviceCopy(tensor, name=name))
            pieces += own
        if any(covered[name] != math.prod(weight.shape) for name, weight in self.weights.items()):
            return None
        return (pieces, copies) if all(map(fits, pieces)) else None


def _is_digested(group: Group, tensor: torch.Tensor, ways: Sequence[Copy]) -> bool:
    """Return whether the kernel digests a tensor, a whole matrix, on the way; digested apart, blocks take less time."""
    is_matrix = len(ways) == 1 and len(ways[0].size) == 2 and math.prod(ways[0].size) == tensor.numel()
    return is_matrix and group.columns is None


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
    """Return the scales as ``[matrices, groups along rows, groups along columns]``; None if their layout is another."""
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
    """Finds out how layers are quantised, in memory of its own and in steps between which the engine can serve.

    Args:
        parts: The layers that the engine converts.
        tensors: For each layer, its checkpoint tensors: a tensor of that form, and its copies into the recorded form.
        make_copies: Makes the copies of parameters that are not quantised.
    """

    def __init__(
        self,
        parts: QuantisedParts,
        tensors: Mapping[nn.Module, Mapping[str, tuple[torch.Tensor, Sequence[Copy]]]],
        make_copies: MakesCopies,
    ) -> None:
        self.known: dict[nn.Module, Fp8Layer] = {}
        """Layers whose quantisation was found."""
        self._parts = parts
        self._tensors = tensors
        self._make_copies = make_copies
        # The smallest layer of a kind shows the formula in many trials, which others confirm in two.
        self._pending = deque(sorted(tensors, key=parts.nbytes))
        self._formulas: dict[Hashable, Formula | None] = {}
        """By class of quantisation and group; None: no known one."""
        self._steps: Iterator[None] | None = None

    @torch.no_grad()
    def find(self, seconds: float) -> bool:
        """Go on for about this long; return True once no more can be found now.

        If memory ran out, the next call goes on where it did.
        """
        ends = time.perf_counter() + seconds
        self._steps = self._steps or self._find()
        for _ in self._steps:
            if time.perf_counter() > ends:
                return False
        self._steps = None
        return True

    def _find(self) -> Iterator[None]:
        found: Counter[str] = Counter()
        while self._pending:
            part = self._pending[0]
            layer: Fp8Layer | None = None
            try:
                layer = yield from self._recognised(part)
            except torch.OutOfMemoryError as error:
                _log.warning("no memory to find out how %s is quantised before this update: %s", _kind(part), error)
                break
            except Exception as error:
                # No weights were touched, and the engine's own code can still convert the layer.
                _log.warning("how %s is quantised was not found out: %r", _kind(part), error)
            found[f"{_kind(part)}: {layer or 'converted by the code of the engine'}"] += 1
            if layer is not None:
                self.known[part] = layer
            self._pending.popleft()
            yield  # the engine may have hundreds of layers, most of which only confirm a known formula
        for text, many in found.items():
            _log.info("%d x %s", many, text)
        if found or self._pending:
            torch.cuda.empty_cache()  # a trainer beside the engine may need it

    def _recognised(self, part: nn.Module) -> Generator[None, None, Fp8Layer | None]:
        live, form = _own(part), self._parts.form_of(part)
        plain: set[str] = set()
        weights: dict[str, Fp8Weight] = {}
        ways = [way for _, some in self._tensors[part].values() for way in some]
        for name in dict.fromkeys(self._parts.parameter_of(way.destination) for way in ways):
            own, recorded = live.get(name), form[name]
            if own is None:
                return None
            if (own.dtype, own.shape, own.stride()) == (recorded.dtype, recorded.shape, recorded.stride()):
                plain.add(name)
                continue
            for weight in _candidates(name, recorded, live):
                formula = yield from self._formula(part, weight)
                if formula is not None:
                    weights[name] = replace(weight, formula=formula)
                    break
            else:
                return None
        layer = Fp8Layer(weights, frozenset(plain))
        return layer if weights and self._is_confirmed(part, layer) else None

    def _formula(self, part: nn.Module, weight: Fp8Weight) -> Generator[None, None, Formula | None]:
        """Find the formula that gives the engine's bits in all trials."""
        key = type(getattr(part, "quant_method", None)), weight.group
        if key not in self._formulas and (trials := _trials(weight)) <= _MOST_TRIALS:
            for formula in formulas(weight.group):
                for trial in range(trials):
                    is_right = self._is_right(part, replace(weight, formula=formula), trial)
                    yield
                    if not is_right:
                        break
                else:
                    self._formulas[key] = formula
                    break
            else:
                self._formulas[key] = None
        return self._formulas.get(key)

    @contextmanager
    def _tried(self, part: nn.Module) -> Iterator[tuple[Mapping[str, torch.Tensor], Trial]]:
        memory = torch.empty(self._parts.nbytes(part), dtype=torch.uint8, device=device_of(part))
        with self._parts.tried(part, memory) as tried:
            yield tried

    def _is_right(self, part: nn.Module, weight: Fp8Weight, trial: int) -> bool:
        live = _own(part)
        with self._tried(part) as (held, convert):
            _fill(held[weight.parameter].data.view(-1, weight.shape[-1]), weight, trial)
            quantised = self._quantised(part, weight, held, live)
            made, _ = convert()
            return all(is_same(made[name], one) for name, one in quantised.items())

    def _is_confirmed(self, part: nn.Module, layer: Fp8Layer) -> bool:
        """Return whether a push gives the engine's bits, and a conversion changes nothing but what pushes fill.

        Two pushes, from tensors at even and at odd multiples of eight bytes, for which other kernels are compiled.
        """
        live = _own(part)
        seen: list[dict[Hashable, object]] = []
        for trial in range(2):
            with self._tried(part) as (held, convert):
                pushed = self._made_up(part, trial)
                for tensor, ways in pushed.values():
                    for way in ways:
                        _part(held[self._parts.parameter_of(way.destination)], way).copy_(way.part_of(tensor))
                wanted = self._pushed(part, layer, pushed, held, live)
                if wanted is None:
                    return False
                made, replaced = convert()
                rest = made.keys() - wanted.keys()
                if (
                    not all(is_same(made[name], one) for name, one in wanted.items())
                    # Sleep loses other parameters, unless the engine's code makes them again.
                    or any(made[name] is not live.get(name) for name in rest)
                    or any(old != leaf for leaf, old in _aliases(replaced, made, live))
                ):
                    return False
                seen.append(dict(_leaves(replaced, made)))
        one, other = seen
        return one.keys() == other.keys() and all(_equal(one[path], other[path]) for path in one)

    def _made_up(self, part: nn.Module, trial: int) -> dict[str, tuple[torch.Tensor, Sequence[Copy]]]:
        """Return made-up checkpoint tensors of a layer with their copies into the recorded form.

        They share the memory of the largest, but no two are alike. In every other trial they lie at odd multiples of
        eight bytes.
        """
        tensors = self._tensors[part]
        before = trial % 2 * _APART // 2
        nbytes = max(tensor.nbytes for tensor, _ in tensors.values()) + _APART * len(tensors) + before
        drawn = torch.Generator(device_of(part)).manual_seed(trial)
        memory = torch.empty(-(-nbytes // 2), dtype=torch.bfloat16, device=device_of(part))
        raw = memory.normal_(0, _SPREAD, generator=drawn).view(torch.uint8)
        begins = range(before, before + _APART * len(tensors), _APART)
        return {
            name: (raw[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape), ways)
            for begin, (name, (tensor, ways)) in zip(begins, tensors.items(), strict=True)
        }

    def _pushed(
        self,
        part: nn.Module,
        layer: Fp8Layer,
        pushed: Mapping[str, tuple[torch.Tensor, Sequence[Copy]]],
        held: Mapping[str, torch.Tensor],
        live: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor] | None:
        """Fill a layer, in memory of its own, as a push of these tensors does; return the parameters that this fills.

        None: no kernel can.
        """
        into = {name: held[name].data.clone() for name in layer.plain}
        for _, ways in pushed.values():
            for way in ways:
                if (own := into.get(self._parts.parameter_of(way.destination))) is not None:
                    _part(own, way).zero_()  # the copy is seen to be made
        for weight in layer.weights.values():
            into |= {name: like(live[name]) for name in (weight.parameter, weight.scales)}
        made = layer.pieces(self._parts, pushed, into, self._make_copies)
        if made is None:
            return None
        nothing = torch.empty(0, dtype=torch.uint8, device=device_of(part))
        Conversion(self._parts, {}, nothing, made[0], made[1]).launch()
        return into

    def _quantised(
        self, part: nn.Module, weight: Fp8Weight, held: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Quantise a whole filled weight to memory of its own."""
        recorded = self._parts.form_of(part)[weight.parameter]
        whole = Copy(recorded, tuple(recorded.shape), recorded.stride(), 0)
        into = {name: like(live[name]) for name in (weight.parameter, weight.scales)}
        pieces = _pieces(weight, held[weight.parameter].data, whole, into)
        if pieces is None or not all(map(fits, pieces)):
            raise WeightSyncError(f"no kernel quantises {tuple(recorded.shape)} in this form")
        # Compile no kernel that pushes do not launch.
        if any(
            _is_digested(weight.group, tensor, ways)
            for tensor, ways in self._tensors[part].values()
            if any(self._parts.parameter_of(way.destination) == weight.parameter for way in ways)
        ):
            pieces = [replace(piece, name=str(number)) for number, piece in enumerate(pieces)]
        Fp8Copies(pieces).enqueue()
        return into


def _kind(part: nn.Module) -> str:
    return type(part).__name__


def _own(part: nn.Module) -> dict[str, torch.Tensor]:
    return {name: own for name, own in part._parameters.items() if own is not None}


def _sizes(weight: Fp8Weight) -> tuple[int, int]:
    """Return the rows and columns of a whole group."""
    _, rows, columns = weight.shape
    return min(weight.group.rows or rows, rows), min(weight.group.columns or columns, columns)


def _needed(weight: Fp8Weight) -> tuple[int, int]:
    """Return how many groups show all pairs of mantissas, and how many share one largest mantissa."""
    shared_by = -(-_MANTISSAS * _EXPONENTS // max(math.prod(_sizes(weight)) - 1, 1))
    return _MANTISSAS * shared_by, shared_by


def _trials(weight: Fp8Weight) -> int:
    return -(-(_needed(weight)[0] + _UNUSUAL_GROUPS) // _count_whole_groups(weight))


def _count_whole_groups(weight: Fp8Weight) -> int:
    matrices, rows, columns = weight.shape
    high, wide = _sizes(weight)
    return matrices * (rows // high) * (columns // wide)


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
    matrix.normal_(0, 0.0 if weight.group == PER_TENSOR else _SPREAD, generator=source)
    needed, shared_by = _needed(weight)
    high, wide = _sizes(weight)
    mantissas = 1 + torch.arange(_MANTISSAS) / _MANTISSAS
    others = (mantissas[:, None] * 2.0 ** -torch.arange(_EXPONENTS)).flatten()
    # Unusual magnitudes first: most wrong formulas show there.
    first = trial * _count_whole_groups(weight) - _UNUSUAL_GROUPS
    for number, (rows, columns) in enumerate(_whole_groups(weight), first):
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
    """Yield the forms in which a parameter may be quantised, with any formula."""
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
                yield Fp8Weight(name, scales, group, formulas(group)[0], shape)
