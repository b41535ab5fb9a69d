"""torch.distributed groups of a trainer's own: with the workers of an engine, or of its ranks among themselves."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import torch

from drivetrain.errors import DeadlineExceeded, EngineBusy, InvalidRequest, WeightSyncError, WeightTransferFailed
from drivetrain.types.weights import (
    CommunicatorSpec,
)

GroupBackend = Literal["nccl", "gloo"]

_dist: Any = torch.distributed
"""``Any``: its process group classes are not declared."""
_POLL_S: Final = (0.00005, 0.0005)
"""Shortest and longest pause between polls of a broadcast under way."""
_NCCL_ERRORS: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_construction: Final = threading.Lock()
_endings: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()
"""Threads that end groups after they were left."""
_MOMENT_S: Final = 0.2
"""Seconds that leaving a group waits for its end, at most."""
_LAST_S: Final = 5.0
"""Seconds that the end of the process waits for each such thread, at most."""


@dataclass(frozen=True, slots=True)
class NcclGroupSpec:
    """A group of ranks that share a store already, and so need no address to meet at."""

    group_name: str
    world_size: int
    timeout: float
    """Timeout in seconds for forming the group, and for each exchange."""
    backend: Literal["nccl"] = "nccl"


class Group:
    """A process group apart from torch's default one, in which rank 0 broadcasts, or ranks exchange tensors.

    Args:
        spec: Size and timeout of the group, and the address at which its ranks meet unless they share a store.
        rank: This process's rank.
        device: Device of this rank's buffers; a GPU for NCCL.
        store: The store through which the group forms, if this process has it already.
        abandoned: Event that makes this rank leave the group once set, even while it forms.

    Raises:
        DeadlineExceeded: the other ranks did not join within ``spec.timeout`` seconds.
        WeightSyncError: the group cannot be formed.
    """

    def __init__(
        self,
        spec: CommunicatorSpec | NcclGroupSpec,
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
        self.kept: list[object] = []
        """Memory that is kept alive until the group has ended."""
        ends = time.monotonic() + spec.timeout
        try:
            if store is None:
                assert isinstance(spec, CommunicatorSpec), "these ranks share a store"
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
        """Wait until every rank has joined the store, because forming the group cannot be interrupted."""
        store.set(f"rank {rank}", "here")
        absent = list(range(self.spec.world_size))
        pause, longest = _POLL_S
        while absent := [other for other in absent if not store.check([f"rank {other}"])]:
            if self._abandoned.is_set():
                raise WeightTransferFailed(f"this rank left the group {self.spec.group_name!r} before it formed")
            if time.monotonic() > ends:
                raise DeadlineExceeded(
                    f"timed out after {self.spec.timeout:g} s waiting for ranks {', '.join(map(str, absent))} of "
                    f"{self.spec.world_size} to join the group {self.spec.group_name!r}"
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
        # At normal priority its kernels would wait until every block of a copy that fills the GPU has started.
        options = _dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.spec.timeout)
        # Otherwise NCCL's watchdog ends the process when a peer is late; this class enforces the deadline itself.
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
        """Send ``buffer`` (uint8) if this is rank 0, otherwise fill it.

        Raises:
            DeadlineExceeded: a rank did not take part within ``spec.timeout`` seconds.
            WeightTransferFailed: a rank is gone, or this one left.
        """
        self.start(buffer).wait()

    def start(self, buffer: torch.Tensor) -> Broadcast:
        """Start to send or fill ``buffer`` (uint8); on a GPU, after the work launched so far.

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

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Broadcast:
        """Start to send contiguous tensors to ranks, and to fill others from ranks, all at once; NCCL only.

        Raises:
            WeightTransferFailed: a rank is gone, or this one left.
        """
        group = self._group
        if group is None:
            raise WeightTransferFailed(f"this rank left the group {self.spec.group_name!r}")
        with self.failing(), torch.cuda.device(self.device):
            group._start_coalescing()
            for tensor, rank in sends:
                group.send([tensor.view(-1).view(torch.uint8)], rank, 0)
            for tensor, rank in receives:
                group.recv([tensor.view(-1).view(torch.uint8)], rank, 0)
            return Broadcast(self, group._end_coalescing(), self._abandoned)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Translate torch's errors to those of :meth:`broadcast`."""
        try:
            yield
        except RuntimeError as error:
            what = f"a broadcast in the group {self.spec.group_name!r} failed: {_first_line(error)}"
            if "timed out" in str(error).lower():
                raise DeadlineExceeded(what) from error
            raise WeightTransferFailed(f"{what}; a rank is gone") from error

    def keep(self, memory: object) -> None:
        """Keep memory alive until the group has ended: an unfinished broadcast may still read or write it."""
        self.kept.append(memory)

    def leave(self) -> None:
        """Leave the group; a broadcast under way in another thread fails. Idempotent."""
        self._abandoned.set()
        group, self._group = self._group, None
        if group is None:
            return
        # An operation that no other rank joined holds the group until its own timeout, so a thread waits for that.
        held = [self.kept, group, self.spec.backend]
        del group  # otherwise this may be the last reference
        ending = threading.Thread(target=_end, args=[held], name="drivetrain-leaves-group", daemon=True)
        ending.start()
        if self.spec.backend == "nccl":
            _endings.add(ending)
        ending.join(_MOMENT_S)


