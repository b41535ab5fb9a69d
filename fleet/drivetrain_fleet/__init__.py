"""Several engines as one engine."""

from __future__ import annotations

from drivetrain_fleet.client import InferenceEngineClient
from drivetrain_fleet.health import Health
from drivetrain_fleet.members import MemberReport
from drivetrain_fleet.routing import RoutingPolicy

__all__ = ["Health", "InferenceEngineClient", "MemberReport", "RoutingPolicy"]
