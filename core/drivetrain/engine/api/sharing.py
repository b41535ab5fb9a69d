"""Handles: the engine for other processes."""

from __future__ import annotations

from drivetrain.engine.api.page import Page
from drivetrain.types.arguments import checked
from drivetrain.types.handle import EngineHandle


class SharingCalls(Page):
    """Let other processes use this engine."""

    @checked
    async def handle(
        self,
        listen: str | None = None,
        *,
        key: str | None = None,
        announce: str | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
    ) -> EngineHandle:
        """Listen for other processes; return the handle by which they can ``attach``.

        Without arguments, each call returns the same handle. A call with arguments listens anew.

        An engine keeps its owner, this process: when it ends or calls ``teardown``, the engine ends for every holder.
        When a holder ends or freezes, its requests are aborted, its prepared weight update is dropped, and its pause is
        lifted unless others have paused too. Memory that it put to sleep stays asleep, and refusals say that it is
        gone; any holder can wake it up.

        Args:
            listen: None: a Unix socket that only this user can open; or ``HOST:PORT``, for other machines.
            key: At least 16 characters that holders must prove to know; None: a random key.
            announce: Host name to put into the handle in place of that of ``listen``, which it needs.
            ssl_certfile: PEM file with a certificate: connections are encrypted by TLS, 1.2 or newer. The handle holds
                the certificate's fingerprint, and its holders accept no other certificate.
            ssl_keyfile: PEM file with the certificate's private key, without a password; None: it is in
                ``ssl_certfile``.

        Raises:
            EngineStateError: the engine is not open.
            InvalidConfig: the address cannot be listened on, the key is too short, the certificate cannot be used, or
                ``announce`` is given without ``listen``.
            EngineInternalError: the Unix socket cannot be made, as in a temporary folder without room.
        """
        return await self.parts.sharing.handle(listen, key, announce, ssl_certfile, ssl_keyfile)
