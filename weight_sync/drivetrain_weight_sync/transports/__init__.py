"""Ways for weights to travel, each with both of its ends in one file."""

from __future__ import annotations

from drivetrain_weight_sync.transports.base import Opened, Patch, Reader, Sender
from drivetrain_weight_sync.transports.plugins import Transport, find_transport, transport_names

__all__ = ["Opened", "Patch", "Reader", "Sender", "Transport", "find_transport", "transport_names"]
