"""Delta transport: sends only changes since the last push, for slow links.

An RL step changes few of the bits of bfloat16 weights. The sender keeps a copy of the engine's weights in CPU memory,
and writes to a folder the elements of each tensor that differ from it. The engine patches its own weights, if they are
the base that the sender compared with; every tensor is verified afterwards. A failed or cancelled push, another
transport, or sleep of the weights may make the two copies differ: then every tensor is written whole.

For a changed tensor, the file of its bucket holds ``NAME:values`` and ``NAME:steps``, the distance of each changed
element from the one before (the first: from -1), in the narrowest of three dtypes. A distance too long for the dtype is
split into several steps, whose elements did not change. A tensor for which this takes as much space as the whole is
written whole, as ``NAME``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file

from drivetrain.errors import InvalidRequest
from drivetrain.types.weights import PluginSource, TensorSpec, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.digest import digest
from drivetrain_weight_sync.tensors.dtypes import as_bits, dtype_of
from drivetrain_weight_sync.transports.base import Opened, Patch, Reader, Sender, hash_of
from drivetrain_weight_sync.transports.checkpoint_files import require_readable
from drivetrain_weight_sync.transports.plugins import Transport
from drivetrain_weight_sync.transports.push_folder import PushFolder

_STEPS: Final = ((torch.uint8, 1), (torch.uint16, 2), (torch.uint32, 4))
"""Dtypes of steps, and their bytes."""


class _Data(BaseModel):
    """Data that the sender passes to the reader."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    base: str | None
    """``hash_of`` the digests of the weights to change; None: every tensor is whole."""
    files: tuple[int, ...]
    """Digest of each file, read as bytes; one per bucket, from ``0.safetensors`` on."""


class DeltaTransport(Transport):
    """Sends changes since the last push through a folder."""

    name = "delta"

    def sender(self) -> DeltaSender:
        """Return the trainer's end of the transport."""
        return DeltaSender(self.directory)

    @classmethod
    def reader(cls) -> DeltaReader:
        """Return an engine worker's end of the transport."""
        return DeltaReader()


