"""Random adapters that change a tiny model's answers.

``tiny_adapters.py MODEL FOLDER`` saves them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def save_adapters(model: Path, folder: Path) -> Path:
    """Save the adapters ``one`` and ``two`` of a model into folders of these names; return ``folder``."""
    for seed, name in enumerate(("one", "two"), 1):
        torch.manual_seed(seed)
        wrapped = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model),
            LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=64, init_lora_weights=False),
        )
        wrapped.save_pretrained(str(folder / name))
    return folder


if __name__ == "__main__":
    save_adapters(Path(sys.argv[1]), Path(sys.argv[2]))
