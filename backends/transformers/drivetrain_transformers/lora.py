"""LoRA adapters: loaded into the model by peft, and chosen row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from drivetrain.errors import InvalidRequest

NO_ADAPTER = "__base__"
"""peft's own name for a row that uses none."""


class Adapters:
    """The adapters of one model. Rows of a batch may use different ones, or none.

    Args:
        module: The model.
        largest_rank: Largest rank of an adapter; None: no limit.
    """

    def __init__(self, module: PreTrainedModel, *, largest_rank: int | None) -> None:
        self._module = module
        self._largest_rank = largest_rank
        self._loaded: dict[str, int] = {}
        self._loads = 0
        self._rows: list[str] = []
        self._hooked: set[nn.Module] = set()

    def load(self, name: str, path: str) -> None:
        """Load an adapter from a peft folder.

        Raises:
            InvalidRequest: the name is taken, its rank is too large, or the folder holds no LoRA adapter of this model.
        """
        from peft import LoraConfig, PeftConfig, inject_adapter_in_model, load_peft_weights, set_peft_model_state_dict

        if name in self._loaded:
            raise InvalidRequest(f"lora_name={name!r} is loaded already; unload it first", field="lora_name")
        if not (Path(path) / "adapter_config.json").is_file():
            raise InvalidRequest(
                f"lora_path={path!r} holds no adapter_config.json; give a peft folder", field="lora_path"
            )
        try:
            config = PeftConfig.from_pretrained(path)
            weights = load_peft_weights(path, device=str(self._module.device))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"lora_path={path!r} cannot be read: {error}", field="lora_path") from error
        if not isinstance(config, LoraConfig) or config.use_dora:
            kind = type(config).__name__ + (" with DoRA" if isinstance(config, LoraConfig) else "")
            raise InvalidRequest(
                f"lora_path={path!r} holds a {kind}; only plain LoRA can be chosen per request",
                field="lora_path",
            )
        if self._largest_rank is not None and config.r > self._largest_rank:
            raise InvalidRequest(
                f"the adapter's rank {config.r} is more than max_lora_rank={self._largest_rank}", field="lora_path"
            )
        config.inference_mode = True
        try:
            inject_adapter_in_model(config, self._module, adapter_name=name)
            outcome = set_peft_model_state_dict(self._module, weights, adapter_name=name)
        except (ValueError, RuntimeError, KeyError) as error:
            self._remove(name)
            raise InvalidRequest(f"lora_path={path!r} does not fit the model: {error}", field="lora_path") from error
        # peft annotates what it returns with the function namedtuple.
        unexpected: list[str] = outcome.unexpected_keys  # type: ignore[attr-defined]
        if unexpected:
            self._remove(name)
            raise InvalidRequest(
                f"lora_path={path!r} has tensors that the model has no place for: {', '.join(unexpected[:4])}",
                field="lora_path",
            )
        self._module.requires_grad_(False)
        self._module.eval()
        self._loads += 1
        self._loaded[name] = self._loads
        self._hook_layers()

    def unload(self, name: str) -> None:
        """Take an adapter out of the model."""
        if name not in self._loaded:
            loaded = ", ".join(self._loaded) or "none"
            raise InvalidRequest(f"lora_name={name!r} is not loaded; loaded: {loaded}", field="lora_name")
        self._remove(name)
        del self._loaded[name]

    def identity(self, name: str | None) -> int:
        """A number that differs for each adapter ever loaded; 0 for none. What caches made with it are known by."""
        return 0 if name is None else self._loaded[name]

    @contextmanager
    def using(self, names: list[str | None]) -> Iterator[None]:
        """Let row ``i`` of what runs within use the adapter ``names[i]``."""
        self._rows = [name or NO_ADAPTER for name in names]
        yield

    def _hook_layers(self) -> None:
        from peft.tuners.lora import LoraLayer

        def choose(layer: object, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
            return args, {**kwargs, "adapter_names": self._rows}

        for layer in self._module.modules():
            if isinstance(layer, LoraLayer) and layer not in self._hooked:
                layer.register_forward_pre_hook(choose, with_kwargs=True)
                self._hooked.add(layer)

    def _remove(self, name: str) -> None:
        from peft.tuners.lora import LoraLayer

        for layer in self._module.modules():
            if isinstance(layer, LoraLayer):
                layer.delete_adapter(name)
        if hasattr(self._module, "peft_config"):
            self._module.peft_config.pop(name, None)
