"""Engines in Ray actors."""

from __future__ import annotations

from drivetrain.checks.extras import from_extra

with from_extra("ray", "drivetrain_fleet.ray"):
    from drivetrain_fleet.ray.engine import RayEngine
    from drivetrain_fleet.ray.fleet import RayFleet
    from drivetrain_fleet.ray.start import RayEngines, start_engines

__all__ = ["RayEngine", "RayEngines", "RayFleet", "start_engines"]
