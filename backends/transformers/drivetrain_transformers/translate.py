"""Translate drivetrain's names to transformers'. Pure functions over plain values."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Final

from pydantic import JsonValue

from drivetrain.backend.toolkit.folder_pooling import folder_pooling
from drivetrain.backend.toolkit.model_folder import config_levels, model_file
from drivetrain.backend.toolkit.translation import context_length_of
from drivetrain.checks.extras import from_extra
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.media.qwen_audio import audio_capabilities
from drivetrain.media.qwen_vision import vision_capabilities
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task

CONFIG_NAMES: Final[Mapping[str, str]] = {
    "revision": "from_pretrained(revision=)",
    "trust_remote_code": "from_pretrained(trust_remote_code=)",
    "dtype": "from_pretrained(dtype=)",
    "device": "module.to()",
    "attention_backend": "from_pretrained(attn_implementation=)",
    "context_length": "the scheduler's limit, at most max_position_embeddings",
    "max_num_seqs": "the scheduler's rows",
    "max_num_batched_tokens": "the scheduler's prefill tokens",
    "enable_prefix_caching": "the scheduler's prefix cache",
    "deterministic": "one row in each forward pass (CPU)",
    "enable_sleep": "always ready",
    "enable_lora": "peft",
    "max_loras": "kept by InferenceEngine",
    "max_lora_rank": "largest rank of a peft adapter",
    "task": "the AutoModel class of the task, and of the media that the model takes",
    "media": "drivetrain.media",
    "engine_kwargs": "from_pretrained(**)",
}
"""EngineConfig fields, with the argument or component that honours each."""

DEFAULT_MAX_NUM_SEQS: Final = 256
DEFAULT_MAX_BATCHED_TOKENS: Final = 8192
PREFIX_CACHE_BYTES: Final = 256 * 2**20
_EAGER: Final = (None, "eager", "sdpa")
"""Implementations of attention that compile nothing for the shapes that come."""
_SPREAD: Final = ("device_map", "tp_plan")
"""Arguments that put parts of the model on other devices."""
UNKNOWN_CONTEXT: Final = 2**20
"""Context length of models that name no limit, such as those with relative positions."""


SEEN_WORKING: Final = ("5.4", "5.24")
"""Oldest and newest minor release on which the tests were run. Their differences are found by feature: whether a
model's ``forward`` takes ``position_ids`` and ``logits_to_keep``."""


def has_grammars() -> bool:
    """Return whether xgrammar, which structured output needs, is installed."""
    return importlib.util.find_spec("xgrammar") is not None


def media_capabilities(config: EngineConfig) -> frozenset[Capability]:
    """Return the media capabilities of the configured model, from the files of its folder.

    Images are taken by models whose prompts repeat one placeholder for each image, without other tokens in between:
    those whose image processor merges patches of a grid (Qwen-VL and its like), and those whose processor selects
    vision features (LLaVA and its like). Sounds are taken by Qwen2-Audio.
    """
    return audio_capabilities(config) | _vision_capabilities(config)


def _vision_capabilities(config: EngineConfig) -> frozenset[Capability]:
    fields = model_file(config, "config.json") if config.task is Task.GENERATE else {}
    if not isinstance(fields.get("vision_config"), dict) or not {"image_token_id", "image_token_index"} & set(fields):
        return frozenset()
    processor = model_file(config, "processor_config.json")
    own = processor.get("image_processor")
    images = own if isinstance(own, dict) else model_file(config, "preprocessor_config.json")
    has_grid = "merge_size" in images and "vision_start_token_id" in fields
    if not has_grid and "vision_feature_select_strategy" not in processor:
        return frozenset()
    return vision_capabilities(config) | {Capability.IMAGES}


def device_of(config: EngineConfig) -> str:
    """Return the configured device; if none is configured, ``"cuda"`` when there is a GPU, else ``"cpu"``."""
    if config.device is not None:
        return config.device
    with from_extra("transformers", "the transformers backend"):
        import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_arguments(config: EngineConfig) -> dict[str, JsonValue]:
    """Return keyword arguments for ``AutoModelForCausalLM.from_pretrained``."""
    arguments: dict[str, JsonValue] = {
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
    }
    if config.revision is not None:
        arguments["revision"] = config.revision
    if config.attention_backend is not None:
        arguments["attn_implementation"] = config.attention_backend
    both = sorted(set(arguments) & set(config.engine_kwargs))
    if both:
        raise InvalidConfig(
            f"engine_kwargs holds {', '.join(both)}, which the configuration sets already; use its own fields",
            field="engine_kwargs",
        )
    return {**arguments, **config.engine_kwargs}


def check_attention(config: EngineConfig) -> None:
    """Check that transformers knows the attention implementation.

    Raises:
        InvalidConfig: It does not. Names with a slash pass: they are kernels of the hub, which the start loads.
    """
    name = config.attention_backend
    if name is None or "/" in name:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if name not in known:
        raise InvalidConfig(
            f"attention_backend={shown(name)}: transformers has no such attention; it has {', '.join(sorted(known))}, "
            "and kernels of the hub",
            field="attention_backend",
        )


def check_deterministic(config: EngineConfig) -> None:
    """Check that the arguments allow deterministic results, if they are asked for.

    Raises:
        InvalidConfig: an argument does not allow them, and is named.
    """
    if not config.deterministic:
        return
    arguments = load_arguments(config)
    attention = arguments.get("attn_implementation")
    if attention not in _EAGER:
        raise InvalidConfig(
            f"attention_backend={attention!r} with deterministic=True: compiled code may depend on earlier requests; "
            "leave it out, or use 'sdpa' or 'eager'",
            field="attention_backend",
        )
    for name in _SPREAD:
        if name in arguments:
            raise InvalidConfig(
                f"engine_kwargs holds {name!r}, with deterministic=True: only results of one CPU are known to be "
                f"deterministic; leave {name!r} out",
                field="engine_kwargs",
            )


def context_length(model_config: object, config: EngineConfig) -> int:
    """Return the most tokens of prompt and output together: the configured limit, or the model's own.

    Raises:
        InvalidConfig: the configured limit exceeds the model's own.
    """
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    own = next(
        (value for name in names if isinstance(value := getattr(model_config, name, None), int)), UNKNOWN_CONTEXT
    )
    return context_length_of(own, config.context_length)


def check_model_folder(config: EngineConfig) -> None:
    """Raise :class:`InvalidConfig` for a context length beyond the model folder's, or a pooling that is not applied."""
    folder_pooling(config)
    levels = config_levels(config.model)
    if levels:
        context_length(SimpleNamespace(**levels[-1]), config)
