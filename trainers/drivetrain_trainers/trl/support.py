"""Refusals of trainers that are not supported, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Final, NoReturn, Protocol

from torch import nn

from drivetrain.errors import InvalidRequest, UnsupportedCapability

SEEN: Final = "1.16.0"
"""Release of TRL that was seen to work."""


class Accelerator(Protocol):
    """The part of accelerate's ``Accelerator`` that is used."""

    @property
    def num_processes(self) -> int:
        """Number of processes that train."""
        ...

    @property
    def distributed_type(self) -> object:
        """An enum, whose value is ``NO`` for one process, begins with ``MULTI_`` for DDP, and is ``FSDP`` for FSDP."""
        ...

    @property
    def is_fsdp2(self) -> bool:
        """True if the second version of FSDP splits the policy."""
        ...


class State(Protocol):
    """The part of ``TrainerState`` that is used."""

    global_step: int


class Trainer(Protocol):
    """The part of TRL's ``GRPOTrainer`` that is used."""

    model: nn.Module
    state: State
    accelerator: Accelerator
    args: object
    use_vllm: bool
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    max_completion_length: int | None
    eos_token_ids: Sequence[int]

    def _tokenize_prompts(self, prompts: list[object]) -> tuple[list[list[int]], object, object]: ...


_OF_A_TRAINER: Final = (
    *("model", "state", "accelerator", "args", "use_vllm", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "max_completion_length", "eos_token_ids", "_tokenize_prompts"),
)


def is_sharded(accelerator: Accelerator) -> bool:
    """Return True if FSDP2 splits the policy over the trainer's processes."""
    return _kind(accelerator) == "FSDP" and accelerator.is_fsdp2


def require_pushable(accelerator: Accelerator, *, share: bool) -> None:
    """Raise unless the trainer's processes can push the policy: each holds it whole, or FSDP2 shards it.

    Args:
        accelerator: The trainer's accelerator.
        share: One engine for all processes.

    Raises:
        InvalidRequest: the policy is sharded in another way, or each rank has an engine of its own.
    """
    kind = _kind(accelerator)
    if kind == "NO" or kind.startswith("MULTI_"):
        return
    split = f"the trainer has distributed_type {kind!r} with {accelerator.num_processes} processes"
    if not is_sharded(accelerator):
        raise InvalidRequest(
            f"{split}; rollouts on drivetrain take one process, several by DDP, or several by FSDP2 with share=True. "
            "Leave FSDP 1 and DeepSpeed out of accelerate's configuration (fsdp_version: 2); the engine may have "
            "several GPUs",
            field="trainer",
        )
    if not share:
        raise InvalidRequest(
            f"{split}, each of which holds a part of the policy; pass share=True, so that they push to one engine "
            "or fleet together",
            field="share",
        )


def _kind(accelerator: Accelerator) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def require_supported(trainer: Trainer, *, share: bool) -> None:
    """Raise unless ``rollout`` supports every setting of the trainer.

    Args:
        trainer: The trainer.
        share: True if one engine serves all processes of the trainer.

    Raises:
        UnsupportedCapability: this release of TRL lacks an attribute that rollouts need.
        InvalidRequest: a setting of the trainer is one that rollouts do not support.
    """
    missing = [name for name in _OF_A_TRAINER if not hasattr(trainer, name)]
    if missing:
        refuse_release(f"its {type(trainer).__name__} has no {', '.join(missing)}")
    require_pushable(trainer.accelerator, share=share)
    if trainer.use_vllm:
        _refuse("use_vllm=True", "leave use_vllm out, or use drivetrain_trainers.trl.generation() without rollout_func")
    if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None):
        _refuse(
            "tools and environments",
            "TRL would generate the turns after a tool's with the policy itself; use "
            "drivetrain_trainers.trl.generation() instead of rollout()",
        )
    if getattr(trainer, "use_transformers_continuous_batching", False):
        _refuse("use_transformers_continuous_batching=True", "leave it out; the engine batches")
    cache = getattr(trainer.args, "cache_implementation", None)
    if cache is not None:
        _refuse(f"cache_implementation={cache!r}", "leave it out; the engine has a cache of its own")


def refuse_images() -> NoReturn:
    """Raise for prompts with images."""
    raise InvalidRequest("the prompts hold images; rollouts on drivetrain take text prompts only", field="prompts")


def refuse_release(why: str) -> NoReturn:
    """Raise :class:`UnsupportedCapability` for a release of TRL that lacks what ``why`` names."""
    raise UnsupportedCapability(
        f"TRL {version('trl')} is not supported: {why}. TRL {SEEN} was seen to work: pip install trl=={SEEN}"
    )


def _refuse(what: str, remedy: str) -> NoReturn:
    raise InvalidRequest(f"the trainer has {what}, which rollout() does not support; {remedy}", field="trainer")
