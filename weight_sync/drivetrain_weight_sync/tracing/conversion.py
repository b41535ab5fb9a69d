"""Fill layers that an engine quantises from tensors at stable addresses, and convert them, in one CUDA graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from drivetrain_weight_sync.copying.device_copies import DeviceCopies, DeviceCopy, Launched, captured, page_locked
from drivetrain_weight_sync.copying.waiting import wait_for
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts

_log = logging.getLogger(__name__)


class Conversion:
    """Layers that are filled and converted again and again while the tensors keep their addresses.

    Each tensor is read once from the sender's memory: one kernel copies it to memory that all layers share in turn, and
    digests it. The engine's own code converts that copy, which mostly lies in the GPU's cache.

    Args:
        parts: Converts the layers.
        copies: For each layer, the copies that fill it, as :class:`DeviceCopies` takes them.
        memory: Bytes in which the copies' destinations lie.
    """

    def __init__(
        self, parts: QuantisedParts, copies: Mapping[nn.Module, Sequence[DeviceCopy]], memory: torch.Tensor
    ) -> None:
        self._parts = parts
        self._memory = memory
        digests = [sum(copy.name is not None for copy in of_part) for of_part in copies.values()]
        # At even places: Triton compiles a variant of the kernel for addresses that are no multiples of 16 bytes.
        places = [many + many % 2 for many in digests]
        self._found = torch.zeros(2, sum(places), dtype=torch.int64, device=memory.device)
        parts_found = torch.split(self._found, places, dim=1)
        self._filled = {
            part: DeviceCopies(of_part, found=found)
            for (part, of_part), found in zip(copies.items(), parts_found, strict=True)
        }
        begins = np.cumsum(places) - places
        taken = np.concatenate([begin + np.arange(many) for begin, many in zip(begins, digests, strict=True)])
        self._taken = torch.from_numpy(taken).to(memory.device)
        self._sums = torch.zeros(2, len(taken), dtype=torch.int64, device=memory.device)
        self._result = page_locked(self._sums)
        self._order = [name for batch in self._filled.values() for name in batch.order]
        self._ends = np.concatenate([batch.ends for batch in self._filled.values()])
        self.names: frozenset[str] = frozenset(self._order)
        """Tensors that are copied and digested."""
        self._launches = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_captured = memory.is_cuda
        """True if a graph is captured at the second launch."""

    @torch.no_grad()
    def launch(self) -> Launched:
        """Fill and convert all layers; return the digests of what was copied.

        From the second launch on, a CUDA graph is replayed, unless the engine's code waits for the GPU.
        """
        self._launches += 1
        if self._launches == 1:
            # A capture that fails leaves torch's allocator in disorder, so look first for what makes it fail.
            waits = _waits_in(self._enqueue) if self._is_captured else ()
            if waits:
                _log.warning(
                    "the engine waits for the GPU while it converts weights, so no graph is made: %s", waits[0]
                )
                self._is_captured = False
            elif not self._is_captured:
                self._enqueue()
        else:
            self._replay()
        return Launched(self._order, self.names, self._ends, self._result, self._memory.device)

    def _replay(self) -> None:
        if self._is_captured and self._graph is None:
            try:
                self._graph = captured(self._memory.device, self._enqueue)
            except Exception as error:
                _log.warning("the engine's conversion of weights cannot be captured, so no graph is made: %s", error)
                self._is_captured = False
                wait_for(self._memory.device)
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.replay()

    def _enqueue(self) -> None:
        self._found.zero_()
        with _numbers_on_device():
            for part, batch in self._filled.items():
                with self._parts.anew(part, self._memory):
                    batch.enqueue()
        torch.index_select(self._found, 1, self._taken, out=self._sums)
        if self._result is not self._sums:
            self._result.copy_(self._sums, non_blocking=True)


@contextmanager
def _numbers_on_device() -> Iterator[None]:
    """Make tensors of single numbers where they are asked for, instead of copying them there and waiting.

    A mode of torch's functions would do it for this thread alone, but torch's compiler does not trace through one.
    """
    usual = torch.tensor

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and type(data) in (int, float):
            return torch.full((), data, **kwargs)
        return usual(data, **kwargs)

    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = usual


def _waits_in(enqueue: Callable[[], object]) -> Sequence[str]:
    """Run a function, and return where it waited for the GPU."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            enqueue()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing CUDA" in str(one.message)]
