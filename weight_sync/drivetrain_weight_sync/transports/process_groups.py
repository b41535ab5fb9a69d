"""Groups of torch.distributed in which a trainer broadcasts: it is rank 0, the workers of the engine come after it."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Literal

import torch

from drivetrain.errors import DeadlineExceeded, EngineBusy, InvalidRequest, WeightSyncError, WeightTransferFailed
from drivetrain.types.weights import (
    CommunicatorSpec,
)

GroupBackend = Literal["nccl", "gloo"]

_dist: Any = torch.distributed
"""Its classes of process groups are not declared."""
_POLL_S: Final = (0.00005, 0.0005)
"""Shortest and longest wait between two looks at a broadcast under way."""
_NCCL_ERRORS: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_construction: Final = threading.Lock()
_endings: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()
"""What lets go of groups."""
_MOMENT_S: Final = 0.2
"""How long whoever leaves a group waits for it to end, which takes less if nothing is under way."""
_LAST_S: Final = 5.0
"""How long the end of the process waits for each of those."""


class Group:
    """A process group apart from torch's default one, in which rank 0 broadcasts.

    Args:
        spec: Where its ranks meet.
        rank: This process's rank.
        device: Where the buffers of this rank lie: of the GPU for NCCL.
        store: Where they meet, if this process made it already.
        abandoned: Gives it up once it is set, also while it forms.

    Raises:
        DeadlineExceeded: the other ranks did not come within ``spec.timeout`` seconds.
        WeightSyncError: the group cannot be formed.
    """

    def __init__(
        self,
        spec: CommunicatorSpec,
        rank: int,
        device: torch.device,
        store: Any = None,
        abandoned: threading.Event | None = None,
    ) -> None:
        if not 0 <= rank < spec.world_size:
            raise InvalidRequest(
                f"rank {rank} is not in a group of {spec.world_size}; world_size counts the trainer and every rank "
                "of the engine from rank_offset on",
                field="world_size",
            )
        self.spec = spec
        self.device = device if spec.backend == "nccl" else torch.device("cpu")
        self._abandoned = abandoned or threading.Event()
        self._group: Any = None
        self._kept: list[object] = []
        ends = time.monotonic() + spec.timeout
        try:
            if store is None:
                store = _reach(spec, ends)
            store = _dist.PrefixStore(spec.group_name, store)
            self._meet(store, rank, ends)
            self._group = self._form(store, rank, ends)
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        except (InvalidRequest, DeadlineExceeded, WeightTransferFailed):
            self.leave()
            raise
        except Exception as error:
            self.leave()
            what = f"the group {spec.group_name!r} did not form: {type(error).__name__}: {_first_line(error)}"
            if time.monotonic() >= ends:
                raise DeadlineExceeded(f"{what} (after {spec.timeout:g} s)") from error
            raise WeightSyncError(what) from error

    def _meet(self, store: Any, rank: int, ends: float) -> None:
        """Wait until every rank is there: what forms the group then cannot be given up."""
        store.set(f"rank {rank}", "here")
        absent = list(range(self.spec.world_size))
        pause, longest = _POLL_S
        while absent := [other for other in absent if not store.check([f"rank {other}"])]:
            if self._abandoned.is_set():
                raise WeightTransferFailed(f"this rank left the group {self.spec.group_name!r} before it formed")
            if time.monotonic() > ends:
                raise DeadlineExceeded(
                    f"the group {self.spec.group_name!r} did not form: of its ranks 0 to {self.spec.world_size - 1}, "
                    f"{', '.join(map(str, absent))} did not come within {self.spec.timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _form(self, store: Any, rank: int, ends: float) -> Any:
        timeout = timedelta(seconds=max(ends - time.monotonic(), 0.001))
        if self.spec.backend == "gloo":
            options: Any = _dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [
                _dist.ProcessGroupGloo.create_device(hostname=_own_address(self.spec, listens=rank == 0))
            ]
            return _dist.ProcessGroupGloo(store, rank, self.spec.world_size, options)
        if self.device.type != "cuda":
            raise InvalidRequest(
                f"NCCL needs a GPU and this rank is on {self.device}; form the group with backend='gloo'",
                field="backend",
            )
        torch.cuda.set_device(self.device)
        # Or what it sends next waits until all of a copy that fills the GPU has begun.
        options = _dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.spec.timeout)
        # Otherwise NCCL's watchdog ends the process when a peer is late; here the deadline is looked after by us.
        with _construction:
            before = os.environ.get(_NCCL_ERRORS)
            os.environ[_NCCL_ERRORS] = "0"
            try:
                return _dist.ProcessGroupNCCL(store, rank, self.spec.world_size, options)
            finally:
                if before is None:
                    del os.environ[_NCCL_ERRORS]
                else:
                    os.environ[_NCCL_ERRORS] = before

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send ``buffer`` (uint8) if this is rank 0, else fill it.

        Raises:
            DeadlineExceeded: a rank did not take part within ``spec.timeout`` seconds.
            WeightTransferFailed: a rank is gone, or this one left.
        """
        self.start(buffer).wait()

    def start(self, buffer: torch.Tensor) -> Broadcast:
        """Begin to send ``buffer`` (uint8), or to fill it; on a GPU after what was launched so far.

        Raises:
            WeightTransferFailed: a rank is gone, or this one left.
        """
        options = _dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group = self._group
        if group is None:
            raise WeightTransferFailed(f"this rank left the group {self.spec.group_name!r}")
        with self.failing():
            return Broadcast(self, group.broadcast([buffer], options), self._abandoned)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Raise what torch raises as the errors of :meth:`broadcast`."""
        try:
            yield
        except RuntimeError as error:
            what = f"a broadcast in the group {self.spec.group_name!r} failed: {_first_line(error)}"
            if "timed out" in str(error).lower():
                raise DeadlineExceeded(what) from error
            raise WeightTransferFailed(f"{what}; a rank is gone") from error

    def keep(self, memory: object) -> None:
        """Hold on to what a broadcast that nobody waits for may still read or write, until the group has ended."""
        self._kept.append(memory)

    def leave(self) -> None:
        """Let go of it; a broadcast under way in another thread gives up. Idempotent."""
        self._abandoned.set()
        group, self._group = self._group, None
        if group is None:
            return
        # An operation that nobody joined holds the group until its own timeout, which is not for us to wait for.
        held = [self._kept, group, self.spec.backend]
        del group  # or it may be the last to hold it
        ending = threading.Thread(target=_end, args=[held], name="drivetrain-leaves-group", daemon=True)
        ending.start()
        if self.spec.backend == "nccl":
            _endings.add(ending)
        ending.join(_MOMENT_S)


class Broadcast:
    """One broadcast under way. Made by :meth:`Group.start`."""

    def __init__(self, group: Group, work: Any, abandoned: threading.Event) -> None:
        self._group = group
        self._work = work
        self._abandoned = abandoned
        self._ends = time.monotonic() + group.spec.timeout

    def precede(self) -> None:
        """Have what is launched on the GPU from here on come after it; on a CPU, wait for it.

        Raises:
            DeadlineExceeded, WeightTransferFailed: as :meth:`wait`.
        """
        if self._group.device.type == "cuda":
            with self._group.failing():
                self._work.wait()  # it is the GPU that waits
        else:
            self.wait()

    def wait(self) -> None:
        """Wait until the buffer was sent, or is filled.

        Raises:
            DeadlineExceeded: a rank did not take part within ``spec.timeout`` seconds.
            WeightTransferFailed: a rank is gone, or this one left.
        """
        name, timeout = self._group.spec.group_name, self._group.spec.timeout
        with self._group.failing():
            pause, longest = _POLL_S
            while not self._work.is_completed():
                if self._abandoned.is_set():
                    raise WeightTransferFailed(f"this rank left the group {name!r} during a broadcast")
                if time.monotonic() > self._ends:
                    raise DeadlineExceeded(f"a broadcast in the group {name!r} did not end within {timeout:g} s")
                time.sleep(pause)
                pause = min(2 * pause, longest)
            self._work.wait()


def _end(held: list[Any]) -> None:
    backend, group = held.pop(), held.pop()
    if backend == "nccl":
        group.abort()


@atexit.register
def _let_end() -> None:
    # A daemon thread within NCCL when the interpreter ends takes the process along.
    for ending in list(_endings):
        ending.join(_LAST_S)


def meeting_place(address: str, world_size: int, timeout: float) -> Any:
    """A store at a free port of this host's ``address``, where so many ranks can form a group.

    Nobody reaches it at other addresses of this host. A host name may mean another address elsewhere, as Debian's
    127.0.1.1, so the store of a name other than ``localhost`` listens at all of them.

    Raises:
        InvalidRequest: the address is not of this host.
    """
    listening = _listening(address)
    port = listening.getsockname()[1]
    store = _dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listening.fileno(),
    )
    listening.detach()  # the store closes it
    return store


def _listening(address: str) -> socket.socket:
    try:
        at = "127.0.0.1" if address == "localhost" else str(ipaddress.ip_address(address))
    except ValueError:
        at = "::" if socket.has_dualstack_ipv6() else ""
    family = socket.AF_INET6 if ":" in at else socket.AF_INET
    try:
        return socket.create_server((at, 0), family=family, dualstack_ipv6=at == "::")
    except OSError as error:
        raise InvalidRequest(
            f"nobody can listen at master_address={address!r} ({error.strerror}); give an address of this host that "
            "the engine's ranks reach",
            field="master_address",
        ) from error


def _reach(spec: CommunicatorSpec, ends: float) -> Any:
    """Connect to the store of rank 0, once it is there."""
    address = (spec.master_address, spec.master_port)
    while True:
        left = ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"nobody listened at {spec.master_address}:{spec.master_port} within {spec.timeout:g} s, where the "
                f"group {spec.group_name!r} was to form"
            )
        try:
            socket.create_connection(address, timeout=left).close()
            break
        except OSError:
            time.sleep(min(0.05, max(left, 0)))
    timeout = timedelta(seconds=max(ends - time.monotonic(), 0.001))
    return _dist.TCPStore(
        spec.master_address, spec.master_port, spec.world_size, False, timeout, wait_for_workers=False
    )


def _own_address(spec: CommunicatorSpec, *, listens: bool) -> str:
    if listens:
        return spec.master_address
    with socket.create_connection((spec.master_address, spec.master_port), timeout=spec.timeout) as connection:
        return str(connection.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _taken(spec: CommunicatorSpec) -> InvalidRequest:
    return InvalidRequest(
        f"the engine is in a group {spec.group_name!r} already, or forms one; leave it first", field="group_name"
    )


class Groups:
    """The groups that one worker of an engine is in, by name. Safe from any thread."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._forming: dict[str, tuple[CommunicatorSpec, threading.Thread, list[BaseException]]] = {}
        """Of each name that was asked for in :meth:`join_behind`: until it failed or was left."""
        self._lock = threading.Lock()

    def join(self, spec: CommunicatorSpec, rank: int, device: torch.device) -> None:
        """Form a group; waits for the other ranks.

        Raises:
            InvalidRequest: this worker is in a group of that name already.
            DeadlineExceeded, WeightSyncError: it does not form.
        """
        if spec.group_name in self._groups:
            raise _taken(spec)
        group = Group(spec, rank, device)
        with self._lock:
            self._groups[spec.group_name] = group

    def join_behind(self, spec: CommunicatorSpec, rank: int, device: torch.device) -> None:
        """Form a group without waiting, for a worker that must go on: call it again until it no longer raises.

        Other ranks may still raise then: it can be called again until all of them are through.

        Raises:
            EngineBusy: it is still forming.
            InvalidRequest: this worker is in another group of that name, or forms one.
            DeadlineExceeded, WeightSyncError: it does not form.
        """
        forming = self._forming.get(spec.group_name)
        if forming is None:
            errors: list[BaseException] = []

            def form() -> None:
                try:
                    self.join(spec, rank, device)
                except BaseException as error:
                    errors.append(error)

            forming = spec, threading.Thread(target=form, name="drivetrain-forms-group", daemon=True), errors
            self._forming[spec.group_name] = forming
            forming[1].start()
        asked, thread, errors = forming
        if asked != spec:
            raise _taken(spec)
        if thread.is_alive():
            raise EngineBusy(f"the group {spec.group_name!r} is still forming")
        if errors:
            del self._forming[spec.group_name]
            raise errors[0]

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            InvalidRequest: this worker is in none of that name.
        """
        self.get(name).leave()
        self._forming.pop(name, None)
        with self._lock:
            self._groups.pop(name, None)

    def get(self, name: str) -> Group:
        """The group of that name.

        Raises:
            InvalidRequest: this worker is in none of that name.
        """
        group = self._groups.get(name)
        if group is None:
            raise InvalidRequest(
                f"the engine is in no group {name!r}; form it with init_weight_update_communicator first",
                field="group_name",
            )
        return group

    def close(self) -> None:
        """Leave every group."""
        for name in list(self._groups):
            with suppress(InvalidRequest):  # someone else left it meanwhile
                self.leave(name)
