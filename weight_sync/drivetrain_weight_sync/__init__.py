"""Weight sync from a trainer to an engine: plans, transports, digests, and both ends of an update.

Names are imported on first use, so that a server can take a trainer's weights without torch in its own process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_weight_sync.copying.digest import digest, digests
    from drivetrain_weight_sync.copying.plan import check_plan, make_plan
    from drivetrain_weight_sync.receiver.receiver import Receiver
    from drivetrain_weight_sync.receiver.saving import ModelFiles, WeightWriter, save_remote, save_sharded
    from drivetrain_weight_sync.receiver.update import Phase
    from drivetrain_weight_sync.receiver.weight_inspection import (
        merged,
        read_weight,
        require_tensor,
        tensor_data,
        validate_weights,
    )
    from drivetrain_weight_sync.receiver.weight_target import ModuleTarget, WeightTarget
    from drivetrain_weight_sync.shards.pieces import WeightShard
    from drivetrain_weight_sync.tracing.traced_target import TracedTarget
    from drivetrain_weight_sync.trainer.logprob_probe import LogprobProbe
    from drivetrain_weight_sync.trainer.lora_sync import LoraSync, LoraSyncResult
    from drivetrain_weight_sync.trainer.pushed_adapter import AdapterTensors
    from drivetrain_weight_sync.trainer.result import WeightSyncResult
    from drivetrain_weight_sync.trainer.source import WeightInput
    from drivetrain_weight_sync.trainer.strategy import Strategy
    from drivetrain_weight_sync.trainer.sync import WeightSync
    from drivetrain_weight_sync.transports.plugins import Transport
    from drivetrain_weight_sync.transports.updatable_engine import UpdatableEngine

_EXPORTS = {
    "copying.digest": ("digest", "digests"),
    "copying.plan": ("check_plan", "make_plan"),
    "receiver.receiver": ("Receiver",),
    "receiver.saving": ("ModelFiles", "WeightWriter", "save_remote", "save_sharded"),
    "receiver.update": ("Phase",),
    "receiver.weight_inspection": ("merged", "read_weight", "require_tensor", "tensor_data", "validate_weights"),
    "receiver.weight_target": ("ModuleTarget", "WeightTarget"),
    "shards.pieces": ("WeightShard",),
    "tracing.traced_target": ("TracedTarget",),
    "trainer.logprob_probe": ("LogprobProbe",),
    "trainer.lora_sync": ("LoraSync", "LoraSyncResult"),
    "trainer.pushed_adapter": ("AdapterTensors",),
    "trainer.result": ("WeightSyncResult",),
    "trainer.source": ("WeightInput",),
    "trainer.strategy": ("Strategy",),
    "trainer.sync": ("WeightSync",),
    "transports.plugins": ("Transport",),
    "transports.updatable_engine": ("UpdatableEngine",),
}

__all__ = [
    "AdapterTensors",
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

# Hidden from type checkers, which would accept any misspelt import from a module with __getattr__.
if not TYPE_CHECKING:
    _MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

    def __getattr__(name: str) -> object:
        import importlib

        from drivetrain.checks.extras import from_extra

        if name not in _MODULE_OF:
            raise AttributeError(f"module 'drivetrain_weight_sync' has no attribute {name!r}")
        with from_extra("weight-sync", "weight sync"):
            value = getattr(importlib.import_module(f"drivetrain_weight_sync.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
