"""Read a checkpoint folder in safetensors or torch format, in one file or several."""

from __future__ import annotations

import errno
import json
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from drivetrain.errors import InvalidRequest
from drivetrain_weight_sync.tensors.checkpoint_names import unwrapped

_INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS: Final = ("*.safetensors", "pytorch_model*.bin", "*.bin")


class Checkpoint:
    """The tensors of a folder, each read when asked for.

    An index file determines which files belong to it. Without one every safetensors file does; without those every
    ``.bin`` file. ``.bin`` files are read as tensors only, so they cannot run code.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        if not path.is_dir():
            raise _refuse(folder, "is not a folder that this process can read" if path.exists() else "does not exist")
        self._files: dict[str, Callable[[str], torch.Tensor]] = {}
        self._key_in_file: dict[str, str] = {}
        for file in _files_of(path):
            for key, read in _open(file).items():
                name = unwrapped(key)
                if name in self._files:
                    raise _refuse(folder, f"holds {name} twice, the second time in {file.name}")
                self._files[name], self._key_in_file[name] = read, key

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, without wrappers' prefixes."""
        return tuple(self._files)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, on the CPU."""
        return self._files[name](self._key_in_file[name])


def require_readable(file: Path) -> None:
    """Read one byte of a regular file, to find out without the GIL whether it can be read.

    safetensors holds the GIL while it opens a file: a FIFO or a dead network mount would freeze the whole process. This
    read would block its own thread alone.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    with file.open("rb") as opened:
        opened.read(1)


def _files_of(folder: Path) -> list[Path]:
    for index in (folder / name for name in _INDEXES):
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _refuse(str(folder), f"has an index {index.name} that cannot be read: {error!r}") from error
            if outside:
                raise _refuse(str(folder), f"has an index {index.name} that names files outside it: {outside[0]!r}")
            absent = [name for name in names if not (folder / name).is_file()]
            if absent:
                raise _refuse(str(folder), f"lacks {', '.join(absent)}, which {index.name} names")
            return [folder / name for name in names]
    for pattern in _PATTERNS:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    raise _refuse(str(folder), "holds neither *.safetensors nor *.bin files")


def _open(file: Path) -> dict[str, Callable[[str], torch.Tensor]]:
    try:
        require_readable(file)
        if file.suffix == ".safetensors":
            handle = safe_open(file, framework="pt", device="cpu")
            return dict.fromkeys(handle.keys(), handle.get_tensor)  # type: ignore[no-untyped-call]
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise _refuse(str(file.parent), f"has a file {file.name} that cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise _refuse(str(file.parent), f"has a file {file.name} that is not a mapping of names to tensors")
    return dict.fromkeys(state, state.__getitem__)


def _refuse(folder: str, problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"the checkpoint folder {folder} {problem}; give a folder, readable by the engine's process, that "
        "save_pretrained or safetensors wrote",
        field="source.path",
    )
