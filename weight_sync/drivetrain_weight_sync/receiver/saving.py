"""Save an engine's weights as a model folder: sharded safetensors beside the original folder's other files."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.errors import DrivetrainError, EngineBusy, EngineInternalError, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain_weight_sync.receiver.weight_target import WeightTarget
from drivetrain_weight_sync.tensors.dtypes import nbytes_of
from drivetrain_weight_sync.transports.threads import in_thread

SHARD_BYTES: Final = 5 * 10**9
"""Largest file in bytes, unless a single tensor is larger. Writing takes as much host memory."""
INDEX: Final = "model.safetensors.index.json"

_CONFIG: Final = "config.json"
_KEPT: Final = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".py"})
"""Suffixes of files copied from the model's folder: configurations, tokenizers, chat templates, code."""
_POLL_S: Final = 0.05
_STAGED: Final = "drivetrain-saving-"

Write = Callable[[Path], Awaitable[object]]
"""Starts to write the weights into a folder, and raises EngineBusy until all are written."""


# Writing the weights, in the worker ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writing:
    folder: Path
    thread: threading.Thread | None = None
    stopped: bool = False
    errors: list[Exception] = field(default_factory=list)


class WeightWriter:
    """Writes the weights of ``target`` in a separate thread, so that the worker can continue.

    Args:
        target: The model. Call :meth:`stop` before changing its weights.
        shard_bytes: Largest file.
    """

    def __init__(self, target: WeightTarget, shard_bytes: int = SHARD_BYTES) -> None:
        self._target = target
        self._shard_bytes = shard_bytes
        self._reading = threading.Lock()
        self._writing: _Writing | None = None

    def write(self, folder: Path) -> None:
        """Write shards and index into ``folder`` without waiting; call again until it no longer raises EngineBusy.

        Removing the folder cancels the write.

        Raises:
            EngineBusy: it is still writing.
            EngineStateError: memory of the weights was given back.
            EngineInternalError: the weights could not be written, or changed meanwhile.
        """
        writing = self._writing
        if writing is None:
            self._target.check_ready()
            writing = self._writing = _Writing(folder)
            shards = self._shards()
            writing.thread = threading.Thread(
                target=self._run, args=(writing, shards), name="drivetrain-writes-weights", daemon=True
            )
            writing.thread.start()
        assert writing.thread is not None
        if writing.thread.is_alive():
            raise EngineBusy(f"the weights are still being written to {writing.folder}")
        self._writing = None
        if writing.folder != folder:  # the caller that named the other folder is gone
            self.write(folder)
        elif writing.errors:
            raise writing.errors[0]

    def stop(self) -> None:
        """Cancel a write under way and read no further tensor. Waits for at most one tensor's copy."""
        writing = self._writing
        if writing is not None:
            writing.stopped = True
            with self._reading:
                pass

    def _shards(self) -> dict[str, list[str]]:
        specs = {spec.name: spec for spec in self._target.manifest().tensors}
        split = split_state_dict_into_shards_factory(
            specs,
            get_storage_size=nbytes_of,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=self._shard_bytes,
        )
        return split.filename_to_tensors

    def _run(self, writing: _Writing, shards: dict[str, list[str]]) -> None:
        try:
            total = 0
            for file, names in shards.items():
                tensors = {name: self._copy(writing, name) for name in names}
                total += sum(tensor.nbytes for tensor in tensors.values())
                save_file(tensors, writing.folder / file, metadata={"format": "pt"})
            places = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (writing.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        except DrivetrainError as error:
            writing.errors.append(error)
        except Exception as error:
            failed = EngineInternalError(f"the weights could not be written: {type(error).__name__}: {error}")
            failed.__cause__ = error
            writing.errors.append(failed)

    @torch.no_grad()
    def _copy(self, writing: _Writing, name: str) -> torch.Tensor:
        if not writing.folder.is_dir():
            raise FileNotFoundError(f"{writing.folder} was removed")
        with self._reading:
            if writing.stopped:
                raise EngineInternalError("saving was cancelled, as the weights were about to change; save them again")
            # A copy: safetensors refuses tensors that share memory, and pins the storages that it reads.
            tensor = self._target.read(name)
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


# Files beside the weights ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Configuration, tokenizer and code files of a model's folder."""

    model: str
    """Folder or hub id."""
    revision: str | None
    dtype: str
    """Dtype of the served weights, such as ``"bfloat16"``, for the saved configuration."""

    def copy_into(self, folder: Path) -> None:
        """Copy every file except weights; for a hub model, those that were downloaded."""
        for file in self._folder().iterdir():
            if file.is_file() and file.suffix in _KEPT and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        path = folder / _CONFIG
        path.write_text(json.dumps(self._of_served_dtype(json.loads(path.read_text())), indent=2) + "\n")

    def _folder(self) -> Path:
        if Path(self.model).is_dir():
            return Path(self.model)
        from transformers.utils.hub import cached_file

        config = cached_file(self.model, _CONFIG, revision=self.revision, local_files_only=True)
        if config is None:
            raise FileNotFoundError(f"{_CONFIG} of {self.model} no longer exists")
        return Path(config).parent

    def _of_served_dtype(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with this dtype wherever it, or a nested configuration, names one."""
        return {
            key: self.dtype
            if key in ("dtype", "torch_dtype") and isinstance(value, str)
            else self._of_served_dtype(value)
            if isinstance(value, dict)
            else value
            for key, value in config.items()
        }


# Saving to a folder or URL ----------------------------------------------------------------------------------------


async def save_sharded(path: str, files: ModelFiles, write: Write, *, named: str = "path") -> None:
    """Save a model to a new or empty folder, which appears only once it is complete.

    Args:
        path: Absolute path of the folder; missing parents are created.
        files: The files beside the weights.
        write: Writes the weights; called again while it raises EngineBusy.
        named: The field that errors name.

    Raises:
        InvalidRequest: the folder cannot be created; nothing was written.
        EngineInternalError: writing failed; the folder was removed again.
    """
    folder = await asyncio.to_thread(_new_folder, path, named)
    staged = folder.with_name(f".{folder.name}.saving-{uuid.uuid4().hex[:8]}")
    appeared = threading.Event()

    def appear() -> None:
        staged.rename(folder)
        appeared.set()

    try:
        await in_thread(lambda: _make(staged, path, named))
        with _failing(path):
            await asyncio.to_thread(files.copy_into, staged)
            await _written(write, staged)
            await in_thread(appear)
    except BaseException as error:
        try:
            await asyncio.to_thread(_discard, folder if appeared.is_set() else staged)
        except OSError as another:
            error.add_note(f"the files written so far could not be removed: {another}")
        raise


async def save_remote(url: str, files: ModelFiles, write: Write) -> None:
    """Save a model to an empty fsspec URL, by way of a temporary folder.

    ``config.json`` is uploaded last, so that an incomplete upload is not taken for a model. See also
    :func:`save_sharded`.

    Raises:
        UnsupportedCapability: fsspec is missing.
        InvalidRequest: the protocol is unknown, or the URL cannot be written to; nothing was written.
        EngineInternalError: writing failed; uploaded files were removed again.
    """
    fs, path = await asyncio.to_thread(_filesystem, url)
    if path is None:
        await save_sharded(url.partition("://")[2], files, write, named="url")
        return
    temporary = Path(tempfile.gettempdir())
    await asyncio.to_thread(remove_orphans, temporary, _STAGED)
    with _failing(url):
        owned = OwnedFolder(temporary, _STAGED)
    staged = owned.path / "model"
    decided = threading.Lock()
    try:
        with _failing(url):
            await in_thread(staged.mkdir)
            await asyncio.to_thread(files.copy_into, staged)
            await _written(write, staged)
            await asyncio.to_thread(_upload, staged, fs, path, decided)
    except BaseException as error:
        if not decided.acquire(blocking=False):  # the upload was complete when the caller gave up
            await asyncio.to_thread(_remove_uploaded, fs, path, error)
        with suppress(OSError):  # the removal of the folder above it logs what stays
            await asyncio.to_thread(_discard, staged)
        raise
    finally:
        await asyncio.to_thread(owned.remove_or_leave, "the staged model of a save")


async def _written(write: Write, folder: Path) -> None:
    while True:
        try:
            await write(folder)
        except EngineBusy:
            await asyncio.sleep(_POLL_S)
        else:
            return


@contextmanager
def _failing(where: str) -> Iterator[None]:
    try:
        yield
    except DrivetrainError:
        raise
    except Exception as error:
        raise EngineInternalError(
            f"the model could not be saved to {where}: {type(error).__name__}: {error}"
        ) from error


def _new_folder(path: str, named: str) -> Path:
    why = ""
    try:
        folder = Path(path).resolve()
        if folder.is_dir():
            why = "is a folder that is not empty" if any(folder.iterdir()) else ""
        elif folder.exists():
            why = "is not a folder"
    except (OSError, ValueError) as error:
        raise _refused(named, path, f"cannot be read ({error})") from error
    if why:
        raise _refused(named, path, why)
    return folder


def _make(staged: Path, path: str, named: str) -> None:
    try:
        staged.mkdir(parents=True)
    except OSError as error:
        raise _refused(named, path, f"cannot be created ({error})") from error


def _discard(staged: Path) -> None:
    """Remove a folder even while a writer is active: renamed first, it takes no further files."""
    if staged.exists():  # otherwise it has its final name, or was never made
        gone = staged.with_name(f"{staged.name}.gone")
        staged.rename(gone)
        shutil.rmtree(gone)


def _filesystem(url: str) -> tuple[Any, str | None]:
    """Return the file system of a URL and the path on it; the path is None for this machine's own file system.

    ``Any``: fsspec declares no types.
    """
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError as error:
        raise UnsupportedCapability(
            "saving to a URL needs fsspec, which is not installed; run: pip install 'drivetrain[remote]'",
            capability=Capability.SAVE_REMOTE.value,
        ) from error
    try:
        fs, path = url_to_fs(url)
    except Exception as error:  # each file system's package raises its own errors
        raise _refused("url", url, f"cannot be opened ({error})") from error
    if isinstance(fs, LocalFileSystem):
        if not url.partition("://")[2].startswith("/"):
            raise _refused("url", url, "has no absolute path; a local one begins with file:///")
        return fs, None
    try:
        there = _entries(fs, path)
        if not there:
            fs.makedirs(path, exist_ok=True)
    except Exception as error:
        raise _refused("url", url, f"cannot be written to ({type(error).__name__}: {error})") from error
    if there:
        raise _refused("url", url, "is not empty")
    return fs, path


def _entries(fs: Any, path: str) -> list[str]:
    try:
        found: list[str] = fs.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return found


def _upload(folder: Path, fs: Any, path: str, decided: threading.Lock) -> None:
    """Upload a folder and remove it. Whoever takes ``decided`` first has the last word: this, or who gives up."""
    try:
        for file in sorted(folder.iterdir(), key=lambda file: (file.name == _CONFIG, file.name)):
            if decided.locked():
                raise _cancelled()
            fs.put_file(str(file), f"{path.rstrip('/')}/{file.name}")
        _discard(folder)
        if not decided.acquire(blocking=False):
            raise _cancelled()
    except BaseException as error:
        _remove_uploaded(fs, path, error)
        raise


def _remove_uploaded(fs: Any, path: str, error: BaseException) -> None:
    """Remove uploaded files after ``error``, which gets a note if they stay."""
    try:
        fs.rm(path, recursive=True)
    except Exception as another:
        error.add_note(f"the uploaded files could not be removed: {type(another).__name__}: {another}")


def _cancelled() -> EngineInternalError:
    return EngineInternalError("saving was cancelled")


def _refused(named: str, value: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{named}={value!r} {why}; give a new or empty folder that can be written to",
        field=named,
    )
