"""The models that the suite serves, and copies of them with other weights. Nothing is downloaded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from drivetrain.testing import tiny_model


class ModelKind(Enum):
    """The kind of model that a case's engine serves."""

    TEXT = "text"
    """The model given to the suite, or a tiny one."""
    LARGE = "large"
    """A model of about 200 MB, large enough to show in the memory of a process."""
    MOE = "moe"
    """A mixture of experts. Its cases need :attr:`~drivetrain.types.capability.Capability.MOE`."""
    VISION = "vision"
    """A model that takes images."""
    AUDIO = "audio"
    """A model that takes sounds."""
    REWARD = "reward"
    """A sequence classifier with one output."""


_TINY: Final[Mapping[ModelKind, tuple[str, Mapping[str, Any]]]] = {
    ModelKind.TEXT: ("qwen2", {}),
    ModelKind.MOE: ("qwen3_moe", {}),
    ModelKind.LARGE: (
        "qwen2",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "initializer_range": 0.05,
        },
    ),
    ModelKind.VISION: ("qwen2_5_vl", {}),
    ModelKind.AUDIO: ("qwen2_audio", {}),
}
"""Architectures of the tiny models, and what differs from :func:`tiny_model`'s own sizes."""


class Models:
    """Provides the model folders of one run; :meth:`close` removes those that it wrote.

    Args:
        text: The text model; None: a tiny one.
        moe: The mixture of experts; None: a tiny one.
        vision: The model that takes images; None: a tiny one.
        dtype: Dtype of the tiny models' weights.
        layers: Layers of the tiny text model; None: its default.
    """

    def __init__(
        self,
        text: Path | None = None,
        moe: Path | None = None,
        vision: Path | None = None,
        dtype: str = "float32",
        layers: int | None = None,
    ) -> None:
        given = {ModelKind.TEXT: text, ModelKind.MOE: moe, ModelKind.VISION: vision}
        self._given = {kind: folder for kind, folder in given.items() if folder is not None}
        self._paths = dict(self._given)
        self.dtype = dtype
        """Dtype of the tiny models' weights."""
        self._layers = {} if layers is None else {"num_hidden_layers": layers}
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-conformance-"))
        self._others: dict[tuple[Path, int], Path] = {}

    def path(self, kind: ModelKind) -> Path:
        """Return the folder of the model of this kind."""
        if kind not in self._paths:
            self._paths[kind] = self._reward_model() if kind is ModelKind.REWARD else self._tiny(kind)
        return self._paths[kind]

    def _tiny(self, kind: ModelKind) -> Path:
        architecture, sizes = _TINY[kind]
        return tiny_model(architecture, dtype=self.dtype, **(self._layers if kind is ModelKind.TEXT else sizes))

    def _reward_model(self) -> Path:
        """Write a tiny Qwen2 with a score of one output instead of a language model's head."""
        import torch
        from transformers import AutoConfig, Qwen2ForSequenceClassification

        text, folder = tiny_model("qwen2", dtype=self.dtype), self._folder / "reward"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(text, num_labels=1)
            Qwen2ForSequenceClassification(config).to(getattr(torch, self.dtype)).save_pretrained(folder)
        for file in text.glob("tokenizer*"):
            shutil.copy(file, folder)
        return folder

    def is_given(self, kind: ModelKind) -> bool:
        """Return True if the model of this kind is the caller's, not a tiny one of random weights."""
        return kind in self._given

    def with_other_weights(self, model: Path, seed: int = 1) -> Path:
        """Return a copy of ``model`` with every weight changed; the same folder for the same arguments."""
        if (model, seed) not in self._others:
            folder = self._folder / f"{model.name}-{seed}"
            _copy_with_other_weights(model, folder, seed)
            self._others[model, seed] = folder
        return self._others[model, seed]

    def folder(self, name: str) -> Path:
        """Make an empty folder for a case's files."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))

    def close(self) -> None:
        """Remove the folders that were written."""
        shutil.rmtree(self._folder, ignore_errors=True)


def copy_model(model: Path, folder: Path, *, without: str) -> None:
    """Copy a model's files, except those whose names match ``without``, into a writable folder."""
    ignore = shutil.ignore_patterns(without)
    shutil.copytree(model, folder, ignore=ignore, copy_function=shutil.copyfile, dirs_exist_ok=True)
    folder.chmod(0o755)


def _copy_with_other_weights(model: Path, folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    copy_model(model, folder, without="*.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel() > 0:
                noise = torch.randn(tensor.shape, generator=generator)
                spread = tensor.float().std() if tensor.numel() > 1 else tensor.float().abs().mean()
                tensors[name] = (tensor.float() + noise * spread * 0.5).to(tensor.dtype)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
