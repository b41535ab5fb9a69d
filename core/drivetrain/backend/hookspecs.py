"""The hook that a plugin implements."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from drivetrain.backend.base import Backend

hookspec = pluggy.HookspecMarker("drivetrain")
hookimpl = pluggy.HookimplMarker("drivetrain")


@hookspec
def drivetrain_backends() -> Iterable[type[Backend]]:  # type: ignore[empty-body]
    """Return the backend classes of this plugin.

    Called when one of the plugin's backends is asked for by name, and by ``drivetrain backends``. Neither the
    module that implements the hook nor those of the classes may import the engine at their top: they are imported to
    describe the backend on machines without the engine.
    """
