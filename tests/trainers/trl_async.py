# pyright: reportMissingImports=false
"""TRL's AsyncGRPOTrainer with rollouts and weights of an engine, by its two protocols: ``make test-trl``.

On a CPU, torch computes its attention, and no GPU is asked for its speed; the rest is TRL's own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from transformers import TrainerCallback

import tiny_async_grpo as tiny
from drivetrain import EngineDied, EngineState, InvalidRequest, InvalidWeights
from drivetrain_trainers.trl import async_rollouts
from tiny_grpo import BACKENDS, engine_of, logged

STEPS: Final = 16


class Strike(TrainerCallback):
    """Strikes once, after the second step."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike

    def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
        if state.global_step == 2:
            self._strike()


def opened(way: Any, args: Any, processing_class: Any, **more: Any) -> Any:
    """Return a trainer with the worker and the transfer of an engine."""
    given = {"train_dataset": tiny.rows(), "processing_class": processing_class, "reward_funcs": tiny.letters, **more}
    return tiny.trainer(args, processing_class, rollout_worker=way.worker(args, **given), weight_transfer=way.weights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reward_rises_while_the_engine_generates_with_the_weights_of_each_step(backend: str) -> None:
    with async_rollouts(engine_of(backend)) as way:
        training = opened(way, tiny.config(max_steps=STEPS), tiny.tokenizer())
        recorded = tiny.Recorded(training)
        training.train()
        assert way.engine.get_weight_version() == str(training.model_version) == str(STEPS + 1)
        assert way.engine.generate([[5, 6, 7]], {"max_new_tokens": 1}).completions
    rewards = logged(training, "reward")
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2
    assert len(recorded.versions) > STEPS // 2
    assert recorded.largest_gap() < 1e-4


def test_a_push_that_is_refused_ends_the_training_and_reads_every_tensor() -> None:
    with async_rollouts(engine_of("transformers")) as way:
        training = opened(way, tiny.config(max_steps=2), tiny.tokenizer())
        with torch.no_grad():
            next(training.model.parameters()).fill_(float("nan"))
        read: list[str] = []
        own = training._streaming_iter

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in own():
                read.append(name)
                yield name, tensor

        training._streaming_iter = watched
        with pytest.raises(InvalidWeights, match="embed_tokens"):
            training.train()
        assert way.weights.version == 0
    assert len(read) == len(dict(training.model.named_parameters()))


def test_an_engine_that_dies_ends_the_training() -> None:
    with async_rollouts(engine_of("transformers", isolation="process")) as way:
        training = opened(way, tiny.config(max_steps=50), tiny.tokenizer())

        host = way.engine.engine
        training.add_callback(Strike(lambda: os.kill(host.host_pid or 0, signal.SIGKILL)))
        # The push is under way, or comes after the engine failed, or the worker is noticed first.
        with pytest.raises(EngineDied, match="was killed by SIGKILL"):
            training.train()
        assert training.state.global_step < 50


def test_a_worker_whose_engine_died_says_so() -> None:
    with async_rollouts(engine_of("transformers", isolation="process")) as way:
        worker = opened(way, tiny.config(max_steps=1), tiny.tokenizer()).rollout_worker
        way.weights.init_weight_transfer()
        with pytest.raises(RuntimeError, match="heartbeat stale"):
            worker.check_health(0.0)
        os.kill(way.engine.engine.host_pid or 0, signal.SIGKILL)
        while way.engine.state is not EngineState.FAILED:
            time.sleep(0.01)
        with pytest.raises(EngineDied, match="was killed by SIGKILL"):
            worker.check_health(0.0)


def test_a_trainer_that_resumes_goes_on_counting_its_weights() -> None:
    with async_rollouts(engine_of("transformers")) as way:
        training = opened(way, tiny.config(max_steps=1), tiny.tokenizer())
        training.rollout_worker.update_model_version(41)
        training.model_version = 41
        training.train()
        assert way.engine.get_weight_version() == str(training.model_version) == "43"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_budget": None}, "token_budget=None: TRL would ask a server of vLLM's for it"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_when_the_worker_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with async_rollouts(engine_of("transformers")) as way:
        with pytest.raises(InvalidRequest, match=message):
            way.worker(
                tiny.config(**settings),
                train_dataset=tiny.rows(),
                processing_class=tiny.tokenizer(),
                reward_funcs=tiny.letters,
            )
        assert way.engine.state is EngineState.CREATED
