"""SkyRL's inference engine interface over any engine, fleet or attached engine."""

from drivetrain_trainers.skyrl.batches import (
    InferenceEngineInput,
    InferenceEngineOutput,
    StreamingChunk,
    group_outputs_by_prompt,
)
from drivetrain_trainers.skyrl.engine import SkyRLInferenceEngine
from drivetrain_trainers.skyrl.transfer import WeightTransferHandle

__all__ = [
    "InferenceEngineInput",
    "InferenceEngineOutput",
    "SkyRLInferenceEngine",
    "StreamingChunk",
    "WeightTransferHandle",
    "group_outputs_by_prompt",
]
