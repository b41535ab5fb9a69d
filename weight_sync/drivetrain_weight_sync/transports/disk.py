"""Disk transport: the trainer writes a checkpoint folder, and the engine reads and checks it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from drivetrain.errors import InvalidWeights, WeightPlanMismatch, WeightSyncError
from drivetrain.types.weights import DiskSource, TensorSpec, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.digest import digest
from drivetrain_weight_sync.copying.plan import check_plan, make_plan
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.dtypes import dtype_of, spec_of, widens
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender
from drivetrain_weight_sync.transports.checkpoint_files import Checkpoint
from drivetrain_weight_sync.transports.push_folder import PushFolder


class DiskSender(Sender):
    """Writes one safetensors file per bucket to a new folder, and removes it after the push.

    The folder is made in ``directory``, readable by the engine's process; None: the temporary folder.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._folder: PushFolder | None = None
        self._plan = WeightPlan(())
        self._bucket_of: dict[str, int] = {}
        self._waiting: list[dict[str, torch.Tensor]] = []
        self._files: dict[str, str] = {}

    def begin(self, plan: WeightPlan) -> None:
        """Make the folder."""
        self.release()
        self._folder = PushFolder(self._directory)
        self._plan = plan
        self._bucket_of = {placed.spec.name: i for i, bucket in enumerate(plan.buckets) for placed in bucket.tensors}
        self._waiting = [{} for _ in plan.buckets]

    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Keep the tensor; write its bucket once it is complete."""
        assert self._folder is not None
        index = self._bucket_of[name]
        placed = self._plan.buckets[index].tensors
        waiting = self._waiting[index]
        waiting[name] = tensor if held else tensor.clone()
        if len(waiting) < len(placed):
            return
        file = f"model-{index + 1:05}-of-{len(self._plan.buckets):05}.safetensors"
        # safetensors refuses tensors that share memory, so each one is copied.
        copies = {p.spec.name: _packed(waiting.pop(p.spec.name), dtype_of(p.spec)) for p in placed}
        with self._folder.writing():
            save_file(copies, self._folder.path / file)
        self._files.update(dict.fromkeys(copies, file))

    def source(self) -> DiskSource:
        """Write the index."""
        assert self._folder is not None
        index = json.dumps({"metadata": {}, "weight_map": self._files})
        with self._folder.writing():
            (self._folder.path / "model.safetensors.index.json").write_text(index)
        return DiskSource(path=str(self._folder.path))

    def release(self) -> None:
        """Remove the folder."""
        folder, self._folder = self._folder, None
        self._waiting, self._files = [], {}
        if folder is not None:
            folder.remove()


class DiskReader(Reader):
    """Reads a folder twice: once to check and digest every tensor before anything changes, once to load."""

    def __init__(self) -> None:
        self._checkpoint: Checkpoint | None = None
        self._stored_names: dict[str, str] = {}
        self._aliases: Mapping[str, str] = {}
        self._dtypes: Mapping[str, torch.dtype] = {}
        """Dtypes of the engine's tensors."""
        self._plan = WeightPlan(())

    @property
    def takes_long(self) -> bool:
        """True: every file is read."""
        return True

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Check names, dtypes, shapes and values of all tensors.

        Raises:
            InvalidRequest: the folder is missing or holds no checkpoint.
            WeightPlanMismatch: the tensors are not the model's, or tied weights differ in value.
            InvalidWeights: a tensor holds NaN or infinity.
            WeightSyncError: the files differ from the request's digests.
        """
        assert isinstance(request.source, DiskSource)
        checkpoint = Checkpoint(request.source.path)
        specs: dict[str, TensorSpec] = {}
        digests: dict[str, int] = {}
        bad: dict[str, str] = {}
        tied: dict[str, str] = {}
        self._stored_names = {}
        self._dtypes = {spec.name: dtype_of(spec) for spec in manifest.tensors}
        for name in checkpoint.names:
            main = manifest.aliases.get(name, name)
            tensor = self._widened(main, checkpoint.read(name))
            value = digest(tensor)
            if digests.setdefault(main, value) != value:
                tied[name] = f"{self._stored_names[main]} and {name}"
            if main not in specs:
                self._stored_names[main] = name
                specs[main] = spec_of(main, tensor)
                bad.update(non_finite({name: tensor}))
        check_plan(list(specs.values()), manifest)
        if tied:
            raise WeightPlanMismatch(
                f"{listed(tied.values())} differ in {request.source.path}, but the engine's model ties them; nothing "
                "was changed. Save tied tensors once, or load the engine with a model that does not tie them",
                mismatched=list(tied),
            )
        if bad:
            raise InvalidWeights(
                f"{request.source.path} holds values that are not finite; nothing was changed: "
                + listed([f"{name} ({what})" for name, what in bad.items()]),
                tensors=list(bad),
            )
        self._aliases = manifest.aliases
        self._plan = request.plan or make_plan([specs[spec.name] for spec in manifest.tensors])
        by_plan_name = {spec.name: digests[self._main(spec.name)] for spec in self._plan.tensors}
        _check_digests(request, by_plan_name)
        self._checkpoint = checkpoint
        return Opened(self._plan, by_plan_name)

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Read one tensor at a time."""
        assert self._checkpoint is not None
        for placed in self._plan.buckets[index].tensors:
            name = placed.spec.name
            main = self._main(name)
            yield name, self._widened(main, self._checkpoint.read(self._stored_names[main]))

    def release(self) -> None:
        """Close the files."""
        self._checkpoint = None

    def _widened(self, main: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the engine's dtype if the conversion keeps every value, otherwise unchanged."""
        wanted = self._dtypes.get(main, tensor.dtype)
        return tensor.to(wanted) if widens(tensor.dtype, wanted) else tensor

    def _main(self, name: str) -> str:
        return self._aliases.get(name, name)


def _check_digests(request: WeightUpdateRequest, found: Mapping[str, int]) -> None:
    given = request.digests
    if given is None:
        return
    differ = [name for name, value in found.items() if given.get(name) != value]
    if differ:
        raise WeightSyncError(
            f"the checkpoint folder does not match the request's digests; nothing was changed. Tensors that "
            f"differ: {listed(differ)}. Write the folder again"
        )


def _packed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
