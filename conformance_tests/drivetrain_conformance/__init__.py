"""The conformance suite: claimed means it works, unclaimed means it refuses."""

from __future__ import annotations

from drivetrain_conformance.oracle import Oracle, TransformersOracle
from drivetrain_conformance.profile import PROFILES, Profile
from drivetrain_conformance.suite import Suite
from drivetrain_conformance.verdict import KnownFailure, Verdict

__all__ = ["PROFILES", "KnownFailure", "Oracle", "Profile", "Suite", "TransformersOracle", "Verdict"]
