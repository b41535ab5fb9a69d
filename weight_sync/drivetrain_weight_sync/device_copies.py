# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportArgumentType=false
"""Many copies within a GPU as one kernel, with the digest of each tensor computed on the way.

A push of a model is hundreds of copies of a few megabytes. Launched one by one they cost 20 µs each of the host's time,
more than the copying itself; and a digest that reads again what was written costs as much as the copy. Here one launch
makes all of them, from a table of addresses, and adds up the same digests as :mod:`drivetrain_weight_sync.digest`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch

from drivetrain_weight_sync.digest import COLUMNS, finished, weights_on

ROWS: Final = 16
"""Rows of 1024 words of 64 bits that one program of the kernel copies: 128 KiB."""
_ROW_BYTES: Final = 8 * COLUMNS
_FIELDS: Final = 5


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """One tensor to digest, and where to copy it to."""

    source: torch.Tensor
    destination: torch.Tensor | None = None
    """Of the same bytes; None: only the digest is wanted."""
    name: str | None = None
    """By which the digest of the source is given; None: it is not wanted."""


def is_available() -> bool:
    """Whether Triton is there, which the kernel is written in. Nothing is imported."""
    return find_spec("triton") is not None


def fits(copy: DeviceCopy) -> bool:
    """Whether the kernel makes this copy: between contiguous tensors of whole words of 64 bits, on one device."""
    tensors = [copy.source] if copy.destination is None else [copy.source, copy.destination]
    return (
        len({(tensor.dtype, tensor.nbytes, tensor.device) for tensor in tensors}) == 1
        and all(tensor.is_contiguous() and tensor.data_ptr() % 8 == 0 for tensor in tensors)
        and copy.source.nbytes % 8 == 0
        and copy.source.nbytes > 0
    )


class DeviceCopies:
    """Copies that are made together, again and again; the tensors stay where they are.

    Args:
        copies: Each of which :func:`fits`, on one device, no two of one name. A destination is not another's source.
    """

    def __init__(self, copies: Iterable[DeviceCopy]) -> None:
        self._copies = list(copies)
        self._digested: dict[str, torch.Tensor] = {}
        items: list[torch.Tensor] = []
        for copy in self._copies:
            items.append(_items(copy, len(self._digested) if copy.name is not None else -1))
            if copy.name is not None:
                self._digested[copy.name] = copy.source
        self.device = self._copies[0].source.device
        self._table = torch.cat(items).to(self.device)
        # The kernel reads the weights of all rows of its last item, also of those that are not there.
        self._most_rows = max(-(-copy.source.nbytes // _ROW_BYTES) for copy in self._copies) + ROWS

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return sum(copy.destination.nbytes for copy in self._copies if copy.destination is not None)

    @torch.no_grad()
    def launch(self) -> torch.Tensor:
        """Make the copies; return what :meth:`digests` wants. The work goes on after this returns."""
        from drivetrain_weight_sync.device_kernel import copy_and_fold

        weights = weights_on(self.device)
        sums = torch.zeros(max(len(self._digested), 1), dtype=torch.int64, device=self.device)
        copy_and_fold[(len(self._table),)](
            self._table,
            weights.a,
            weights.b,
            weights.per_row(self._most_rows),
            sums,
            COLUMNS=COLUMNS,
            ROWS=ROWS,
        )
        return sums

    def digests(self, sums: torch.Tensor) -> Mapping[str, int]:
        """The digest of each tensor, by name, as :func:`drivetrain_weight_sync.digest.digests` gives it.

        Args:
            sums: What :meth:`launch` returned; this waits for its work.
        """
        values = zip(self._digested.items(), sums.tolist()[: len(self._digested)], strict=True)
        return {name: finished(value, source) for (name, source), value in values}


def _items(copy: DeviceCopy, index: int) -> torch.Tensor:
    """Addresses of source and destination, number of words, first row, and whose digest: int64 ``[items, 5]``."""
    words = copy.source.nbytes // 8
    rows = torch.arange(0, -(-words // COLUMNS), ROWS, dtype=torch.int64)
    items = torch.empty(len(rows), _FIELDS, dtype=torch.int64)
    items[:, 0] = copy.source.data_ptr() + rows * _ROW_BYTES
    items[:, 1] = 0 if copy.destination is None else copy.destination.data_ptr() + rows * _ROW_BYTES
    items[:, 2] = (words - rows * COLUMNS).clamp(max=ROWS * COLUMNS)
    items[:, 3] = rows
    items[:, 4] = index
    return items
