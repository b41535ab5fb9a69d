"""The vllm-server backend: uses a running vLLM server over HTTP. No vLLM code runs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, ClassVar, Final

from drivetrain.backend.base import EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.backend.toolkit.rope_config import require_plain_rope, short_rope_length
from drivetrain.backend.toolkit.translation import context_length_of, shortened_all
from drivetrain.backend.toolkit.xgrammar_limits import refuse_ignored_parts
from drivetrain.errors import EngineDied, EngineInternalError, EngineStartError, InvalidConfig
from drivetrain.servers.http_client import ServerClient, ServerKind
from drivetrain.servers.remote_backend import BUSY_S, ENDPOINT, LOOK_S, ServerBackend
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.modes import PauseMode
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_vllm.errors import as_engine_error
from drivetrain_vllm.remote_info import (
    ABORT,
    CONFIG_NAMES,
    GENERATE,
    INFO,
    METRICS,
    POOL,
    UNLABELLED,
    ServerSays,
    check_agreement,
    check_count,
    check_paths,
    check_server,
    claims,
    schema_of,
    stats_of,
)
from drivetrain_vllm.translate import Served, plain_sampling_params, room_of
from drivetrain_weight_sync.receiver.model_folder import read_model_folder

KIND: Final = ServerKind(
    engine="vLLM",
    launch="VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out",
    port=8000,
    as_engine_error=as_engine_error,
    key_statuses=(401,),
)
_INFO_S: Final = 180.0
"""Timeout for the server's configuration: the first time, the server also inspects its installed packages."""
_PREFIX: Final = "generate-tokens-"
"""Prefix that the server adds to a request's id."""
_PROBE: Final[Mapping[str, object]] = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}


