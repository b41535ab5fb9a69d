"""One interface between an RL trainer and any LLM inference engine.

Names are imported on first use, so ``import drivetrain`` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.attached.engine import attach
    from drivetrain.backend.base import (
        Backend,
        EngineStats,
        GenerateRequest,
        GenerateResult,
        ModelInfo,
        ReadMedium,
        StopKind,
        TokenDelta,
    )
    from drivetrain.backend.hookspecs import hookimpl
    from drivetrain.backend.registry import BackendInfo, BackendStatus, list_backends, load_backend
    from drivetrain.create import create_engine
    from drivetrain.engine.engine import InferenceEngine
    from drivetrain.engine.states import EngineState
    from drivetrain.errors import (
        BackendError,
        BackendLoadError,
        BackendUnavailable,
        DeadlineExceeded,
        DrivetrainError,
        DuplicateBackend,
        EngineBusy,
        EngineDied,
        EngineError,
        EngineInternalError,
        EngineOutOfMemory,
        EngineStartError,
        EngineStateError,
        InvalidConfig,
        InvalidRequest,
        InvalidWeights,
        MissingDependency,
        NonFiniteLogits,
        NoTokenAllowed,
        UnknownBackend,
        UnsupportedCapability,
        WeightBaseMismatch,
        WeightPlanMismatch,
        WeightProbeFailed,
        WeightSyncError,
        WeightTransferFailed,
        WeightVerifyFailed,
        WireError,
    )
    from drivetrain.types.capability import Capability
    from drivetrain.types.config import EngineConfig, Isolation, MediaLimits, Task, Timeouts
    from drivetrain.types.handle import EngineHandle
    from drivetrain.types.modes import MemoryTag, PauseMode, TurnMode
    from drivetrain.types.outputs import (
        Completion,
        CompletionChunk,
        FinishReason,
        GenerationOutput,
        TopLogprobs,
        VersionSpan,
        group_outputs_by_prompt,
    )
    from drivetrain.types.prompts import (
        AudioInput,
        ChatPrompt,
        ImageInput,
        MediaInput,
        Message,
        Prompt,
        PromptLike,
        TextPrompt,
        TokenPrompt,
        VideoInput,
    )
    from drivetrain.types.sampling import (
        ActionMask,
        DisallowedTokens,
        EbnfGrammar,
        JsonSchema,
        LogitProcessor,
        LogprobsMode,
        RegexGrammar,
        SamplingParams,
        StructuredOutput,
        TemperatureSchedule,
    )
    from drivetrain.types.weights import (
        BroadcastSource,
        CommunicatorSpec,
        CudaIpcSource,
        DiskSource,
        InProcessSource,
        LoraSource,
        PluginSource,
        SharedMemorySource,
        TensorData,
        TensorSpec,
        WeightManifest,
        WeightPlan,
        WeightReport,
        WeightSource,
        WeightUpdateRequest,
    )

    __version__: str

_EXPORTS = {
    "attached.engine": ("attach",),
    "backend.base": (
        "Backend",
        "EngineStats",
        "GenerateRequest",
        "GenerateResult",
        "ModelInfo",
        "ReadMedium",
        "StopKind",
        "TokenDelta",
    ),
    "backend.hookspecs": ("hookimpl",),
    "backend.registry": (
        "BackendInfo",
        "BackendStatus",
        "list_backends",
        "load_backend",
    ),
    "create": ("create_engine",),
    "engine.engine": ("InferenceEngine",),
    "engine.states": ("EngineState",),
    "errors": (
        "BackendError",
        "BackendLoadError",
        "BackendUnavailable",
        "DeadlineExceeded",
        "DrivetrainError",
        "DuplicateBackend",
        "EngineBusy",
        "EngineDied",
        "EngineError",
        "EngineInternalError",
        "EngineOutOfMemory",
        "EngineStartError",
        "EngineStateError",
        "InvalidConfig",
        "InvalidRequest",
        "InvalidWeights",
        "MissingDependency",
        "NonFiniteLogits",
        "NoTokenAllowed",
        "UnknownBackend",
        "UnsupportedCapability",
        "WeightBaseMismatch",
        "WeightPlanMismatch",
        "WeightProbeFailed",
        "WeightSyncError",
        "WeightTransferFailed",
        "WeightVerifyFailed",
        "WireError",
    ),
    "types.capability": ("Capability",),
    "types.config": (
        "EngineConfig",
        "Isolation",
        "MediaLimits",
        "Task",
        "Timeouts",
    ),
    "types.handle": ("EngineHandle",),
    "types.modes": (
        "MemoryTag",
        "PauseMode",
        "TurnMode",
    ),
    "types.outputs": (
        "Completion",
        "CompletionChunk",
        "FinishReason",
        "GenerationOutput",
        "TopLogprobs",
        "VersionSpan",
        "group_outputs_by_prompt",
    ),
    "types.prompts": (
        "AudioInput",
        "ChatPrompt",
        "ImageInput",
        "MediaInput",
        "Message",
        "Prompt",
        "PromptLike",
        "TextPrompt",
        "TokenPrompt",
        "VideoInput",
    ),
    "types.sampling": (
        "ActionMask",
        "DisallowedTokens",
        "EbnfGrammar",
        "JsonSchema",
        "LogitProcessor",
        "LogprobsMode",
        "RegexGrammar",
        "SamplingParams",
        "StructuredOutput",
        "TemperatureSchedule",
    ),
    "types.weights": (
        "BroadcastSource",
        "CommunicatorSpec",
        "CudaIpcSource",
        "DiskSource",
        "InProcessSource",
        "LoraSource",
        "PluginSource",
        "SharedMemorySource",
        "TensorData",
        "TensorSpec",
        "WeightManifest",
        "WeightPlan",
        "WeightReport",
        "WeightSource",
        "WeightUpdateRequest",
    ),
}

__all__ = [
    "ActionMask",
    "AudioInput",
    "Backend",
    "BackendError",
    "BackendInfo",
    "BackendLoadError",
    "BackendStatus",
    "BackendUnavailable",
    "BroadcastSource",
    "Capability",
    "ChatPrompt",
    "CommunicatorSpec",
    "Completion",
    "CompletionChunk",
    "CudaIpcSource",
    "DeadlineExceeded",
    "DisallowedTokens",
    "DiskSource",
    "DrivetrainError",
    "DuplicateBackend",
    "EbnfGrammar",
    "EngineBusy",
    "EngineConfig",
    "EngineDied",
    "EngineError",
    "EngineHandle",
    "EngineInternalError",
    "EngineOutOfMemory",
    "EngineStartError",
    "EngineState",
    "EngineStateError",
    "EngineStats",
    "FinishReason",
    "GenerateRequest",
    "GenerateResult",
    "GenerationOutput",
    "ImageInput",
    "InProcessSource",
    "InferenceEngine",
    "InvalidConfig",
    "InvalidRequest",
    "InvalidWeights",
    "Isolation",
    "JsonSchema",
    "LogitProcessor",
    "LogprobsMode",
    "LoraSource",
    "MediaInput",
    "MediaLimits",
    "MemoryTag",
    "Message",
    "MissingDependency",
    "ModelInfo",
    "NoTokenAllowed",
    "NonFiniteLogits",
    "PauseMode",
    "PluginSource",
    "Prompt",
    "PromptLike",
    "ReadMedium",
    "RegexGrammar",
    "SamplingParams",
    "SharedMemorySource",
    "StopKind",
    "StructuredOutput",
    "Task",
    "TemperatureSchedule",
    "TensorData",
    "TensorSpec",
    "TextPrompt",
    "Timeouts",
    "TokenDelta",
    "TokenPrompt",
    "TopLogprobs",
    "TurnMode",
    "UnknownBackend",
    "UnsupportedCapability",
    "VersionSpan",
    "VideoInput",
    "WeightBaseMismatch",
    "WeightManifest",
    "WeightPlan",
    "WeightPlanMismatch",
    "WeightProbeFailed",
    "WeightReport",
    "WeightSource",
    "WeightSyncError",
    "WeightTransferFailed",
    "WeightUpdateRequest",
    "WeightVerifyFailed",
    "WireError",
    "__version__",
    "attach",
    "create_engine",
    "group_outputs_by_prompt",
    "hookimpl",
    "list_backends",
    "load_backend",
]

# Hidden from type checkers, which would accept any misspelt import from a module with __getattr__.
if not TYPE_CHECKING:
    _MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

    def __getattr__(name: str) -> object:
        import importlib

        if name == "__version__":
            import importlib.metadata

            value = importlib.metadata.version("drivetrain")
        elif name in _MODULE_OF:
            value = getattr(importlib.import_module(f"drivetrain.{_MODULE_OF[name]}"), name)
        else:
            raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
