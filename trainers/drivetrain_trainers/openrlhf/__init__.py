"""Rollouts of OpenRLHF on any engine: see :func:`create_engines_with`."""

from __future__ import annotations

from drivetrain.checks.extras import from_extra

with from_extra("openrlhf", "drivetrain_trainers.openrlhf"):
    from drivetrain_trainers.openrlhf.actor import RolloutActor
    from drivetrain_trainers.openrlhf.start import create_engines_with

__all__ = ["RolloutActor", "create_engines_with"]
