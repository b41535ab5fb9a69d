"""The engine behind the routes: its names in requests, and its adapters."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.request_builder import ParamsLike
from drivetrain.engine.tasks import gather_or_cancel
from drivetrain.errors import DrivetrainError, EngineBusy, InvalidRequest, TooManyAdapters
from drivetrain.openai.engine_calls import Call
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import CompletionChunk, GenerationOutput
from drivetrain.types.prompts import Prompt, TokenPrompt
from drivetrain.types.weights import LoraSource, WeightUpdateRequest
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.request_records import RECORD, RequestRecord
from drivetrain_serving.other_processes import OtherProcesses
from drivetrain_serving.traffic import Traffic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COUNTS: Final = ("logprobs", "prompt_logprobs")
"""Sampling parameters that count most likely tokens."""
_POLL_S: Final = 0.05
_ABORTS_AT_ONCE: Final = 64
_MOST_NAMED: Final = 10
"""Most names of models and adapters in an error."""
_MOST_GIVEN: Final = 128
"""Most characters of a request's own id that begin the engine's."""


def with_own_id(call: Call) -> Call:
    """Return the call with an id that no other request of any process has: the given one with a random end."""
    return dataclasses.replace(call, id=f"{call.id[:_MOST_GIVEN]}-{uuid.uuid4().hex}")


class EngineCall(Protocol):
    """A request of any route, in the engine's words."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...
    @property
    def params(self) -> ParamsLike | Sequence[ParamsLike]: ...
    @property
    def request_ids(self) -> Sequence[str]: ...
    @property
    def lora(self) -> str | None: ...
    @property
    def priority(self) -> int: ...


