"""A fleet of engines in Ray actors: an engine whose actor Ray makes anew joins again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import ray

from drivetrain.attached.engine import AttachedEngine, attach
from drivetrain.engine.states import EngineState
from drivetrain.engine.tasks import cancel_all
from drivetrain.errors import DeadlineExceeded, DrivetrainError, EngineDied, EngineStartError, EngineStateError
from drivetrain_fleet.client import InferenceEngineClient
from drivetrain_fleet.ray.engine import RayEngine
from drivetrain_fleet.routing import RoutingPolicy

logger = logging.getLogger("drivetrain.fleet")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_JOINING_PAUSE_S: Final = 0.2
_ENDED: Final = frozenset({EngineState.FAILED, EngineState.CLOSED})


class RayFleet(InferenceEngineClient):
    """A fleet of engines in Ray actors; made by ``RayEngines.fleet``.

    If an actor dies, its engine is ``failed``. Once Ray has made the actor anew, the new engine takes the old one's
    name and place. It is ``stale`` until the next complete weight update, unless it has loaded what the fleet serves.
    ``teardown`` detaches from the engines; ``RayEngines.close`` ends them.

    Args:
        engines: The engines.
        attached: The page of each.
        min_engines: As of :class:`drivetrain_fleet.InferenceEngineClient`; so are the arguments that follow.
        max_staleness: Versions that an engine may be behind and still serve.
        routing: The policy that spreads samples over the engines.
        max_waiting: Samples that may wait for an engine.
        max_samples_per_engine: Samples that one engine may have at a time.
        exact_failover: Stream tokens from the engines, to know which samples have none.
    """

    def __init__(
        self,
        engines: Sequence[RayEngine],
        attached: Sequence[AttachedEngine],
        *,
        min_engines: int = 1,
        max_staleness: int = 0,
        routing: RoutingPolicy | None = None,
        max_waiting: int = 1 << 16,
        max_samples_per_engine: int | None = None,
        exact_failover: bool = True,
    ) -> None:
        super().__init__(
            {engine.name: page for engine, page in zip(engines, attached, strict=True)},
            min_engines=min_engines,
            max_staleness=max_staleness,
            routing=routing,
            max_waiting=max_waiting,
            max_samples_per_engine=max_samples_per_engine,
            exact_failover=exact_failover,
        )
        self._first = tuple(zip(engines, attached, strict=True))
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Compare the engines, and get ready to serve.

        Raises:
            InvalidConfig: Two engines differ.
            EngineDied: An engine was lost.
        """
        await super().start(progress)
        for engine, page in self._first:
            self._watch(engine.name, engine, page)

    async def teardown(self) -> None:
        """Detach from the engines; idempotent."""
        await cancel_all(self._watches)
        await super().teardown()

    async def join(self, engine: RayEngine, name: str | None = None) -> str:
        """Attach to another engine and let it join, as ``add`` does; return its name in the fleet.

        Raises:
            InvalidConfig: It differs from the fleet's engines.
            EngineStateError: The fleet is not open, or sleeps.
            EngineStartError: The engine did not start.
            EngineDied: Its actor has ended.
            DeadlineExceeded: Its actor did not answer in time.
        """
        page = await engine.attach()
        try:
            name = await self.add(page, name)
        except BaseException:
            await page.teardown()
            raise
        self._watch(name, engine, page)
        return name

    def _watch(self, name: str, engine: RayEngine, page: AttachedEngine) -> None:
        task = asyncio.create_task(self._keep(name, engine, page))
        self._watches.append(task)
        task.add_done_callback(self._watched)

    def _watched(self, task: asyncio.Task[None]) -> None:
        self._watches.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an engine that was lost does not join again", exc_info=error)

    # Engines that are made anew ----------------------------------------------------------------------------------

    async def _keep(self, name: str, engine: RayEngine, page: AttachedEngine) -> None:
        """Let the engine that Ray makes in a lost one's place join, again and again."""
        joined = True
        while True:
            await page.parts.backend.died()
            member = self._fleet.members.find(name)
            if joined and (member is None or member.engine is not page):
                return  # the engine was removed
            try:
                page = await self._attach_anew(name, engine)
            except EngineDied as error:
                logger.error("%s does not come back: %s", name, error)
                return
            try:
                joined = await self._take_its_place(name, page)
            except DrivetrainError as error:
                logger.error("%s does not join: %s", name, error)
                await page.teardown()
                return
            except BaseException:
                await page.teardown()
                raise

    async def _attach_anew(self, name: str, engine: RayEngine) -> AttachedEngine:
        """Attach to the engine once Ray has made it anew.

        Raises:
            EngineDied: Ray does not make it anew.
        """
        pause = _FIRST_PAUSE_S
        while True:
            handle = None
            try:
                handle = await engine.handle()
                return await attach(handle)
            except EngineStartError as error:
                logger.error("%s did not start anew: %s", name, error)
                ray.kill(engine.actor, no_restart=False)
            except DrivetrainError as error:
                if handle is None and isinstance(error, EngineDied):
                    raise
                logger.info("%s is not back yet: %s", name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _take_its_place(self, name: str, page: AttachedEngine) -> bool:
        """Let an engine join in the place of the failed one of this name; return False if it was lost meanwhile.

        Raises:
            DrivetrainError: It cannot join.
        """
        while True:
            try:
                self._refuse_asleep()
                member = self._fleet.members.find(name)
                if member is not None and member.status.failed:
                    await (await self.remove(name)).teardown()
                await self.add(page, name)
            except (DeadlineExceeded, EngineStateError, EngineDied) as error:
                if self.state in _ENDED:
                    raise
                if page.state in _ENDED:
                    return False
                logger.info("%s cannot join yet: %s", name, error)
            else:
                return True
            await asyncio.sleep(_JOINING_PAUSE_S)
