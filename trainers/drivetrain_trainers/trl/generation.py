"""An engine in the place of vLLM behind ``GRPOConfig(use_vllm=True)``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from types import SimpleNamespace, TracebackType
from typing import Final, Protocol, Self

from torch import nn

from drivetrain.checks.extras import from_extra
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.synchronous import SyncEngine
from drivetrain_trainers.trl.policy_engine import EngineLike, PolicyEngine
from drivetrain_trainers.trl.sampling import GenerationSettings, sampling_params
from drivetrain_trainers.trl.support import Accelerator, refuse_images, refuse_release, require_pushable

_REPLACED: Final = "VLLMGeneration"
_OF_THE_ENGINE: Final = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_length", "model_impl")
"""Settings of vLLM's that belong into the engine's configuration."""
_GENERATION: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_WITHOUT_EFFECT: Final = frozenset(
    {"server_base_url", "server_host", "server_port", "server_timeout", "group_port", "max_num_seqs"}
    | {"trust_remote_code", "logprobs"}
)
"""Arguments for vLLM's server, or computed by TRL: not settings of the engine that is used."""

Sampled = tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]
"""Prompt ids, completion ids, and of each sampled token a list with its logprob and one with its id."""


class Tokenizer(Protocol):
    """The part of the trainer's tokenizer that is used."""

    eos_token_id: int | None


class Step(Protocol):
    """TRL's profiler of a call, which knows the training step."""

    step: int | None

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class EngineGeneration:
    """The object in ``trainer.vllm_generation``: TRL tells it when the weights have changed, and asks for completions.

    Args:
        served: The engine.
        model: The policy.
        accelerator: The trainer's accelerator.
        settings: The generation settings.
    """

    def __init__(
        self, served: PolicyEngine, model: nn.Module, accelerator: Accelerator, settings: GenerationSettings
    ) -> None:
        self._served = served
        self._model = model
        self._accelerator = accelerator
        self._params = sampling_params(settings)
        self._behind = True
        self._step = -1

    @property
    def llm(self) -> object:
        """The part of vLLM's object that TRL's loop over tools reads: ``llm_engine.model_config.max_model_len``."""
        length = self._served.engine.model_info.context_length
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=length)))

    def sync_weights(self) -> None:
        """Record that the policy has changed. The next :meth:`generate`, which knows the step, pushes it."""
        self._behind = True

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[object] | None,
        num_generations: int,
        profiler: Step | None = None,
    ) -> Sampled:
        """Return one completion of each prompt.

        Args:
            prompts: Token ids, which TRL has repeated ``num_generations`` times.
            images: Must be None.
            num_generations: Completions per prompt; 1 for turns after a tool's, which not every rank of the trainer
                has. Consecutive equal prompts become one request in any case.
            profiler: Times the generation, and tells the training step, which becomes the weight version. Without it,
                pushes are counted.

        Raises:
            InvalidRequest: there are images.
            DrivetrainError: the errors of the push and of ``generate``.
        """
        ids = [list(prompt) for prompt in prompts]
        # Not every rank has turns after a tool's, so that ranks agree on the weights and on the first turn only.
        first = num_generations != 1
        with self._served.together(self._accelerator):
            if images is not None:
                refuse_images()
            if self._behind:
                told = getattr(profiler, "step", None)
                self._step = self._step + 1 if told is None else told
            self._served.serve(self._model, self._step, again=self._behind)
            self._behind = False
            with nullcontext() if profiler is None else profiler:
                completions = self._served.generate(ids, self._params, agree=first)
        return (
            ids,
            [completion.token_ids for completion in completions],
            [[[logprob] for logprob in completion.logprobs or []] for completion in completions],
            [[[token] for token in completion.token_ids] for completion in completions],
        )


