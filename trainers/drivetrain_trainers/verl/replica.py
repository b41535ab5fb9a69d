# pyright: reportMissingImports=false
"""One engine of the rollout, as verl starts and controls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutReplica

from drivetrain.errors import DrivetrainError, InvalidConfig
from drivetrain_fleet.ray.calls import call, make
from drivetrain_trainers.verl.engine_server import EngineServer
from drivetrain_trainers.verl.plugin_names import server_name

_CALLS_AT_ONCE: Final = 1 << 14
"""Calls that the actor takes at once: the engine queues requests, and no abort may wait behind them."""


class DrivetrainReplica(RolloutReplica):
    """Starts a Ray actor that owns one engine, on the node and with the GPUs of this replica's workers."""

    async def launch_servers(self) -> None:
        """Start the actor and its engine.

        Raises:
            InvalidConfig: The drivetrain rollout cannot do what a field of the configuration asks for.
            EngineStartError: The engine did not start.
        """
        self._refuse()
        node, devices = await self._place()
        platform = get_platform()
        environment: dict[str, str] = {name: "1" for name in platform.ray_noset_envvars()}
        environment |= {**platform.rollout_env_vars(), platform.visible_devices_envvar(): ",".join(devices)}
        kind = "teacher" if self.is_teacher_model else ""
        options: Mapping[str, object] = {
            "name": server_name(self.replica_rank, kind, self.name_suffix),
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            "runtime_env": {"env_vars": environment},
            "max_concurrency": _CALLS_AT_ONCE,
        }
        server = make(
            EngineServer, options, self.config, self.model_config, self.rollout_mode.value, self.is_teacher_model
        )
        try:
            address = await call(server, "start")
        except RayTaskError as error:
            if isinstance(error.cause, DrivetrainError):
                raise error.cause from None
            raise
        self.servers = [server]
        self._server_handle = server
        self._server_address = address

    def _refuse(self) -> None:
        if self.nnodes > 1:
            raise InvalidConfig(
                f"actor_rollout_ref.rollout asks for {self.world_size} GPUs a replica, on {self.nnodes} nodes of "
                f"{self.gpus_per_replica_node}; expected one node: lower tensor_model_parallel_size",
                field="actor_rollout_ref.rollout.tensor_model_parallel_size",
            )
        if self.is_reward_model:
            raise InvalidConfig(
                "reward.reward_model.rollout.name='drivetrain': verl asks reward models by HTTP, which this rollout "
                "does not serve; name another rollout",
                field="reward.reward_model.rollout.name",
            )

    async def _place(self) -> tuple[str, list[str]]:
        """Return the node of this replica's workers, and their devices."""
        places = [await worker.__ray_call__.remote(_place_of) for worker in self.workers]
        nodes = {node for node, _ in places}
        if len(nodes) != 1:
            raise InvalidConfig(
                f"the workers of replica {self.replica_rank} are on {len(nodes)} nodes; expected one: lower "
                "tensor_model_parallel_size, or give each node whole replicas",
                field="actor_rollout_ref.rollout.tensor_model_parallel_size",
            )
        return nodes.pop(), [device for _, device in places]


def _place_of(_: object) -> tuple[str, str]:
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_platform().ray_resource_name()) or []
    return context.get_node_id(), str(devices[0]) if devices else ""
