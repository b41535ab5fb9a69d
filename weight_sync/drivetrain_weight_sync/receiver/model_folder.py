"""Facts about a model from its folder or hub repository, for engines that do not report them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain.checks.extras import from_extra
from drivetrain.types.config import EngineConfig
from drivetrain.types.weights import TensorSpec
from drivetrain_weight_sync.tensors.dtypes import nbytes_of


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model as its files describe it."""

    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    configured_eos: tuple[int, ...]
    """EOS ids of the model's own configuration, which the generation configuration may leave out."""
    dtype: str
    """Dtype of the checkpoint, such as ``"bfloat16"``; ``"auto"`` if the configuration names none."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the tensors, by checkpoint name."""
    fields: Mapping[str, object]
    """Fields of the text part of the model's own configuration."""
    adaptable: Sequence[Mapping[str, tuple[int, ...]]]
    """Shapes of the weights that adapters can change, once for each way to name them."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes.values()))

    def bytes_as(self, dtype: str) -> int:
        """Return the total size of the tensors in this dtype, in bytes."""
        return sum(nbytes_of(TensorSpec(name, dtype, shape)) for name, shape in self.shapes.items())


def read_model_folder(config: EngineConfig) -> ModelFolder:
    """Read the configuration files of the configured model; no weights are read."""
    with from_extra("transformers", f"reading the configuration of {config.model!r}"):
        from transformers import AutoConfig

        from drivetrain_weight_sync.receiver.adaptable_layers import shapes_in_language_model
        from drivetrain_weight_sync.receiver.checkpoint_manifest import checkpoint_of, eos_of_checkpoint

    whole = AutoConfig.from_pretrained(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    text = whole.get_text_config()
    named = getattr(text, "eos_token_id", None)
    own = named if isinstance(named, list) else [named]
    checkpoint = checkpoint_of(config.model, config.revision, trust_remote_code=config.trust_remote_code)
    shapes = {spec.name: spec.shape for spec in checkpoint.tensors}
    return ModelFolder(
        architecture=(whole.architectures or [type(whole).__name__])[0],
        vocab_size=int(text.vocab_size),
        context_length=int(getattr(text, "max_position_embeddings", None) or 2**20),
        eos_token_ids=eos_of_checkpoint(config.model, config.revision, text, whole),
        configured_eos=tuple(one for one in own if one is not None),
        dtype=str(getattr(text, "dtype", None) or "auto").removeprefix("torch."),
        shapes=shapes,
        fields=text.to_dict(),
        adaptable=[shapes] if text is whole else shapes_in_language_model(config),
    )
