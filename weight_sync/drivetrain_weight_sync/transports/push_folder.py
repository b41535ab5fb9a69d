"""A temporary folder for one push, removed even after its owner was killed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.errors import WeightSyncError

_PREFIX: Final = "drivetrain-weights-"


class PushFolder:
    """A new folder. Folders left beside it by killed processes are removed when the next one is made on their host.

    Args:
        directory: its parent, readable by the engine's process; None: the temporary folder.

    Raises:
        WeightSyncError: it cannot be created; no part of it is left.
    """

    def __init__(self, directory: Path | None) -> None:
        parent = Path(tempfile.gettempdir() if directory is None else directory)
        remove_orphans(parent, _PREFIX)
        with _failing(parent):
            self._folder = OwnedFolder(parent, _PREFIX)
        self.path = self._folder.path

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise errors of writing to the folder as WeightSyncError. They come before the engine gets any tensor."""
        with _failing(self.path.parent):
            yield

    def remove(self) -> None:
        """Remove the folder with its contents, or log that it stays: the push has ended, and its result stands."""
        self._folder.remove_or_leave("the folder of a weight push")


@contextmanager
def _failing(parent: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"the weights cannot be written to {parent} ({error}); nothing was changed. Make room there, or name a "
            "folder with room by directory=…"
        ) from error
