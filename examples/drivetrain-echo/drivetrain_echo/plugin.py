"""The entry point: what this plugin provides. Imports no engine until it is asked for one."""

from drivetrain import Backend, hookimpl


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    """Provide the echo backend."""
    from drivetrain_echo.engine import EchoBackend

    return [EchoBackend]