class Generation:
    """Puts an engine in the place of TRL's ``VLLMGeneration`` while its context is open. Made by :func:`generation`."""

    def __init__(self, served: PolicyEngine, sleep: bool) -> None:
        with from_extra("trl", "drivetrain_trainers.trl"):
            from trl.trainer import grpo_trainer  # pyright: ignore[reportMissingImports]
        theirs = getattr(grpo_trainer, _REPLACED, None)
        if theirs is None:
            refuse_release(f"its grpo_trainer has no {_REPLACED}")
        asked = inspect.signature(theirs.generate).parameters.keys() - {"self"}
        if asked != {"prompts", "images", "num_generations", "profiler"} or not hasattr(theirs, "sync_weights"):
            refuse_release(f"its {_REPLACED}.generate takes {', '.join(sorted(asked))}")
        self._module = grpo_trainer
        self._theirs = theirs
        self._served = served
        self._sleep = sleep

    @property
    def engine(self) -> SyncEngine:
        """The engine; with ``share``, on ranks other than 0, from the first generation on."""
        return self._served.engine

    def __call__(
        self, model: nn.Module, accelerator: Accelerator, processing_class: Tokenizer, **settings: object
    ) -> EngineGeneration:
        """Stand in for the constructor of ``VLLMGeneration``: check the trainer's settings.

        Raises:
            InvalidRequest: the trainer is set to something that the engine does not do; before any work.
        """
        require_pushable(accelerator, share=self._served.share)
        self._require_ours(settings)
        generation = {name: settings[name] for name in _GENERATION}
        wanted = GenerationSettings(
            **generation,  # type: ignore[arg-type]  # checked as sampling parameters
            eos_token_ids=_eos_token_ids(model, processing_class),
            structured_outputs_regex=settings["structured_outputs_regex"],  # type: ignore[arg-type]  # likewise
            generation_kwargs=settings["generation_kwargs"] or {},  # type: ignore[arg-type]  # likewise
        )
        return EngineGeneration(self._served, model, accelerator, wanted)

    def _require_ours(self, settings: Mapping[str, object]) -> None:
        known = {*_OF_THE_ENGINE, *_GENERATION, *_WITHOUT_EFFECT}
        known |= {"mode", "enable_sleep_mode", "structured_outputs_regex", "generation_kwargs"}
        if settings.keys() - _WITHOUT_EFFECT != known - _WITHOUT_EFFECT:
            differ = ", ".join(sorted((settings.keys() - _WITHOUT_EFFECT) ^ (known - _WITHOUT_EFFECT)))
            refuse_release(f"it makes {_REPLACED} with other arguments ({differ})")
        if settings["mode"] != "colocate":
            _refuse("mode", settings, "leave it at 'colocate'; the engine is the one given to generation()")
        if settings["enable_sleep_mode"] and not self._sleep:
            _refuse("enable_sleep_mode", settings, "pass sleep=True to generation() too")
        defaults = {one.name: one.default for one in fields(self._module.GRPOConfig) if one.default is not MISSING}
        for name in _OF_THE_ENGINE:
            if settings[name] != defaults.get(f"vllm_{name}"):
                _refuse(name, settings, "leave it out; give generation() the field of the engine's configuration")

    def close(self) -> None:
        """Put TRL's class back, disconnect the policy, and stop the engine unless it is the caller's. Idempotent."""
        if getattr(self._module, _REPLACED) is self:
            setattr(self._module, _REPLACED, self._theirs)
        self._served.close()

    def __enter__(self) -> Self:
        """Put the engine in the place of vLLM, for trainers that are made within."""
        setattr(self._module, _REPLACED, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def generation(
    engine: EngineLike,
    *,
    lora_name: str | None = None,
    cast: bool = False,
    sleep: bool = False,
    share: bool = False,
    **fields: object,
) -> Generation:
    """Put an engine in the place of vLLM, for every ``GRPOTrainer`` with ``use_vllm=True`` made in its context.

    TRL then corrects for the difference between the engine's logprobs and the policy's, and reports it, as it does for
    vLLM. The policy is pushed when TRL asks for it, with ``str(global_step)`` as the weight version. TRL's settings of
    vLLM itself, such as ``vllm_gpu_memory_utilization``, are refused: the engine has a configuration.

    Args:
        engine: As for :func:`rollout`.
        lora_name: As for :func:`rollout`.
        cast: As for :func:`rollout`.
        sleep: Let the engine's memory go between generations; needed for ``vllm_enable_sleep_mode=True``.
        share: As for :func:`rollout`.
        fields: Fields of the engine's configuration, such as ``model``.

    Raises:
        UnsupportedCapability: This release of TRL has another class there.
        InvalidRequest: the arguments conflict.
        DrivetrainError: the errors of :func:`create_engine`.
    """
    served = PolicyEngine(engine, lora_name=lora_name, cast=cast, sleep=sleep, share=share, fields=fields)
    try:
        return Generation(served, sleep)
    except BaseException:
        served.close()
        raise


def _eos_token_ids(model: nn.Module, processing_class: Tokenizer) -> list[int]:
    """Return the ids that end a completion for TRL: the model's, and the tokenizer's."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    given: int | list[int] | None = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [] if given is None else [given] if isinstance(given, int) else list(given)
    own = tokenizer.eos_token_id
    return ids if own is None or own in ids else [own, *ids]


def _refuse(name: str, settings: Mapping[str, object], remedy: str) -> None:
    raise InvalidRequest(f"vllm_{name}={shown(settings[name])}: {remedy}", field=f"vllm_{name}")
