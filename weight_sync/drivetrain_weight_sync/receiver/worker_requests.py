"""Generation on an engine that runs our worker: the connection, ids, admission, aborts and the cache key."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, TokenDelta
from drivetrain.backend.toolkit.collected_sample import Added
from drivetrain.errors import EngineDied, EngineInternalError
from drivetrain.process.worker_connection import WorkerConnection, WorkerListener
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import MediaInput
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_weight_sync.receiver.cache_epochs import OF_EXPERTS
from drivetrain_weight_sync.receiver.request_arrivals import request_id

_ABORT_AGAIN_S: Final = 0.1


class InFlight(Protocol):
    """The state of a request in flight that weight updates touch."""

    def replaced(self, version: str, tokens: float) -> None:
        """Record that new weights follow this many tokens; infinity if every token was already sampled."""
        ...


class Sample(InFlight, Protocol):
    """A sample that is put together from the engine's outputs; see ``CollectedSample`` of the toolkit."""

    added_mask: SamplingMask | None
    """Ids that the tokens of the last :meth:`add` were drawn from; None: not asked for."""

    @property
    def ended(self) -> bool:
        """True if the last output was added."""
        ...

    def add(self, output: Any, /) -> Added:
        """Add an output of the engine; return its ids, their logprobs, and the top logprobs."""
        ...

    def result(self, version: str) -> GenerateResult:
        """Return the complete sample; ``version`` is the version that is served now."""
        ...


S = TypeVar("S", bound=Sample)


