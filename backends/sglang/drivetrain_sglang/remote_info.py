"""Properties of a running SGLang server, and the capabilities they imply. Pure functions over its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from drivetrain.backend.base import EngineStats
from drivetrain.backend.toolkit.engine_versions import release
from drivetrain.errors import EngineInternalError, EngineStartError, InvalidConfig
from drivetrain.servers.launched_fields import check_launched_fields, not_launched_with
from drivetrain.servers.remote_backend import ENDPOINT
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain_sglang.translate import REPLICATED_QUERIES

OLDEST: Final = (0, 5, 23)
"""Oldest release that was seen to work."""

_ALWAYS: Final = frozenset(
    {
        Capability.STREAMING,
        Capability.ABORT,
        Capability.LOGPROBS_TEMPERATURE,
        Capability.TOP_LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.SCORE_TOKENS,
        Capability.STOP_TOKEN_IDS,
        Capability.IGNORE_EOS,
        Capability.TOP_P,
        Capability.MIN_P,
        Capability.VERSION_SPANS,
        Capability.MOE,
    }
)

_MUST_BE: Final[Mapping[str, object]] = {
    "disaggregation_mode": "null",
    "dllm_algorithm": None,
    "enable_watermark": False,
    "mlx_enable_sampling": False,
    "pp_size": 1,
    "preferred_sampling_params": None,
    "skip_tokenizer_init": False,
    "speculative_algorithm": None,
    "tokenizer_worker_num": 1,
}
"""Arguments of the server with the values required for requests to have their documented meaning."""


@dataclass(frozen=True, slots=True)
class ServerSays:
    """The answers of ``/server_info`` and ``/model_info``."""

    server: Mapping[str, Any]
    model: Mapping[str, Any]

    @property
    def version(self) -> str:
        """SGLang's version."""
        return str(self.server.get("version", "unknown"))

    @property
    def weight_version(self) -> str:
        """Current version label of the weights."""
        return str(self.model["weight_version"])

    @property
    def architecture(self) -> str:
        """Class of the model."""
        return str((self.model.get("architectures") or ["unknown"])[0])

    @property
    def folder(self) -> str:
        """The model as named at launch."""
        return str(self.server.get("model_path", ""))

    @property
    def launch(self) -> tuple[object, ...]:
        """A key that differs between two launches of a server on the same port."""
        return (self.server.get("random_seed"), str(self.server.get("startup_time")))


def claims(config: EngineConfig, says: ServerSays) -> frozenset[Capability]:
    """Return the capabilities of a plain server: its own, and the ones that this client adds."""
    if not says.model.get("is_generation", True):
        return frozenset({Capability.EMBED})
    claimed = set(_ALWAYS)
    if config.enable_lora and says.server.get("enable_lora") and says.server.get("dp_size", 1) == 1:
        claimed.add(Capability.LORA)
    if not says.server.get("disable_radix_cache"):
        claimed.add(Capability.PREFIX_CACHE)
    if has_priorities(says):
        claimed.add(Capability.PRIORITY)
    return frozenset(claimed)


def has_priorities(says: ServerSays) -> bool:
    """Return whether the scheduler honours priorities."""
    return bool(says.server.get("enable_priority_scheduling"))


def check_server(says: ServerSays, endpoint: str) -> None:
    """Check that the server's version and arguments are supported.

    Raises:
        EngineStartError: it is older than the oldest supported release.
        InvalidConfig: it was launched with an argument that changes the meaning of requests.
    """
    if release(says.version) < OLDEST:
        raise EngineStartError(
            f"the server at {endpoint} is SGLang {says.version}; this backend needs "
            f"{'.'.join(map(str, OLDEST))} or newer"
        )
    for name, value in _MUST_BE.items():
        if says.server.get(name, value) != value:
            raise InvalidConfig(
                f"the server at {endpoint} was launched with {name}={says.server[name]!r}, which changes the "
                f"meaning of requests; launch it with {name}={value!r}",
                field=ENDPOINT,
            )
    if says.server.get("dcp_size", 1) != 1 and says.server.get(REPLICATED_QUERIES) is not False:
        raise InvalidConfig(
            f"the server at {endpoint} was launched with dcp_size={says.server['dcp_size']} and may answer from copies "
            "of weights that no update changes; launch it with --no-dcp-replicate-q-proj",
            field=ENDPOINT,
        )