class VLLMServerBackend(ServerBackend[ServerSays]):
    """A running vLLM server, as started by ``vllm serve``."""

    name = "vllm-server"
    kind: ClassVar[ServerKind] = KIND
    alive_path: ClassVar[str] = "/health"
    config_names: ClassVar[Mapping[str, str]] = CONFIG_NAMES

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._says: ServerSays | None = None
        self._weight_bytes = 0
        self._is_frozen = False

    @classmethod
    async def look(cls, client: ServerClient) -> ServerSays:
        """Fetch the server's schema and configuration, and detect whether it reports cached tokens."""
        version = await client.get("/version", LOOK_S)
        openapi = await client.get("/openapi.json", BUSY_S)
        if not isinstance(version, dict) or "version" not in version or not isinstance(openapi, dict):
            raise EngineStartError(f"the server at {client.endpoint} is not a vLLM server")
        paths, fields = schema_of(openapi)
        check_paths(paths, client.endpoint)
        says = ServerSays(
            version=str(version["version"]),
            paths=paths,
            sampling_fields=fields,
            config=(await client.get(INFO, _INFO_S))["vllm_config"],
            weight_version=str((await client.get("/weight_info", BUSY_S))["weight_version"]),
        )
        if not says.generates:
            return says
        if (await client.get("/is_paused", BUSY_S))["is_paused"]:
            raise EngineStartError(f"the vLLM server at {client.endpoint} is paused; POST /resume to it")
        answer = await client.post(GENERATE, _PROBE, BUSY_S)
        return replace(says, reports_cached=answer["usage"].get("prompt_tokens_details") is not None)

    @classmethod
    async def launch_of(cls, client: ServerClient) -> object:
        """Check that the engine core is alive, even if paused, and return the launch's key."""
        await client.get(cls.alive_path, LOOK_S)
        return (await client.get(INFO, _INFO_S))["vllm_config"].get("instance_id")

    @classmethod
    def claims_of(cls, config: EngineConfig, says: ServerSays) -> frozenset[Capability]:
        """Check the server, and return its capabilities."""
        check_server(says, str(config.endpoint))
        check_agreement(config, says)
        return claims(config, says)

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Connect, and label weights that have no version yet."""
        says = self._says = await self.connect(report)
        self.version = says.weight_version
        report("reading the model's configuration")
        model = await asyncio.to_thread(read_model_folder, self.config)
        self.check_same_folder(says.folder)
        short = short_rope_length(model.fields)
        if short is not None and says.context_length > short:
            raise InvalidConfig(
                f"the server at {self.client.endpoint} was launched with --max-model-len {says.context_length}: vLLM "
                "then uses the long factors of this model's rotary embedding (longrope) for all sequences, which gives "
                f"wrong output; launch it with --max-model-len {short}",
                field=ENDPOINT,
            )
        require_plain_rope(model.fields, "rope" in str(says.part("model_config.hf_overrides")), "vLLM")
        self._weight_bytes = model.bytes_as(says.dtype)
        if says.weight_version == UNLABELLED:
            await self.set_weight_version(self.config.weight_version)
        report("warming up")
        await self._warm_up()
        self.watch()
        own = context_length_of(model.context_length, self.config.context_length)
        room = min(own, says.context_length - room_of(self.config))
        return ModelInfo(
            vocab_size=model.vocab_size,
            context_length=room,
            eos_token_ids=model.eos_token_ids,
            dtype=says.dtype,
            architecture=model.architecture,
            parameters=model.parameters,
            device=says.device,
            weight_version=self.version,
        )

    async def _warm_up(self) -> None:
        """Warm up: the first request is slow, and one aborted during that time would end without a token."""
        match self.config.task:
            case Task.EMBED:
                await self.embed([[0, 0]], None)
            case Task.REWARD:
                await self.reward_score([[0, 0]])
            case Task.GENERATE:
                request = GenerateRequest("warm-up", [0, 0], SamplingParams(), 2, (), LogprobsMode.TEMPERATURE)
                await self.client.post(GENERATE, self._body(request, self.new_name(), stream=False), BUSY_S)

    async def close(self) -> None:
        """Resume frozen requests and disconnect; the server keeps running."""
        with suppress(EngineDied):
            if self._is_frozen and self.is_there:
                await self.unfreeze()
        await super().close()

    async def stats(self) -> EngineStats:
        """Return requests of all clients, as counted by the batch's last step."""
        metrics = await self.call(self.client.text(METRICS, self.config.timeouts.control))
        return stats_of(metrics, self._server, self._weight_bytes)

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        served, name = Served(request), self.new_name()
        body = self._body(request, name, stream=False)
        with self.sent(request.request_id, name) as sent:
            served.add(await self.call(self.client.post(GENERATE, body, None)))
            sent.ended = True
        return self.whole(request, served.result(self.version))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample, yielding a delta per step."""
        served = Served(request)
        if request.params.prompt_logprobs is not None:
            # Streams have no prompt logprobs.
            scored = replace(request, max_new_tokens=0, params=request.params.model_copy(update={"logprobs": None}))
            answer = await self.call(
                self.client.post(GENERATE, self._body(scored, self.new_name(), stream=False), None)
            )
            served.add({**answer, "choices": []})
        name = self.new_name()
        with self.sent(request.request_id, name) as sent:
            # The finish reason comes before the last event, which has the count of cached tokens.
            last: TokenDelta | None = None
            async with aclosing(self._events(self._body(request, name, stream=True))) as events:
                async for event in events:
                    ids, logprobs, top = served.add(event)
                    sent.ended = served.ended
                    if served.ended and event["choices"]:
                        last = TokenDelta(ids, logprobs, top)
                    elif ids:
                        yield TokenDelta(ids, logprobs, top)
        if last is None:
            raise EngineInternalError(f"request {request.request_id}: the server ended it without a finish reason")
        yield replace(last, result=self.whole(request, served.result(self.version)))

    async def _events(self, body: Mapping[str, object]) -> AsyncGenerator[Mapping[str, Any], None]:
        events = self.client.events(GENERATE, body)
        async with aclosing(events):
            # Only the first event may have to wait for a connection.
            event = await self.call(anext(events, None))
            while event is not None:
                yield event
                event = await self.checked(anext(events, None))

    def _body(self, request: GenerateRequest, name: str, *, stream: bool) -> dict[str, object]:
        check_count(request.params, self._server)
        if request.params.structured_output is not None and self._server.may_use_xgrammar:
            refuse_ignored_parts(request.params.structured_output)
        body: dict[str, object] = {
            "request_id": name,
            "token_ids": request.prompt_token_ids,
            "sampling_params": plain_sampling_params(request),
            "cache_salt": self.cache_key,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._server.has_priorities:
            body["priority"] = -request.priority  # in vLLM a lower number is a higher priority
        return body

    async def send_abort(self, names: Sequence[str]) -> None:
        """End requests, whether running, waiting or frozen."""
        body = {"request_ids": [_PREFIX + name for name in names]}
        await self.call(self.client.post(ABORT, body, self.config.timeouts.control))

    # Pause and versions ------------------------------------------------------------------------------------------

    async def freeze(self, mode: PauseMode) -> None:
        """Stop stepping, for all clients; ``RETRACT`` also frees the caches."""
        clear = "true" if mode is PauseMode.RETRACT else "false"
        self._is_frozen = True
        path = f"/pause?mode=keep&clear_cache={clear}"
        await self.call(self.client.post(path, None, self.config.timeouts.control))

    async def unfreeze(self) -> None:
        """Step again."""
        await self.call(self.client.post("/resume", None, self.config.timeouts.control))
        self._is_frozen = False

    async def set_weight_version(self, version: str) -> None:
        """Label the weights with a version."""
        body = {"new_version": version}
        await self.call(self.client.post("/update_weight_version", body, self.config.timeouts.control))
        self.version = version

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one unit vector per prompt."""
        vectors = await self._pooled(prompts, task="embed")
        return shortened_all(vectors, dimensions)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        """Return the model's first score per sequence, without activation."""
        return [scores[0] for scores in await self._pooled(sequences, task="classify", use_activation=False)]

    async def _pooled(self, prompts: list[list[int]], **params: object) -> list[list[float]]:
        body = {"input": prompts, "cache_salt": self.cache_key, **params}
        answer = await self.call(self.client.post(POOL, body, None))
        found = sorted(answer["data"], key=lambda one: one["index"])
        return [[float(number) for number in one["data"]] for one in found]

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _server(self) -> ServerSays:
        if self._says is None:
            raise EngineInternalError("the vllm-server backend is not connected")
        return self._says
