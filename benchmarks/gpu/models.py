"""Models of real sizes, of which there is a configuration only: engines make the weights (``load_format: dummy``)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

from drivetrain.testing import tiny_model

SIZES: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "7b": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "1.8b": (
        "qwen2",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
    ),
    "0.5b": (
        "qwen2",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
        },
    ),
    "tiny": ("qwen2", {"hidden_size": 128, "num_hidden_layers": 4}),
    "moe": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
}


def model_folder(size: str) -> Path:
    """A folder with the configuration of a model of that size and no weights: the engine makes its own."""
    architecture, fields = SIZES[size]
    folder = Path(tempfile.mkdtemp(prefix="benchmark-")) / size
    tiny_model(architecture, directory=folder, dtype="bfloat16", max_position_embeddings=4096)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][0]] * fields["num_hidden_layers"]
    file.write_text(json.dumps(config))
    return folder
