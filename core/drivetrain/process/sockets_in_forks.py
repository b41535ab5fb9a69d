"""Sockets and pipes that end with their process, though a forked one has copies of all descriptors.

A copy keeps a port taken, and keeps the peer of a connection waiting, after the process that owns the socket has ended.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import weakref
from collections.abc import Iterator
from typing import Final

Holder = socket.socket | asyncio.BaseTransport | asyncio.AbstractServer
"""Holds a socket, a pipe, or several sockets."""

_holders: Final[weakref.WeakSet[Holder]] = weakref.WeakSet()


def keep_from_forks(holder: Holder) -> None:
    """Let processes that are forked from this one have no copies of a holder's descriptors, for as long as it lives.

    A program that ``subprocess`` starts with the descriptor in ``pass_fds`` inherits it. With a ``preexec_fn``,
    for which alone Python runs the hooks of a fork, it finds the null device there.
    """
    _holders.add(holder)


def _descriptors() -> Iterator[int]:
    for holder in list(_holders):
        if isinstance(holder, socket.socket):
            yield holder.fileno()
        elif isinstance(holder, asyncio.BaseTransport):
            held = holder.get_extra_info("socket") or holder.get_extra_info("pipe")
            if held is not None:
                yield -1 if isinstance(held, io.IOBase) and held.closed else held.fileno()
        elif isinstance(holder, asyncio.Server):
            yield from (one.fileno() for one in holder.sockets)


def _replace_copies() -> None:
    """Put the null device in the place of each copy.

    The number stays taken: the copied object closes it when it is released, and must not close another file. The
    parent's event loop polls the socket itself, so that nothing may be shut down or unregistered here.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _descriptors():
        if descriptor >= 0:  # else it was closed
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _holders.clear()


os.register_at_fork(after_in_child=_replace_copies)