class WorkerRequests(Backend, Generic[S]):
    """Connects to the worker inside an engine, and sends requests to the engine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.version = config.weight_version
        """Version of the weights that are served."""
        self.in_flight: dict[str, InFlight] = {}
        """Requests in flight, by the engine's id."""
        self._listener: WorkerListener | None = None
        self._worker: WorkerConnection | None = None
        self._names: dict[str, str] = {}
        """The engine's ids of our requests, from before their admission until they have ended."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._admits = asyncio.Event()
        self._admits.set()
        self._cache_epoch = 0

    # For each engine ---------------------------------------------------------------------------------------------

    @abstractmethod
    def collect(self, request: GenerateRequest) -> S:
        """Return an empty sample, to which the request's outputs are added."""

    @abstractmethod
    def outputs(self, request: GenerateRequest, sample: S, *, stream: bool) -> AsyncGenerator[Any, None]:
        """Send a request within :meth:`admitted`, and yield the engine's outputs.

        If ``stream`` is false, a single output with all tokens is enough.
        """

    @abstractmethod
    async def send_abort(self, names: Sequence[str]) -> None:
        """Abort requests by the engine's ids. The engine may not know some of them yet, or any more."""

    # The worker --------------------------------------------------------------------------------------------------

    def listen(self) -> str:
        """Listen for the worker, and return the name under which it finds this process."""
        self._listener = WorkerListener()
        return self._listener.name

    async def connect(self, lost: str) -> None:
        """Wait until the worker has connected.

        Args:
            lost: Message of the ``EngineDied`` that calls raise once the worker has died.

        Raises:
            EngineStartError: It did not connect in time.
        """
        assert self._listener is not None, "connect() follows listen()"
        self._worker = await self._listener.accept(lambda: EngineDied(lost))

    def disconnect(self) -> None:
        """Close the connection; waiting calls fail."""
        listener, self._listener = self._listener, None
        worker, self._worker = self._worker, None
        for aborting in self._aborts:
            aborting.cancel()
        if listener is not None:
            listener.close()
        if worker is not None:
            worker.close()

    @property
    def worker(self) -> WorkerConnection:
        """The connection.

        Raises:
            EngineInternalError: The engine is not running.
        """
        if self._worker is None:
            raise EngineInternalError(f"the {self.name} backend is not running")
        return self._worker

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample, which the engine returns at once."""
        sample = self.collect(request)
        async with aclosing(self.outputs(request, sample, stream=False)) as outputs:
            async for output in outputs:
                sample.add(output)
        return sample.result(self.version)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample, yielding a delta per step."""
        sample = self.collect(request)
        async with aclosing(self.outputs(request, sample, stream=True)) as outputs:
            async for output in outputs:
                ids, logprobs, top = sample.add(output)
                if ids or sample.ended:
                    result = sample.result(self.version) if sample.ended else None
                    yield TokenDelta(ids, logprobs, top, result, sampling_mask=sample.added_mask)

    async def warm_up(self, media: Iterable[tuple[list[int], tuple[MediaInput, ...]]] = ()) -> None:
        """Generate a little: the first request is slow, and one aborted during that time would end without a token.

        Args:
            media: Prompts with media, each as token ids and media.
        """
        plain, filtered = SamplingParams(temperature=0), SamplingParams(min_p=0.1, top_k=2)
        prompts = [(plain, [0, 0], ()), (filtered, [0, 0], ()), *((filtered, ids, given) for ids, given in media)]
        for params, ids, given in prompts:
            await self.generate(GenerateRequest("warm-up", ids, params, 2, (), LogprobsMode.TEMPERATURE, media=given))
        await self.reset_prefix_cache()

    def new_id(self) -> str:
        """Return a new unique request id for the engine."""
        return request_id(self._prefix, next(self._numbers))

    @asynccontextmanager
    async def admitted(self, request: GenerateRequest, sample: InFlight) -> AsyncIterator[str]:
        """Count a request as in flight, before any of it is sent to the engine; yield its id for the engine.

        If the engine labels no tokens, this waits while weights are being replaced: the tokens of a request that
        arrived meanwhile could come from either version.
        """
        name = self._names[request.request_id] = self.new_id()
        try:
            await self._admits.wait()
            self.in_flight[name] = sample
            yield name
        finally:
            self._names.pop(request.request_id, None)
            self.in_flight.pop(name, None)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests, whether running, waiting or frozen."""
        asked = {one: self._names[one] for one in request_ids if one in self._names}
        if asked:
            await self.send_abort(list(asked.values()))
            aborting = asyncio.create_task(self._abort_until_ended(asked))
            self._aborts.add(aborting)
            aborting.add_done_callback(self._abort_ended)

    def _abort_ended(self, aborting: asyncio.Task[None]) -> None:
        self._aborts.discard(aborting)
        if not aborting.cancelled():
            aborting.exception()  # retrieved so that asyncio does not log it: died() reports that the engine is gone

    async def _abort_until_ended(self, asked: Mapping[str, str]) -> None:
        """Repeat the abort until the requests end: it may overtake its request, which the engine then does not know."""
        while True:
            await asyncio.sleep(_ABORT_AGAIN_S)
            left = [name for one, name in asked.items() if self._names.get(one) == name]
            if not left:
                return
            await self.send_abort(left)

    @contextmanager
    def nobody_admitted(self) -> Iterator[None]:
        """Let new requests wait within the ``with`` body."""
        self._admits.clear()
        try:
            yield
        finally:
            self._admits.set()

    # Prefix cache ------------------------------------------------------------------------------------------------

    @property
    def cache_key(self) -> str:
        """Prefix-cache key of new requests, used beside their tokens.

        No two engines have one in common: a cache that outlasts an engine, or that several share, has prefixes of other
        weights.
        """
        return f"drivetrain-{self._prefix}-{self._cache_epoch}"

    def cache_key_of(self, request: GenerateRequest) -> str:
        """Return the key of a request's prefixes; if its prompt's experts are asked for, none of other weights match.

        An update that keeps the prefix cache keeps the experts of its tokens too. See :class:`CacheEpochs`.
        """
        prompt_experts = request.params.return_prompt_routed_experts
        return f"{self.cache_key}{OF_EXPERTS}" if prompt_experts else self.cache_key

    def renew_cache_key(self) -> None:
        """Let new requests use no earlier prefix."""
        self._cache_epoch += 1
