"""The Ray actor that OpenRLHF's trainer calls: an engine with the methods of its ``RolloutRayActor``."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import torch
from ray.actor import ActorHandle

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig, InvalidRequest, MissingDependency, UnsupportedCapability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.weights import TensorSpec
from drivetrain_fleet.ray.actor import EngineActor
from drivetrain_trainers.openrlhf.sampling import RequestOutput, request_output, sampling_params
from drivetrain_trainers.openrlhf.weights import IpcHandles, TrainerWeights

_MEMORY: Final = {
    "weights": frozenset({MemoryTag.WEIGHTS}),
    "kv_cache": frozenset({MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH}),
}
"""Kinds of memory, by vLLM's tags."""


class _Executor(Protocol):
    """OpenRLHF's ``AgentExecutorBase``."""

    async def execute(
        self,
        prompt: object,
        label: object,
        sampling_params: object,
        max_length: int,
        hf_tokenizer: object,
        llm_engine: RolloutActor,
        images: object = None,
    ) -> object: ...


class RolloutActor(EngineActor):
    """Generates for OpenRLHF's trainer and takes its weights, on any engine.

    Rollouts run in OpenRLHF's own executors, which ask this actor for tokens. Weights are staged as they come. Once the
    last tensor of an update has come, the engine serves them, and its version counts the updates.

    Args:
        config: The engine's configuration.
        keepers: As of :class:`EngineActor`.
        agent_func_path: A Python file with OpenRLHF's ``AgentExecutor``; None: its single-turn executor.
        remote_rm_url: URLs of reward models, or a Python file with a ``reward_func``; for the single-turn executor.
    """

    def __init__(
        self,
        config: EngineConfig,
        keepers: list[ActorHandle[object]],
        agent_func_path: str | None = None,
        remote_rm_url: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(config, keepers)
        self._agent_func_path = agent_func_path
        self._remote_rm_url = remote_rm_url
        self._executor: _Executor | None = None
        self._weights: TrainerWeights | None = None
        self._unfinished = 0

    # Generation ------------------------------------------------------------------------------------------------------

    async def generate_responses(
        self,
        prompt: object,
        label: object,
        sampling_params: object,
        max_length: int,
        hf_tokenizer: object,
        num_samples: int = 1,
        images: object = None,
    ) -> list[object]:
        """Run OpenRLHF's executor ``num_samples`` times at once; return its responses."""
        if self._executor is None:
            self._executor = await asyncio.to_thread(_executor, self._agent_func_path, self._remote_rm_url)
        executor = self._executor
        return await asyncio.gather(
            *(
                executor.execute(
                    prompt=prompt,
                    label=label,
                    sampling_params=sampling_params,
                    max_length=max_length,
                    hf_tokenizer=hf_tokenizer,
                    llm_engine=self,
                    images=images,
                )
                for _ in range(num_samples)
            )
        )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: object,
        multi_modal_data: Mapping[str, object] | None = None,
    ) -> RequestOutput:
        """Generate from token ids; executors call this.

        Args:
            prompt_token_ids: The prompt, used exactly as given.
            sampling_params: vLLM's ``SamplingParams``.
            multi_modal_data: Must be empty.

        Raises:
            InvalidRequest: A sampling parameter is not translated, or its value is wrong.
            UnsupportedCapability: There are images, or the engine lacks a capability that a parameter needs.
            DrivetrainError: as ``InferenceEngine.generate``.
        """
        if multi_modal_data:
            raise UnsupportedCapability(
                f"multi_modal_data holds {', '.join(multi_modal_data)}: OpenRLHF's images are not passed on yet; train "
                "on text"
            )
        params = _translated(sampling_params)
        engine = await self._started()
        self._unfinished += 1
        try:
            output = await engine.generate([list(prompt_token_ids)], params)
        finally:
            self._unfinished -= 1
        return request_output(output.completions)

    async def get_num_unfinished_requests(self) -> int:
        """Return the number of calls of :meth:`generate` that run or wait; the trainer spreads prompts by it."""
        return self._unfinished

    # Control ---------------------------------------------------------------------------------------------------------

    async def pause_generation(self) -> None:
        """Freeze requests in flight, and keep their cache, as vLLM's mode ``keep``."""
        await (await self._started()).pause_generation(PauseMode.IN_PLACE)

    async def resume_generation(self) -> None:
        """Let requests go on."""
        await (await self._started()).continue_generation()

    async def reset_prefix_cache(self) -> None:
        """Discard every cached prefix."""
        await (await self._started()).reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """Free all memory that the engine can free.

        Args:
            level: 1 keeps a copy of the weights, and 2 does not, as the engine's ``sleep_keeps_weights`` must say.

        Raises:
            InvalidRequest: The level is unknown, or disagrees with the engine's ``sleep_keeps_weights``.
            EngineBusy: Requests are in flight.
        """
        engine = await self._started()
        expected = 1 if engine.config.sleep_keeps_weights else 2
        if level != expected:
            raise InvalidRequest(
                f"sleep(level={shown(level)}): expected {expected}, for the engine has sleep_keeps_weights="
                f"{engine.config.sleep_keeps_weights}; change it in the configuration",
                field="level",
            )
        await engine.sleep()

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocate the memory of ``tags`` again; memory that is not asleep is unchanged.

        Args:
            tags: ``weights`` and ``kv_cache``; None: both.

        Raises:
            InvalidRequest: A tag is unknown.
        """
        given = list(_MEMORY) if tags is None else list(tags)
        unknown = [tag for tag in given if tag not in _MEMORY]
        if unknown:
            raise InvalidRequest(f"tags={shown(unknown)}: expected {' and '.join(_MEMORY)}", field="tags")
        engine = await self._started()
        waking = engine.status.asleep & frozenset().union(*(_MEMORY[tag] for tag in given))
        if waking:
            await engine.wake_up(waking)

    # Weights ---------------------------------------------------------------------------------------------------------

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        use_ray: bool = False,
    ) -> None:
        """Join the trainer's group with every rank that it counts for this engine; return once it has formed.

        Args:
            master_address: Host of rank 0, which holds the store.
            master_port: Its port.
            rank_offset: First rank of this engine, which has ``tensor_parallel_size`` of them.
            world_size: Ranks of all engines and the trainer's one.
            group_name: Name of the group.
            backend: ``nccl`` or ``gloo``. OpenRLHF 0.8.9 and later form an NCCL communicator for both.
            use_ray: Must be false.

        Raises:
            UnsupportedCapability: ``use_ray``.
            InvalidRequest: The ranks do not fit, or NCCL has no GPU here.
            DeadlineExceeded, WeightSyncError: The group did not form.
        """
        if use_ray:
            raise UnsupportedCapability(
                "use_ray=True: groups of ray.util.collective are not joined; start OpenRLHF without "
                "--vllm.sync_with_ray"
            )
        weights = await self._trainer_weights()
        await weights.join(master_address, master_port, rank_offset, world_size, group_name, backend)

    async def update_weight(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Receive the broadcast of one tensor; with the last one, serve all of them.

        Args:
            name: Name of the parameter.
            dtype: Its dtype; widened to the engine's if that loses nothing.
            shape: Its shape.
            empty_cache: True for the last parameter of an update.

        Raises:
            InvalidRequest, WeightPlanMismatch: The tensor was received and refused, or tensors are missing.
            DeadlineExceeded, WeightSyncError: The trainer is gone; the engine serves its old weights.
            DrivetrainError: as ``WeightSync.push``.
        """
        weights = await self._trainer_weights()
        await weights.receive(_spec(name, dtype, shape), last=empty_cache)

    async def update_weight_cuda_ipc(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        ipc_handles: IpcHandles,
        empty_cache: bool = False,
    ) -> None:
        """Copy one tensor out of the trainer's GPU memory; with the last one, serve all of them.

        Args:
            name: Name of the parameter.
            dtype: Its dtype; widened to the engine's if that loses nothing.
            shape: Its shape.
            ipc_handles: The result of ``torch.multiprocessing.reductions.reduce_tensor``, by UUID of the GPU.
            empty_cache: True for the last parameter of an update.

        Raises:
            UnsupportedCapability: The actor sees none of these GPUs.
            InvalidRequest, WeightPlanMismatch: The tensor was refused, or tensors are missing.
            DrivetrainError: as ``WeightSync.push``.
        """
        weights = await self._trainer_weights()
        await weights.open(_spec(name, dtype, shape), ipc_handles, last=empty_cache)

    async def get_weight_version(self) -> str:
        """Return the version of the weights that the engine serves. Not a method of OpenRLHF's."""
        return (await self._started()).get_weight_version()

    async def _trainer_weights(self) -> TrainerWeights:
        engine: InferenceEngine = await self._started()
        if self._weights is None:
            self._weights = TrainerWeights(engine, engine.config.tensor_parallel_size)
        return self._weights

    async def close(self) -> None:
        """Leave the trainer's group and close the engine; the actor can then be killed."""
        if self._weights is not None:
            await self._weights.close()
        await super().close()


_translated = sampling_params
"""The imported function, under a name that no argument of the methods above hides."""


def _spec(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape))


def _executor(agent_func_path: str | None, remote_rm_url: str | Sequence[str] | None) -> _Executor:
    try:
        agent = importlib.import_module("openrlhf.utils.agent")
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"generate_responses runs OpenRLHF's executor, and {error.name!r} is not installed on the engine's node; "
            "install openrlhf there"
        ) from error
    if agent_func_path is None:
        made: _Executor = agent.SingleTurnAgentExecutor(remote_rm_url)
        return made
    spec = importlib.util.spec_from_file_location("agent_module", agent_func_path)
    if not agent_func_path.endswith(".py") or spec is None or spec.loader is None:
        raise InvalidConfig(
            f"agent_func_path={shown(agent_func_path)}: expected a Python file", field="agent_func_path"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = getattr(module, "AgentExecutor", None)
    if not isinstance(own, type) or not issubclass(own, agent.AgentExecutorBase):
        raise InvalidConfig(
            f"{agent_func_path} has no class AgentExecutor derived from openrlhf.utils.agent.AgentExecutorBase; define "
            "it there",
            field="agent_func_path",
        )
    executor: _Executor = own()
    return executor
