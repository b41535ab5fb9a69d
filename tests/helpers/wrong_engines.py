"""A plugin of transformers backends that compute, load or update a model wrongly, each in one way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drivetrain import Capability, EngineConfig, GenerateRequest, GenerateResult, ModelInfo, hookimpl
from drivetrain.backend.base import Backend
from drivetrain.errors import EngineStartError
from drivetrain.types.weights import BeginUpdate, CommitUpdate, WeightMessage, WeightReply
from drivetrain_transformers.engine import TransformersBackend

WRONG_LAYER = 4
"""Index of the layer that is wrong."""
DROPPED = f"model.layers.{WRONG_LAYER}.mlp.down_proj.weight"
"""Checkpoint name of the tensor that an update leaves as it was."""


class Spoiled(TransformersBackend):
    """Base class: spoils the module once it is loaded."""

    def spoil(self, module: nn.Module) -> None:
        """Change the loaded module."""

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        info = await super().start(report)
        self.spoil(self.module)
        return info

    @property
    def module(self) -> nn.Module:
        """The module that the engine runs."""
        return self.runner.model.module

    @property
    def layer(self) -> Any:
        """The layer that is wrong."""
        layers: Any = self.module.get_submodule("model.layers")
        return layers[WRONG_LAYER]


class WrongActivation(Spoiled):
    """One layer's MLP computes another activation than the model's."""

    name = "wrong-activation"

    def spoil(self, module: nn.Module) -> None:
        self.layer.mlp.act_fn = nn.GELU()


class SlightlyWrongActivation(Spoiled):
    """One layer's MLP is a little too large."""

    name = "slightly-wrong-activation"

    def spoil(self, module: nn.Module) -> None:
        self.layer.mlp.register_forward_hook(lambda _, inputs, output: output * 1.08)


class NoRope(Spoiled):
    """One layer's attention does not rotate keys and queries by their positions."""

    name = "no-rope"

    def spoil(self, module: nn.Module) -> None:
        def without_positions(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            cos, sin = kwargs["position_embeddings"]
            return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

        self.layer.self_attn.register_forward_pre_hook(without_positions, with_kwargs=True)


class IgnoresWindows(Spoiled):
    """Attention sees all tokens where the model has sliding windows."""

    name = "ignores-windows"

    def spoil(self, module: nn.Module) -> None:
        config: Any = module.config
        config.sliding_window = None
        parts: list[Any] = list(module.modules())
        for part in parts:
            if hasattr(part, "sliding_window"):
                part.sliding_window = None


class _GivesHiddenStates(Spoiled):
    """Base class: computes hidden states of greedy requests in a pass of their own."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return super().capabilities(config) | {Capability.HIDDEN_STATES}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        wanted = request.params.return_hidden_states
        params = request.params.model_copy(update={"return_hidden_states": False})
        result = await super().generate(dataclasses.replace(request, params=params))
        if not wanted:
            return result
        ids = torch.tensor([[*request.prompt_token_ids, *result.token_ids]])
        with torch.no_grad():
            states = self.module.get_submodule("model")(input_ids=ids, use_cache=False)[0][0]
        start = len(request.prompt_token_ids) - 1
        return dataclasses.replace(result, hidden_states=states[start:-1].tolist())


class WrongHead(_GivesHiddenStates):
    """The head scales its logits."""

    name = "wrong-head"

    def spoil(self, module: nn.Module) -> None:
        head: Any = module.get_submodule("lm_head")
        head.register_forward_hook(lambda _, inputs, logits: logits * 1.01)


class WrongHeadWithoutUpdates(WrongHead):
    """The same, with an engine that takes no weights."""

    name = "wrong-head-without-updates"

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        claimed = super().capabilities(config)
        return frozenset(one for one in claimed if not one.value.startswith(("weight", "sleep")))


class WrongNorm(_GivesHiddenStates):
    """The final norm divides by a smaller number."""

    name = "wrong-norm"

    def spoil(self, module: nn.Module) -> None:
        norm: Any = module.get_submodule("model.norm")
        norm.register_forward_hook(lambda _, inputs, states: states * 1.01)


class WrongLoading(Spoiled):
    """One tensor is loaded with other values than the checkpoint's."""

    name = "wrong-loading"

    def spoil(self, module: nn.Module) -> None:
        with torch.no_grad():
            self.layer.mlp.down_proj.weight.mul_(1.5)


class DropsATensor(Spoiled):
    """An update leaves one tensor as it was, and reports success."""

    name = "drops-a-tensor"
    _kept: torch.Tensor | None = None

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        weight = self.layer.mlp.down_proj.weight
        if isinstance(message, BeginUpdate):
            self._kept = weight.detach().clone()
        reply = await super().receive_weights(message)
        if isinstance(message, CommitUpdate) and self._kept is not None:
            with torch.no_grad():
                weight.copy_(self._kept)
        return reply


class KeepsStaleCache(Spoiled):
    """An update keeps the prefix cache that older weights made."""

    name = "keeps-a-stale-cache"
    _updating = False

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        self._updating = True
        return await super().receive_weights(message)

    async def reset_prefix_cache(self) -> None:
        if not self._updating:
            await super().reset_prefix_cache()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._updating = False
        return await super().generate(request)


class ClaimsACache(Spoiled):
    """Nothing is ever served from the prefix cache that is claimed."""

    name = "claims-a-cache"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await self.reset_prefix_cache()
        return await super().generate(request)


class DoesNotStart(Spoiled):
    """The engine fails while it starts."""

    name = "does-not-start"

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        raise EngineStartError("the engine ran into a wall")


WRONG: list[type[Backend]] = [
    WrongActivation,
    SlightlyWrongActivation,
    NoRope,
    IgnoresWindows,
    WrongHead,
    WrongHeadWithoutUpdates,
    WrongNorm,
    WrongLoading,
    DropsATensor,
    KeepsStaleCache,
    ClaimsACache,
    DoesNotStart,
]


@hookimpl
def drivetrain_backends() -> list[type[Backend]]:
    return WRONG