class DeltaSender(Sender):
    """Compares each tensor bit by bit with the engine's, and writes the difference.

    Args:
        directory: the parent of each push's folder, readable by the engine; None: the temporary folder.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._held: dict[str, torch.Tensor] = {}
        """Flat copies of the engine's tensors, or of those it will have once this push is committed."""
        self._known: str | None = None
        """``hash_of`` the digests of the engine's weights if ``_held`` is known to equal them, else None."""
        self._base: str | None = None
        """``hash_of`` the digests of the weights that this push changes; None: every tensor is whole."""
        self._plan = WeightPlan(())
        self._specs: dict[str, TensorSpec] = {}
        self._bucket_of: dict[str, int] = {}
        self._waiting: list[set[str]] = []
        """By bucket, the tensors that are still to be put."""
        self._changes: list[dict[str, torch.Tensor]] = []
        """By bucket, the contents of its file."""
        self._files: dict[int, int] = {}
        self._folder: PushFolder | None = None
        self._sent_nbytes = 0

    def begin(self, plan: WeightPlan) -> None:
        """Make the folder of this push, and check whether a delta can be sent."""
        self.release()
        self._base = self._known if plan == self._plan else None
        if self._base is None:
            self._held = {}
        self._plan = plan
        self._specs = {spec.name: spec for spec in plan.tensors}
        self._bucket_of = {placed.spec.name: i for i, bucket in enumerate(plan.buckets) for placed in bucket.tensors}
        self._waiting = [{placed.spec.name for placed in bucket.tensors} for bucket in plan.buckets]
        self._changes = [{} for _ in plan.buckets]
        self._files = {}
        self._sent_nbytes = 0
        self._folder = PushFolder(self._directory)

    @torch.no_grad()
    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Compare the tensor; write its bucket once all of the bucket's tensors were put."""
        self._known = None  # from here on the copies differ from the engine's weights
        index = self._bucket_of[name]
        new = tensor.to("cpu", dtype_of(self._specs[name])).reshape(-1)
        old = self._held.get(name)
        if old is None:
            self._held[name] = new.clone() if new.data_ptr() == tensor.data_ptr() else new
            self._changes[index][name] = self._held[name].view(tensor.shape)
        else:
            self._compare(name, new, old)
        self._waiting[index].discard(name)
        if not self._waiting[index]:
            self._write(index)

    def source(self) -> PluginSource:
        """Describe the folder and the weights that it changes."""
        assert self._folder is not None
        files = tuple(self._files[index] for index in range(len(self._plan.buckets)))
        data = _Data(folder=str(self._folder.path), base=self._base, files=files)
        return PluginSource(transport=DeltaTransport.name, data=data.model_dump(mode="json"))

    def put_whole(self) -> None:
        """Write every tensor whole from the copies."""
        self._base, self._sent_nbytes = None, 0
        for index, bucket in enumerate(self._plan.buckets):
            for placed in bucket.tensors:
                spec = placed.spec
                self._changes[index][spec.name] = self._held[spec.name].view(spec.shape)
            self._write(index)

    def committed(self, digests: Mapping[str, int]) -> None:
        """Record that the engine holds the tensors that were put, as the base of the next push."""
        self._known = hash_of(digests)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all files."""
        return self._sent_nbytes

    def release(self) -> None:
        """Remove the folder."""
        folder, self._folder = self._folder, None
        self._changes = []
        if folder is not None:
            folder.remove()

    def close(self) -> None:
        """Forget the tensors that the engine holds."""
        self.release()
        self._held, self._known = {}, None

    def _compare(self, name: str, new: torch.Tensor, old: torch.Tensor) -> None:
        bits, held = as_bits(new), as_bits(old)
        positions = torch.nonzero(bits != held).view(-1)
        if not len(positions):
            return
        into = self._changes[self._bucket_of[name]]
        steps = _steps(positions, new.element_size(), at_most=new.nbytes)
        if steps is None:
            held.copy_(bits)
            into[name] = old.view(self._specs[name].shape)
            return
        positions = _positions(steps)
        values = bits[positions]
        held[positions] = values
        into[f"{name}:steps"], into[f"{name}:values"] = steps, values.view(new.dtype)

    def _write(self, index: int) -> None:
        assert self._folder is not None
        path = self._folder.path / f"{index}.safetensors"
        with self._folder.writing():
            save_file(self._changes[index], path)
            self._changes[index] = {}
            self._files[index] = _digest_of(path)
            self._sent_nbytes += path.stat().st_size


class DeltaReader(Reader):
    """Reads a folder of changes."""

    def __init__(self) -> None:
        self._folder = Path()
        self._plan = WeightPlan(())

    @property
    def takes_long(self) -> bool:
        """True: every file is read."""
        return True

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Check that every file arrived as it was sent.

        Raises:
            InvalidRequest: the folder does not exist, or differs from the request's description.
        """
        assert isinstance(request.source, PluginSource)
        assert request.plan is not None
        assert request.digests is not None
        try:
            data = _Data.model_validate(request.source.data)
        except ValidationError as error:
            raise InvalidRequest(f"the data of a delta is invalid: {error}", field="source.data") from None
        if len(data.files) != len(request.plan.buckets):
            raise InvalidRequest(
                f"the delta names {len(data.files)} files for a plan of {len(request.plan.buckets)} buckets",
                field="source.data.files",
            )
        self._folder, self._plan = Path(data.folder), request.plan
        for index, sent in enumerate(data.files):
            path = self._path(index)
            try:
                require_readable(path)
                found = _digest_of(path)
            except OSError as error:
                raise InvalidRequest(
                    f"{path} cannot be read ({error.strerror}); trainer and engine must both reach the folder: give "
                    "WeightSync.connect a directory that they share",
                    field="source.data.folder",
                ) from error
            if found != sent:
                raise InvalidRequest(
                    f"{path} differs from what was written; nothing was changed. Push again", field="source.data.files"
                )
        return Opened(request.plan, request.digests, data.base)

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor | Patch]]:
        """Read the changes of a bucket."""
        with safe_open(self._path(index), framework="pt") as file:
            names = set(file.keys())
            for placed in self._plan.buckets[index].tensors:
                name = placed.spec.name
                if name in names:
                    yield name, file.get_tensor(name)
                elif f"{name}:steps" in names:
                    yield name, Patch(_positions(file.get_tensor(f"{name}:steps")), file.get_tensor(f"{name}:values"))

    def release(self) -> None:
        """Forget the folder."""
        self._folder, self._plan = Path(), WeightPlan(())

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"


def _steps(positions: torch.Tensor, value_nbytes: int, *, at_most: int) -> torch.Tensor | None:
    """Return the distances between positions in the dtype that takes least space; None if that is too much.

    Args:
        positions: int64 ``[n]``, ascending.
        value_nbytes: Bytes of an element.
        at_most: Bytes at which steps and values take too much.
    """
    gaps = torch.diff(positions, prepend=torch.tensor([-1]))
    best: tuple[int, torch.dtype, torch.Tensor] | None = None
    for dtype, nbytes in _STEPS:
        hops = (gaps + (_longest(nbytes) - 1)).div_(_longest(nbytes), rounding_mode="floor")
        cost = int(hops.sum()) * (nbytes + value_nbytes)
        if best is None or cost < best[0]:
            best = cost, dtype, hops
    assert best is not None
    cost, dtype, hops = best
    if cost >= at_most:
        return None
    longest = _longest(dtype.itemsize)
    steps = torch.full((int(hops.sum()),), longest)
    steps[hops.cumsum(0) - 1] = gaps - (hops - 1) * longest
    return steps.to(dtype)


def _longest(nbytes: int) -> int:
    return int(2 ** (8 * nbytes)) - 1


def _positions(steps: torch.Tensor) -> torch.Tensor:
    return steps.to(torch.int64).cumsum(0) - 1


def _digest_of(path: Path) -> int:
    """Return the digest of a file's bytes."""
    size = path.stat().st_size
    return digest(torch.from_file(str(path), size=size, dtype=torch.uint8))
