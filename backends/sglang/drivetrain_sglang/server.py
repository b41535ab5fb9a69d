"""The sglang-server backend: a server that somebody else launched, over HTTP. Nothing of SGLang's runs here."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from drivetrain.backend import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.capability import Capability
from drivetrain.config import EngineConfig, Isolation, Task
from drivetrain.errors import (
    DrivetrainError,
    EngineDied,
    EngineError,
    EngineInternalError,
    EngineStartError,
    InvalidConfig,
    InvalidRequest,
)
from drivetrain.outputs import FinishReason
from drivetrain.sampling import LogprobsMode, SamplingParams
from drivetrain.translation import context_length_of, shortened
from drivetrain_sglang.client import ServerClient
from drivetrain_sglang.served import (
    CONFIG_NAMES,
    ENDPOINT,
    ServerSays,
    check_agreement,
    check_server,
    claims,
    dtype_of,
    has_priorities,
    is_after_temperature,
    largest_rank,
    room,
    stats_of,
)
from drivetrain_sglang.translate import (
    Collected,
    Deltas,
    Ending,
    cut_at,
    ending,
    plain_sampling_params,
    request_fields,
)
from drivetrain_weight_sync.adapters import check_adapter

_LOOK_S: Final = 4.0
"""Within this a server that is up has said what it is."""
_BUSY_S: Final = 60.0
"""Within this its scheduler has, whatever it is busy with."""
_CONNECT_S: Final = 4.0
_POLL_S: Final = 0.5
_STOOD_STILL_S: Final = 1.0
"""A loop that is later than this was kept by something else, such as a training step."""
_ABORT_AGAIN_S: Final = 0.1
_ABORTS_AT_ONCE: Final = 64
_LAST_ABORTS: Final = 6
"""How often an abort is said for a request whose caller went away, each time after twice as long."""
_COLD: Final = 0.5
"""Temperature of the request that finds out what a logprob is."""


class SGLangServerBackend(Backend):
    """A running SGLang server, as ``python -m sglang.launch_server`` starts it."""

    name: ClassVar[str] = "sglang-server"
    engine_distribution: ClassVar[str] = "aiohttp"
    config_names: ClassVar[Mapping[str, str]] = CONFIG_NAMES
    default_isolation: ClassVar[Isolation] = Isolation.INLINE

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._client = _client_of(config)
        self._numbers = itertools.count()
        self._prefix = uuid.uuid4().hex
        self._rids: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._death: asyncio.Future[EngineError] | None = None
        self._cache_epoch = 0
        self._aborts = asyncio.Semaphore(_ABORTS_AT_ONCE)
        self._version = ""
        self._is_incremental = False
        self._has_priorities = False
        self._own_eos: frozenset[int] = frozenset()
        self._launch: tuple[object, ...] = ()
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of the model's tensors, by checkpoint name."""
        self._largest_rank = 0
        self._loras: dict[str, str] = {}
        """Adapter → its name on the server, which other clients may give adapters as well."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        """Ask the server; this blocks for some seconds at most.

        Raises:
            InvalidConfig: there is no endpoint, or the configuration is not what the server is.
            EngineStartError: nobody answers there, or not an SGLang that this works with.
        """
        client = _client_of(config)
        with ThreadPoolExecutor(1, thread_name_prefix="drivetrain-sglang-look") as thread:
            says = thread.submit(asyncio.run, _ask_once(client)).result()
        check_server(says, client.endpoint)
        check_agreement(config, says)
        return claims(config, says)

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Connect, and find out what nobody says: what a logprob is there."""
        report(f"connecting to {self._client.endpoint}")
        await self._client.open()
        says = await _look(self._client)
        check_server(says, self._client.endpoint)
        check_agreement(self.config, says)
        self._death = asyncio.get_running_loop().create_future()
        self._launch = says.launch
        self._version = says.weight_version
        self._is_incremental = bool(says.server.get("incremental_streaming_output"))
        self._has_priorities = has_priorities(says)
        report("reading the model's configuration")
        model = await asyncio.to_thread(_model_of, self.config)
        if model.architecture != says.architecture or _are_other_folders(self.config.model, says.folder):
            raise EngineStartError(
                f"model={self.config.model!r} is a {model.architecture}, but the server at {self._client.endpoint} was "
                f"launched with a {says.architecture} from {says.folder!r}; name the same model"
            )
        self._own_eos, self._shapes = model.ends, model.shapes
        self._largest_rank = largest_rank(self.config, says)
        report("warming up")
        await self._warm_up()
        self._spawn(self._watch())
        return ModelInfo(
            vocab_size=model.vocab_size,
            context_length=min(context_length_of(model.context_length, self.config.context_length), room(says)),
            eos_token_ids=model.eos_token_ids,
            dtype=dtype_of(says, model.dtype),
            architecture=model.architecture,
            parameters=sum(map(math.prod, model.shapes.values())),
            device=str(says.server.get("device", "unknown")),
            weight_version=says.weight_version,
        )

    async def _warm_up(self) -> None:
        if self.config.task is not Task.GENERATE:
            await self.embed([[0, 0]], None)
            return
        answers: list[Mapping[str, Any]] = []
        for temperature in (_COLD, 0.0):
            params = SamplingParams(temperature=temperature, logprobs=20)
            request = GenerateRequest("warm-up", [0, 0], params, 1, (), LogprobsMode.TEMPERATURE)
            answers.append(await self._client.post("/generate", self._body(request, stream=False), _LOOK_S))
        if not is_after_temperature(answers[0], answers[1], _COLD):
            raise EngineStartError(
                f"the server at {self._client.endpoint} leaves temperature out of its logprobs; launch it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def close(self) -> None:
        """Take away what was loaded, and disconnect; the server goes on."""
        try:
            while self._loras and self._death is not None and not self._death.done():
                await self.unload_lora_adapter(next(iter(self._loras)))
        except EngineDied:
            self._loras.clear()  # they went with the server
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def died(self) -> EngineError:
        """Return when the server is gone, or is another one."""
        assert self._death is not None, "died() is called once the engine is started"
        return await asyncio.shield(self._death)

    async def _watch(self) -> None:
        """Look every now and then whether the server is there; one that is not fails every waiter."""
        # Through a connection of its own, which does not wait its turn behind thousands of requests.
        watching = _client_of(self.config)
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
        """Why the server is; empty if it answers, or if this loop stood still meanwhile, so that nobody can say."""
        heartbeat = self.config.timeouts.heartbeat
        asked = asyncio.create_task(watching.get("/model_info", None))
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
                return f"the SGLang server at {self._client.endpoint} did not answer within {waited:g} s"
            error = asked.exception()
            return "" if error is None else str(error)
        finally:
            asked.cancel()
            reached.cancel()
            await asyncio.gather(asked, reached, return_exceptions=True)

    async def _die(self, why: str) -> None:
        if self._death is not None and not self._death.done():
            self._death.set_result(EngineDied(why))
            await self._client.close()

    async def stats(self) -> EngineStats:
        """Requests and memory, as the scheduler last published them."""
        return stats_of(await self._call(self._client.get("/v1/loads", self.config.timeouts.control)))

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        collected = Collected(request)
        watched = ending(request, self._own_eos) is Ending.WATCHED
        async with aclosing(self._outputs(request, stream=watched)) as outputs:
            async for output in outputs:
                collected.add(output)
        return self._result(request, collected)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample, a delta a step."""
        collected = Collected(request)
        async with aclosing(self._outputs(request, stream=True)) as outputs:
            async for output in outputs:
                ids, logprobs, top = collected.add(output)
                ended = output["meta_info"].get("finish_reason") is not None
                if ids or ended:
                    yield TokenDelta(ids, logprobs, top, self._result(request, collected) if ended else None)

    def _result(self, request: GenerateRequest, collected: Collected) -> GenerateResult:
        result = collected.result(self._version)
        if result.finish_reason is FinishReason.LENGTH and len(result.token_ids) < request.max_new_tokens:
            raise EngineInternalError(
                f"request {request.request_id}: the server ended it after {len(result.token_ids)} of "
                f"{request.max_new_tokens} tokens; was it launched with SGLANG_MAX_NEW_TOKENS_LIMIT?"
            )
        if result.finish_reason is FinishReason.STOP and result.matched_stop is None:
            raise EngineInternalError(
                f"request {request.request_id}: the server ended it at id {result.token_ids[-1:]}, which is none of "
                f"its stops {sorted(request.stop_token_ids)}"
            )
        return result

    def _body(self, request: GenerateRequest, *, stream: bool) -> dict[str, object]:
        # SGLang aborts whatever begins like the id that it is given: none of these is the beginning of another.
        rid = f"{self._prefix}-{next(self._numbers)}."
        fields = request_fields(
            request,
            rid,
            f"{self._prefix}-{self._cache_epoch}",
            stream=stream,
            params_of=lambda asked: plain_sampling_params(asked, self._own_eos),
        )
        if not self._has_priorities:
            del fields["priority"]
        if request.lora is not None:
            fields["lora_path"] = self._loras[request.lora]
        return fields

    async def _outputs(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[Mapping[str, Any], None]:
        """What the server says of a request, chunk by chunk; the last one has a finish reason."""
        body = self._body(request, stream=stream)
        rid = str(body["rid"])
        self._rids[request.request_id] = rid
        ended, first = False, True
        try:
            if not stream:
                yield await self._call(self._client.post("/generate", body, None))
                ended = True
                return
            stops = request.stop_token_ids if ending(request, self._own_eos) is Ending.WATCHED else ()
            deltas = None if self._is_incremental else Deltas()
            async with aclosing(self._client.events("/generate", body)) as events:
                while not ended:
                    # Only the first may wait for a connection.
                    event = await (self._call if first else self._checked)(anext(events))
                    first = False
                    output = cut_at(event if deltas is None else deltas.delta(event), stops)
                    # The server itself may not know yet that it ended there.
                    ended = event["meta_info"].get("finish_reason") is not None
                    yield output
                    if output["meta_info"].get("finish_reason") is not None:
                        return
        finally:
            del self._rids[request.request_id]
            if not ended:
                self._spawn(self._abort_for_good(rid))

    async def abort(self, request_ids: list[str]) -> None:
        """End requests, running or waiting."""
        known = [request_id for request_id in request_ids if request_id in self._rids]
        await asyncio.gather(*(self._abort(self._rids[request_id]) for request_id in known))
        for request_id in known:
            if request_id in self._rids:
                self._spawn(self._abort_until_ended(request_id, self._rids[request_id]))

    async def _abort(self, rid: str) -> None:
        async with self._aborts:
            await self._call(self._client.post("/abort_request", {"rid": rid}, self.config.timeouts.control))

    async def _abort_until_ended(self, request_id: str, rid: str) -> None:
        """The abort may have overtaken the request on its way to the server."""
        while True:
            await asyncio.sleep(_ABORT_AGAIN_S)
            if self._rids.get(request_id) != rid:
                return
            await self._abort(rid)

    async def _abort_for_good(self, rid: str) -> None:
        for already in range(_LAST_ABORTS):
            await self._abort(rid)
            await asyncio.sleep(_ABORT_AGAIN_S * 2**already)

    # Cache and versions ------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        """Ask for no earlier prefix any more; the server lets go of them when it wants their memory."""
        self._cache_epoch += 1

    async def set_weight_version(self, version: str) -> None:
        """Label the weights."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._call(self._client.post("/update_weight_version", body, self.config.timeouts.control))
        self._version = version

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder, which has the same path here and where the server runs."""
        await asyncio.to_thread(check_adapter, lora_path, self._largest_rank, self._shapes)
        name = f"{self._prefix}-{next(self._numbers)}-{lora_name}"
        body = {"lora_name": name, "lora_path": lora_path, "pinned": pinned}
        try:
            await self._call(self._client.post("/load_lora_adapter", body, self.config.timeouts.control))
        except InvalidRequest as error:
            raise InvalidRequest(str(error), field="lora_path") from error
        self._loras[lora_name] = name

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        body = {"lora_name": self._loras.pop(lora_name)}
        await self._call(self._client.post("/unload_lora_adapter", body, self.config.timeouts.control))

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one vector of length 1 per prompt."""
        answer = await self._call(self._client.post("/encode", {"input_ids": prompts}, None))
        vectors = [[float(value) for value in one["embedding"]] for one in answer]
        return vectors if dimensions is None else [shortened(vector, dimensions) for vector in vectors]

    # ---------------------------------------------------------------------------------------------------------------

    async def _call(self, answer: Awaitable[Any]) -> Any:
        """Await an answer, or the server's death; if the connection breaks, find out which it is."""
        if self._death is None:
            return await answer
        asked = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({asked, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise EngineDied(str(self._death.result()))
            return await self._checked(asked)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _checked(self, answer: Awaitable[Any]) -> Any:
        """Await what comes through a connection that there is, and breaks when the server dies."""
        try:
            return await answer
        except EngineDied as error:
            if self._death is None:
                raise
            if not self._death.done():
                try:
                    says = await _look(self._client)
                except DrivetrainError:
                    await self._die(str(error))
                else:
                    if says.launch != self._launch:
                        await self._die(f"the SGLang server at {self._client.endpoint} was launched anew")
            if self._death.done():
                raise EngineDied(str(self._death.result())) from error
            raise EngineInternalError(f"{error}; the server itself is up") from error

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; what fails there because the server is gone is told by :meth:`died`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            error = None if ended.cancelled() else ended.exception()
            if error is not None and not isinstance(error, EngineError):
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a task of the sglang-server backend failed", "exception": error, "task": ended}
                )

        task.add_done_callback(done)


@dataclass(frozen=True, slots=True)
class _Model:
    """What a model's folder says."""

    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    ends: frozenset[int]
    """Every id at which SGLang ends a request by itself."""
    dtype: str
    shapes: dict[str, tuple[int, ...]]


def _model_of(config: EngineConfig) -> _Model:
    from transformers import AutoConfig, AutoTokenizer

    from drivetrain_weight_sync.checkpoint import checkpoint_of, eos_token_ids

    whole = AutoConfig.from_pretrained(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    text = whole.get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(
        config.tokenizer or config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    eos = eos_token_ids(config.model, text, whole)
    named = getattr(text, "eos_token_id", None)
    own = named if isinstance(named, list) else [named]
    more = tokenizer.get_added_vocab().get("<|eom_id|>")
    checkpoint = checkpoint_of(config.model, config.revision, trust_remote_code=config.trust_remote_code)
    return _Model(
        architecture=(whole.architectures or [type(whole).__name__])[0],
        vocab_size=int(text.vocab_size),
        context_length=int(getattr(text, "max_position_embeddings", None) or 2**20),
        eos_token_ids=eos,
        ends=frozenset(one for one in (*eos, *own, tokenizer.eos_token_id, more) if one is not None),
        dtype=str(getattr(text, "dtype", None) or "auto").removeprefix("torch."),
        shapes={spec.name: spec.shape for spec in checkpoint.tensors},
    )


def _are_other_folders(one: str, other: str) -> bool:
    """Whether both are here and differ; a server on another machine, or in a container, has paths of its own."""
    return Path(one).is_dir() and Path(other).is_dir() and not Path(one).samefile(other)


def _client_of(config: EngineConfig) -> ServerClient:
    if config.endpoint is None:
        raise InvalidConfig(
            "endpoint is missing; give the address of a running SGLang server, such as 'http://127.0.0.1:30000'",
            field=ENDPOINT,
        )
    return ServerClient(config.endpoint, config.endpoint_api_key)


async def _ask_once(client: ServerClient) -> ServerSays:
    await client.open()
    try:
        return await _look(client)
    except EngineDied as error:
        raise EngineStartError(
            f"{error}; launch one with: python -m sglang.launch_server --model-path MODEL"
        ) from error
    finally:
        await client.close()


async def _look(client: ServerClient) -> ServerSays:
    model = await client.get("/model_info", _LOOK_S)
    server = await client.get("/server_info", _BUSY_S)
    if not isinstance(server, dict) or not isinstance(model, dict) or "max_req_input_len" not in server:
        raise EngineStartError(f"what answers at {client.endpoint} is no SGLang server")
    return ServerSays(server, model)
