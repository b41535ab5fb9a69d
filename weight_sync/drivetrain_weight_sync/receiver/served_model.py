"""The model that an engine is going to serve, as its folder describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from drivetrain.backend.base import ModelInfo
from drivetrain.backend.toolkit.model_folder import require_dense_for_adapters, served_context_length
from drivetrain.backend.toolkit.rope_config import plain_rope
from drivetrain.types.config import EngineConfig
from drivetrain.types.weights import WeightManifest


@dataclass(frozen=True)
class ServedModel:
    """Properties that adapters need to start an engine, and to describe its model afterwards."""

    config: EngineConfig
    model_config: Any
    """The model's configuration, a ``PreTrainedConfig`` of transformers."""
    device: str
    """Device type."""
    own_length: int
    """Longest sequence that the model itself can take, in tokens."""
    context_length: int
    """Maximum number of prompt and output tokens, as configured."""

    @classmethod
    def read(cls, config: EngineConfig, device: str, engine: str) -> ServedModel:
        """Read the configuration of the model and check ``config`` against it. Loads no weights.

        Args:
            config: The engine's configuration.
            device: Device type.
            engine: Name of the engine in errors.

        Raises:
            InvalidConfig: The context is too long for the model, experts are to be spread and it has none, or adapters
                are enabled for a mixture of experts on a CPU.
        """
        from transformers import AutoConfig

        model_config = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        text = model_config.get_text_config()
        own = getattr(text, "max_position_embeddings", None) or 2**20
        fields = text.to_dict()
        if device == "cpu":
            require_dense_for_adapters(config, [fields], engine)
        return cls(config, model_config, device, own, served_context_length(config, fields, own, engine))

    @cached_property
    def text(self) -> Any:
        """Configuration of the language model within ``model_config``, or ``model_config`` itself."""
        return self.model_config.get_text_config()

    @cached_property
    def fields(self) -> Mapping[str, object]:
        """Fields of :attr:`text`."""
        fields: dict[str, object] = self.text.to_dict()
        return fields

    @property
    def dtype(self) -> str:
        """Dtype of the checkpoint, such as ``"bfloat16"``; ``"auto"`` if its configuration names none."""
        return name_of_dtype(getattr(self.text, "dtype", None) or "auto")

    @property
    def overrides(self) -> dict[str, object]:
        """Fields of the model's configuration that the engine must override; see ``plain_rope``."""
        return plain_rope(self.fields, nested=self.text is not self.model_config)

    @cached_property
    def tensors(self) -> WeightManifest:
        """The model's tensors, by checkpoint name."""
        from drivetrain_weight_sync.receiver.checkpoint_manifest import checkpoint_of

        config = self.config
        return checkpoint_of(config.model, config.revision, trust_remote_code=config.trust_remote_code)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's tensors, by checkpoint name."""
        return {spec.name: spec.shape for spec in self.tensors.tensors}

    @cached_property
    def adaptable(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """Shapes of the weights that adapters can change, once for each way to name them."""
        from drivetrain_weight_sync.receiver.adaptable_layers import shapes_in_language_model

        return [self.shapes] if self.text is self.model_config else shapes_in_language_model(self.config)

    def require_weights(self) -> None:
        """Raise :class:`EngineStartError` if the model's folder lacks weights that the engine is going to load."""
        from drivetrain_weight_sync.receiver.checkpoint_comparison import require_complete

        folder = Path(self.config.model)
        if folder.is_dir() and self.config.engine_kwargs.get("load_format") != "dummy":
            require_complete(folder, self.tensors)

    def info(self, *, vocab_size: int, dtype: object, context_length: int) -> ModelInfo:
        """Describe the model, given the vocabulary, dtype and context length that the engine has."""
        from drivetrain_weight_sync.receiver.checkpoint_manifest import eos_of_checkpoint

        config = self.config
        return ModelInfo(
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_ids=eos_of_checkpoint(config.model, config.revision, self.text, self.model_config),
            dtype=name_of_dtype(dtype),
            architecture=(self.model_config.architectures or [type(self.model_config).__name__])[0],
            parameters=sum(map(math.prod, self.shapes.values())),
            device=self.device,
        )


def name_of_dtype(dtype: object) -> str:
    """Return the name of a torch dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
