# pyright: reportMissingImports=false
"""Tell whether the installed verl has what the plugin uses."""

from __future__ import annotations

import inspect
from importlib.metadata import version

from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from drivetrain.errors import BackendUnavailable
from drivetrain_trainers.verl.plugin_names import SEEN_WORKING

_OUTPUT_FIELDS = ("token_ids", "log_probs", "routed_experts", "stop_reason", "extra_fields")
_ROLLOUT_METHODS = ("resume", "update_weights", "release")
_MODES = ("HYBRID", "COLOCATED", "STANDALONE")
_REPLICA_METHODS = ("launch_servers", "sleep", "wake_up", "abort_all_requests", "resume_generation")


def missing_features() -> list[str]:
    """Return the names of verl's features that the plugin uses and this release lacks."""
    lacking = [f"TokenOutput.{name}" for name in _OUTPUT_FIELDS if name not in TokenOutput.model_fields]
    lacking += [f"BaseRollout.{name}" for name in _ROLLOUT_METHODS if not hasattr(BaseRollout, name)]
    lacking += [f"RolloutMode.{name}" for name in _MODES if not hasattr(RolloutMode, name)]
    lacking += [f"RolloutReplica.{name}" for name in _REPLICA_METHODS if not hasattr(RolloutReplica, name)]
    if "wire_format" not in inspect.signature(BaseRollout.update_weights).parameters:
        lacking.append("BaseRollout.update_weights(wire_format=)")
    return lacking


def require_features() -> None:
    """Raise if this verl lacks something that the plugin uses.

    Raises:
        BackendUnavailable: Names everything that is missing, and a version that has it.
    """
    if lacking := missing_features():
        raise BackendUnavailable(
            f"verl {version('verl')} has no {', '.join(lacking)}; the drivetrain rollout was seen to work with verl "
            f"{SEEN_WORKING}: pip install verl=={SEEN_WORKING}"
        )
