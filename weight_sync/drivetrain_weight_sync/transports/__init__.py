"""Weight transports, each with its sender and reader in one file."""

from __future__ import annotations

from drivetrain_weight_sync.transports.base import Opened, Patch, Reader, Sender
from drivetrain_weight_sync.transports.plugins import Transport, find_transport, transport_names

__all__ = ["Opened", "Patch", "Reader", "Sender", "Transport", "find_transport", "transport_names"]
