"""Handles: the engine for other processes."""

from __future__ import annotations

from drivetrain.engine.api.page import Page
from drivetrain.types.arguments import checked
from drivetrain.types.handle import EngineHandle


class SharingCalls(Page):
    """Let other processes use this engine."""

    @checked
    async def handle(
        self, listen: str | None = None, *, key: str | None = None, announce: str | None = None
    ) -> EngineHandle:
        """Listen for other processes, and return what one of them needs to ``attach``.

        An engine keeps its owner, this process: when it ends or calls ``teardown``, the engine ends for every holder.
        Of a holder that ends or freezes, requests are aborted, a prepared weight update is dropped, and a pause is
        lifted.

        Args:
            listen: None: a Unix socket that only this user can open; or ``HOST:PORT``, for other machines.
            key: At least 16 characters that holders must prove to know; None: a random key.
            announce: Host name to put into the handle in place of the one that is listened on.

        Raises:
            EngineStateError: the engine is not open.
            InvalidConfig: the address cannot be listened on, or the key is too short.
        """
        return await self.parts.sharing.handle(listen, key, announce)
