"""Entry point of the plugin. The engine is imported only on request."""

from drivetrain import Backend, hookimpl


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    """Provide the echo backend."""
    from drivetrain_echo.engine import EchoBackend

    return [EchoBackend]
