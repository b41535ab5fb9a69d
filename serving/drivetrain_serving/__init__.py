"""An HTTP server over any engine or fleet, which speaks the routes of vLLM and SGLang: see :func:`create_app`."""

from __future__ import annotations

from drivetrain.checks.extras import from_extra
from drivetrain_serving.config import ServerConfig

with from_extra("serve", "the HTTP server"):
    from drivetrain_serving.app import create_app
    from drivetrain_serving.server import Server

__all__ = ["Server", "ServerConfig", "create_app"]
