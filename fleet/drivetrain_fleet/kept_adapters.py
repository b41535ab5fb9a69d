"""Keep the folders of pushed LoRA adapters, so that an engine that joins later can load them."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Final

from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans

logger = logging.getLogger("drivetrain.fleet")

_PREFIX: Final = "drivetrain-adapter-"
_ADAPTER: Final = "adapter"


class KeptAdapters:
    """One folder per adapter name: hard links to the pushed files, or copies where the file system has no links.

    The pusher, such as ``LoraSync``, removes its own folder. The kept one lies beside it, so that the same engines can
    read it. If the fleet's process is killed, the next fleet that keeps an adapter there removes it.
    """

    def __init__(self) -> None:
        self._folders: dict[str, OwnedFolder] = {}

    def keep(self, name: str, path: str) -> str:
        """Keep an adapter in place of the earlier one of this name; return its folder, or ``path`` if it is not local.

        Called after the engines have loaded the new adapter, so none needs the earlier folder.
        """
        kept: OwnedFolder | None = None
        if os.path.isdir(path):
            beside = Path(path).absolute().parent
            remove_orphans(beside, _PREFIX)
            try:
                kept = OwnedFolder(beside, _PREFIX)
                shutil.copytree(path, kept.path / _ADAPTER, copy_function=_link)
            except OSError as error:
                logger.warning("the adapter %r is not kept for engines that join: %s", name, error)
                if kept is not None:
                    kept.remove_or_leave("a part of a fleet's copy of an adapter")
                    kept = None
        self.drop(name)
        if kept is None:
            return path
        self._folders[name] = kept
        return str(kept.path / _ADAPTER)

    def drop(self, name: str) -> None:
        """Remove the folder of an adapter, if it is kept."""
        folder = self._folders.pop(name, None)
        if folder is not None:
            folder.remove_or_leave("a fleet's copy of an adapter")

    def close(self) -> None:
        """Remove every folder."""
        for name in list(self._folders):
            self.drop(name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