_AGREES: Final[Mapping[str, Callable[[ServerSays], object]]] = {
    "revision": lambda says: says.server.get("revision"),
    "dtype": lambda says: says.server.get("dtype"),
    "device": lambda says: says.server.get("device"),
    "gpu_memory_utilization": lambda says: says.server.get("mem_fraction_static"),
    "max_num_batched_tokens": lambda says: says.server.get("chunked_prefill_size"),
    "max_num_seqs": lambda says: says.server.get("max_running_requests"),
    "enable_prefix_caching": lambda says: not says.server.get("disable_radix_cache"),
    "attention_backend": lambda says: says.server.get("attention_backend"),
    "enable_sleep": lambda says: bool(says.server.get("enable_memory_saver")),
    "weight_version": lambda says: says.weight_version,
}
"""Fields that only a launch can honour, with the server's own value of each."""

CONFIG_NAMES: Final[Mapping[str, str]] = {
    ENDPOINT: "the server's address",
    "endpoint_api_key": "Authorization",
    "trust_remote_code": "of the tokenizer",
    "context_length": "kept by InferenceEngine",
    "task": "is_embedding",
    "enable_lora": "enable_lora",
    "max_loras": "kept by InferenceEngine",
    "max_lora_rank": "max_lora_rank",
    **{field: "checked against the server" for field in _AGREES if field != "weight_version"},
}
"""EngineConfig fields, with the argument or component that honours each."""


def check_agreement(config: EngineConfig, says: ServerSays) -> None:
    """Check that the configuration agrees with the server.

    Raises:
        InvalidConfig: naming the field, its value and the server's.
    """
    check_launched_fields(config, says, _AGREES)
    own_rank = int(says.server.get("max_lora_rank") or 0)
    if config.enable_lora and config.max_lora_rank is not None and config.max_lora_rank > own_rank:
        raise InvalidConfig(
            f"max_lora_rank={config.max_lora_rank}, but the server at {config.endpoint} was launched with "
            f"{own_rank or 'none'}; leave it out, or launch the server with --enable-lora and --max-lora-rank",
            field="max_lora_rank",
        )
    for name, wanted in config.engine_kwargs.items():
        if name not in says.server or says.server[name] != wanted:
            raise not_launched_with(config, name)
    if config.task is Task.GENERATE and not says.model.get("is_generation", True):
        raise InvalidConfig(
            f"task='generate', but the model of the server at {config.endpoint} embeds; connect with task='embed'",
            field="task",
        )


def largest_rank(config: EngineConfig, says: ServerSays) -> int:
    """Return the largest rank of a LoRA adapter."""
    return config.max_lora_rank or int(says.server.get("max_lora_rank") or 0)


def room(says: ServerSays) -> int:
    """Return the most tokens that a prompt, or prompt and output together, can have without being truncated."""
    return int(says.server["max_req_input_len"]) - 1


def dtype_of(says: ServerSays, checkpoint: str) -> str:
    """Return the dtype of the served weights; SGLang's "auto" loads float32 as float16."""
    named = str(says.server.get("dtype", "auto"))
    named = {"half": "float16", "float": "float32", "bf16": "bfloat16"}.get(named, named)
    return named if named != "auto" else {"float32": "float16"}.get(checkpoint, checkpoint)


def stats_of(loads: Mapping[str, Any]) -> EngineStats:
    """Return requests and memory over all replicas, from ``/v1/loads``; memory is precise to a thousandth of a GiB."""
    try:
        ranks = loads["loads"]
        return EngineStats(
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            kv_cache_bytes=sum(int(rank["memory"]["kv_cache_gb"] * 2**30) for rank in ranks),
            weight_bytes=sum(int(rank["memory"]["weight_gb"] * 2**30) for rank in ranks),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineInternalError(
            f"the server's /v1/loads is not as expected: {type(error).__name__}: {error}"
        ) from error


def is_after_temperature(cold: Mapping[str, Any], raw: Mapping[str, Any], temperature: float) -> bool:
    """Detect whether logprobs include temperature, from one prompt's answers at ``temperature`` and greedily.

    A server launched with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` leaves temperature out, and does not report that.
    """
    likely = {entry[1]: entry[0] for entry in raw["meta_info"]["output_top_logprobs"][0]}
    both = [(entry[0], likely[entry[1]]) for entry in cold["meta_info"]["output_top_logprobs"][0] if entry[1] in likely]
    (high, raw_high), (low, raw_low) = both[0], both[-1]
    found, spread = float(high - low), float(raw_high - raw_low)
    return abs(found - spread / temperature) <= abs(found - spread)
