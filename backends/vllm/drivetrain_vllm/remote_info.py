"""What a running vLLM server says of itself, and what follows from it. Pure functions over its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from drivetrain.backend.base import EngineStats
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import EngineInternalError, EngineStartError, InvalidConfig, InvalidRequest
from drivetrain.servers.remote_backend import ENDPOINT
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_vllm.translate import PLAIN_FIELDS

GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"
POOL: Final = "/pooling"
INFO: Final = "/server_info?config_format=json"
METRICS: Final = "/metrics/?name[]=vllm:num_requests_running&name[]=vllm:num_requests_waiting"
"""These two alone: all of them keep the server busy for a hundredth of a second."""
UNLABELLED: Final = "default"
"""Version of weights that nobody gave one."""

_ALWAYS: Final = frozenset(
    {
        Capability.STREAMING,
        Capability.ABORT,
        Capability.PROMPT_LOGPROBS,
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
"""What makes the distribution that is drawn from another than that of the temperature alone."""
_GRAMMARS: Final = frozenset({Capability.STRUCTURED_JSON, Capability.STRUCTURED_REGEX, Capability.STRUCTURED_EBNF})
_PAUSES: Final = frozenset({Capability.PAUSE_IN_PLACE, Capability.PAUSE_RETRACT})

_PATHS: Final[Mapping[str, str]] = {
    "/server_info": "with VLLM_SERVER_DEV_MODE=1 in its environment: it says what it is only then",
    "/weight_info": "with VLLM_SERVER_DEV_MODE=1 in its environment: it says what weights it has only then",
}
"""What a server must have → how it is launched to have it."""

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
"""Part of the server's configuration → the values with which requests were seen to mean what they say."""