class ServedEngine:
    """An engine, the names by which requests know its model, and the adapters that were loaded by name.

    Args:
        engine: A started engine, or a fleet.
        config: The server's configuration.
    """

    def __init__(self, engine: InferenceEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        model = engine.config.model
        self._names = config.served_model_name or (model,)
        self._accepted = {*self._names, model, Path(model).name}
        self.adapters: dict[str, str] = {}
        """Name → folder of each loaded adapter."""
        self._by_request: dict[str, None] = {}
        """Names that requests had loaded; the least recently named first."""
        self.slept = False
        """True if the engine is paused by a sleep; waking up then ends the pause."""
        self.traffic = Traffic()
        self.generating: Counter[str] = Counter()
        """Ids of SGLang's requests in flight."""
        self.others = OtherProcesses()
        self._engine_ids: dict[str, Counter[str]] = {}
        """Ids by which clients may abort a request → the engine's ids of its prompts."""
        self._loading = asyncio.Lock()
        self._updates = 0

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self._names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return self._names

    def is_model(self, name: str) -> bool:
        """Return whether requests know the model itself by this name."""
        return name in self._accepted

    def with_logprobs(self, params: Mapping[str, object], prompt_logprobs: object = None) -> dict[str, object]:
        """Return sampling parameters in which a count of logprobs of -1, the whole vocabulary, is its size.

        Args:
            params: The sampling parameters.
            prompt_logprobs: Count for the prompt's tokens; None: as in ``params``. Their ranks are asked for too if the
                engine gives them.
        """
        params = dict(params)
        if prompt_logprobs is not None:
            params["prompt_logprobs"] = prompt_logprobs
            params["return_prompt_ranks"] = self.engine.supports(Capability.PROMPT_RANKS)
        whole = {name: self.engine.model_info.vocab_size for name in _COUNTS if params.get(name) == -1}
        return {**params, **whole}

    async def token_prompt(self, prompt: Prompt, index: int) -> TokenPrompt:
        """Return a prompt as token ids; ``index`` is its place in the request."""
        if isinstance(prompt, TokenPrompt):
            return prompt
        length = self.engine.model_info.context_length
        ids = await in_prompt_thread(lambda: self.engine.tokenizer.encode(prompt, length, f"prompts[{index}]"))
        return TokenPrompt.model_construct(token_ids=tuple(ids), media=())

    async def generate(self, call: EngineCall) -> GenerationOutput:
        """Generate as the engine does, and count the tokens."""
        with self._recorded(call) as record:
            output = await self.engine.generate(
                call.prompts, call.params, request_ids=call.request_ids, lora=call.lora, priority=call.priority
            )
            self._count(output, record)
        return output

    async def score_and_generate(self, token_ids: Sequence[int], at: NDArray[np.int64], call: Call) -> GenerationOutput:
        """Score ids at the last positions of a prompt, generate after it in the same request, and count the tokens.

        Args:
            token_ids: The prompt.
            at: Ids to score at each of the last positions; integers of shape (positions, K).
            call: The request; its prompts are not read.
        """
        with self._recorded(call) as record:
            output = await self.engine.compute_logprobs(
                [token_ids],
                at=[at],
                last_n=len(at),
                sampling_params=call.params,
                request_ids=call.request_ids,
                lora=call.lora,
                priority=call.priority,
            )
            self._count(output, record)
        return output

    def _count(self, output: GenerationOutput, record: RequestRecord | None) -> None:
        tokens = sum(len(completion.token_ids) for completion in output.completions)
        self.traffic.add(tokens)
        if record is not None:
            record.sampled(tokens)
            for completion in output.completions:
                record.completed(completion)

    async def generate_stream(self, call: EngineCall) -> AsyncGenerator[CompletionChunk, None]:
        """Generate as the engine does, chunk by chunk, and count the tokens."""
        with self._recorded(call) as record:
            chunks = self.engine.generate_stream(
                call.prompts, call.params, request_ids=call.request_ids, lora=call.lora, priority=call.priority
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    self.traffic.add(len(chunk.token_ids))
                    if record is not None:
                        record.sampled(len(chunk.token_ids))
                        if chunk.completion is not None:
                            record.completed(chunk.completion)
                    yield chunk

    @contextmanager
    def _recorded(self, call: EngineCall) -> Iterator[RequestRecord | None]:
        """Tell the request's record, if there is one, that the engine is asked, and the error that it raises."""
        record = RECORD.get()
        if record is not None:
            record.generates(call.lora or self.name, call.request_ids)
        try:
            yield record
        except DrivetrainError as error:
            if record is not None:
                record.failed(error)
            raise

    async def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's ``model`` names; None for the model itself.

        An adapter of ``lora_folder`` is loaded when it is first named. If the engine has no room, it takes the place of
        the least recently named idle adapter of that folder.

        Raises:
            InvalidRequest: no model or adapter of that name is served.
            TooManyAdapters: the engine has no room, and its adapters were all loaded by control routes.
            EngineBusy: requests use every such adapter for longer than ``timeouts.control``.
        """
        if model is None or model in self._accepted:
            return None
        await self._require_adapter(model)
        return model

    async def _require_adapter(self, name: str) -> None:
        if name not in self.adapters:
            path = await asyncio.to_thread(self._in_folder, name)
            if path is None:
                names = (*self.names, *self.adapters)
                served = ", ".join(map(shown, names[:_MOST_NAMED]))
                more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
                raise InvalidRequest(f"The model {shown(name)} does not exist. Served: {served}{more}.", field="model")
            async with self._loading:
                if name not in self.adapters:
                    await self._load_by_request(name, str(path))
        if name in self._by_request:
            self._by_request[name] = self._by_request.pop(name)

    async def _load_by_request(self, name: str, path: str) -> None:
        try:
            await self._load(name, path)
        except TooManyAdapters:
            if not self._by_request:
                raise
            await self._make_room()
            await self._load(name, path)
        self._by_request[name] = None

    async def _make_room(self) -> None:
        """Unload an adapter that a request had loaded."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.engine.config.timeouts.control
        while True:
            for name in tuple(self._by_request):
                with suppress(EngineBusy):
                    await self.engine.unload_lora_adapter(name)
                    self._forget(name)
                    return
            if loop.time() > until:
                raise EngineBusy("requests use every adapter that another could replace; raise max_loras")
            await asyncio.sleep(_POLL_S)

    def _forget(self, name: str) -> None:
        self.adapters.pop(name, None)
        self._by_request.pop(name, None)

    def _in_folder(self, name: str) -> Path | None:
        folder = self.config.lora_folder
        if folder is None or Path(name).name != name or name in (".", ".."):
            return None
        path = Path(folder, name)
        return path if (path / "adapter_config.json").is_file() else None

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter; with ``replace``, one of that name takes the new weights.

        If requests in flight use the replaced adapter, all requests in flight end first, and later ones wait.

        Raises:
            InvalidRequest: the name is taken, or the folder holds no adapter of this model.
            TooManyAdapters: the engine has no room for another.
            EngineBusy: the engine is paused, and requests that it holds use the adapter.
        """
        await self.take_adapter(name, path, lambda: self._load(name, path, replace=replace))

    async def take_adapter(self, name: str, path: str, load: Callable[[], Awaitable[None]]) -> None:
        """Have ``load`` bring the adapter to the engine; ``path`` is where it is said to come from.

        Raises:
            InvalidRequest: the name is that of the model.
            DrivetrainError: as ``load``.
        """
        async with self._loading:
            if name in self._accepted:
                raise InvalidRequest(f"{shown(name)} is the name of the model itself", field="lora_name")
            await load()
            self.adapters[name] = path
            self._by_request.pop(name, None)  # a request no longer decides how long it stays

    async def _load(self, name: str, path: str, *, replace: bool = False) -> None:
        if replace and name in self.adapters and self.engine.supports(Capability.WEIGHTS_LORA):
            source = LoraSource(lora_name=name, path=path)
            await self.engine.update_named_weights(
                WeightUpdateRequest(version=self.version_of(path), source=source, mode=self.update_mode())
            )
        else:
            if replace and name in self.adapters:
                await self.engine.unload_lora_adapter(name)
                self._forget(name)
            await self.engine.load_lora_adapter(name, path)
        self.adapters[name] = path

    def update_mode(self) -> PauseMode:
        """Return the mode of an update: requests in flight end first, but in a pause, which would last for ever."""
        waits = not self.engine.is_paused and self.engine.supports(Capability.PAUSE_WAIT)
        return PauseMode.WAIT if waits else PauseMode.RETRACT

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter.

        Raises:
            InvalidRequest: none of that name is loaded.
            EngineBusy: requests use it.
        """
        async with self._loading:
            await self.engine.unload_lora_adapter(name)
            self._forget(name)

    async def unload_idle_adapter(self, name: str) -> None:
        """Unload an adapter once no request uses it, within the time of a control call.

        Raises:
            InvalidRequest: none of that name is loaded.
            EngineBusy: requests use it until the end of that time.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.engine.config.timeouts.control
        while True:
            try:
                return await self.unload_adapter(name)
            except EngineBusy:
                if loop.time() > until:
                    raise
                await asyncio.sleep(_POLL_S)

    @contextmanager
    def known_as(self, answer_id: str, call: Call, given: str | None = None) -> Iterator[Call]:
        """Let :meth:`abort` find a request by its own id, its answer's id, and vLLM's id of each of its prompts.

        Yields the call to make. Its id is the engine's own, so that requests in flight may have the same id, also in
        other processes that serve the engine.

        Args:
            answer_id: Id of the answer.
            call: The request.
            given: The request's own id, if the call's is the engine's already.
        """
        if given is None:
            given, call = call.id, with_own_id(call)
        ids = call.request_ids
        names = {one: [one] for one in ids} | {f"{answer_id}-{index}": [one] for index, one in enumerate(ids)}
        names |= {given: ids, answer_id: ids}
        for name, of_engine in names.items():
            self._engine_ids.setdefault(name, Counter()).update(of_engine)
        try:
            yield call
        finally:
            for name, of_engine in names.items():
                self._engine_ids[name] -= Counter(of_engine)
                if not self._engine_ids[name]:
                    del self._engine_ids[name]

    def engine_ids(self, request_id: str) -> list[str]:
        """Return the engine's ids of a request of this process; the id itself if no request is known by it."""
        return list(self._engine_ids.get(request_id, (request_id,)))

    async def abort(self, request_id: str) -> None:
        """End one request, whichever process of the server it is in."""
        for one in self.engine_ids(request_id):
            await self.engine.abort(one)
        await self.others.abort(request_id)

    async def abort_each(self, request_ids: Iterable[str]) -> None:
        """End several requests, many at once; see :meth:`abort`."""
        ids = list(dict.fromkeys(request_ids))
        for first in range(0, len(ids), _ABORTS_AT_ONCE):
            await gather_or_cancel(self.abort(one) for one in ids[first : first + _ABORTS_AT_ONCE])

    async def abort_all(self) -> None:
        """End every request of all processes."""
        await self.engine.abort_generation()
        await self.others.abort_all()

    def version_of(self, path: str) -> str:
        """Return a label for an update whose sender gave none: its folder's name, or a number if that is served."""
        self._updates += 1
        name = Path(path).name
        return name if name not in ("", self.engine.get_weight_version()) else f"update-{self._updates}"
