# pyright: reportPrivateImportUsage=false
"""Receive LoRA adapters whose tensors come through a transport of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from drivetrain.errors import DrivetrainError, InvalidRequest, WeightSyncError, WeightVerifyFailed
from drivetrain.types.weights import WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.device_copies import DeviceCopy, Looks, can_look, fits, reaches
from drivetrain_weight_sync.copying.digest import digests
from drivetrain_weight_sync.copying.plan import bucket_offsets, check_geometry, plan_nbytes
from drivetrain_weight_sync.copying.waiting import wait_for
from drivetrain_weight_sync.receiver.lora_adapters import GivenAdapter
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.transports.base import Patch, Reader, Slots
from drivetrain_weight_sync.transports.process_groups import Groups
from drivetrain_weight_sync.transports.readers import Readers


def receive_adapter(update: WeightUpdateRequest, groups: Groups) -> GivenAdapter:
    """Return the adapter that an update brings, verified against the sender's digests, in memory of its own.

    Its tensors lie in one piece of memory on the device on which they arrive. Memory that the source shares is unmapped
    before this returns.

    Args:
        update: The update, whose ``lora`` names the adapter.
        groups: The groups in which a trainer broadcasts to this worker.

    Raises:
        InvalidRequest: the source does not exist, or differs from its description.
        WeightVerifyFailed: tensors differ from those that were sent.
    """
    adapter, plan = update.lora, update.plan
    assert adapter is not None, "an update that brings an adapter names it"
    assert plan is not None
    check_geometry(plan)
    _check_digests_given(plan, update.digests)
    readers = Readers(groups)
    received = ReceivedAdapter(plan)
    try:
        _read(readers.of(update.source), update, plan, received)
        found, strange = received.looked()
    finally:
        received.settle()  # copies may still read memory that is unmapped here
        readers.close()
    _verify(found, update.digests or {})
    where = f"the adapter {adapter.lora_name!r}"
    return GivenAdapter(where, "lora", adapter.config, received.tensors, strange, is_own=True)


class ReceivedAdapter:
    """Memory for the tensors of a plan, into which a reader's tensors are copied."""

    def __init__(self, plan: WeightPlan) -> None:
        self._plan = plan
        self._offsets = bucket_offsets(plan)
        self._memory: torch.Tensor | None = None
        self._looks: list[DeviceCopy] = []
        """Tensors for the copy kernel to digest, with the copies that are not made yet."""
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, index: int, tensors: Iterable[tuple[str, torch.Tensor | Patch]], *, hold: bool) -> None:
        """Copy the tensors of a bucket, or on a GPU leave that to :meth:`looked` if they stay valid until then."""
        given = [(name, tensor) for name, tensor in tensors if not isinstance(tensor, Patch)]
        if not given:
            return
        if self._memory is None:
            self._memory = _memory(plan_nbytes(self._plan), given[0][1].device)
        bucket = self._plan.buckets[index]
        slots = Slots(self._memory)
        own = {placed.spec.name: slots.view(self._offsets[index], placed) for placed in bucket.tensors}
        now: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in given:
            self.tensors[name] = destination = own[name]
            copy = DeviceCopy(tensor, destination, name)
            if not (can_look(tensor.dtype) and reaches(tensor) and fits(copy)):
                now.append((destination, tensor))
            elif hold:
                self._looks.append(copy)
            else:
                now.append((destination, tensor))
                self._looks.append(DeviceCopy(destination, None, name))
        if now:
            torch._foreach_copy_([to for to, _ in now], [of for _, of in now])

    def looked(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return digests by name, and which tensors hold NaN or infinity; one launch copies and does both on a GPU."""
        found, strange = Looks()(self._looks) if self._looks else ({}, [])
        others = {name: tensor for name, tensor in self.tensors.items() if name not in found}
        return found | digests(others), non_finite(others | {name: self.tensors[name] for name in strange})

    def settle(self) -> None:
        """Wait for copies to a GPU."""
        if self._memory is not None and self._memory.is_cuda:
            wait_for(self._memory.device)


def _memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 ``[nbytes]``, which on a CPU can be copied to a GPU at full speed if there is one in use."""
    pinned = device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def _read(reader: Reader, update: WeightUpdateRequest, plan: WeightPlan, received: ReceivedAdapter) -> None:
    """Open the source and take its tensors."""
    try:
        reader.open(update, WeightManifest(plan.tensors))
        for brought in reader.bring(range(len(plan.buckets))):
            for index in brought:
                received.take(index, reader.tensors(index), hold=reader.holds)
    except DrivetrainError:
        raise
    except Exception as error:
        raise WeightSyncError(
            f"the {update.source.kind} source of the adapter cannot be read: {type(error).__name__}: {error}; nothing "
            "was changed"
        ) from error


def _verify(found: Mapping[str, int], sent: Mapping[str, int]) -> None:
    differ = [name for name, value in sent.items() if found.get(name) != value]
    if differ:
        raise WeightVerifyFailed(
            f"{len(differ)} of {len(sent)} tensors of the adapter differ from what was sent: {listed(differ)}. They "
            "changed in transit, or the adapter was written to during the push; nothing was changed, push it again",
            tensors=differ,
        )


def _check_digests_given(plan: WeightPlan, given: Mapping[str, int] | None) -> None:
    differ = sorted({spec.name for spec in plan.tensors} ^ (given or {}).keys())
    if differ:
        raise InvalidRequest(
            f"digests and plan name different tensors: {listed(differ)}; give one digest per tensor of the plan",
            field="digests",
        )
