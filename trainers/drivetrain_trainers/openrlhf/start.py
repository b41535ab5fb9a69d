"""Engines in the place of OpenRLHF's: a function with the signature of its ``create_vllm_engines``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from drivetrain.checks.safe_repr import shown
from drivetrain.create import fields_of
from drivetrain.engine.tasks import gather_or_cancel
from drivetrain.errors import InvalidConfig, UnsupportedCapability
from drivetrain.types.config import EngineConfig
from drivetrain.types.sampling import LogprobsMode
from drivetrain_fleet.ray.calls import call
from drivetrain_fleet.ray.start import RayEngines, start_engines
from drivetrain_trainers.openrlhf.actor import RolloutActor

_T = TypeVar("_T")
_SHARE_OF_A_GPU: Final = 0.2
"""GPU and CPU of an engine that shares a bundle with the trainer's models, as OpenRLHF counts them."""
_LOGPROBS: Final = {"raw_logprobs": LogprobsMode.RAW, "processed_logprobs": LogprobsMode.PROCESSED}
"""vLLM's modes whose numbers are logprobs."""


def create_engines_with(
    engine: str | os.PathLike[str] | Mapping[str, object], **fields: object
) -> Callable[..., list[ActorHandle[object]]]:
    """Return a function to put in the place of OpenRLHF's ``create_vllm_engines``.

    It returns Ray actors with the methods that OpenRLHF's trainer calls, when all engines have started.

    Args:
        engine: A backend's name, a mapping, or a YAML file, as of :func:`drivetrain.create_engine`.
        fields: Fields of :class:`EngineConfig`. They and those of ``engine`` win over OpenRLHF's arguments.

    Raises:
        InvalidConfig: ``engine`` is none of these.
    """
    given = fields_of(engine, fields)

    def create(
        num_engines: int,
        tensor_parallel_size: int,
        pretrain: str,
        seed: int,
        full_determinism: bool,
        enable_prefix_caching: bool,
        enforce_eager: bool,
        max_model_len: int,
        shared_pg: PlacementGroup | None = None,
        gpu_memory_utilization: float | None = None,
        vllm_enable_sleep: bool = False,
        logprobs_mode: str | None = None,
        agent_func_path: str | None = None,
        remote_rm_url: str | Sequence[str] | None = None,
        max_images_per_prompt: int = 0,
    ) -> list[ActorHandle[object]]:
        if max_images_per_prompt > 0:
            raise UnsupportedCapability(
                f"max_images_per_prompt={max_images_per_prompt}: OpenRLHF's images are not passed on yet; train on text"
            )
        if enforce_eager and "engine_kwargs" not in given:
            raise InvalidConfig(
                "enforce_eager=True is an argument of vLLM's: give engine_kwargs with your engine's own argument, such "
                "as {'enforce_eager': True} for vLLM or {'disable_cuda_graph': True} for SGLang",
                field="enforce_eager",
            )
        wanted = {
            "model": pretrain,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": "bfloat16",
            "context_length": max_model_len,
            "enable_prefix_caching": enable_prefix_caching,
            "gpu_memory_utilization": gpu_memory_utilization,
            "deterministic": full_determinism,
            "enable_sleep": vllm_enable_sleep,
            "sleep_keeps_weights": vllm_enable_sleep,
            **_mode(logprobs_mode),
            **given,
        }
        configs = [EngineConfig.from_mapping({"seed": seed + number, **wanted}) for number in range(num_engines)]
        for config in configs:
            _check_ranks(config, tensor_parallel_size, shared_pg)
        arguments = (agent_func_path, remote_rm_url)
        return _run(_start(configs, shared_pg, arguments, asleep=vllm_enable_sleep))

    return create


def _mode(given: str | None) -> dict[str, object]:
    if given is None:
        return {}
    if given not in _LOGPROBS:
        raise InvalidConfig(f"logprobs_mode={shown(given)}: expected {' or '.join(_LOGPROBS)}", field="logprobs_mode")
    return {"logprobs_mode": _LOGPROBS[given]}


def _check_ranks(config: EngineConfig, tensor_parallel_size: int, group: PlacementGroup | None) -> None:
    ranks = (config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size)
    if ranks != (tensor_parallel_size, 1, 1):
        raise InvalidConfig(
            f"tensor, pipeline and data parallel sizes are {ranks}: OpenRLHF's trainer counts {tensor_parallel_size} "
            "ranks for each engine (--vllm.tensor_parallel_size), and forms its group with them; give the engine the "
            "same tensor_parallel_size, and 1 for the others",
            field="tensor_parallel_size",
        )
    if group is not None and tensor_parallel_size > 1:
        raise InvalidConfig(
            f"tensor_parallel_size={tensor_parallel_size} with shared_pg: an engine over several bundles takes whole "
            "GPUs, and the trainer's models are on them; use engines of one GPU, or leave --train.colocate_all out",
            field="tensor_parallel_size",
        )


async def _start(
    configs: Sequence[EngineConfig], group: PlacementGroup | None, arguments: Sequence[object], *, asleep: bool
) -> list[ActorHandle[object]]:
    """Start all engines, the n-th one in the n-th bundle of a group; end them all if one fails."""
    share: dict[str, Any] = {}
    if group is not None:
        share = {"gpus_per_engine": _SHARE_OF_A_GPU, "cpus_per_engine": _SHARE_OF_A_GPU}
    started: list[RayEngines] = []

    async def start(number: int, config: EngineConfig) -> ActorHandle[object]:
        engines = await start_engines(
            config,
            placement_group=group,
            bundle_indices=None if group is None else [number],
            max_restarts=0,  # the trainer keeps no place for an engine that comes back with its first weights
            actor_class=RolloutActor,
            actor_arguments=arguments,
            **share,
        )
        started.append(engines)
        (engine,) = engines
        if asleep:
            await call(engine.actor, "sleep")
        return engine.actor

    try:
        return await gather_or_cancel(start(number, config) for number, config in enumerate(configs))
    except BaseException:
        for engines in started:
            engines.kill()
        raise


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run work in a loop of its own, also where one is running already."""
    with ThreadPoolExecutor(1, thread_name_prefix="drivetrain-openrlhf") as threads:
        run: Callable[[Coroutine[Any, Any, _T]], _T] = asyncio.run
        return threads.submit(run, work).result()
