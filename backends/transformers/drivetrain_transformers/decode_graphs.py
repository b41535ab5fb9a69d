"""CUDA graphs of decode steps: a replayed step is one launch, where transformers launches hundreds of kernels.

A graph is made of one shape: a number of rows and a range of columns of the running batch's buffers, both rounded up so
that a few graphs serve many steps. It reads the step's numbers from one tensor on the GPU, and ends with the logits.

A shape's first steps run as usual, its graph is captured after the second, and the third runs both ways: a graph whose
logits differ is thrown away, and no other is made. Graphs are dropped with the buffers and the weights that they read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from drivetrain_weight_sync.copying.waiting import WAITING

logger: Final = logging.getLogger("drivetrain.transformers")

_COLUMNS: Final = 64
"""Ranges of columns are rounded up to a multiple of this."""
_MOST_GRAPHS: Final = 16
_EAGER_STEPS: Final = 2
"""Steps of a shape before its graph is captured: shapes that pass by are not worth one."""
_TOLERATED: Final = 0.1
"""Largest difference of the logits by rounding, as a share of their norm; a wrong step changes them by more."""
_FIXED_ROPES: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose factors do not depend on the positions."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows and columns of the running batch's buffers that a step computes."""

    rows: int
    start: int
    end: int


class Batch(Protocol):
    """The running batch, as far as a step needs it: a ``RunningCache``."""

    @property
    def lengths(self) -> list[int]:
        """Tokens in each row."""
        ...

    @property
    def end(self) -> int:
        """Column of the next token."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        ...

    def shape_of_step(self) -> Shape:
        """Return the rows and columns that a step computes whose tensors are fixed."""
        ...


@dataclass(frozen=True, slots=True)
class FixedStep:
    """A step whose tensors are always the same: its numbers change in place.

    Rows of the shape that hold no sequence are computed like the others: they see their own new token alone, and write
    zeros, so that no number of theirs can reach a sequence that joins later.
    """

    shape: Shape
    numbers: torch.Tensor
    """Ids and positions of each row, the column to write, and the number of rows in use; int64, (2 * rows + 2,)."""

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> FixedStep:
        """Return a step of this shape."""
        return cls(shape, torch.zeros(2 * shape.rows + 2, dtype=torch.long, device=device))

    def set(self, ids: list[int], positions: list[int], column: int) -> None:
        """Set the next step's numbers. One row is in use for each id."""
        empty = [0] * (self.shape.rows - len(ids))
        self.numbers.copy_(torch.tensor([*ids, *empty, *positions, *empty, column, len(ids)], dtype=torch.long))

    @property
    def ids(self) -> torch.Tensor:
        """The rows' ids, shape (rows, 1)."""
        return self.numbers[: self.shape.rows, None]

    @property
    def positions(self) -> torch.Tensor:
        """The ids' positions, shape (rows, 1)."""
        return self.numbers[self.shape.rows : -2, None]

    @property
    def column(self) -> torch.Tensor:
        """The column of the new token, shape (1,)."""
        return self.numbers[-2:-1]

    @property
    def in_use(self) -> torch.Tensor:
        """True for rows that hold a sequence, shape (rows,)."""
        return torch.arange(self.shape.rows, device=self.numbers.device) < self.numbers[-1]

    def mask(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the attention mask, True where a row sees a column; shape (rows, 1, 1, columns).

        Args:
            columns: The buffers' mask of these rows and columns, 1 where a row has a token.
        """
        places = torch.arange(self.shape.start, self.shape.end, device=columns.device)
        seen = (columns == 1) & self.in_use[:, None]
        return (seen | (places == self.column))[:, None, None]

    def write(self, buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write keys or values of the new tokens; return the part of the buffer that the shape covers.

        Args:
            buffer: Shape (rows of the buffers, heads, columns of the buffers, head size).
            new: Shape (rows, heads, 1, head size).
        """
        own = buffer[: self.shape.rows]
        own.index_copy_(2, self.column, torch.where(self.in_use[:, None, None, None], new, 0).to(own.dtype))
        return own[:, :, self.shape.start : self.shape.end]


@dataclass(slots=True)
class _Graph:
    step: FixedStep
    replay: Callable[[], torch.Tensor]
    reads: list[int]
    """Addresses of the model's tensors."""
    is_checked: bool = False


Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Makes of a computation one that runs it again on the same tensors, and returns the same result tensor."""


def captured(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a computation as a CUDA graph.

    Other threads may use the GPU meanwhile, but may wait for all of it (``torch.cuda.synchronize``) only with
    :data:`~drivetrain_weight_sync.copying.waiting.WAITING`: CUDA refuses it during a capture.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()  # set-up at a first run must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with WAITING, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


class DecodeGraphs:
    """The graphs of one running batch.

    Args:
        module: The model.
        capture: Makes a graph of a computation.
    """

    def __init__(self, module: PreTrainedModel, capture: Capture = captured) -> None:
        self._tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
        self.capture = capture
        self._graphs: OrderedDict[Shape, _Graph] = OrderedDict()
        self._seen: dict[Shape, int] = {}
        self.is_off = False

    def drop(self) -> None:
        """Drop all graphs, with their memory: the buffers or the weights change."""
        self._graphs.clear()
        self._seen.clear()

    def decode(
        self,
        ids: list[int],
        cache: Batch,
        eager: Callable[[], torch.Tensor],
        fixed: Callable[[FixedStep], torch.Tensor],
    ) -> torch.Tensor:
        """Compute one token of each running row; return logits of shape (rows, vocabulary).

        Args:
            ids: Newest id of each row.
            cache: The running batch, with a column open for these ids.
            eager: Computes the same without a graph.
            fixed: Computes a fixed step on the batch; returns logits of shape (the step's rows, vocabulary).
        """
        if self.is_off:
            return eager()
        shape = cache.shape_of_step()
        graph = self._graphs.get(shape)
        if graph is not None and graph.reads != self._addresses():
            self.drop()
            graph = None
        if graph is None:
            logits = eager()
            self._count(shape, ids, cache, fixed)
            return logits
        self._graphs.move_to_end(shape)
        graph.step.set(ids, cache.lengths, cache.end)
        if graph.is_checked:
            return graph.replay()[: len(ids)]
        found = graph.replay()[: len(ids)].clone()
        wanted = eager()
        self._check(found, wanted, graph)
        return wanted

    def _count(self, shape: Shape, ids: list[int], cache: Batch, fixed: Callable[[FixedStep], torch.Tensor]) -> None:
        """Count a shape's step; capture its graph if it was the last one to run without."""
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] < _EAGER_STEPS:
            return
        step = FixedStep.of(shape, cache.device)
        step.set(ids, cache.lengths, cache.end)
        try:
            replay = self.capture(lambda: fixed(step))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, IndexError) as error:
            # The step can be computed, but transformers or the free memory does not allow a graph.
            self._give_up(f"a decode step cannot be captured as a CUDA graph: {type(error).__name__}: {error}")
            return
        self._graphs[shape] = _Graph(step, replay, self._addresses())
        if len(self._graphs) > _MOST_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            del self._seen[oldest]

    def _check(self, found: torch.Tensor, wanted: torch.Tensor, graph: _Graph) -> None:
        finite = wanted.isfinite().all(-1)
        if not bool(finite.any()):
            return  # no row has logits that can be compared: the next step tries again
        found, wanted = found[finite].float(), wanted[finite].float()
        difference = float((found - wanted).norm() / wanted.norm())
        if difference <= _TOLERATED:
            graph.is_checked = True
        else:
            self._give_up(f"a decode step's CUDA graph gives other logits, by {difference:.2g} of their norm")

    def _give_up(self, reason: str) -> None:
        logger.warning("%s; steps run without graphs from here on, which takes more time for small batches", reason)
        self.is_off = True
        self.drop()

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]


def can_be_fixed(module: PreTrainedModel) -> bool:
    """Return whether a model's step depends on nothing but ids, positions, a mask and the cache's tensors."""
    config = module.config.get_text_config(decoder=True)
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=module.config).layers)
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {ropes.get("rope_type", "default")} if isinstance(ropes, dict) else {None}
    return plain and config._attn_implementation == "sdpa" and kinds <= _FIXED_ROPES and _has_no_window(config)


def _has_no_window(config: object) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "attention_chunk_size", None) is None


def rows_of_step(rows: int, capacity: int) -> int:
    """Return the number of rows that a step of ``rows`` computes: the next multiple of an eighth of it, or of 8."""
    multiple = max(8, 1 << max(0, rows.bit_length() - 4)) if rows > 4 else 1
    return min(capacity, -(-rows // multiple) * multiple)


def columns_of_step(start: int, end: int, capacity: int) -> tuple[int, int]:
    """Return the range of columns that a step computes which sees columns ``start`` to ``end``, the latter excluded."""
    return start // _COLUMNS * _COLUMNS, min(capacity, -(-end // _COLUMNS) * _COLUMNS)
