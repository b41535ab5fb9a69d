"""Ways for weights to travel, each with both of its ends in one file."""

from __future__ import annotations

from drivetrain_weight_sync.transports.base import Opened, Reader, Sender
from drivetrain_weight_sync.transports.registry import READERS, make_reader

__all__ = ["READERS", "Opened", "Reader", "Sender", "make_reader"]
