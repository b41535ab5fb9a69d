"""Weights from a trainer to an engine: plans, transports, digests, and both ends of an update."""

from __future__ import annotations

from drivetrain_weight_sync.digest import digest, digests
from drivetrain_weight_sync.inspect import merged, read_weight, require_tensor, tensor_data, validate_weights
from drivetrain_weight_sync.lora_sync import LoraSync, LoraSyncResult
from drivetrain_weight_sync.plan import check_plan, make_plan
from drivetrain_weight_sync.probe import LogprobProbe
from drivetrain_weight_sync.receiver import Phase, Receiver
from drivetrain_weight_sync.recorded import RecordedTarget
from drivetrain_weight_sync.saving import ModelFiles, WeightWriter, save_remote, save_sharded
from drivetrain_weight_sync.source import WeightInput
from drivetrain_weight_sync.strategy import Strategy
from drivetrain_weight_sync.sync import UpdatableEngine, WeightSync, WeightSyncResult
from drivetrain_weight_sync.target import ModuleTarget, WeightTarget
from drivetrain_weight_sync.transports.plugins import Transport

__all__ = [
    "LogprobProbe",
    "LoraSync",
    "LoraSyncResult",
    "ModelFiles",
    "ModuleTarget",
    "Phase",
    "Receiver",
    "RecordedTarget",
    "Strategy",
    "Transport",
    "UpdatableEngine",
    "WeightInput",
    "WeightSync",
    "WeightSyncResult",
    "WeightTarget",
    "WeightWriter",
    "check_plan",
    "digest",
    "digests",
    "make_plan",
    "merged",
    "read_weight",
    "require_tensor",
    "save_remote",
    "save_sharded",
    "tensor_data",
    "validate_weights",
]
