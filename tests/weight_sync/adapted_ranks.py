"""Tasks of a sharded trainer's ranks whose policy has adapters of peft."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import torch
from tests.weight_sync.adapted_policies import SETTINGS, adapted, bits, model
from tests.weight_sync.receiver_engines import InlineEngine
from tests.weight_sync.trainer_ranks import local
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from drivetrain import InferenceEngine, SamplingParams, create_engine
from drivetrain.errors import DrivetrainError
from drivetrain.testing import tiny_model
from drivetrain.types.capability import Capability
from drivetrain.types.weights import WeightUpdateRequest
from drivetrain_weight_sync import AdapterTensors, LoraSync, WeightSync
from drivetrain_weight_sync.trainer.pushed_adapter import PeftAdapter

KINDS: Final[dict[str, dict[str, Any]]] = {
    **SETTINGS,
    "tied head": {"tied": True, "target_modules": ["lm_head", "q_proj"]},
    "stacked experts": {"architecture": "qwen3_moe", "target_modules": ["q_proj"]},
}
"""Arguments of :func:`adapted`."""


def sharded(policy: nn.Module, dim: int) -> nn.Module:
    """Shard a policy as a trainer does: layer by layer, the matrices along ``dim``."""

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(dim if parameter.ndim == 2 else 0)

    inner: Any = policy.get_submodule("base_model.model.model")
    for layer in inner.layers:
        # A layer that has adapters may be sharded on its own.
        fully_shard(layer.self_attn.q_proj, shard_placement_fn=placement)
        fully_shard(layer, shard_placement_fn=placement)
    fully_shard(policy, shard_placement_fn=placement)
    return policy


def own_bits(policy: nn.Module) -> dict[str, bytes]:
    """Return the bits of this rank's shards."""
    state = policy.state_dict()
    return {n: (local(t) if hasattr(t, "to_local") else t).numpy().tobytes() for n, t in state.items()}


def push_merged(rank: int, kind: str, strategy: str, dim: int) -> list[str]:
    """Push twice with a step between; return what differs from a push of the whole policy."""
    fields = KINDS[kind]
    architecture = fields.get("architecture", "qwen2")

    def engine() -> tuple[nn.Module, InlineEngine]:
        served = model(architecture)
        made = InlineEngine(served)
        made.config = made.config.model_copy(update={"model": str(tiny_model(architecture))})
        return served, made

    async def wrong() -> list[str]:
        policy, whole = sharded(adapted(**fields), dim), adapted(**fields)
        served, target = engine()
        expected, target_of_whole = engine()
        found: list[str] = []
        last = bits(model(architecture))
        first = last
        async with WeightSync.connect(policy, target if rank == 0 else None, strategy, bucket_bytes=8192) as sync:
            for step in range(2):
                before = own_bits(policy)
                await sync.push(version=f"step-{step}")
                if own_bits(policy) != before:
                    found.append("the policy")
                if rank == 0:
                    last = bits(served)
                    async with WeightSync.connect(whole, target_of_whole) as other:
                        await other.push(version=f"step-{step}")
                    found += [name for name, value in bits(expected).items() if value != last[name]]
                with torch.no_grad():
                    for some in (policy, whole):
                        for name, parameter in some.named_parameters():
                            if "lora_" in name or "tokens_delta" in name:
                                (local(parameter) if some is policy else parameter).mul_(-1.5)
        if rank == 0 and last == first:
            found.append("nothing arrived")
        return found

    return asyncio.run(wrong())


def push_adapter(rank: int, strategy: str, dim: int, as_tensors: bool = False) -> list[object]:
    """Push the adapter alone, twice; return what an engine's adapters held after each, or the results."""

    async def pushes() -> list[object]:
        policy: Any = sharded(adapted(), dim)
        found_in = PeftAdapter(policy, "default")
        given = AdapterTensors(found_in.config, found_in.tensors) if as_tensors else policy
        engine = create_engine("transformers", model=str(tiny_model()), enable_lora=True) if rank == 1 else None
        found: list[object] = []
        if engine is not None:
            await engine.start()
        try:
            async with LoraSync.connect(given, engine, "policy", strategy) as sync:
                for step in range(2):
                    result = await sync.push(version=f"step-{step}")
                    answer = None if engine is None else await answer_of(engine, "policy")
                    found.append((result.version, result.strategy.value, result.tensors, result.nbytes, answer))
                    with torch.no_grad():
                        for name, parameter in policy.named_parameters():
                            if "lora_" in name:
                                local(parameter).mul_(-1.5)
        finally:
            if engine is not None:
                await engine.teardown()
        return found

    return asyncio.run(pushes())


async def answer_of(engine: InferenceEngine, lora: str) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
    (output,) = (await engine.generate([[5, 6, 7]], params, lora=lora)).completions
    return output.token_ids, output.logprobs or []


async def answers_unsharded() -> list[tuple[list[int], list[float]]]:
    """Return the answers of :func:`push_adapter`, pushed by one process that holds the whole policy."""
    policy = adapted()
    found = []
    async with create_engine("transformers", model=str(tiny_model()), enable_lora=True) as engine:
        async with LoraSync.connect(policy, engine, "policy") as sync:
            for step in range(2):
                await sync.push(version=f"step-{step}")
                found.append(await answer_of(engine, "policy"))
                with torch.no_grad():
                    for name, parameter in policy.named_parameters():
                        if "lora_" in name:
                            parameter.mul_(-1.5)
    return found


def push_what_fails(rank: int, how: str) -> list[str]:
    """Push an adapter that is refused, then one that is not; return the error and the version after it."""

    async def pushes() -> list[str]:
        bad: Any = adapted(lora_bias=True, target_modules=["o_proj"]) if how == "cannot be merged" else adapted()
        sharded(bad, 0)
        if how == "disabled on one rank" and rank == 1:
            bad.base_model.disable_adapter_layers()
        unread = rank == 0 and how.startswith("cannot be read on the engine's rank")
        if unread and not how.endswith("adapter alone"):
            bad.base_model.disable_adapter_layers()
        if how.startswith("NaN") and rank == 1:
            with torch.no_grad():
                local(bad.get_parameter(f"{LAYER}.mlp.up_proj.lora_B.default.weight")).fill_(float("nan"))
        served = model()
        engine = AdaptableInlineEngine(served) if rank == 0 else None
        connect: Any = LoraSync.connect if how.endswith("adapter alone") else WeightSync.connect
        before, found = bits(served), []
        async with connect(bad, engine) as sync:
            if unread and how.endswith("adapter alone"):
                bad.delete_adapter("default")
            try:
                await sync.push(version="bad")
            except DrivetrainError as error:
                found.append(f"{type(error).__name__}: {error}")
        assert bits(served) == before
        async with connect(sharded(adapted(), 0), engine) as sync:
            found.append((await sync.push(version="good")).version)
        return found

    return asyncio.run(pushes())


LAYER = "base_model.model.model.layers.0"


class AdaptableInlineEngine(InlineEngine):
    """An engine that takes any adapter."""

    capabilities = InlineEngine.capabilities | {Capability.WEIGHTS_LORA, Capability.WEIGHTS_LORA_TENSORS}

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        """Record the request."""
        self.requests.append(request)
