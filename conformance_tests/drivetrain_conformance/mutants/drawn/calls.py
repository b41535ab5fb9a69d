"""Effects on other calls: one that does nothing, forgives an error, leaks, or leaves a tensor as it was."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from drivetrain.backend.base import ModelInfo
from drivetrain.errors import DrivetrainError
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import (
    BeginUpdate,
    CommitUpdate,
    DiskSource,
    LoadBuckets,
    PrepareUpdate,
    VerifyUpdate,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.weight_sources import write_checkpoint
from drivetrain_conformance.mutants.drawn.mutant import (
    Effect,
    OnCall,
    OnConfig,
    Scene,
)
from drivetrain_conformance.mutants.drawn.numbers import log_count

_CONTROL: Final = (
    *("abort", "freeze", "unfreeze", "sleep", "wake_up", "reset_prefix_cache", "set_weight_version"),
    *("load_lora_adapter", "load_lora_tensors", "unload_lora_adapter"),
)
_NEED_REQUESTS: Final = frozenset({"abort", "freeze", "unfreeze"})


def of_a_call(rng: random.Random) -> tuple[str, Effect]:
    """Draw a call that does nothing, or something else than asked."""
    method = rng.choice(_CONTROL)

    async def misses(backend: Any, proceed: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        return None

    async def forgives(backend: Any, proceed: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
        try:
            return await proceed(*arguments)
        except DrivetrainError:
            return None

    def with_arguments(change: Callable[[Any], Any]) -> Callable[..., Awaitable[Any]]:
        async def acts(backend: Any, proceed: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
            return await proceed(change(arguments[0]), *arguments[1:])

        return acts

    def matters(arguments: tuple[Any, ...], scene: Scene, error: Exception | None) -> bool:
        return error is None and (method not in _NEED_REQUESTS or bool(scene.beside))

    if method.startswith("load") and rng.random() < 0.5:
        return f"{method} forgives an error", OnCall((method,), forgives, lambda _, scene, error: error is not None)
    if method == "freeze" and rng.random() < 0.7:
        other = {PauseMode.IN_PLACE: PauseMode.RETRACT, PauseMode.RETRACT: PauseMode.IN_PLACE}
        one = rng.choice([*other])
        swap = with_arguments(lambda mode: other[mode] if mode is one else mode)
        shows = lambda arguments, scene, error: bool(scene.beside) and arguments[0] is one  # noqa: E731
        return f"freeze takes {one.value} for {other[one].value}", OnCall((method,), swap, shows)
    if method == "abort" and rng.random() < 0.5:
        limit = rng.choice((1, 2, 4, 8, 16))
        some = lambda arguments, scene, error: len({o.request_id for o in scene.beside} & {*arguments[0]}) > limit  # noqa: E731
        return f"abort ends {limit} at most", OnCall((method,), with_arguments(lambda ids: ids[:limit]), some)
    if method == "sleep" and rng.random() < 0.5:
        less = with_arguments(lambda tags: frozenset(sorted(tags, key=str)[:1]))
        return "sleep frees the first tag only", OnCall((method,), less, lambda a, scene, error: len(a[0]) > 1)
    return f"{method} does nothing", OnCall((method,), misses, matters)


_LEAKY: Final = (
    *("generate", "stream", "abort", "freeze", "sleep", "wake_up", "reset_prefix_cache", "receive_weights", "embed"),
    *("reward_score", "load_lora_adapter", "unload_lora_adapter", "load_lora_tensors", "read_weight", "save_sharded"),
)


def of_a_leak(rng: random.Random) -> tuple[str, Effect]:
    """Draw a resource that each call leaks."""
    method, kind = rng.choice(_LEAKY), rng.choice(("memory", "memory", "a thread", "a descriptor", "a task", "a timer"))
    size = log_count(rng, 16_384, 1 << 20)
    kept: list[object] = []

    async def act(backend: Any, proceed: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
        match kind:
            case "memory":
                kept.append(bytearray(b"x" * size))
            case "a thread":
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            case "a descriptor":
                kept.append(os.open(os.devnull, os.O_RDONLY))
            case "a task":
                kept.append(asyncio.ensure_future(asyncio.Event().wait()))
            case _:
                asyncio.get_running_loop().call_later(1e6, kept.append, None)
        return await proceed(*arguments)

    what = f"{size} bytes" if kind == "memory" else kind
    return f"each {method} leaves {what} behind", OnCall((method,), act, lambda *_: True, least=3)


_TENSORS: Final = (
    *("norm", "embed_tokens", "lm_head", "bias", "experts", ".gate.", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "layers.0.", "layers.1."),
)


def of_a_tensor(rng: random.Random) -> tuple[str, Effect]:
    """Draw a tensor that an update, or a sleep that keeps weights, leaves as it was before, or changes a little."""
    part, share = rng.choice(_TENSORS), rng.choice((1.0, 1.0, 0.5))

    def has_it(scene: Scene) -> bool:
        return any(part in name for name in scene.kept["names"])

    async def put_back(backend: Any, version: str) -> None:
        now, before = await _tensors(backend), backend.kept.get("tensors", {})
        for name in now:
            if part in name and name in before:
                rows = max(1, round(len(now[name]) * share))
                now[name][:rows] = before[name][:rows]
        await _write(backend, now, version)

    async def update(backend: Any, proceed: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
        if isinstance(arguments[0], BeginUpdate):
            backend.kept["tensors"] = await _tensors(backend)
        made = await proceed(*arguments)
        if isinstance(arguments[0], CommitUpdate):
            await put_back(backend, arguments[0].version)
        return made

    async def wake(backend: Any, proceed: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
        made = await proceed(*arguments)
        if isinstance(made, ModelInfo):
            backend.kept["tensors"] = await _tensors(backend)
        elif MemoryTag.WEIGHTS in arguments[0] and backend.config.sleep_keeps_weights:
            await put_back(backend, backend.committed)
        return made

    def shows_awake(arguments: tuple[Any, ...], scene: Scene, error: Exception | None) -> bool:
        keeps = scene.config.sleep_keeps_weights and scene.method == "wake_up"
        return has_it(scene) and keeps and MemoryTag.WEIGHTS in arguments[0] and "update" in scene.past

    def shows(arguments: tuple[Any, ...], scene: Scene, error: Exception | None) -> bool:
        return has_it(scene) and error is None and isinstance(arguments[0], CommitUpdate)

    how = "" if share == 1.0 else f"the first {share:g} of "
    if rng.random() < 0.25:
        woken = OnCall(("start", "wake_up"), wake, shows_awake, needs=Capability.SLEEP_KEEPS_WEIGHTS)
        return f"{how}{part!r} wakes as it was at the start", woken
    return f"{how}{part!r} is not updated", OnCall(("receive_weights",), update, shows)


async def _tensors(backend: Any) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in (await backend.weight_manifest()).tensors]
    read = [await backend.read_weight(name) for name in names]
    return {
        one.spec.name: torch.frombuffer(bytearray(one.data), dtype=getattr(torch, one.spec.dtype)).reshape(
            one.spec.shape
        )
        for one in read
    }


async def _write(backend: Any, tensors: Mapping[str, torch.Tensor], version: str) -> None:
    """Update the weights of a backend by its own means, below those that are watched."""
    send = backend.unwatched("receive_weights")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), Path(backend.config.model), dict(tensors))
        request = WeightUpdateRequest(version=version, source=DiskSource(path=folder))
        prepared: WeightReply = await send(PrepareUpdate(request))
        await send(BeginUpdate())
        await send(LoadBuckets(tuple(range(prepared.buckets))))
        await send(VerifyUpdate())
        await send(CommitUpdate(version))


_CONFIGURED: Final[Mapping[str, Capability | None]] = {
    "context_length": None,
    "max_num_seqs": None,
    "weight_version": None,
    "deterministic": Capability.DETERMINISTIC,
    "sleep_keeps_weights": Capability.SLEEP_KEEPS_WEIGHTS,
    "enable_prefix_caching": Capability.PREFIX_CACHE,
    "max_lora_rank": Capability.LORA,
    "max_loras": Capability.LORA,
}
"""Fields of the configuration, and the capability that a value other than the default needs."""


def of_the_configuration(rng: random.Random) -> tuple[str, Effect]:
    """Draw a field of the configuration that is lost."""
    field = rng.choice([*_CONFIGURED])
    return f"the configuration loses {field}", OnConfig(field, needs=_CONFIGURED[field])
