"""The demo's loop: roll out, score, train, sync, and roll out again with the new weights.

Only ``settings.backend`` selects the engine; the code below does not depend on it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from drivetrain import (
    Capability,
    Completion,
    EngineInternalError,
    InferenceEngine,
    LogprobsMode,
    MemoryTag,
    SamplingParams,
    create_engine,
)
from drivetrain_demo.checks import check_logprobs, check_rise, check_versions, versions_seen
from drivetrain_demo.grpo import group_advantages
from drivetrain_demo.result import Check, DemoResult, StepRecord, Training
from drivetrain_demo.reward import grade, is_right
from drivetrain_demo.settings import LOGPROB_TOLERANCE, MIN_STEPS_TO_JUDGE, Settings, tiny_policy
from drivetrain_demo.tasks import Task, load_tasks
from drivetrain_demo.trainer import Recipe, Sample, Trainer
from drivetrain_fleet import InferenceEngineClient
from drivetrain_weight_sync import WeightSync

KV_CACHE: Final = (MemoryTag.KV_CACHE,)


@dataclass(frozen=True, slots=True)
class _Rollout:
    tasks: Sequence[Task]
    completions: Sequence[Completion]
    rewards: Sequence[float]
    seconds: float


async def run(settings: Settings, *, report: Callable[[str], None], watch: Callable[[StepRecord], None]) -> DemoResult:
    """Run the whole loop.

    Args:
        settings: The run's settings.
        report: Called with a short text at each stage of starting.
        watch: Called after each step.

    Returns:
        The result; a run whose check failed ends at that check.

    Raises:
        DrivetrainError: the prompts or the configuration are wrong, or the engine or the sync failed.
    """
    begun = time.perf_counter()
    tasks = load_tasks(settings.prompts)
    model = settings.model or str(await asyncio.to_thread(tiny_policy, settings.seed))
    fields = {**settings.engine_fields, "model": model}
    if settings.isolation is not None:
        fields["isolation"] = settings.isolation.value
    engines = [create_engine(settings.backend, **fields) for _ in range(settings.engines)]
    engine = engines[0] if len(engines) == 1 else InferenceEngineClient(engines)
    try:
        await engine.start(report)
        trainer = await asyncio.to_thread(_load_trainer, settings, model, engine.model_info.dtype)
        async with WeightSync.connect(trainer.model, engine, cast=True) as sync:
            loop = _Loop(settings, tasks, engine, trainer, sync)
            await loop.run(watch)
    finally:
        await engine.teardown()
    return DemoResult(
        settings=settings,
        backend=engine.config.backend,
        isolation=engine.isolation.value,
        model=model,
        dtype=engine.model_info.dtype,
        parameters=engine.model_info.parameters,
        strategy=sync.strategy.value,
        records=tuple(loop.records),
        checks=tuple(loop.checks()),
        notes=tuple(loop.notes()),
        seconds=time.perf_counter() - begun,
    )


class _Loop:
    def __init__(
        self, settings: Settings, tasks: Sequence[Task], engine: InferenceEngine, trainer: Trainer, sync: WeightSync
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._trainer = trainer
        self._sync = sync
        self._batches = _batches(tasks, settings.prompts_per_step, settings.seed)
        self._tolerance = _tolerance(settings, engine)
        self._chat = _chat(settings, engine)
        self._sleeps = engine.supports(Capability.SLEEP_KV_CACHE)
        self._seeds = engine.supports(Capability.SEED)
        self.records: list[StepRecord] = []

    async def run(self, watch: Callable[[StepRecord], None]) -> None:
        await self._sync.push(version="step-0")
        for step in range(self._settings.steps + 1):
            record = await self._step(step)
            self.records.append(record)
            watch(record)
            if not all(check.passed for check in self._checks_of_steps()):
                return

    async def _step(self, step: int) -> StepRecord:
        version = f"step-{step}"
        rollout = await self._roll_out(step)
        samples = _samples(rollout, self._settings.n)
        gap = await asyncio.to_thread(self._trainer.logprob_gap, samples)
        seen = versions_seen(rollout.completions)
        training = None
        if step < self._settings.steps and seen == (version,) and gap <= self._tolerance:
            training = await self._train(step, samples)
        first = rollout.completions[0]
        return StepRecord(
            step=step,
            version=version,
            versions_seen=seen,
            reward=sum(rollout.rewards) / len(rollout.rewards),
            accuracy=sum(map(is_right, rollout.rewards)) / len(rollout.rewards),
            logprob_gap=gap,
            completions=len(rollout.completions),
            tokens=sum(len(completion.token_ids) for completion in rollout.completions),
            generate_seconds=rollout.seconds,
            example=f"{rollout.tasks[0].prompt} → {first.text}",
            training=training,
        )

    async def _roll_out(self, step: int) -> _Rollout:
        settings = self._settings
        tasks = next(self._batches)
        # Sample i of a prompt uses seed + i, so seeds of prompts are n apart; otherwise prompts would share random
        # numbers.
        first = (settings.seed << 32) + step * len(tasks) * settings.n
        params = [
            SamplingParams(
                n=settings.n,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                logprobs=0,
                logprobs_mode=LogprobsMode.TEMPERATURE,
                seed=first + index * settings.n if self._seeds else None,
            )
            for index in range(len(tasks))
        ]
        begun = time.perf_counter()
        output = await self._engine.generate([task.as_prompt(chat=self._chat) for task in tasks], params)
        seconds = time.perf_counter() - begun
        rewards = [grade(completion.text, tasks[completion.prompt_index].answer) for completion in output.completions]
        return _Rollout(tasks, output.completions, rewards, seconds)

    async def _train(self, step: int, samples: Sequence[Sample]) -> Training:
        slept = woken = None
        if self._sleeps:
            slept = await _timed(self._engine.sleep(KV_CACHE))
        begun = time.perf_counter()
        entropy = await asyncio.to_thread(self._trainer.step, samples, entropy_scale=1 - step / self._settings.steps)
        trained = time.perf_counter() - begun
        pushed = await self._sync.push(version=f"step-{step + 1}")
        if self._sleeps:
            woken = await _timed(self._engine.wake_up(KV_CACHE))
        return Training(entropy, trained, slept, pushed.total_seconds, woken)

    def checks(self) -> Sequence[Check]:
        """Return the run's checks so far; the rise of the reward is judged only if no other check failed."""
        checks = self._checks_of_steps()
        if self._settings.judges_rise and all(check.passed for check in checks):
            checks.append(check_rise(self.records, self._settings))
        return checks

    def notes(self) -> Iterator[str]:
        """Yield notes on deviations from the usual course, with their reasons."""
        name = self._engine.config.backend
        if not self._sleeps:
            yield f"the {name} engine does not claim sleep_kv_cache here, so it was awake while the policy was trained"
        if not self._seeds:
            yield f"the {name} engine does not claim seed, so another run gives other completions"
        if self._settings.expect_rise and not self._settings.judges_rise:
            yield f"the rise of the reward is not judged in fewer than {MIN_STEPS_TO_JUDGE} steps"

    def _checks_of_steps(self) -> list[Check]:
        return [check_versions(self.records), check_logprobs(self.records, self._tolerance)]


