"""TRL on any engine: rollouts for ``GRPOTrainer(rollout_func=…)``, and the engine behind ``use_vllm=True``."""

from drivetrain_trainers.trl.generation import EngineGeneration, Generation, generation
from drivetrain_trainers.trl.policy_engine import EngineLike
from drivetrain_trainers.trl.rollouts import Rollout, rollout

__all__ = ["EngineGeneration", "EngineLike", "Generation", "Rollout", "generation", "rollout"]
