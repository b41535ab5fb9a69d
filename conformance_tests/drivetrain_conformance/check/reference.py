"""The reference of a check: a plain transformers forward pass, whose weights can be changed and zeroed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.checks.extras import from_extra
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig
from drivetrain_conformance.references.oracle import load_reference

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    _Kept = list[tuple[torch.Tensor, torch.Tensor]]

USER: Final = "drivetrain check"
_ROWS: Final = 128
"""Positions whose logprobs are computed at once, since a row is as long as the vocabulary."""
_SHARE: Final = 0.1
"""Root mean square of the noise added to weights, as a share of the root mean square of the tensor."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of a sequence in nats, each of shape (tokens - 1,)."""

    own: NDArray[np.float64]
    """Logprob of each token but the first."""
    best: NDArray[np.float64]
    """Logprob of the most likely token at the same position."""


def require_transformers() -> None:
    """Raise :class:`~drivetrain.errors.MissingDependency` unless torch and transformers can be imported."""
    with from_extra("transformers", USER):
        import transformers  # noqa: F401

        import drivetrain_weight_sync  # noqa: F401


class Reference:
    """The checkpoint in transformers: weights as stored, arithmetic in float32, one sequence at a time, no cache.

    Only the layer that is running is converted to float32, so the memory is that of the checkpoint and one layer.

    Args:
        config: The engine's configuration; it names the model.
        device: The torch device to compute on.

    Raises:
        InvalidConfig: transformers cannot load the model.
    """

    def __init__(self, config: EngineConfig, device: str) -> None:
        self._config = config
        self.device = device
        self._arithmetic = "float32"
        self.module: PreTrainedModel = self._loaded()

    def restore(self) -> None:
        """Read the checkpoint again: in place of perturbed weights."""
        del self.module  # before the new one takes memory
        self.module = self._loaded()

    def _loaded(self) -> PreTrainedModel:
        import torch

        config = self._config
        options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        try:
            module = load_reference(config.model, dtype="auto", **options)
            module.to(torch.device(self.device))  # type: ignore[arg-type]  # transformers wraps `to` without its `self`
        except Exception as error:  # transformers' errors have no common base class
            raise InvalidConfig(
                f"transformers cannot load {config.model!r} on {self.device!r} as the reference: "
                f"{type(error).__name__}: {error}",
                field="model",
            ) from error
        self._convert_while_running(module)
        return module

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def dtype(self) -> str:
        """Dtype of the checkpoint."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def layers(self) -> list[nn.Module]:
        """Decoder layers of the language model, first to last; empty if they cannot be told."""
        from torch import nn

        count = self.module.config.get_text_config(decoder=True).num_hidden_layers
        decoder: nn.Module = self.module.get_decoder() or self.module
        lists = [part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
        return list(lists[0]) if lists else []

    @property
    def sliding_window(self) -> int | None:
        """Width of the model's sliding windows in tokens; None if it has none."""
        window = getattr(self.module.config.get_text_config(decoder=True), "sliding_window", None)
        return window if isinstance(window, int) and window > 0 else None

    def score(self, token_ids: Sequence[int], arithmetic: str = "float32") -> Scores:
        """Return the logprobs of a sequence of at least two tokens, computed in float32 or another dtype."""
        import torch

        with torch.no_grad(), self._computing_in(arithmetic):
            tokens = torch.tensor([list(token_ids)], device=self.device)
            logits = self.module(input_ids=tokens, use_cache=False).logits[0, :-1]
            own, best = [], []
            for rows, following in zip(torch.split(logits, _ROWS), torch.split(tokens[0, 1:], _ROWS), strict=True):
                logprobs = rows.double().log_softmax(-1)
                own.append(logprobs.gather(1, following[:, None])[:, 0])
                best.append(logprobs.amax(-1))
            return Scores(torch.cat(own).cpu().numpy(), torch.cat(best).cpu().numpy())

    def hidden_states(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the input of the language model's head, shape (tokens, hidden size)."""
        import torch

        with torch.no_grad():
            tokens = torch.tensor([list(token_ids)], device=self.device)
            states = self.module.base_model(input_ids=tokens, use_cache=False)[0][0]
            return np.asarray(states.double().cpu().numpy())

    def perturb(self, seed: int = 1) -> int:
        """Change every value of every floating-point tensor that a push brings; return the number of tensors."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        tensors = {id(tensor): tensor for tensor in self.module.state_dict(keep_vars=True).values()}
        changed = [tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.numel()]
        with torch.no_grad():
            for tensor in changed:
                size = tensor.float().square().mean().sqrt()
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
                tensor.copy_(tensor.float() + noise * _SHARE * torch.where(size > 0, size, torch.ones_like(size)))
        return len(changed)

    @contextmanager
    def zeroed(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Set all parameters of these modules to zero during the block; no copy of them is made.

        A residual layer without weights adds nothing to its input.
        """
        import torch

        own = {id(tensor): tensor for part in parts for tensor in part.parameters()}.values()
        kept: _Kept = [(tensor, tensor.data) for tensor in own]
        sizes: dict[torch.dtype, int] = {}
        for tensor in own:
            sizes[tensor.dtype] = max(sizes.get(tensor.dtype, 0), tensor.numel())
        # All share the memory of one tensor of zeros.
        zeros = {dtype: torch.zeros(size, dtype=dtype, device=self.device) for dtype, size in sizes.items()}
        try:
            for tensor in own:
                tensor.data = zeros[tensor.dtype][: tensor.numel()].view(tensor.shape)
            yield
        finally:
            _put_back(kept)

    @contextmanager
    def _computing_in(self, arithmetic: str) -> Iterator[None]:
        self._arithmetic = arithmetic
        try:
            yield
        finally:
            self._arithmetic = "float32"

    def _convert_while_running(self, module: nn.Module) -> None:
        """Convert each layer's parameters while it runs; to float32, the conversion loses nothing."""
        from torch import nn

        named = dict(module.named_modules())
        elements = {
            f"{name}.{index}"
            for name, part in named.items()
            if isinstance(part, nn.ModuleList)
            for index in range(len(part))
        }
        layers = {name for name in elements if elements.isdisjoint(_above(name))}
        around = {above for name in layers for above in _above(name)}
        for name, part in named.items():
            if name in around:  # runs as long as all of its layers do
                for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                    tensor.data = self._converted(tensor)
            elif name in layers or layers.isdisjoint(_above(name)):
                self._convert_part(part, recurse=name in layers)

    def _convert_part(self, part: nn.Module, *, recurse: bool) -> None:
        kept: _Kept = []

        def convert(_: nn.Module, __: object) -> None:
            for tensor in (*part.parameters(recurse), *part.buffers(recurse)):
                kept.append((tensor, tensor.data))
                tensor.data = self._converted(tensor)

        def put_back(*_: object) -> None:
            _put_back(kept)
            kept.clear()

        part.register_forward_pre_hook(convert)
        part.register_forward_hook(put_back, always_call=True)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter or buffer in the dtype of the arithmetic; buffers in float32 stay."""
        import torch

        narrow = tensor.dtype in (torch.bfloat16, torch.float16)
        if narrow or (tensor.dtype == torch.float32 and isinstance(tensor, torch.nn.Parameter)):
            return tensor.data.to(getattr(torch, self._arithmetic))
        return tensor.data


def device_for(nbytes: int) -> str:
    """Return the GPU with the most free memory if a model of ``nbytes`` fits there with room to compute; else "cpu"."""
    import torch

    free = {f"cuda:{index}": torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())}
    best = max(free, key=lambda name: free[name], default="cpu")
    return best if free.get(best, 0) > 1.2 * nbytes + (2 << 30) else "cpu"


def _above(name: str) -> list[str]:
    """Return the names of the modules that hold the module of this name."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts))]


def _put_back(kept: _Kept) -> None:
    for tensor, data in kept:
        tensor.data = data
