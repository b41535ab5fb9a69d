"""The sglang-server backend: uses a running SGLang server over HTTP. No SGLang code runs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final

from drivetrain.backend.base import EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.backend.toolkit.rope_config import require_plain_rope, require_short_rope
from drivetrain.backend.toolkit.translation import context_length_of, shortened_all
from drivetrain.errors import EngineDied, EngineStartError, InvalidRequest
from drivetrain.servers.http_client import ServerClient, ServerKind
from drivetrain.servers.remote_backend import BUSY_S, LOOK_S, ServerBackend
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_sglang.errors import as_engine_error
from drivetrain_sglang.remote_info import (
    CONFIG_NAMES,
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
    ADAPTED_WITH,
    Collected,
    Deltas,
    Ending,
    cut_at,
    ending,
    plain_sampling_params,
    request_fields,
)
from drivetrain_weight_sync.receiver.model_folder import read_model_folder
from drivetrain_weight_sync.receiver.plain_adapters import PlainAdapters

KIND: Final = ServerKind(
    engine="SGLang",
    launch="python -m sglang.launch_server --model-path MODEL",
    port=30000,
    as_engine_error=as_engine_error,
    key_remedy="set endpoint_api_key to its key; if it was started with --admin-api-key, it must have no other "
    "--api-key beside it",
)
_ABORTS_AT_ONCE: Final = 64
_COLD: Final = 0.5
"""Temperature of the request that detects how logprobs are computed."""


class SGLangServerBackend(ServerBackend[ServerSays]):
    """A running SGLang server, as started by ``python -m sglang.launch_server``."""

    name = "sglang-server"
    kind: ClassVar[ServerKind] = KIND
    alive_path: ClassVar[str] = "/model_info"
    config_names: ClassVar[Mapping[str, str]] = CONFIG_NAMES

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._aborts = asyncio.Semaphore(_ABORTS_AT_ONCE)
        self._is_incremental = False
        self._has_priorities = False
        self._own_eos: frozenset[int] = frozenset()
        """Every id at which SGLang ends a request by itself."""
        self._adaptable: Sequence[Mapping[str, tuple[int, ...]]] = ()
        """Shapes of the weights that adapters can change, once for each way to name them."""
        self._plain = PlainAdapters(0, ADAPTED_WITH, writes=False)
        self._loras: dict[str, str] = {}
        """Adapter names to unique names on the server, where other clients may load adapters too."""

    @classmethod
    async def look(cls, client: ServerClient) -> ServerSays:
        """Fetch the server's arguments and its model."""
        model = await client.get("/model_info", LOOK_S)
        server = await client.get("/server_info", BUSY_S)
        if not isinstance(server, dict) or not isinstance(model, dict) or "max_req_input_len" not in server:
            raise EngineStartError(f"the server at {client.endpoint} is not an SGLang server")
        return ServerSays(server, model)

    @classmethod
    def claims_of(cls, config: EngineConfig, says: ServerSays) -> frozenset[Capability]:
        """Check the server, and return its capabilities."""
        check_server(says, str(config.endpoint))
        check_agreement(config, says)
        return claims(config, says)

    # Lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        """Connect, and detect how logprobs are computed, which the server does not report."""
        says = await self.connect(report)
        self.version = says.weight_version
        self._is_incremental = bool(says.server.get("incremental_streaming_output"))
        self._has_priorities = has_priorities(says)
        report("reading the model's configuration")
        model = await asyncio.to_thread(read_model_folder, self.config)
        if model.architecture != says.architecture:
            raise EngineStartError(
                f"model={self.config.model!r} is a {model.architecture}, but the server at {self.client.endpoint} was "
                f"launched with a {says.architecture} from {says.folder!r}; name the same model"
            )
        self.check_same_folder(says.folder)
        context_length = min(context_length_of(model.context_length, self.config.context_length), room(says))
        require_short_rope(context_length, model.fields, "SGLang")
        require_plain_rope(model.fields, "rope" in str(says.server.get("json_model_override_args")), "SGLang")
        ends = {*model.eos_token_ids, *model.configured_eos, *await asyncio.to_thread(_tokenizer_ends, self.config)}
        self._own_eos, self._adaptable = frozenset(ends), model.adaptable
        # The server may run on another machine, which cannot read folders written here.
        self._plain = PlainAdapters(largest_rank(self.config, says), ADAPTED_WITH, writes=False)
        report("warming up")
        await self._warm_up()
        self.watch()
        return ModelInfo(
            vocab_size=model.vocab_size,
            context_length=context_length,
            eos_token_ids=model.eos_token_ids,
            dtype=dtype_of(says, model.dtype),
            architecture=model.architecture,
            parameters=model.parameters,
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
            body = self._body(request, self.new_name(), stream=False)
            answers.append(await self.client.post("/generate", body, LOOK_S))
        if not is_after_temperature(answers[0], answers[1], _COLD):
            raise EngineStartError(
                f"the server at {self.client.endpoint} leaves temperature out of its logprobs; launch it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def close(self) -> None:
        """Unload our adapters and disconnect; the server keeps running."""
        try:
            while self._loras and self.is_there:
                await self.unload_lora_adapter(next(iter(self._loras)))
        except EngineDied:
            self._loras.clear()  # the adapters are gone with the server
        await super().close()

    async def stats(self) -> EngineStats:
        """Return requests and memory, as the scheduler last published them."""
        return stats_of(await self.call(self.client.get("/v1/loads", self.config.timeouts.control)))

    # Generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        collected = Collected(request)
        watched = ending(request, self._own_eos) is Ending.WATCHED
        async with aclosing(self._outputs(request, stream=watched)) as outputs:
            async for output in outputs:
                collected.add(output)
        return self.whole(request, collected.result(self.version))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate one sample, yielding a delta per step."""
        collected = Collected(request)
        async with aclosing(self._outputs(request, stream=True)) as outputs:
            async for output in outputs:
                ids, logprobs, top = collected.add(output)
                if ids or collected.ended:
                    result = self.whole(request, collected.result(self.version)) if collected.ended else None
                    yield TokenDelta(ids, logprobs, top, result)

    def _body(self, request: GenerateRequest, name: str, *, stream: bool) -> dict[str, object]:
        fields = request_fields(
            request,
            name,
            self.cache_key,
            stream=stream,
            params_of=lambda asked: plain_sampling_params(asked, self._own_eos),
        )
        if not self._has_priorities:
            del fields["priority"]
        if request.lora is not None:
            fields["lora_path"] = self._loras[request.lora]
        return fields

    async def _outputs(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the server's outputs for a request, chunk by chunk; the last one has a finish reason."""
        # SGLang aborts every request whose id starts with the given one, so no name is a prefix of another.
        name = self.new_name()
        body = self._body(request, name, stream=stream)
        with self.sent(request.request_id, name) as sent:
            if not stream:
                answer = await self.call(self.client.post("/generate", body, None))
                sent.ended = True
                yield answer
                return
            stops = request.stop_token_ids if ending(request, self._own_eos) is Ending.WATCHED else ()
            deltas, first = None if self._is_incremental else Deltas(), True
            async with aclosing(self.client.events("/generate", body)) as events:
                while not sent.ended:
                    # Only the first event may have to wait for a connection.
                    event = await (self.call if first else self.checked)(anext(events))
                    first = False
                    output = cut_at(event if deltas is None else deltas.delta(event), stops)
                    # If the chunk was cut at a stop id, the server does not know yet that the request ended.
                    sent.ended = event["meta_info"].get("finish_reason") is not None
                    yield output
                    if output["meta_info"].get("finish_reason") is not None:
                        return

    async def send_abort(self, names: Sequence[str]) -> None:
        """End requests, one by one."""

        async def end(name: str) -> None:
            async with self._aborts:
                await self.call(self.client.post("/abort_request", {"rid": name}, self.config.timeouts.control))

        await asyncio.gather(*map(end, names))

    # Versions ----------------------------------------------------------------------------------------------------

    async def set_weight_version(self, version: str) -> None:
        """Label the weights with a version."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.call(self.client.post("/update_weight_version", body, self.config.timeouts.control))
        self.version = version

    # LoRA --------------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        """Load an adapter from a peft folder, which must have the same path here and on the server."""
        await asyncio.to_thread(self._plain.folder_for, lora_name, lora_path, *self._adaptable)
        name = f"{self.new_name()}{lora_name}"
        body = {"lora_name": name, "lora_path": lora_path, "pinned": pinned}
        try:
            await self.call(self.client.post("/load_lora_adapter", body, self.config.timeouts.control))
        except InvalidRequest as error:
            raise InvalidRequest(str(error), field="lora_path") from error
        self._loras[lora_name] = name

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        if lora_name not in self._loras:
            raise InvalidRequest(f"lora_name={lora_name!r} is not loaded", field="lora_name")
        body = {"lora_name": self._loras[lora_name]}
        await self.call(self.client.post("/unload_lora_adapter", body, self.config.timeouts.control))
        del self._loras[lora_name]

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        """Return one unit vector per prompt."""
        answer = await self.call(self.client.post("/encode", {"input_ids": prompts}, None))
        vectors = [[float(value) for value in one["embedding"]] for one in answer]
        return shortened_all(vectors, dimensions)


def _tokenizer_ends(config: EngineConfig) -> frozenset[int]:
    """Return ids of the tokenizer at which SGLang ends a request."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        config.tokenizer or config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    more = tokenizer.get_added_vocab().get("<|eom_id|>")
    return frozenset(one for one in (tokenizer.eos_token_id, more) if one is not None)
