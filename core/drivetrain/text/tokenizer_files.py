"""The files of a tokenizer, for a process that does not have the model's folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from drivetrain.errors import InvalidConfig
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import EngineConfig

_SUFFIXES: Final = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt", ".vocab"})
_MOST_BYTES: Final = 1 << 28


def _source(config: EngineConfig) -> Path:
    return Path(config.tokenizer or config.model)


def is_here(config: EngineConfig) -> bool:
    """Return whether this process can load the tokenizer itself: its folder is here, or it is a hub id."""
    source = _source(config)
    return source.is_dir() or not source.is_absolute()


def read_tokenizer_files(config: EngineConfig) -> dict[str, bytes]:
    """Read the files of a tokenizer's folder that may belong to the tokenizer, by name; no weights and no code.

    Raises:
        InvalidConfig: There is no such folder, or the files are larger than 256 MiB together.
    """
    folder = _source(config)
    if not folder.is_dir():
        raise InvalidConfig(f"tokenizer: {str(folder)!r} is no folder, so its files cannot be read", field="tokenizer")
    found: dict[str, bytes] = {}
    room = _MOST_BYTES
    for file in sorted(folder.iterdir()):
        if file.suffix in _SUFFIXES and not file.name.endswith(".index.json") and file.is_file():
            room -= file.stat().st_size
            if room < 0:
                raise InvalidConfig(
                    f"the tokenizer's files in {str(folder)!r} have more than {_MOST_BYTES >> 20} MiB; set tokenizer= "
                    "to a folder of its own",
                    field="tokenizer",
                )
            found[file.name] = file.read_bytes()
    return found


def load_tokenizer(config: EngineConfig, files: dict[str, bytes]) -> Tokenizer:
    """Load a tokenizer from the contents of its files.

    Raises:
        InvalidConfig: There is no tokenizer among them, or a name is not that of a plain file.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-tokenizer-") as folder:
        for name, content in files.items():
            if Path(name).name != name or Path(name).suffix not in _SUFFIXES:
                raise InvalidConfig(f"the engine's owner sent a file of the name {name!r}", field="tokenizer")
            Path(folder, name).write_bytes(content)
        own = config.model_copy(update={"model": folder, "tokenizer": None, "trust_remote_code": False})
        return Tokenizer.load(own)