def _tolerance(settings: Settings, engine: InferenceEngine) -> float:
    if settings.logprob_tolerance is not None:
        return settings.logprob_tolerance
    return LOGPROB_TOLERANCE.get(engine.model_info.dtype, max(LOGPROB_TOLERANCE.values()))


def _chat(settings: Settings, engine: InferenceEngine) -> bool:
    if settings.chat is not None:
        return settings.chat
    return settings.model is not None and bool(engine.tokenizer.inner.chat_template)


def _load_trainer(settings: Settings, model: str, dtype: str) -> Trainer:
    recipe = Recipe(
        learning_rate=settings.learning_rate,
        minibatches=settings.minibatches,
        micro_batch=settings.micro_batch,
        entropy_weight=settings.entropy_weight,
        temperature=settings.temperature,
        max_grad_norm=settings.max_grad_norm,
    )
    compute_dtype: torch.dtype = getattr(torch, dtype)
    return Trainer.load(model, recipe, compute_dtype=compute_dtype, device=settings.device, seed=settings.seed)


def _batches(tasks: Sequence[Task], size: int, seed: int) -> Iterator[list[Task]]:
    """Yield batches without end; each pass over the tasks has a new random order."""
    shuffle = random.Random(seed)
    waiting: list[Task] = []
    while True:
        batch: list[Task] = []
        while len(batch) < size:
            if not waiting:
                waiting = shuffle.sample(tasks, len(tasks))
            batch.append(waiting.pop())
        yield batch


def _samples(rollout: _Rollout, n: int) -> list[Sample]:
    advantages = group_advantages(torch.tensor(rollout.rewards).view(-1, n)).flatten().tolist()
    return [
        Sample(completion.prompt_token_ids, completion.token_ids, _logprobs(completion), advantage)
        for completion, advantage in zip(rollout.completions, advantages, strict=True)
        if completion.token_ids
    ]


def _logprobs(completion: Completion) -> Sequence[float]:
    if completion.logprobs is None:
        raise EngineInternalError(f"completion {completion.request_id} has no logprobs, although they were requested")
    return completion.logprobs


async def _timed(work: Awaitable[None]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun
