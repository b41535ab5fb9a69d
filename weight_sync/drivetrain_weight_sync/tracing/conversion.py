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
from drivetrain_weight_sync.copying.fp8_copies import Fp8Copies, Fp8Piece
from drivetrain_weight_sync.copying.waiting import wait_for
from drivetrain_weight_sync.tracing.quantised_parts import QuantisedParts

_log = logging.getLogger(__name__)


class Conversion:
    """Layers that are filled and converted again and again while the tensors keep their addresses.

    Each tensor is read from the sender's memory and digested on the way. A layer whose quantisation is known is
    quantised from there in place. For others, one kernel copies the tensors to memory that all layers share in turn,
    and the engine's own code converts that copy, which mostly lies in the GPU's cache.

    Args:
        parts: Converts the layers.
        copies: For each layer that the engine converts, the copies that fill it, as :class:`DeviceCopies` takes them.
        memory: Bytes in which these copies' destinations lie.
        pieces: Pieces of layers that are quantised in place.
        plain: Copies into other parameters of these layers.
    """

    def __init__(
        self,
        parts: QuantisedParts,
        copies: Mapping[nn.Module, Sequence[DeviceCopy]],
        memory: torch.Tensor,
        pieces: Sequence[Fp8Piece] = (),
        plain: Sequence[DeviceCopy] = (),
    ) -> None:
        self._parts = parts
        self._memory = memory
        self._device = memory.device
        self._launches = 0
        self._loaded: dict[nn.Module, dict[str, torch.Tensor]] = {}
        """Kept parts as this launch loaded them. A graph keeps those of its capture, and fills them at each launch."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_captured = memory.is_cuda
        """True if a graph is captured at the second launch."""
        batches: list[Sequence[DeviceCopy] | Sequence[Fp8Piece]] = [*copies.values(), plain, pieces]
        digests = [sum(one.name is not None for one in batch) for batch in batches]
        # At even places: Triton compiles a variant of the kernel for addresses that are no multiples of 16 bytes.
        places = [many + many % 2 for many in digests]
        self._found = torch.zeros(2, max(sum(places), 1), dtype=torch.int64, device=self._device)
        found = [self._found[:, end - many : end] for many, end in zip(places, np.cumsum(places), strict=True)]
        self._filled = {
            part: DeviceCopies(of_part, found=sums)
            for (part, of_part), sums in zip(copies.items(), found, strict=False)
        }
        self._plain = DeviceCopies(plain, found=found[-2]) if plain else None
        self._quantised = Fp8Copies(pieces, found=found[-1]) if pieces else None
        made = [*self._filled.values(), self._plain, self._quantised]
        begins = np.cumsum(places) - places
        taken = np.concatenate([begin + np.arange(many) for begin, many in zip(begins, digests, strict=True)])
        self._taken = torch.from_numpy(taken.astype(np.int64)).to(self._device)
        self._sums = torch.zeros(2, len(taken), dtype=torch.int64, device=self._device)
        self._result = page_locked(self._sums)
        self._order = [name for batch in made if batch is not None for name in batch.order]
        self._ends = np.concatenate([batch.ends for batch in made if batch is not None])
        self.names = frozenset(self._order)
        """Tensors that are copied and digested."""

    @torch.no_grad()
    def launch(self) -> Launched:
        """Fill and convert all layers; return the digests of the copied tensors.

        From the second launch on a CUDA graph is replayed, unless the engine's code waits for the GPU.
        """
        self._launches += 1
        if self._launches > 1:
            self._replay()
        elif self._is_captured and self._filled:
            # A capture that fails leaves torch's allocator in disorder, so look first for what makes it fail.
            waits = _waits_in(self._enqueue)
            if waits:
                _log.warning(
                    "the engine waits for the GPU while it converts weights, so no graph is made: %s", waits[0]
                )
                self._is_captured = False
        else:
            self._enqueue()
        self._parts.loaded |= self._loaded
        if self._graph is None:
            self._loaded = {}  # the next launch makes others
        return Launched(self._order, self.names, self._ends, self._result, self._device)

    def _replay(self) -> None:
        if self._is_captured and self._graph is None:
            try:
                self._graph = captured(self._device, self._enqueue)
            except Exception as error:
                _log.warning("the engine's conversion of weights cannot be captured, so no graph is made: %s", error)
                self._is_captured = False
                wait_for(self._device)
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.replay()

    def _enqueue(self) -> None:
        self._found.zero_()
        if self._plain is not None:
            self._plain.enqueue()
        if self._quantised is not None:
            self._quantised.enqueue()
        if self._filled:
            with _numbers_on_device():
                for part, batch in self._filled.items():
                    with self._parts.anew(part, self._memory):
                        batch.enqueue()
            self._loaded = {part: self._parts.loaded[part] for part in self._filled if part in self._parts.kept}
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
