"""The experts that tokens were routed to, packed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, repr=False)
class RoutedExperts:
    """The experts that each token of a sample, or of its prompt, was routed to.

    Tokens are sliced like a list (``experts[:8]``) and joined by ``+``. Two are equal if they hold the same ids.
    """

    layers: int = 0
    """Layers with experts; those without are left out. 0 if there are no tokens."""
    experts_per_token: int = 0
    """Experts of each token in each layer."""
    bytes_per_expert: int = 1
    """1 if all ids are below 256, else 2."""
    packed: bytes = b""
    """Ids token by token, layer by layer, as unsigned little-endian integers."""

    @classmethod
    def of(cls, experts: ArrayLike) -> RoutedExperts:
        """Pack ids of shape (tokens, layers, experts per token).

        Raises:
            ValueError: Another shape, or an id below 0 or above 65,535.
        """
        import numpy as np

        ids = np.asarray(experts)
        if not ids.size:
            return cls()
        if ids.ndim != 3 or ids.dtype.kind not in "iu":
            raise ValueError(f"experts of shape {ids.shape}, {ids.dtype}: expected integers (tokens, layers, experts)")
        least, most = int(ids.min()), int(ids.max())
        if not 0 <= least <= most < 2**16:
            raise ValueError(f"experts from {least} to {most}: expected from 0 to {2**16 - 1}")
        width = 1 if most < 2**8 else 2
        return cls(ids.shape[1], ids.shape[2], width, ids.astype(f"<u{width}").tobytes())

    @classmethod
    def join(cls, parts: Iterable[RoutedExperts]) -> RoutedExperts:
        """Put the tokens of several one after another.

        Raises:
            ValueError: They are of models with another number of layers or of experts per token.
        """
        import numpy as np

        arrays = [part.to_numpy() for part in parts if len(part)]
        return cls.of(np.concatenate(arrays)) if arrays else cls()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.packed) // (self.layers * self.experts_per_token * self.bytes_per_expert) if self.packed else 0

    def __getitem__(self, tokens: slice) -> RoutedExperts:
        """Return some of the tokens."""
        if not isinstance(tokens, slice):
            raise TypeError(f"tokens={tokens!r}: take a slice such as experts[:8], or call to_numpy()")
        return RoutedExperts.of(self.to_numpy()[tokens])

    def __add__(self, other: RoutedExperts) -> RoutedExperts:
        """Return these tokens followed by the other's."""
        return RoutedExperts.join((self, other))

    def __repr__(self) -> str:
        """Return the sizes; the ids themselves would fill pages."""
        return f"RoutedExperts(tokens={len(self)}, layers={self.layers}, experts_per_token={self.experts_per_token})"

    def to_numpy(self) -> NDArray[np.uint8 | np.uint16]:
        """Return a view of the ids, of shape (tokens, layers, experts per token)."""
        import numpy as np

        ids = np.frombuffer(self.packed, dtype=f"<u{self.bytes_per_expert}")
        found: NDArray[np.uint8 | np.uint16] = ids.reshape(len(self), self.layers, self.experts_per_token)
        return found

    def tolist(self) -> list[list[list[int]]]:
        """Return the ids as nested lists, (tokens, layers, experts per token)."""
        found: list[list[list[int]]] = self.to_numpy().tolist()
        return found
