"""In-process transport: copies straight from the trainer's tensors to the engine's, in one process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from drivetrain.errors import InvalidRequest
from drivetrain.types.weights import InProcessSource, TensorSpec, WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.plan import check_plan
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.dtypes import dtype_of, spec_of
from drivetrain_weight_sync.transports.base import Opened, Reader, Sender

_Tensors = Mapping[str, torch.Tensor | DerivedTensor]
_registered: Final[dict[str, _Tensors]] = {}


class InProcessSender(Sender):
    """Registers the trainer's own tensors; only streamed or converted ones are copied."""

    copies = False
    lends = True
    release_blocks = False

    def __init__(self) -> None:
        self._key = uuid.uuid4().hex
        self._specs: dict[str, TensorSpec] = {}
        self._tensors: dict[str, torch.Tensor | DerivedTensor] = {}

    def begin(self, plan: WeightPlan) -> None:
        """Forget earlier tensors."""
        self.release()
        self._specs = {spec.name: spec for spec in plan.tensors}

    def put(self, name: str, tensor: torch.Tensor, *, held: bool) -> None:
        """Keep the tensor, or a copy if it is streamed or has another dtype."""
        self._tensors[name] = tensor.to(dtype_of(self._specs[name]), copy=not held)

    def put_derived(self, name: str, tensor: torch.Tensor, derived: DerivedTensor) -> None:
        """Keep how to compute the tensor, which the engine does when it loads it."""
        self._tensors[name] = derived

    def source(self) -> InProcessSource:
        """Register the tensors that were put."""
        _registered[self._key] = self._tensors
        return InProcessSource(key=self._key)

    def release(self) -> None:
        """Drop every reference to the tensors."""
        _registered.pop(self._key, None)
        self._tensors = {}


class InProcessReader(Reader):
    """Looks up the registered tensors."""

    def __init__(self) -> None:
        self._tensors: _Tensors = {}
        self._plan = WeightPlan(())

    def open(self, request: WeightUpdateRequest, manifest: WeightManifest) -> Opened:
        """Look up the key, and check that the tensors are those of the plan."""
        assert isinstance(request.source, InProcessSource)
        assert request.plan is not None
        assert request.digests is not None
        key = request.source.key
        if key not in _registered:
            raise InvalidRequest(
                f"no tensors are registered under {key!r} in this process; in_process works only for an engine with "
                'isolation="inline", within one push',
                field="source.key",
            )
        tensors = _registered[key]
        # Derived tensors are converted when they are computed.
        wanted = {spec.name: spec for spec in request.plan.tensors}
        specs = [
            wanted[name] if isinstance(tensor, DerivedTensor) else spec_of(name, tensor)
            for name, tensor in tensors.items()
        ]
        check_plan(specs, WeightManifest(request.plan.tensors))
        self._tensors, self._plan = tensors, request.plan
        return Opened(request.plan, request.digests)

    @property
    def holds(self) -> bool:
        """True: tensors are views of memory that stays where it is."""
        return True

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trainer's own tensors."""
        for placed in self._plan.buckets[index].tensors:
            tensor = self._tensors[placed.spec.name]
            yield (
                placed.spec.name,
                tensor.compute().to(dtype_of(placed.spec)) if isinstance(tensor, DerivedTensor) else tensor,
            )

    def release(self) -> None:
        """Drop every reference to the tensors."""
        self._tensors = {}