@dataclass(frozen=True, slots=True)
class ServerSays:
    """What ``/openapi.json``, ``/server_info``, ``/version`` and ``/weight_info`` say, and one answer."""

    version: str
    """VLLM's."""
    paths: frozenset[str]
    """What it answers."""
    sampling_fields: frozenset[str]
    """What it knows of a request's sampling params; what it does not, it drops."""
    config: Mapping[str, Any]
    """All its configuration."""
    weight_version: str
    """The label that the weights have now."""
    reports_cached: bool = False
    """Whether answers say how many tokens came from the prefix cache."""

    def part(self, name: str) -> Any:
        """What the configuration says at a dotted name; None where a release says nothing."""
        found: Any = self.config
        for step in name.split("."):
            found = found.get(step) if isinstance(found, Mapping) else None
        return found

    @property
    def launch(self) -> object:
        """Differs between two launches of a server on the same port."""
        return self.config.get("instance_id")

    @property
    def generates(self) -> bool:
        """Whether the model does."""
        return bool(self.part("scheduler_config.runner_type") == "generate")

    @property
    def logprobs_mode(self) -> str:
        """Which distribution logprobs belong to, in vLLM's words."""
        return str(self.part("model_config.logprobs_mode"))

    @property
    def folder(self) -> str:
        """The model that it was launched with, as it was named there."""
        return str(self.part("model_config.model"))

    @property
    def dtype(self) -> str:
        """The type of the served weights."""
        return str(self.part("model_config.dtype")).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The kind of device."""
        return str(self.part("device_config.device"))

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return int(self.part("model_config.max_model_len"))

    @property
    def has_priorities(self) -> bool:
        """Whether the scheduler looks at priorities; it refuses them otherwise."""
        return bool(self.part("scheduler_config.policy") == "priority")


def claims(config: EngineConfig, says: ServerSays) -> frozenset[Capability]:
    """What a plain server does rightly, or is made to from here."""
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
    """Modes of logprobs, and what may be changed of the distribution while they are still what they say."""
    if says.logprobs_mode == "raw_logprobs":
        # A grammar's mask is in them, all else is not.
        return _DRAWN | {Capability.LOGPROBS_RAW}
    if config.logprobs_mode is LogprobsMode.TEMPERATURE:
        # As long as nothing else is applied, what is drawn from is that after temperature.
        return frozenset({Capability.LOGPROBS_TEMPERATURE, Capability.LOGPROBS_PROCESSED})
    has_tokenizer = not says.part("model_config.skip_tokenizer_init")
    return _DRAWN | {Capability.LOGPROBS_PROCESSED} | (_GRAMMARS if has_tokenizer else frozenset())


def check_paths(paths: frozenset[str], endpoint: str) -> None:
    """Check that a server answers what this backend cannot do without.

    Raises:
        EngineStartError: naming how to launch it.
    """
    for path, remedy in _PATHS.items():
        if path not in paths:
            raise EngineStartError(f"the vLLM server at {endpoint} has no {path}; launch it {remedy}")
    if not {GENERATE, POOL} & paths:
        raise EngineStartError(
            f"the vLLM server at {endpoint} takes no token ids at {GENERATE}; launch it with --enable-scale-out"
        )


def check_server(says: ServerSays, endpoint: str) -> None:
    """Check that a server is one whose answers are known to be right.

    Raises:
        EngineStartError: it does not know what this backend may ask it.
        InvalidConfig: it was launched with an argument that changes what requests mean.
    """
    for name, values in _MUST_BE.items():
        if says.part(name) not in (*values, None):
            raise InvalidConfig(
                f"the server at {endpoint} was launched with {name}={says.part(name)!r}, with which requests do not "
                f"mean what they say, or which was not looked at; launch it with {' or '.join(map(repr, values))}",
                field=ENDPOINT,
            )
    if says.generates and (unknown := PLAIN_FIELDS - says.sampling_fields):
        raise EngineStartError(
            f"the server at {endpoint} is vLLM {says.version}, which knows nothing of {', '.join(sorted(unknown))}; "
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
"""Field that only a launch can honour → what the server was launched with."""

_ANY_WILL_DO: Final = (("dtype", "auto"), ("enable_sleep", False))
"""Fields and values that ask nothing of a launch."""

CONFIG_NAMES: Final[Mapping[str, str]] = {
    ENDPOINT: "the server's address",
    "endpoint_api_key": "Authorization",
    "trust_remote_code": "of the tokenizer",
    "context_length": "kept by the engine page",
    "task": "runner",
    **{field: "checked against the server" for field in _AGREES},
}
"""Field of EngineConfig → what honours it here."""


def check_agreement(config: EngineConfig, says: ServerSays) -> None:
    """Check that what the configuration says of the engine is what the server is.

    Raises:
        InvalidConfig: naming the field, its value and the server's.
    """
    for field in sorted(_AGREES.keys() & config.model_fields_set):
        value, own = getattr(config, field), _AGREES[field](says)
        if value != own and (field, value) not in _ANY_WILL_DO:
            raise _disagreement(config, field, value, own)
    label = says.weight_version
    if "weight_version" in config.model_fields_set and label not in (UNLABELLED, config.weight_version):
        raise _disagreement(config, "weight_version", config.weight_version, label)
    for name, wanted in config.engine_kwargs.items():
        held = [part[name] for part in says.config.values() if isinstance(part, Mapping) and name in part]
        if wanted not in held:
            raise InvalidConfig(
                f"engine_kwargs={shown({name: wanted})}: only the launch of a server can set it, and the one at "
                f"{config.endpoint} was launched without; leave it out",
                field="engine_kwargs",
            )
    if (config.task is Task.GENERATE) is not says.generates:
        model = "generates" if says.generates else "does not generate"
        raise InvalidConfig(
            f"task={config.task.value!r}, but the model of the server at {config.endpoint} {model}; connect with "
            f"task={'generate' if says.generates else 'embed or reward'}",
            field="task",
        )


def _disagreement(config: EngineConfig, field: str, value: object, own: object) -> InvalidConfig:
    return InvalidConfig(
        f"{field}={value!r}, but the server at {config.endpoint} was launched with {own!r}; leave it out, or launch "
        "the server so",
        field=field,
    )


def check_count(params: SamplingParams, says: ServerSays) -> None:
    """Check that a server gives as many alternatives as a request asks for.

    Raises:
        InvalidRequest: it gives fewer.
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
    """Requests of all clients, from ``/metrics``, and memory as far as the server says what it holds.

    Raises:
        EngineInternalError: it does not say how many requests there are.
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
    """What ``/openapi.json`` says: the paths, and the names of a request's sampling params."""
    schemas = openapi.get("components", {}).get("schemas", {})
    params = schemas.get("GenerateRequest", {}).get("properties", {}).get("sampling_params", {})
    named = params.get("$ref", "").rpartition("/")[2]
    fields = schemas.get(named, params).get("properties", {})
    return frozenset(openapi.get("paths", {})), frozenset(fields)
