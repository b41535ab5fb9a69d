# pyright: reportMissingImports=false
"""Entry point of the group ``verl.plugins``: makes ``actor_rollout_ref.rollout.name=drivetrain`` known to verl.

verl loads it in every process, while its own package is still being imported, and hides errors. It therefore only
registers names; whether this verl has what the plugin needs is checked when a replica is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from drivetrain_trainers.verl.plugin_names import ROLLOUT

if TYPE_CHECKING:
    from drivetrain_trainers.verl.replica import DrivetrainReplica


def _replica() -> type[DrivetrainReplica]:
    from drivetrain_trainers.verl.features import require_features

    require_features()
    from drivetrain_trainers.verl.replica import DrivetrainReplica

    return DrivetrainReplica


_ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "drivetrain_trainers.verl.rollout.DrivetrainRollout"
RolloutReplicaRegistry.register(ROLLOUT, _replica)
