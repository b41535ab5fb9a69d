"""Names under which verl and the plugin find each other."""

from __future__ import annotations

from typing import Final

ROLLOUT: Final = "drivetrain"
"""Value of ``actor_rollout_ref.rollout.name``, and the key of ``rollout.engine_kwargs`` for the engine's fields."""
OPTIONS: Final = f"actor_rollout_ref.rollout.engine_kwargs.{ROLLOUT}"
"""The key of verl's configuration that holds the fields of the engine's."""
TEACHER: Final = "distillation.teacher_models.*.inference"
"""The key that holds a teacher's fields, in place of ``actor_rollout_ref.rollout``."""
ADAPTER: Final = "policy"
"""Name under which the engine serves the adapter that verl trains, if adapters are not merged."""
SEEN_WORKING: Final = "0.9.1"
"""The version of verl that the tests run."""


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """Return the name of the Ray actor that owns a replica's engine.

    Args:
        replica_rank: The replica's rank among those of its kind.
        kind: Empty for the policy's own replicas.
        suffix: Appended by verl to tell several groups of replicas apart.
    """
    return "_".join(part for part in (ROLLOUT, "server", kind, str(replica_rank)) if part) + suffix
