"""Weight sync from a trainer to an engine: plans, transports, digests, and both ends of an update."""

from __future__ import annotations

from drivetrain.checks.extras import from_extra

with from_extra("weight-sync", "weight sync"):
    from drivetrain_weight_sync.copying.digest import digest, digests
    from drivetrain_weight_sync.copying.plan import check_plan, make_plan
    from drivetrain_weight_sync.receiver.receiver import Receiver
    from drivetrain_weight_sync.receiver.saving import ModelFiles, WeightWriter, save_remote, save_sharded
    from drivetrain_weight_sync.receiver.target import ModuleTarget, WeightTarget
    from drivetrain_weight_sync.receiver.update import Phase
    from drivetrain_weight_sync.receiver.weight_inspection import (
        merged,
        read_weight,
        require_tensor,
        tensor_data,
        validate_weights,
    )
    from drivetrain_weight_sync.shards.pieces import WeightShard
    from drivetrain_weight_sync.tracing.traced_target import TracedTarget
    from drivetrain_weight_sync.trainer.logprob_probe import LogprobProbe
    from drivetrain_weight_sync.trainer.lora_sync import LoraSync, LoraSyncResult
    from drivetrain_weight_sync.trainer.result import WeightSyncResult
    from drivetrain_weight_sync.trainer.source import WeightInput
    from drivetrain_weight_sync.trainer.strategy import Strategy
    from drivetrain_weight_sync.trainer.sync import WeightSync
    from drivetrain_weight_sync.transports.plugins import Transport
    from drivetrain_weight_sync.transports.updatable_engine import UpdatableEngine

__all__ = [
    "LogprobProbe",
    "LoraSync",
    "LoraSyncResult",
    "ModelFiles",
    "ModuleTarget",
    "Phase",
    "Receiver",
    "Strategy",
    "TracedTarget",
    "Transport",
    "UpdatableEngine",
    "WeightInput",
    "WeightShard",
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
