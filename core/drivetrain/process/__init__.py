"""Engines in a host process, behind the same ``Backend`` page as engines in this process.

The wire protocol is the ``Backend`` page: each of its coroutines is a method that can be called over a socket, with the
argument and result types of its annotations. ``docs/reference/wire.md`` describes it.
"""

from __future__ import annotations

from drivetrain.process.capability_probe import ProbeResult, probe
from drivetrain.process.hosted_backend import HostedBackend
from drivetrain.process.wire import WIRE_VERSION

__all__ = ["WIRE_VERSION", "HostedBackend", "ProbeResult", "probe"]
