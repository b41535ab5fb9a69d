"""LoRA adapters, looked at before an engine is given them: engines take what does not fit, and serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from drivetrain.errors import InvalidRequest

_PREFIX: Final = "base_model.model."


def check_adapter(path: str, largest_rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a peft folder holds a plain LoRA adapter of this model.

    Args:
        path: The folder.
        largest_rank: What the engine has room for.
        shapes: Of the model's tensors, by checkpoint name.

    Raises:
        InvalidRequest: it does not; nothing was loaded.
    """
    try:
        config = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
        rank, kind = int(config["r"]), config.get("peft_type")
        with safe_open(Path(path) / "adapter_model.safetensors", framework="np") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise _wrong(path, f"cannot be read as a peft folder: {type(error).__name__}: {error}") from error
    if kind != "LORA" or config.get("use_dora"):
        raise _wrong(path, "holds something else than plain LoRA, which alone can be chosen per request")
    if rank > largest_rank:
        raise _wrong(path, f"has rank {rank}, more than max_lora_rank={largest_rank}")
    for name, shape in found.items():
        module, _, part = name.removeprefix(_PREFIX).rpartition(".lora_")
        own = shapes.get(f"{module}.weight")
        if own is None:
            raise _wrong(path, f"has {name}, for which the model has no place")
        # A maps the layer's inputs to the rank, B the rank to its outputs.
        side, at = (shape[-1], -1) if part.startswith(("A", "embedding_B")) else (shape[0], 0)
        if side != own[at]:
            raise _wrong(path, f"does not fit the model: {name} is {list(shape)}, the layer's weight {list(own)}")


def _wrong(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"lora_path={path!r} {what}", field="lora_path")
