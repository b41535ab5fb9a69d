# pyright: reportMissingImports=false
"""Have vLLM load adapters from memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain_vllm.in_engine.adapters_again import LoadsAgain
from drivetrain_weight_sync.receiver.rank_weights import HeldAdapter


def load_held(manager: Any, adapters: Mapping[str, HeldAdapter]) -> None:
    """Have a worker's ``WorkerLoRAManager`` load adapters of these paths from memory, and others from their folders."""
    if "_load_adapter" in vars(manager):
        return
    from_folder, again = manager._load_adapter, LoadsAgain(manager._adapter_manager)

    def load(request: Any) -> Any:
        held = adapters.get(request.lora_path)
        if held is None:
            return from_folder(request)
        if held.loaded is None:
            held.loaded = again.filled(held, request.lora_int_id) or again.noted(held, _loaded(manager, request, held))
        return held.loaded

    manager._load_adapter = load


def _loaded(manager: Any, request: Any, held: HeldAdapter) -> Any:
    """Return vLLM's ``LoRAModel``, as ``WorkerLoRAManager._load_adapter`` makes it of a folder."""
    from vllm.lora.peft_helper import PEFTHelper

    config = manager.lora_config
    helper = PEFTHelper.from_dict({**held.config, "vllm_max_position_embeddings": manager.max_position_embeddings})
    helper.validate_legal(config)
    model = manager._adapter_manager.model
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    for name in ("get_rename_mapper", "get_unstacked_mapper"):  # the latter until 0.26
        if hasattr(mapper, name):
            mapper = getattr(mapper, name)()
            break
    build = manager._lora_model_cls.from_lora_tensors
    optional = {
        "model_vocab_size": manager.vocab_size,
        "weights_mapper": mapper,
        "skip_prefixes": getattr(model, "lora_skip_prefixes", None),
    }
    known = inspect.signature(build).parameters
    made = build(
        lora_model_id=request.lora_int_id,
        tensors=held.tensors,
        peft_helper=helper,
        device=str(next(iter(held.tensors.values())).device),
        dtype=config.lora_dtype,
        **{name: value for name, value in optional.items() if name in known},
    )
    require_layers(manager._adapter_manager, made.loras)
    if hasattr(request, "is_3d_lora_weight"):
        made.is_3d_lora_weight = request.is_3d_lora_weight
    return made


def require_layers(adapters: Any, layers: Iterable[str]) -> None:
    """Raise for layers that vLLM does not adapt. It refuses them in a folder's files, but skips them in memory.

    Args:
        adapters: The ``LoRAModelManager``.
        layers: Names of the adapter's layers in vLLM's model.
    """
    packed = adapters.packed_modules_mapping
    known = {part for layer in adapters.supported_lora_modules for part in (layer, *packed.get(layer, ()))}
    # A name with "base_layer" belongs to stacked experts, of which vLLM itself checks the form.
    strange = sorted(layer for layer in layers if "base_layer" not in layer and _own_name(layer) not in known)
    if strange:
        raise ValueError(
            f"the adapter changes {', '.join(strange[:4])}, but vLLM adapts only {', '.join(sorted(known))} in this "
            "model; train without those layers"
        )


def _own_name(layer: str) -> str:
    """Return the part of a layer's name that vLLM uses, such as ``q_proj`` or ``experts.0.up_proj``."""
    _, is_of_experts, part = layer.partition(".experts")
    return f"experts{part}" if is_of_experts else layer.rpartition(".")[2]
