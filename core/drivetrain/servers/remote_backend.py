"""Base of backends whose engine is a running server: the parts that do not depend on the engine."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult
from drivetrain.errors import (
    DrivetrainError,
    EngineDied,
    EngineError,
    EngineInternalError,
    EngineStartError,
    InvalidConfig,
)
from drivetrain.servers.http_client import ServerClient, ServerKind
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.outputs import FinishReason

ENDPOINT: Final = "endpoint"
LOOK_S: Final = 4.0
"""Seconds within which a running server describes itself."""
BUSY_S: Final = 60.0
"""Seconds within which a running server's scheduler answers, however busy."""
_CONNECT_S: Final = 4.0
_POLL_S: Final = 0.5
_STOOD_STILL_S: Final = 1.0
"""Seconds of delay above which our own event loop counts as blocked, as by a training step."""
_ABORT_AGAIN_S: Final = (0.01, 0.1)
"""Seconds before an abort is repeated: the first, doubled each time up to the second."""
_LAST_ABORTS: Final = 6
"""Number of aborts for a request whose caller went away; the pause doubles each time."""


class ServerAnswers(Protocol):
    """A server's description of itself."""

    @property
    def launch(self) -> object:
        """Identity of the launch: differs if the server was relaunched on the same port."""
        ...


@dataclass(slots=True)
class Sent:
    """A request in flight at the server."""

    name: str
    """The request's id at the server."""
    ended: bool = False
    """True if the server reported its end or the caller stopped waiting."""


Says = TypeVar("Says", bound=ServerAnswers)


