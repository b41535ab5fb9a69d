"""Properties of a running vLLM server, and the capabilities they imply. Pure functions over its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from drivetrain.backend.base import EngineStats
from drivetrain.errors import EngineInternalError, EngineStartError, InvalidConfig, InvalidRequest
from drivetrain.servers.launched_fields import check_launched_fields, disagreement, not_launched_with
from drivetrain.servers.remote_backend import ENDPOINT
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_vllm.translate import PLAIN_FIELDS, WITH_XGRAMMAR

GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"
POOL: Final = "/pooling"
INFO: Final = "/server_info?config_format=json"
METRICS: Final = "/metrics/?name[]=vllm:num_requests_running&name[]=vllm:num_requests_waiting"
"""Only these two metrics: fetching all of them keeps the server busy for 10 ms."""
UNLABELLED: Final = "default"
"""Version label of weights that were never labelled."""

_ALWAYS: Final = frozenset(
    {
        Capability.STREAMING,
        Capability.ABORT,
        Capability.PROMPT_LOGPROBS,
        Capability.PROMPT_RANKS,
        Capability.SCORE_TOKENS,
        Capability.STOP_TOKEN_IDS,
        Capability.IGNORE_EOS,
        Capability.SEED,
        Capability.VERSION_SPANS,
        Capability.MOE,
    }
)
_DRAWN: Final = frozenset(
    {
        Capability.TOP_K,
        Capability.TOP_P,
        Capability.FREQUENCY_PENALTY,
        Capability.PRESENCE_PENALTY,
        Capability.LOGIT_BIAS,
    }
)
"""Parameters that change the sampled distribution beyond temperature."""
_GRAMMARS: Final = frozenset({Capability.STRUCTURED_JSON, Capability.STRUCTURED_REGEX, Capability.STRUCTURED_EBNF})
_PAUSES: Final = frozenset({Capability.PAUSE_IN_PLACE, Capability.PAUSE_RETRACT})

_PATHS: Final[Mapping[str, str]] = {
    "/server_info": "with VLLM_SERVER_DEV_MODE=1 in its environment: it says what it is only then",
    "/weight_info": "with VLLM_SERVER_DEV_MODE=1 in its environment: it says what weights it has only then",
}
"""Endpoints that a server must have, with the way to launch it."""

_MUST_BE: Final[Mapping[str, tuple[object, ...]]] = {
    "model_config.logits_processors": (None,),
    "model_config.logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "parallel_config.pipeline_parallel_size": (1,),
    "parallel_config.data_parallel_size": (1,),
    "parallel_config._api_process_count": (1,),
    "structured_outputs_config.reasoning_parser": ("",),
    "diffusion_config": (None,),
    "ec_transfer_config": (None,),
    "kv_transfer_config": (None,),
    "speculative_config": (None,),
    "watermark_config": (None,),
}
"""Parts of the server's configuration with the values required for requests to have their documented meaning."""


