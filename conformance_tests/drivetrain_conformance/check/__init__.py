"""``drivetrain check``: does this engine compute this model?"""

from __future__ import annotations

from drivetrain_conformance.check.report import CheckReport, CheckRow, Outcome
from drivetrain_conformance.check.run import check_engine

__all__ = ["CheckReport", "CheckRow", "Outcome", "check_engine"]