class ServerBackend(Backend, Generic[Says]):
    """Queries the server before claiming capabilities, watches it, and aborts abandoned requests reliably."""

    kind: ClassVar[ServerKind]
    alive_path: ClassVar[str]
    """Path that a live server answers at once, however busy."""
    engine_distribution = "aiohttp"
    default_isolation: ClassVar[Isolation] = Isolation.INLINE

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.client = self._client_of(config)
        self.version = ""
        """Version of the served weights."""
        self._prefix = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._cache_epoch = 0
        self._sent: dict[str, Sent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._death: asyncio.Future[EngineError] | None = None
        self._launch: object = None

    # For each engine ---------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    async def look(cls, client: ServerClient) -> Says:
        """Query the server's description.

        Raises:
            EngineStartError: It is not a server of this engine.
        """

    @classmethod
    async def launch_of(cls, client: ServerClient) -> object:
        """Return the identity of the server's launch. Override it if a cheaper query than :meth:`look` suffices."""
        return (await cls.look(client)).launch

    @classmethod
    @abstractmethod
    def claims_of(cls, config: EngineConfig, says: Says) -> frozenset[Capability]:
        """Return the capabilities that work with this server.

        Raises:
            EngineStartError: This backend does not work with such a server.
            InvalidConfig: The server would interpret requests differently, or does not match the configuration.
        """

    @abstractmethod
    async def send_abort(self, names: Sequence[str]) -> None:
        """Abort the requests with these server-side ids. The server may not know some of them yet, or any more."""

    # Before launch -----------------------------------------------------------------------------------------------

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Query the server for its capabilities; blocks for a few seconds at most.

        Raises:
            InvalidConfig: There is no endpoint, or the server does not match the configuration.
            EngineStartError: No server answers at the address, or one that this backend does not know.
        """
        client = cls._client_of(config)
        with ThreadPoolExecutor(1, thread_name_prefix="drivetrain-server-look") as thread:
            says = thread.submit(asyncio.run, cls._look_once(client)).result()
        return cls.claims_of(config, says)

    @classmethod
    async def _look_once(cls, client: ServerClient) -> Says:
        await client.open()
        try:
            return await cls.look(client)
        except EngineDied as error:
            raise EngineStartError(f"{error}; launch one with: {cls.kind.launch}") from error
        finally:
            await client.close()

    @classmethod
    def _client_of(cls, config: EngineConfig) -> ServerClient:
        if config.endpoint is None:
            raise InvalidConfig(
                f"endpoint is missing; give the address of a running {cls.kind.engine} server, such as "
                f"'http://127.0.0.1:{cls.kind.port}'",
                field=ENDPOINT,
            )
        return ServerClient(config.endpoint, config.endpoint_api_key, cls.kind)

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def connect(self, report: Callable[[str], None]) -> Says:
        """Connect, and check the server again."""
        report(f"connecting to {self.client.endpoint}")
        await self.client.open()
        says = await self.look(self.client)
        self.claims_of(self.config, says)
        self._death = asyncio.get_running_loop().create_future()
        self._launch = says.launch
        return says

    def check_same_folder(self, served: str) -> None:
        """Check that the server serves the configured model, if both folders exist here.

        A server on another machine or in a container has other paths, which are not compared.

        Raises:
            EngineStartError: ``served`` is another folder.
        """
        own = Path(self.config.model)
        if own.is_dir() and Path(served).is_dir() and not own.samefile(served):
            raise EngineStartError(
                f"model={self.config.model!r}, but the server at {self.client.endpoint} was launched with {served!r}; "
                "name the same model"
            )

    def watch(self) -> None:
        """Start polling the server; if it is lost, every waiter fails."""
        self.spawn(self._watch())

    @property
    def is_there(self) -> bool:
        """True if the engine is started and the server was not found dead."""
        return self._death is not None and not self._death.done()

    async def close(self) -> None:
        """Disconnect; the server keeps running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()

    async def died(self) -> EngineError:
        """Wait until the server is gone or was replaced by another launch, and return the error."""
        assert self._death is not None, "died() is called once the engine is started"
        return await asyncio.shield(self._death)

    async def _watch(self) -> None:
        # A separate client, whose connections do not queue behind thousands of requests.
        watching = self._client_of(self.config)
        await watching.open()
        try:
            why = ""
            while not why:
                await asyncio.sleep(_POLL_S)
                why = await self._is_lost(watching)
        finally:
            await watching.close()
        await self._die(why)

    async def _is_lost(self, watching: ServerClient) -> str:
        """Return why the server is considered lost, or "" if it answered or our own loop was blocked."""
        heartbeat = self.config.timeouts.heartbeat
        asked = asyncio.create_task(watching.get(self.alive_path, None))
        reached = asyncio.create_task(watching.reach())
        begun, waited = time.monotonic(), 0.0
        try:
            while not asked.done() and waited < heartbeat:
                if waited >= _CONNECT_S and not (reached.done() and reached.exception() is None):
                    break
                await asyncio.wait({asked}, timeout=_POLL_S)
                waited += _POLL_S
            if time.monotonic() - begun > waited + _STOOD_STILL_S:
                return ""
            if not asked.done():
                return f"the {self.kind.engine} server at {self.client.endpoint} did not answer within {waited:g} s"
            error = asked.exception()
            return "" if error is None else str(error)
        finally:
            asked.cancel()
            reached.cancel()
            await asyncio.gather(asked, reached, return_exceptions=True)

    async def _die(self, why: str) -> None:
        if self.is_there:
            assert self._death is not None
            self._death.set_result(EngineDied(why))
            await self.client.close()

    # Requests ----------------------------------------------------------------------------------------------------

    @property
    def cache_key(self) -> str:
        """Key under which the server caches prefixes, in addition to their tokens."""
        return f"{self._prefix}-{self._cache_epoch}"

    def new_name(self) -> str:
        """Return a request id that is unique among the server's clients and not a prefix of any other."""
        return f"{self._prefix}-{next(self._numbers)}."

    @contextmanager
    def sent(self, request_id: str, name: str) -> Iterator[Sent]:
        """Track a request during the block; if it has not ended by then, abort it reliably in the background."""
        request = self._sent[request_id] = Sent(name)
        try:
            yield request
        finally:
            del self._sent[request_id]
            if not request.ended:
                request.ended = True
                self.spawn(self._abort_for_good(name))

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests, running or waiting."""
        known = [self._sent[request_id] for request_id in request_ids if request_id in self._sent]
        if known:
            await self.send_abort([request.name for request in known])
            self.spawn(self._abort_until_ended(known))

    async def _abort_until_ended(self, requests: Sequence[Sent]) -> None:
        """Repeat the abort until the requests end: it may overtake its request on the way to the server."""
        pause, longest = _ABORT_AGAIN_S
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            requests = [request for request in requests if not request.ended]
            if not requests:
                return
            await self.send_abort([request.name for request in requests])

    async def _abort_for_good(self, name: str) -> None:
        for already in range(_LAST_ABORTS):
            await self.send_abort([name])
            await asyncio.sleep(_ABORT_AGAIN_S[1] * 2**already)

    @staticmethod
    def whole(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        """Return ``result`` if the server ended the sample as the request says.

        Raises:
            EngineInternalError: The server cut it by a limit or a stop of its own.
        """
        if result.finish_reason is FinishReason.LENGTH and len(result.token_ids) < request.max_new_tokens:
            raise EngineInternalError(
                f"request {request.request_id}: the server ended it after {len(result.token_ids)} of "
                f"{request.max_new_tokens} tokens; was it launched with a limit of its own?"
            )
        if result.finish_reason is FinishReason.STOP and result.matched_stop is None:
            raise EngineInternalError(
                f"request {request.request_id}: the server ended it at id {result.token_ids[-1:]}, which is none of "
                f"its stops {sorted(request.stop_token_ids)}"
            )
        return result

    async def reset_prefix_cache(self) -> None:
        """Start a new cache key, so that no earlier prefix is used; the server evicts those when it needs memory."""
        self._cache_epoch += 1

    # Calls -------------------------------------------------------------------------------------------------------

    async def call(self, answer: Awaitable[Any]) -> Any:
        """Await an answer or the server's death. If the connection breaks, find out whether the server died."""
        if self._death is None:
            return await answer
        asked = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({asked, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise EngineDied(str(self._death.result()))
            return await self.checked(asked)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def checked(self, answer: Awaitable[Any]) -> Any:
        """Await an answer; if the connection breaks, find out whether the server died and raise the matching error.

        Unlike :meth:`call` it does not watch for the server's death while it waits.
        """
        try:
            return await answer
        except EngineDied as error:
            if self._death is None:
                raise
            if not self._death.done():
                try:
                    launch = await self.launch_of(self.client)
                except DrivetrainError:
                    await self._die(str(error))
                else:
                    if launch != self._launch:
                        await self._die(f"the {self.kind.engine} server at {self.client.endpoint} was launched anew")
            if self._death.done():
                raise EngineDied(str(self._death.result())) from error
            raise EngineInternalError(f"{error}; the server itself is up") from error

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background. :meth:`died` reports failures caused by the server's death."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            error = None if ended.cancelled() else ended.exception()
            if error is not None and not isinstance(error, EngineError):
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"a task of the {self.name} backend failed", "exception": error, "task": ended}
                )

        task.add_done_callback(done)
