"""Receive LoRA adapters whose tensors come through a transport of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from drivetrain.errors import DrivetrainError, InvalidRequest, WeightSyncError, WeightVerifyFailed
from drivetrain.types.weights import WeightManifest, WeightPlan, WeightUpdateRequest
from drivetrain_weight_sync.copying.device_copies import DeviceCopy, Looks, can_look, fits, reaches
from drivetrain_weight_sync.copying.digest import digests
from drivetrain_weight_sync.copying.plan import check_geometry
from drivetrain_weight_sync.receiver.lora_adapters import GivenAdapter
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.tensors.names import listed
from drivetrain_weight_sync.transports.base import Patch, Reader
from drivetrain_weight_sync.transports.process_groups import Groups
from drivetrain_weight_sync.transports.readers import Readers


@contextmanager
def receiving(update: WeightUpdateRequest, groups: Groups) -> Iterator[GivenAdapter]:
    """Yield the adapter that an update brings, verified against the sender's digests.

    Its tensors are valid within the context, and may be the trainer's own memory: copy them. On leaving, memory that
    the source shares is unmapped.

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
    tensors: Mapping[str, torch.Tensor] = {}
    try:
        tensors = _read(readers.of(update.source), update, plan)
        found, strange = _looked(tensors)
        _verify(found, update.digests or {})
        yield GivenAdapter(f"the adapter {adapter.lora_name!r}", "lora", adapter.config, tensors, strange)
    finally:
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # copies may still read memory that is unmapped here
        readers.close()


def _read(reader: Reader, update: WeightUpdateRequest, plan: WeightPlan) -> dict[str, torch.Tensor]:
    """Open the source and return its tensors, copied if the reader needs their memory again."""
    try:
        reader.open(update, WeightManifest(plan.tensors))
        return {
            name: tensor if reader.holds else tensor.clone()
            for brought in reader.bring(range(len(plan.buckets)))
            for index in brought
            for name, tensor in reader.tensors(index)
            if not isinstance(tensor, Patch)
        }
    except DrivetrainError:
        raise
    except Exception as error:
        raise WeightSyncError(
            f"the {update.source.kind} source of the adapter cannot be read: {type(error).__name__}: {error}; nothing "
            "was changed"
        ) from error


def _looked(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], dict[str, str]]:
    """Return digests by name, and which tensors hold NaN or infinity; one kernel launch does both on a GPU."""
    copies = [
        copy
        for name, tensor in tensors.items()
        if reaches(tensor) and can_look(tensor.dtype) and fits(copy := DeviceCopy(tensor, None, name))
    ]
    found, strange = Looks()(copies) if copies else ({}, [])
    others = {name: tensor for name, tensor in tensors.items() if name not in found}
    return found | digests(others), non_finite(others | {name: tensors[name] for name in strange})


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