@dataclass(frozen=True, slots=True)
class ServerSays:
    """Contents of ``/openapi.json``, ``/server_info``, ``/version``, ``/weight_info``, and a fact from one answer."""

    version: str
    """VLLM's version."""
    paths: frozenset[str]
    """The server's endpoints."""
    sampling_fields: frozenset[str]
    """Sampling parameters that the server knows; it drops others silently."""
    config: Mapping[str, Any]
    """The server's complete configuration."""
    weight_version: str
    """Current version label of the weights."""
    reports_cached: bool = False
    """True if answers report the number of tokens from the prefix cache."""

    def part(self, name: str) -> Any:
        """Return the value at a dotted name of the configuration; None if this release has no such name."""
        found: Any = self.config
        for step in name.split("."):
            found = found.get(step) if isinstance(found, Mapping) else None
        return found

    @property
    def launch(self) -> object:
        """A key that differs between two launches of a server on the same port."""
        return self.config.get("instance_id")

    @property
    def generates(self) -> bool:
        """True if the model generates text."""
        return bool(self.part("scheduler_config.runner_type") == "generate")

    @property
    def may_use_xgrammar(self) -> bool:
        """True if the server may compile a grammar with xgrammar."""
        return (self.part("structured_outputs_config.backend") or "auto") in WITH_XGRAMMAR

    @property
    def logprobs_mode(self) -> str:
        """The distribution to which logprobs belong, in vLLM's words."""
        return str(self.part("model_config.logprobs_mode"))

    @property
    def folder(self) -> str:
        """The model as named at launch."""
        return str(self.part("model_config.model"))

    @property
    def dtype(self) -> str:
        """Dtype of the served weights."""
        return str(self.part("model_config.dtype")).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The device type."""
        return str(self.part("device_config.device"))

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return int(self.part("model_config.max_model_len"))

    @property
    def has_priorities(self) -> bool:
        """True if the scheduler honours priorities; otherwise it refuses them."""
        return bool(self.part("scheduler_config.policy") == "priority")


def claims(config: EngineConfig, says: ServerSays) -> frozenset[Capability]:
    """Return the capabilities of a plain server: its own, and the ones that this client adds."""
    if not says.generates:
        own = {Task.EMBED: Capability.EMBED, Task.REWARD: Capability.REWARD_SCORE}
        return frozenset({own[config.task]} if config.task in own else ())
    claimed = set(_ALWAYS | _drawn(config, says))
    if says.part("model_config.max_logprobs") != 0:
        claimed.add(Capability.TOP_LOGPROBS)
    if says.part("cache_config.enable_prefix_caching") and says.reports_cached:
        claimed.add(Capability.PREFIX_CACHE)
    if says.has_priorities:
        claimed.add(Capability.PRIORITY)
    if {"/pause", "/resume"} <= says.paths:
        claimed |= _PAUSES
    return frozenset(claimed)


def _drawn(config: EngineConfig, says: ServerSays) -> frozenset[Capability]:
    """Return logprobs modes, and the parameters with which logprobs still have the mode's meaning."""
    if says.logprobs_mode == "raw_logprobs":
        # Raw logprobs include a grammar's mask, but no other parameter.
        return _DRAWN | {Capability.LOGPROBS_RAW}
    if config.logprobs_mode is LogprobsMode.TEMPERATURE:
        # Without further parameters, the processed distribution is the one after temperature.
        return frozenset({Capability.LOGPROBS_TEMPERATURE, Capability.LOGPROBS_PROCESSED})
    has_tokenizer = not says.part("model_config.skip_tokenizer_init")
    return _DRAWN | {Capability.LOGPROBS_PROCESSED} | (_GRAMMARS if has_tokenizer else frozenset())


def check_paths(paths: frozenset[str], endpoint: str) -> None:
    """Check that a server has the endpoints that this backend needs.

    Raises:
        EngineStartError: an endpoint is missing; the message names the launch argument.
    """
    for path, remedy in _PATHS.items():
        if path not in paths:
            raise EngineStartError(f"the vLLM server at {endpoint} has no {path}; launch it {remedy}")
    if not {GENERATE, POOL} & paths:
        raise EngineStartError(
            f"the vLLM server at {endpoint} does not accept token ids at {GENERATE}; launch it with --enable-scale-out"
        )


def check_server(says: ServerSays, endpoint: str) -> None:
    """Check that the server's arguments and request fields are supported.

    Raises:
        EngineStartError: it does not know a request field that this backend may send.
        InvalidConfig: it was launched with an argument that changes the meaning of requests.
    """
    for name, values in _MUST_BE.items():
        if says.part(name) not in (*values, None):
            raise InvalidConfig(
                f"the server at {endpoint} was launched with {name}={says.part(name)!r}, which changes the "
                f"meaning of requests or was never tested; launch it with {' or '.join(map(repr, values))}",
                field=ENDPOINT,
            )
    if says.generates and (unknown := PLAIN_FIELDS - says.sampling_fields):
        raise EngineStartError(
            f"the server at {endpoint} is vLLM {says.version}, which does not support {', '.join(sorted(unknown))}; "
            "launch a newer one"
        )


