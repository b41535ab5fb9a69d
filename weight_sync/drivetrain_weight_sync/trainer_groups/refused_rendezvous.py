"""Releases a trainer that waits in the rendezvous of a group which this server refused to join.

Trainers announce a group by HTTP in one thread, and meet the server in another: rank 0 hosts a TCPStore, whose
constructor returns once every rank has counted itself in one key of it. Without the server it waits for minutes, and
reads the server's refusal only afterwards. A count that is no ``int`` makes the constructor raise at once.

The messages are those of ``torch/csrc/distributed/c10d/TCPStoreBackend.hpp``, and the wait is that of
``TCPStore::waitForWorkers``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

_VALIDATE: Final = struct.pack("=BI", 0, 0x3C85F7CE)
_COUNT: Final = b"init/"
_ADD: Final = struct.pack("=BQ", 4, len(_COUNT)) + _COUNT
_NO_INT: Final = 1 << 40
"""More than an ``int`` holds, and still a number for ranks that count themselves later."""
_PAUSE_S: Final = 0.05


async def release_trainer(address: str, port: int, world_size: int) -> bool:
    """Make the rendezvous at an address fail; wait until its store listens, and run until cancelled otherwise.

    Args:
        address: Where rank 0 hosts its store.
        port: The store's port.
        world_size: Number of ranks that the store waits for.

    Returns:
        True if ranks waited there; false if the store has met all its ranks, or the address is no store's.
    """
    while True:
        try:
            reader, writer = await asyncio.open_connection(address, port)
            break
        except (socket.gaierror, ValueError):  # ValueError: no host's name, such as "a..b"
            return False
        except OSError:
            await asyncio.sleep(_PAUSE_S)
    try:
        writer.write(_VALIDATE)
        waiting = await _add(reader, writer, 0) < world_size
        if waiting:
            await _add(reader, writer, _NO_INT)
        return waiting
    except (OSError, EOFError):
        return False
    finally:
        writer.close()


async def _add(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> int:
    """Add to the number of ranks, and return the sum."""
    writer.write(_ADD + struct.pack("=q", number))
    (count,) = struct.unpack("=q", await reader.readexactly(8))
    return int(count)
