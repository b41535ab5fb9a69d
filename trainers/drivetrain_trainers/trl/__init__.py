"""TRL on any engine: ``GRPOTrainer(rollout_func=…)``, the engine behind ``use_vllm=True``, and AsyncGRPO."""

from drivetrain_trainers.trl.async_weights import EngineWeights
from drivetrain_trainers.trl.asynchronous import AsyncRollouts, async_rollouts
from drivetrain_trainers.trl.generation import EngineGeneration, Generation, generation
from drivetrain_trainers.trl.policy_engine import EngineLike
from drivetrain_trainers.trl.rollouts import Rollout, rollout

__all__ = [
    "AsyncRollouts",
    "EngineGeneration",
    "EngineLike",
    "EngineWeights",
    "Generation",
    "Rollout",
    "async_rollouts",
    "generation",
    "rollout",
]