_AGREES: Final[Mapping[str, Callable[[ServerSays], object]]] = {
    "revision": lambda says: says.part("model_config.revision"),
    "dtype": lambda says: says.dtype,
    "device": lambda says: says.device,
    "gpu_memory_utilization": lambda says: says.part("cache_config.gpu_memory_utilization"),
    "max_num_batched_tokens": lambda says: says.part("scheduler_config.max_num_batched_tokens"),
    "max_num_seqs": lambda says: says.part("scheduler_config.max_num_seqs"),
    "enable_prefix_caching": lambda says: bool(says.part("cache_config.enable_prefix_caching")),
    "attention_backend": lambda says: says.part("attention_config.backend"),
    "enable_sleep": lambda says: bool(says.part("model_config.enable_sleep_mode")),
}
"""Fields that only a launch can honour, with the server's own value of each."""

CONFIG_NAMES: Final[Mapping[str, str]] = {
    ENDPOINT: "the server's address",
    "endpoint_api_key": "Authorization",
    "trust_remote_code": "of the tokenizer",
    "context_length": "kept by InferenceEngine",
    "task": "runner",
    **{field: "checked against the server" for field in _AGREES},
}
"""EngineConfig fields, with the argument or component that honours each."""


def check_agreement(config: EngineConfig, says: ServerSays) -> None:
    """Check that the configuration agrees with the server.

    Raises:
        InvalidConfig: naming the field, its value and the server's.
    """
    check_launched_fields(config, says, _AGREES)
    label = says.weight_version
    if "weight_version" in config.model_fields_set and label not in (UNLABELLED, config.weight_version):
        raise disagreement(config, "weight_version", label)
    for name, wanted in config.engine_kwargs.items():
        held = [part[name] for part in says.config.values() if isinstance(part, Mapping) and name in part]
        if wanted not in held:
            raise not_launched_with(config, name)
    if (config.task is Task.GENERATE) is not says.generates:
        model = "generates" if says.generates else "does not generate"
        raise InvalidConfig(
            f"task={config.task.value!r}, but the model of the server at {config.endpoint} {model}; connect with "
            f"task={'generate' if says.generates else 'embed or reward'}",
            field="task",
        )


def check_count(params: SamplingParams, says: ServerSays) -> None:
    """Check that the server returns as many top logprobs as a request asks for.

    Raises:
        InvalidRequest: it returns fewer.
    """
    most = int(says.part("model_config.max_logprobs"))
    for field, count, room in (("logprobs", params.logprobs, 1), ("prompt_logprobs", params.prompt_logprobs, 0)):
        if count and most != -1 and count + room > most:
            raise InvalidRequest(
                f"sampling_params.{field}={count} is more than the server's {most - room}; launch it with a larger "
                "--max-logprobs, or with -1",
                field=f"sampling_params.{field}",
            )


_RUNNING: Final = re.compile(r"^vllm:num_requests_(running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)


def stats_of(metrics: str, says: ServerSays, weight_bytes: int) -> EngineStats:
    """Return requests of all clients, from ``/metrics``, and memory as far as the server reports it.

    Raises:
        EngineInternalError: the metrics lack the number of requests.
    """
    found: dict[str, float] = {}
    for kind, value in _RUNNING.findall(metrics):
        found[kind] = found.get(kind, 0.0) + float(value)
    if found.keys() != {"running", "waiting"}:
        raise EngineInternalError(
            "the server's /metrics does not say how many requests it has; was it launched with --disable-log-stats?"
        )
    return EngineStats(
        running=int(found["running"]),
        waiting=int(found["waiting"]),
        kv_cache_bytes=int(says.part("cache_config.kv_cache_memory_bytes") or 0),
        weight_bytes=weight_bytes,
    )


def schema_of(openapi: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of ``/openapi.json``, and the names of a request's sampling parameters."""
    schemas = openapi.get("components", {}).get("schemas", {})
    params = schemas.get("GenerateRequest", {}).get("properties", {}).get("sampling_params", {})
    named = params.get("$ref", "").rpartition("/")[2]
    fields = schemas.get(named, params).get("properties", {})
    return frozenset(openapi.get("paths", {})), frozenset(fields)
