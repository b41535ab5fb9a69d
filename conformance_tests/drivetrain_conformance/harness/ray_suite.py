"""The suite of any backend through handles to Ray actors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from drivetrain.engine.tasks import cancel_all
from drivetrain.errors import EngineStartError
from drivetrain.types.config import EngineConfig
from drivetrain.types.handle import EngineHandle
from drivetrain_conformance.harness.remote_suite import EngineHost, RemoteSuite
from drivetrain_conformance.harness.suite import Suite
from drivetrain_fleet.ray.actor import EngineActor, Refusal
from drivetrain_fleet.ray.calls import make

_START_S: Final = 300.0
_END_S: Final = 20.0


class ReusedActor(EngineActor):
    """An engine's actor that can own another engine once the first one is closed: importing takes most of a start."""

    async def renew(self, config: EngineConfig) -> None:
        """Own a new engine, which starts when its handle is asked for."""
        if self._ending is not None:
            await cancel_all([self._ending])
        EngineActor.__init__(self, config, [])


class ActorHost:
    """An actor with one engine, started and ready.

    Raises:
        DrivetrainError: The error of the start.
    """

    def __init__(self, fields: Mapping[str, object], idle: list[ActorHandle[object]]) -> None:
        self._idle = idle
        self._stopping = threading.Lock()
        self._ended = False
        config = EngineConfig.from_mapping(fields)
        self._actor: Any = _actor(idle, config)
        node, self.pid, _ = ray.get(self._actor.placement.remote(), timeout=_START_S)
        try:
            ray.get(self._actor.renew.remote(config), timeout=_START_S)
            answer = ray.get(self._actor.handle.remote(node), timeout=_START_S)
        except RayError as error:
            self._kill()
            raise EngineStartError(f"the actor failed: {error}") from error
        if isinstance(answer, Refusal):
            self.stop()
            raise answer.error()
        assert isinstance(answer, EngineHandle)
        self.endpoint = answer.address
        self.key = answer.key

    @property
    def is_alive(self) -> bool:
        """True while the actor runs and owns this engine."""
        return not self._ended and psutil.pid_exists(self.pid)

    def stop(self) -> None:
        """Close the engine, and keep the actor for another one; idempotent."""
        with self._stopping:
            if self._ended:
                return
            self._ended = True
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)  # a case may have frozen it
            try:
                ray.get(self._actor.close.remote(), timeout=_END_S)
            except RayError:  # it has died, or does not answer
                self._kill()
            else:
                self._idle.append(self._actor)

    def _kill(self) -> None:
        self._ended = True
        ray.kill(self._actor, no_restart=True)
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            psutil.Process(self.pid).wait(_END_S)


def _actor(idle: list[ActorHandle[object]], config: EngineConfig) -> Any:
    """Return an actor that owns no engine."""
    while idle:
        actor: Any = idle.pop()
        with suppress(RayError):
            ray.get(actor.placement.remote(), timeout=_END_S)
            return actor
    return make(ReusedActor, {"num_cpus": 0, "max_restarts": 0}, config, [])


class RaySuite(RemoteSuite):
    """Another suite's backend, used from this process through handles to actors of a Ray that the suite starts.

    Args:
        inner: The suite of the backend.
    """

    def __init__(self, inner: Suite) -> None:
        super().__init__(inner, None)
        self._idle: list[ActorHandle[object]] = []
        before = {child.pid for child in psutil.Process().children()}
        ray.init(
            "local",  # never a cluster that runs already
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        self._daemons = [child for child in psutil.Process().children() if child.pid not in before]

    def _start_host(self, fields: Mapping[str, object]) -> EngineHost:
        return ActorHost(fields, self._idle)

    def isolation_of(self, fields: Mapping[str, object]) -> str:
        """Return "ray"."""
        return "ray"

    def own_processes(self) -> frozenset[int]:
        """Return the pids of Ray's daemons and workers, but not of processes that a worker has started."""
        found = set(super().own_processes())
        for daemon in self._daemons:
            with suppress(psutil.NoSuchProcess):
                found |= {daemon.pid, *(child.pid for child in daemon.children())}
        return frozenset(found)

    def close(self) -> None:
        """End every engine that still runs, and Ray."""
        super().close()
        ray.shutdown()
