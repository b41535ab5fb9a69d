"""The engine that a trainer uses: one page of calls, the same on every backend, over parts that do the work.

``drivetrain.engine.api`` documents the calls by topic; ``drivetrain.engine.parts`` draws the parts. This module starts
the parts, watches the backend, and closes it. :class:`~drivetrain.backend.base.Backend` hides what differs between
engines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Self

from drivetrain.backend.base import Backend
from drivetrain.backend.toolkit.daemon_thread import in_daemon_thread
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.stall_watch import ended
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.api.conveniences import Conveniences
from drivetrain.engine.api.lora import LoraCalls
from drivetrain.engine.api.openai_api import OpenAICalls
from drivetrain.engine.api.sessions import SessionCalls
from drivetrain.engine.api.sharing import SharingCalls
from drivetrain.engine.config_checks import absolute_folders
from drivetrain.engine.death_reports import report_death
from drivetrain.engine.listener import EngineListener
from drivetrain.engine.parts import PartKinds
from drivetrain.engine.shared_state import EngineFacts, shared_capabilities, this_machine
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError, EngineError, EngineStartError
from drivetrain.types.arguments import checked
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation

logger = logging.getLogger("drivetrain.engine")


class InferenceEngine(Conveniences, OpenAICalls, SessionCalls, LoraCalls, SharingCalls):
    """One inference engine. Made by :func:`~drivetrain.create.create_engine`; used as ``async with engine:``.

    It belongs to the event loop that it was started in. Any number of tasks of that loop may use it at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        *,
        capabilities: frozenset[Capability],
        isolation: Isolation,
        versions: dict[str, str],
    ) -> None:
        self.config = config
        self.capabilities = capabilities
        self.isolation = isolation
        self.versions = versions
        self.capabilities_by_files: Callable[[], frozenset[Capability]] | None = None
        """Fetches a hub model's configuration and returns the capabilities with it; None if the model is a folder."""
        self.parts = PartKinds().build(config, backend, capabilities)
        self._instance = secrets.token_hex(8)
        self._backend_closed = False
        self._death_watch: asyncio.Task[None] | None = None

    @checked
    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Load the model and get ready to serve. ``progress`` is called with a few words at each stage.

        Raises:
            EngineStartError: the engine did not start; the message names the exception and carries the last log lines.
            DeadlineExceeded: starting took longer than ``timeouts.start``.
        """
        controller, model, weights = self.parts.controller, self.parts.model, self.parts.weights
        controller.starting()
        report_death(self.parts.backend, self._fail)

        def report(stage: str) -> None:
            logger.info("%s: %s", self.config.backend, stage)
            if progress is not None:
                progress(stage)

        try:
            # A host process keeps the deadline itself and quotes its last log lines, so it may report first.
            grace = 0.0 if self.isolation is Isolation.INLINE else self.config.timeouts.close
            waited_for = f"the {self.config.backend} engine to start with the model {shown(self.config.model)}"
            if self.config.tokenizer is not None:
                waited_for += f" and the tokenizer {shown(self.config.tokenizer)}"
            async with deadline(self.config.timeouts.start + grace, waited_for):
                await self._fetch_configuration(report)
                await model.start(report)
        except BaseException as error:
            said = self.config.redacted(str(error))
            controller.fail(f"it did not start: {said}")
            await self._close_backend()
            if isinstance(error, Exception) and not isinstance(error, DrivetrainError):
                what = f"the {self.config.backend} engine did not start: {type(error).__name__}: {said}"
                raise EngineStartError(what) from (error if said == str(error) else None)
            if said != str(error):  # an engine's own error may repeat its arguments
                error.args = (said,)
                raise error from None
            raise
        if model.info.weight_version is not None:
            weights.publish(model.info.weight_version)
        controller.started()
        self.parts.sharing.make_listener = lambda: EngineListener(self.parts, self._facts)
        self._death_watch = asyncio.create_task(self._watch_for_death())

    async def _fetch_configuration(self, report: Callable[[str], None]) -> None:
        if self.capabilities_by_files is not None:
            report("fetching the model's configuration")
            async with deadline(self.config.timeouts.start, f"the hub's files of {shown(self.config.model)}"):
                known = await in_daemon_thread(self.capabilities_by_files, "drivetrain-fetches")
            self.capabilities = self.parts.controller.capabilities = known

    async def teardown(self) -> None:
        """Stop the engine and leave nothing behind; idempotent. Requests in flight come back aborted.

        Raises:
            EngineStateError: this is another event loop than the one that the engine was started in.
        """
        controller, in_flight = self.parts.controller, self.parts.in_flight
        if self.state in (EngineState.CLOSED, EngineState.CREATED):
            controller.close()
            return
        controller.require_own_loop("teardown()")
        await self.parts.sharing.close()
        if self.state is not EngineState.FAILED:
            try:
                async with deadline(self.config.timeouts.close, "requests in flight to end"):
                    await in_flight.abort(None)
                    await in_flight.drained()
            except DrivetrainError as error:
                logger.warning("requests in flight did not end before teardown: %s", error)
        controller.close()
        if self._death_watch is not None:
            self._death_watch.cancel()
            await asyncio.gather(self._death_watch, return_exceptions=True)
        await self._close_backend()

    def _facts(self) -> EngineFacts:
        backend = type(self.parts.backend)
        capabilities = shared_capabilities(backend, self.config, self.capabilities, self.isolation)
        return EngineFacts(
            config=self.config.model_copy(update={"endpoint_api_key": None, **absolute_folders(self.config)}),
            capabilities=frozenset(capability.value for capability in capabilities),
            native_stops=self.parts.backend.native_stops,
            counts_resumed_tokens=self.parts.backend.counts_resumed_tokens,
            versions=self.versions,
            model=self.model_info,
            pid=self.host_pid or os.getpid(),
            machine=this_machine(),
            instance=self._instance,
        )

    async def _close_backend(self) -> None:
        if self._backend_closed:
            return
        self._backend_closed = True
        async with deadline(self.config.timeouts.close * 2, f"the {self.config.backend} engine to close"):
            await self.parts.backend.close()

    async def _watch_for_death(self) -> None:
        backend, in_flight = self.parts.backend, self.parts.in_flight
        # A host process watches for stalls itself.
        inline = self.isolation is Isolation.INLINE
        error = await (ended(backend, lambda: in_flight.running) if inline else backend.died())
        logger.error("the %s engine died: %s", self.config.backend, error)
        self._fail(error)
        if inline:
            in_flight.fail(error)

    def _fail(self, error: EngineError) -> None:
        self.parts.controller.fail(str(error), died=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.teardown()
