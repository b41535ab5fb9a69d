"""Rollouts for ``GRPOTrainer(rollout_func=…)``."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypedDict

from drivetrain.synchronous import SyncEngine
from drivetrain_trainers.trl.policy_engine import EngineLike, PolicyEngine
from drivetrain_trainers.trl.sampling import GenerationSettings, sampling_params
from drivetrain_trainers.trl.support import Trainer, refuse_images, require_supported


class Rollouts(TypedDict):
    """The result of a ``rollout_func``, as TRL takes it; one entry per prompt."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    """The sampled ids, an EOS included."""
    logprobs: list[list[float]]
    """Logprob of each sampled id under the distribution that it was drawn from."""
    weight_version: list[str | None]
    """The training step whose weights sampled the completion, as text. TRL passes it to reward functions."""


class Rollout:
    """A ``rollout_func`` of TRL. Made by :func:`rollout`."""

    def __init__(self, served: PolicyEngine) -> None:
        self._served = served

    @property
    def engine(self) -> SyncEngine:
        """The engine; with ``share``, on ranks other than 0, from the first rollout on."""
        return self._served.engine

    def __call__(self, prompts: list[object], trainer: Trainer) -> Rollouts:
        """Return one completion of each of ``prompts``, which TRL has repeated ``num_generations`` times.

        If ``trainer.state.global_step`` has changed, the policy's weights are pushed first. With several ranks, an
        error on one of them is raised on all.

        Raises:
            InvalidRequest: the trainer is set to something that has no equivalent; before any work.
            UnsupportedCapability: the engine lacks a capability, or TRL is another release; before any work.
            DrivetrainError: the errors of the push and of ``generate``.
        """
        require_supported(trainer, share=self._served.share)
        with self._served.together(trainer.accelerator):
            params = sampling_params(_settings(trainer))
            ids, images, _ = trainer._tokenize_prompts(prompts)
            if images is not None:
                refuse_images()
            ids = [list(prompt) for prompt in ids]
            self._served.serve(trainer.model, trainer.state.global_step)
            completions = self._served.generate(ids, params)
        return {
            "prompt_ids": ids,
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [completion.logprobs or [] for completion in completions],
            "weight_version": [completion.weight_version for completion in completions],
        }

    def close(self) -> None:
        """Disconnect the policy, and stop the engine unless it was given as a sync engine. Idempotent."""
        self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rollout(
    engine: EngineLike,
    *,
    lora_name: str | None = None,
    cast: bool = False,
    sleep: bool = False,
    share: bool = False,
    **fields: object,
) -> Rollout:
    """Make a ``rollout_func`` for TRL's ``GRPOTrainer``, whose rollouts an engine generates.

    The engine is started at the first rollout. Before a rollout, the policy is pushed if the trainer has made a step
    since the last push, with ``str(global_step)`` as the weight version.

    Args:
        engine: A backend's name, a mapping, a YAML file or a configuration; an engine or a fleet that was not started;
            the handle of an engine; or a :class:`SyncEngine`, which stays the caller's.
        lora_name: Push the adapter of a peft policy alone, under this name; the engine needs ``enable_lora=True`` and
            the base model's checkpoint. None: push all weights, with adapters merged.
        cast: Round the policy's weights to the engine's dtype, such as float32 to bfloat16.
        sleep: Let the engine's memory go between rollouts.
        share: For a trainer of several processes (DDP, FSDP2): one engine or fleet for all of them. Rank 0 makes it and
            pushes; the others attach to it, and send their shards if FSDP2 splits the policy. False: each rank makes
            an engine of its own and pushes to it; a configured seed is increased by the rank.
        fields: Fields of the engine's configuration, such as ``model``.

    Raises:
        InvalidRequest: the arguments conflict.
        DrivetrainError: the errors of :func:`create_engine`.
    """
    return Rollout(PolicyEngine(engine, lora_name=lora_name, cast=cast, sleep=sleep, share=share, fields=fields))


def _settings(trainer: Trainer) -> GenerationSettings:
    return GenerationSettings(
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        repetition_penalty=trainer.repetition_penalty,
        max_completion_length=trainer.max_completion_length,
        eos_token_ids=trainer.eos_token_ids,
        generation_kwargs=getattr(trainer.args, "generation_kwargs", None) or {},
    )
