"""Tiny real models of a few hundred thousand parameters, for tests, tutorials and the demo."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import itertools
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedConfig,
)

from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.testing.byte_tokenizer import (
    AUDIO_TOKENS,
    SPECIAL_TOKENS,
    VISION_TOKENS,
    VOCAB_SIZE,
    byte_tokenizer,
)

ConfigValue = str | int | float | bool | None | Sequence["ConfigValue"] | Mapping[str, "ConfigValue"]

_ENDOFTEXT, _IM_START, _IM_END, _PAD = range(256, 256 + len(SPECIAL_TOKENS))
_VISION_START, _VISION_END, _IMAGE, _VIDEO = range(VOCAB_SIZE, VOCAB_SIZE + len(VISION_TOKENS))
_AUDIO: Final = VOCAB_SIZE + AUDIO_TOKENS.index("<|AUDIO|>")
_random_state: Final = threading.Lock()
"""Held while torch's random state, which all threads share, is replaced."""
_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")

_WIDTH: Final = 128
_HEAD: Final = 64
"""Head size. Some engines refuse smaller heads: vLLM's attention on a CPU, SGLang's rotary kernel on a GPU."""

_COMMON: Final[dict[str, ConfigValue]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": _WIDTH // _HEAD,
    "max_position_embeddings": 1024,
    # The usual 0.02 makes a small model's logits nearly uniform, which hides mistakes in comparisons.
    "initializer_range": 0.1,
    "bos_token_id": _ENDOFTEXT,
    "eos_token_id": _IM_END,
    "pad_token_id": _PAD,
}
_GROUPED: Final[dict[str, ConfigValue]] = {**_COMMON, "intermediate_size": _WIDTH, "num_key_value_heads": 2}
_MOE: Final[dict[str, ConfigValue]] = {
    **_GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_OWN_HEADS: Final[dict[str, ConfigValue]] = {"head_dim": _HEAD, "num_attention_heads": 4, "num_key_value_heads": 2}
_PATTERNS: Final = ("layer_types", "layers_block_type")
"""Fields that name a type for each layer. Tuples of them are repeated over the layers."""
_FOUR_LAYERS: Final[dict[str, ConfigValue]] = {"num_hidden_layers": 4}
_DELTA_RULE: Final[dict[str, ConfigValue]] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_ALTERNATING: Final[dict[str, ConfigValue]] = {
    **_GROUPED,
    **_OWN_HEADS,
    "sliding_window": 32,
    "layer_types": ("sliding_attention", "full_attention"),
}

ARCHITECTURES: Final[Mapping[str, Mapping[str, ConfigValue]]] = MappingProxyType(
    {
        "qwen2": _GROUPED,
        "qwen3": {**_GROUPED, **_OWN_HEADS},
        "llama": {**_GROUPED, **_OWN_HEADS},
        "mistral": {**_GROUPED, **_OWN_HEADS, "sliding_window": 32},
        "phi3": _GROUPED,
        "gemma2": {**_ALTERNATING, "query_pre_attn_scalar": _HEAD},
        "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": _HEAD},
        "gpt2": _COMMON,
        "gpt_neox": {**_COMMON, "intermediate_size": _WIDTH},
        "opt": {key: value for key, value in _COMMON.items() if key != "initializer_range"}
        | {"ffn_dim": _WIDTH, "word_embed_proj_dim": _WIDTH, "init_std": 0.1},
        "bloom": {key: value for key, value in _COMMON.items() if key != "max_position_embeddings"},
        "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 64},
        "qwen3_moe": {**_MOE, **_OWN_HEADS},
        "mixtral": {**_GROUPED, "head_dim": _HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
        "deepseek_v3": {
            **_GROUPED,
            "q_lora_rank": 64,
            # Sizes and frequencies of published models: engines are made for these alone.
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            # Engines read these fields of published configurations:
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        "gpt_oss": {
            **_ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        "qwen3_next": {
            **_MOE,
            **_FOUR_LAYERS,
            **_DELTA_RULE,
            "head_dim": _HEAD,
            "shared_expert_intermediate_size": 64,
            "layer_types": ("linear_attention", "linear_attention", "linear_attention", "full_attention"),
        },
        "granitemoehybrid": {
            **_GROUPED,
            **_FOUR_LAYERS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "layer_types": ("mamba", "attention", "mamba", "attention"),
        },
        "falcon_h1": {
            **_GROUPED,
            "head_dim": _HEAD,
            "mamba_d_ssm": _WIDTH,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
        "nemotron_h": {
            **_GROUPED,
            **_FOUR_LAYERS,
            "head_dim": _HEAD,
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 16,
            "n_groups": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "layers_block_type": ("mamba", "attention", "mamba", "moe"),
        },
        "lfm2": {**_GROUPED, **_FOUR_LAYERS, "layer_types": ("conv", "full_attention", "conv", "conv")},
        "mamba2": {**_COMMON, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1},
    }
)
"""Architecture (the ``model_type`` of transformers) → the configuration values that make it tiny."""

_PATCH: Final = 14
"""Side of a patch in pixels, as in Qwen's models; SGLang takes inputs of other sizes for precomputed embeddings. Two by
two patches make one token."""
_EYES: Final[dict[str, ConfigValue]] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": _PATCH,
    "in_chans": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.1,
}
_PLACES: Final[dict[str, ConfigValue]] = {
    "vision_start_token_id": _VISION_START,
    "vision_end_token_id": _VISION_END,
    "image_token_id": _IMAGE,
    "video_token_id": _VIDEO,
    "tie_word_embeddings": False,
    **{name: _COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
}
_WITH_IMAGES: Final[dict[str, ConfigValue]] = {**_GROUPED, "vocab_size": VOCAB_SIZE + len(VISION_TOKENS)}
_ROPE: Final[dict[str, ConfigValue]] = {"rope_type": "default", "rope_theta": 10000.0}

VISION_ARCHITECTURES: Final[Mapping[str, Mapping[str, ConfigValue]]] = MappingProxyType(
    {
        "qwen2_vl": {
            **_PLACES,
            "text_config": {**_WITH_IMAGES, "rope_parameters": {**_ROPE, "mrope_section": (8, 12, 12)}},
            "vision_config": {**_EYES, "embed_dim": _WIDTH, "hidden_size": _WIDTH, "mlp_ratio": 2},
        },
        "qwen2_5_vl": {
            **_PLACES,
            "text_config": {**_WITH_IMAGES, "rope_parameters": {**_ROPE, "mrope_section": (8, 12, 12)}},
            "vision_config": {
                **_EYES,
                "hidden_size": _WIDTH,
                "intermediate_size": _WIDTH,
                "out_hidden_size": _WIDTH,
                "window_size": 4 * _PATCH,
                "fullatt_block_indexes": (1,),
            },
        },
        "qwen3_vl": {
            **_PLACES,
            "text_config": {
                **_WITH_IMAGES,
                "head_dim": _HEAD,
                "rope_parameters": {**_ROPE, "mrope_section": (12, 10, 10), "mrope_interleaved": True},
            },
            "vision_config": {
                **_EYES,
                "hidden_size": _WIDTH,
                "intermediate_size": _WIDTH,
                "out_hidden_size": _WIDTH,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": (0, 1),
            },
        },
        "llava": {
            "image_token_id": _IMAGE,
            "tie_word_embeddings": False,
            "text_config": {**_WITH_IMAGES, **_OWN_HEADS, "model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": _WIDTH,
                "intermediate_size": _WIDTH,
                "projection_dim": _WIDTH,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 4 * _PATCH,
                "patch_size": _PATCH,
                "initializer_range": 0.1,
                "initializer_factor": 5.0,
            },
        },
    }
)
"""The same for vision models. The first three take videos too, and images of many sizes; for LLaVA an image is resized,
cropped, and always 16 tokens."""

_MEL_BINS: Final = 32

AUDIO_ARCHITECTURES: Final[Mapping[str, Mapping[str, ConfigValue]]] = MappingProxyType(
    {
        "qwen2_audio": {
            "audio_token_index": _AUDIO,
            "tie_word_embeddings": False,
            "text_config": {**_GROUPED, "vocab_size": VOCAB_SIZE + len(AUDIO_TOKENS), "model_type": "qwen2"},
            "audio_config": {
                "num_mel_bins": _MEL_BINS,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": _WIDTH,
                "d_model": _WIDTH,
                "initializer_range": 0.1,
            },
        },
    }
)
"""The same for audio models. They hear 30 seconds at once, of which 40 milliseconds are a token; a sound of any length
takes the encoder as long as one of 30 seconds."""

_PREPROCESSOR: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": _PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": (4 * _PATCH) ** 2, "longest_edge": (16 * _PATCH) ** 2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

_PROCESSORS: Final[Mapping[str, Mapping[str, Mapping[str, object]]]] = MappingProxyType(
    {
        "llava": {
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 4 * _PATCH},
                "crop_size": {"height": 4 * _PATCH, "width": 4 * _PATCH},
            },
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "image_token": VISION_TOKENS[2],
                "patch_size": _PATCH,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        },
        "qwen2_audio": {
            "preprocessor_config.json": {
                "feature_extractor_type": "WhisperFeatureExtractor",
                "processor_class": "Qwen2AudioProcessor",
                "feature_size": _MEL_BINS,
                "return_attention_mask": True,
            }
        },
    }
)
"""Files of the processors that are not Qwen-VL's."""

_KNOWN: Final = {**ARCHITECTURES, **VISION_ARCHITECTURES, **AUDIO_ARCHITECTURES}


def tiny_model(
    architecture: str = "qwen2",
    *,
    directory: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **config_overrides: ConfigValue,
) -> Path:
    """Write a model folder with random weights and return its path; any engine that loads a folder can load it.

    The folder holds a transformers configuration, safetensors weights in float32, a byte-level tokenizer with a ChatML
    template (see :func:`byte_tokenizer`) and a generation configuration with the EOS ids. The model has 2 layers of
    width 128, 260 token ids and, if the architecture has positions, a context of 1024 tokens. Sliding windows are 32
    tokens wide. The same arguments give the same weights. Nothing is downloaded.

    A model of :data:`VISION_ARCHITECTURES` also takes images, and Qwen's videos. It has four more token ids, a template
    that places media, and an image processor configuration. For Qwen's models 28 by 28 pixels are a token, and an image
    has 4 to 64 tokens; the video processor uses the same configuration, with as many tokens per pair of frames. For
    LLaVA an image has 16 tokens.

    A model of :data:`AUDIO_ARCHITECTURES` takes sounds instead, and has three more token ids than a text model.

    Args:
        architecture: A key of :data:`ARCHITECTURES`, :data:`VISION_ARCHITECTURES` or :data:`AUDIO_ARCHITECTURES`, such
            as ``"llama"``.
        directory: An empty or new folder to write to. None: a folder in the system's temporary directory, shared by
            this user's calls with the same arguments; treat it as read-only.
        seed: Seed of the weights.
        config_overrides: Fields of the architecture's configuration, such as ``num_hidden_layers=4`` or
            ``tie_word_embeddings=True``; ``dtype="bfloat16"`` sets the type of the weights. For a nested configuration,
            such as ``text_config``, a mapping changes only the fields that it names.

    Raises:
        InvalidConfig: The architecture or a field is unknown, the values do not work together, or ``directory`` is not
            empty.
    """
    if not isinstance(architecture, str) or architecture not in _KNOWN:
        close = difflib.get_close_matches(shown(architecture), _KNOWN, n=1)
        raise InvalidConfig(
            f"architecture={shown(architecture)} is not known{f'; did you mean {close[0]!r}?' if close else ''}; "
            f"known: {', '.join(_KNOWN)}",
            field="architecture",
        )
    if directory is None:
        return _cached(architecture, seed, config_overrides)
    folder = Path(directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidConfig(
            f"directory={os.fspath(folder)!r} is there and not empty; give an empty or a new folder", field="directory"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, architecture, seed, config_overrides)
    return folder


def _write(folder: Path, architecture: str, seed: int, overrides: Mapping[str, ConfigValue]) -> None:
    config = _config(architecture, overrides)
    dtype = config.dtype or torch.float32
    takes_images, takes_audio = architecture in VISION_ARCHITECTURES, architecture in AUDIO_ARCHITECTURES
    with _random_state, torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        try:
            kind: Any = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
            if takes_audio:
                kind = AutoModelForMultimodalLM
            model = kind.from_config(config, dtype=torch.float32)
            # Biases start as zeros and norms as ones, so code that forgets one would go unnoticed.
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.any():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            model = model.to(dtype)
            for part in model.config.sub_configs:  # from_config leaves the parts in their old dtype
                getattr(model.config, part).dtype = dtype
            model(torch.zeros((1, 4), dtype=torch.long))
        except Exception as error:  # the architecture may raise anything for values that do not fit together
            raise _does_not_work(architecture, overrides, error) from error
    model.generation_config = GenerationConfig(
        bos_token_id=_ENDOFTEXT, eos_token_id=[_IM_END, _ENDOFTEXT], pad_token_id=_PAD
    )
    # In a process group transformers saves on rank 0 alone, but each call here writes a folder of its own.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    with no_progress_bars():
        model.save_pretrained(folder)
    if takes_audio:
        _correct_names(folder / "model.safetensors")
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or 1024
    byte_tokenizer(model_max_length=length, vision=takes_images, audio=takes_audio).save_pretrained(folder)
    if takes_images or takes_audio:
        files = _PROCESSORS.get(architecture, {"preprocessor_config.json": _PREPROCESSOR})
        for name, fields in files.items():
            (folder / name).write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _correct_names(file: Path) -> None:
    """Give tensors the names that Qwen2-Audio's checkpoint has: transformers 5.19 reverts one renaming twice."""
    tensors = load_file(file)
    wrong = "language_model.model.model."
    if any(name.startswith(wrong) for name in tensors):
        corrected = {name.replace(wrong, "language_model.model."): tensor for name, tensor in tensors.items()}
        save_file(corrected, file, metadata={"format": "pt"})


def _does_not_work(architecture: str, overrides: Mapping[str, ConfigValue], error: Exception) -> InvalidConfig:
    return InvalidConfig(
        f"{architecture} does not work with {dict(overrides)!r}: {type(error).__name__}: {error}; "
        "change these fields, or leave them out"
    )


def _config(architecture: str, overrides: Mapping[str, ConfigValue]) -> PreTrainedConfig:
    default = AutoConfig.for_model(architecture)
    for name in overrides:
        if not hasattr(default, name) and name not in _KNOWN[architecture]:
            known = [key for key in default.to_dict() if not key.startswith("_")]
            close = difflib.get_close_matches(name, known, n=1)
            raise InvalidConfig(
                f"{name}={overrides[name]!r}: {type(default).__name__} has no such field"
                + (f"; did you mean {close[0]!r}?" if close else f"; it has: {', '.join(known)}"),
                field=name,
            )
    vocab_size = overrides.get("vocab_size", VOCAB_SIZE)
    if isinstance(vocab_size, int) and vocab_size < VOCAB_SIZE:
        raise InvalidConfig(
            f"vocab_size={vocab_size} is too small; the byte-level tokenizer needs {VOCAB_SIZE} ids", field="vocab_size"
        )
    # gpt2 calls hidden_size n_embd: map both to one name, or the tiny value and the override would both be present.
    own = default.attribute_map
    values = {own.get(name, name): value for name, value in _KNOWN[architecture].items()}
    for name, value in overrides.items():
        tiny = values.get(own.get(name, name))
        if isinstance(tiny, Mapping) and isinstance(value, Mapping):
            value = {**tiny, **value}
        values[own.get(name, name)] = value
    layers = values.get("num_hidden_layers")
    for name in _PATTERNS:
        pattern = values.get(name)
        if isinstance(pattern, tuple) and isinstance(layers, int) and layers > 0:
            values[name] = list(itertools.islice(itertools.cycle(pattern), layers))
    try:
        return AutoConfig.for_model(architecture, **values)
    except Exception as error:  # transformers' errors have no common base class
        raise _does_not_work(architecture, overrides, error) from error


def _cached(architecture: str, seed: int, overrides: Mapping[str, ConfigValue]) -> Path:
    folder = _cache_root() / f"{architecture}-{_key(architecture, seed, overrides)}"
    if _complete(folder):
        return folder
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        _write(building, architecture, seed, overrides)
        try:
            building.rename(folder)
        except OSError:  # it exists: another process wrote it, or the system's cleaner deleted files not read for days
            # Existing files stay: another process may be reading them, and files of one key have the same content.
            for file in building.iterdir():
                file.replace(folder / file.name)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _key(architecture: str, seed: int, overrides: Mapping[str, ConfigValue]) -> str:
    """Return a digest of everything that the weights depend on, including this code."""
    digest = hashlib.sha256()
    for file in (__file__, inspect.getfile(byte_tokenizer)):
        digest.update(Path(file).read_bytes())
    versions = (transformers.__version__, torch.__version__)
    try:
        arguments = json.dumps([architecture, seed, overrides, *versions], sort_keys=True)
    except TypeError as error:
        raise InvalidConfig(f"{dict(overrides)!r} holds a value that a config.json cannot: {error}") from error
    digest.update(arguments.encode())
    return digest.hexdigest()[:16]


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _cache_root() -> Path:
    root = Path(tempfile.gettempdir()) / f"drivetrain-tiny-models-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InvalidConfig(f"{os.fspath(root)!r} belongs to another user; remove it, set TMPDIR, or give a directory")
    return root
