"""The server's connections: uvicorn's protocol within the server's bounds."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from drivetrain.process.sockets_in_forks import keep_from_forks
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.request_counts import RequestCounts
from drivetrain_serving.http_layer.slow_clients import EndsSlowClients


def protocol_of(config: ServerConfig, counts: RequestCounts | None, *, to_front_ends: bool) -> type[H11Protocol]:
    """Return the protocol of a server's connections.

    Args:
        config: The server's limits. Up to twice ``max_body_bytes`` of a refused body are discarded.
        counts: Counts the requests that are refused before they have a path.
        to_front_ends: The clients are front-ends that pass requests on. ``send_timeout`` does not apply to them: a
            front-end stops reading while its own client is slow, and ends slow clients itself.
    """

    class Connection(EndsSlowClients):
        most_bytes = 2 * config.max_body_bytes
        most_seconds = config.body_timeout
        header_seconds = config.header_timeout
        send_seconds = None if to_front_ends else config.send_timeout

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            keep_from_forks(transport)  # it would not end for the client when it does for the server
            super().connection_made(transport)

        def refuse(self, status: int, words: str) -> None:
            if counts is not None and self.conn.our_state is h11.IDLE:
                counts.count("", status)
            super().refuse(status, words)

    return Connection