class Broadcast:
    """A broadcast or an exchange under way. Created by :meth:`Group.start` and :meth:`Group.exchange`."""

    def __init__(self, group: Group, work: Any, abandoned: threading.Event) -> None:
        self._group = group
        self._work = work
        self._abandoned = abandoned
        self._ends = time.monotonic() + group.spec.timeout

    def precede(self) -> None:
        """Order later GPU work after the broadcast; on a CPU, wait for the broadcast.

        Raises:
            DeadlineExceeded, WeightTransferFailed: as :meth:`wait`.
        """
        if self._group.device.type == "cuda":
            with self._group.failing():
                self._work.wait()  # makes the GPU stream wait, not this thread
        else:
            self.wait()

    def wait(self, watch: Callable[[], None] = lambda: None) -> None:
        """Wait until the buffer was sent, or is filled; call ``watch`` now and then, which may raise.

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
                watch()
                if time.monotonic() > self._ends:
                    raise DeadlineExceeded(
                        f"timed out after {timeout:g} s waiting for a broadcast in the group {name!r}"
                    )
                time.sleep(pause)
                pause = min(2 * pause, longest)
            self._work.wait()


def _end(held: list[Any]) -> None:
    backend, group = held.pop(), held.pop()
    if backend == "nccl":
        group.abort()


@atexit.register
def _let_end() -> None:
    # A daemon thread that is inside NCCL when the interpreter ends crashes the process.
    for ending in list(_endings):
        ending.join(_LAST_S)


def meeting_place(address: str, world_size: int, timeout: float) -> Any:
    """Create a store at a free port of this host's ``address``, through which the ranks can form a group.

    It listens at that address only. A host name other than ``localhost`` may resolve differently elsewhere, as Debian's
    127.0.1.1 does, so for such a name the store listens at all addresses.

    Raises:
        InvalidRequest: the address does not belong to this host.
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
            f"cannot listen at master_address={address!r} ({error.strerror}); give an address of this host that "
            "the engine's ranks reach",
            field="master_address",
        ) from error


def _reach(spec: CommunicatorSpec, ends: float) -> Any:
    """Connect to the store of rank 0, waiting until it listens."""
    address = (spec.master_address, spec.master_port)
    while True:
        left = ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"timed out after {spec.timeout:g} s waiting for rank 0 of the group {spec.group_name!r} to listen at "
                f"{spec.master_address}:{spec.master_port}"
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
        f"the engine is already in a group {spec.group_name!r}, or is forming it; leave it first", field="group_name"
    )


class Groups:
    """The groups that one worker of an engine is in, by name. Safe from any thread."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._forming: dict[str, tuple[CommunicatorSpec, threading.Thread, list[BaseException]]] = {}
        """Groups requested through :meth:`join_behind`, by name, until they failed or were left."""
        self._lock = threading.Lock()

    def join(self, spec: CommunicatorSpec, rank: int, device: torch.device) -> None:
        """Form a group, waiting for the other ranks.

        Args:
            spec: Name, size and address of the group.
            rank: This worker's rank in the group: ``spec.rank_offset`` plus its rank in the engine.
            device: Device of its buffers; a GPU for NCCL.

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
        """Form a group in the background, for a worker that must continue; call again until it no longer raises.

        Even then, other ranks may still raise EngineBusy: this can be called again until all ranks succeed.

        Raises:
            EngineBusy: it is still forming.
            InvalidRequest: this worker is in another group of that name, or is forming one.
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
            InvalidRequest: this worker is in no group of that name.
        """
        self.get(name).leave()
        self._forming.pop(name, None)
        with self._lock:
            self._groups.pop(name, None)

    def get(self, name: str) -> Group:
        """Return the group of that name.

        Raises:
            InvalidRequest: this worker is in no group of that name.
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
            with suppress(InvalidRequest):  # another thread left it meanwhile
                self.leave(name)
