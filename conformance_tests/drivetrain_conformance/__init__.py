"""The conformance suite: claimed means it works, unclaimed means it refuses."""

from __future__ import annotations

from drivetrain_conformance.harness.run_profile import PROFILES, Profile
from drivetrain_conformance.harness.suite import Suite
from drivetrain_conformance.harness.verdict import KnownFailure, Verdict
from drivetrain_conformance.references.oracle import Logits, Oracle, TransformersOracle

__all__ = ["PROFILES", "KnownFailure", "Logits", "Oracle", "Profile", "Suite", "TransformersOracle", "Verdict"]
