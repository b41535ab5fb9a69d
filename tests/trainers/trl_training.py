# pyright: reportMissingImports=false
"""TRL's own GRPOTrainer learns on every backend, by rollout_func and behind use_vllm: ``make test-trl``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from drivetrain import SyncEngine, sync_engine
from drivetrain_trainers.trl import generation, rollout
from drivetrain_weight_sync import LoraSync, WeightSync
from tiny_grpo import BACKENDS, PROMPTS, RANK, SAMPLES, engine_of, letters, logged, policy, trainer

STEPS: Final = 16
LORA: Final = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
KINDS: Final = ("full", "merged", "adapter")


class Judge:
    """A reward function that keeps the training step and the weight versions of every rollout."""

    __name__ = "judge"

    def __init__(self, engine: SyncEngine) -> None:
        self.engine = engine
        self.seen: list[tuple[int, set[str | None]]] = []

    def __call__(
        self,
        completions: Sequence[str],
        trainer_state: Any,
        weight_version: Sequence[str | None] | None = None,
        **_: object,
    ) -> list[float]:
        versions = set(weight_version or ()) | {self.engine.get_weight_version()}
        self.seen.append((trainer_state.global_step, versions))
        return letters(completions)

    def require_own_versions(self, steps: Sequence[int]) -> None:
        assert self.seen == [(step, {str(step)}) for step in steps]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("through", ["rollout_func", "use_vllm"])
def test_the_reward_rises_with_the_weights_of_each_step(through: str, backend: str, kind: str) -> None:
    config = engine_of(backend, **(LORA if kind == "adapter" else {}))
    lora_name = "policy" if kind == "adapter" else None
    made = policy(None if kind == "full" else {})
    settings: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 3e-3 if kind == "full" else 1e-2}
    if through == "rollout_func":
        with rollout(config, lora_name=lora_name) as rolling:
            judge = Judge(rolling.engine)
            training = trainer(made, judge, rollout_func=rolling, **settings)
            training.train()
    else:
        with generation(config, lora_name=lora_name) as replaced:
            judge = Judge(replaced.engine)
            training = trainer(made, judge, use_vllm=True, **settings)
            training.train()
        differences = logged(training, "sampling/sampling_logp_difference/max")
        assert len(differences) == STEPS
        assert max(differences) <= 1e-4
        ratios = [logged(training, f"sampling/importance_sampling_ratio/{which}") for which in ("min", "max")]
        assert all(abs(ratio - 1) < 1e-3 for some in ratios for ratio in some)
    judge.require_own_versions(range(STEPS))
    rewards = logged(training, "reward")
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8


class Pushes:
    """Counts the pushes of weights, which go on as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for sync in (WeightSync, LoraSync):
            push = sync.push

            async def counted(sync: Any, *, version: str, push: Any = push) -> object:
                self.count += 1
                return await push(sync, version=version)

            monkeypatch.setattr(sync, "push", counted)


SCHEDULES: Final[dict[str, tuple[dict[str, int], list[int]]]] = {
    # per_device_train_batch_size is a quarter of the prompts' samples here.
    "gradient accumulation": ({"gradient_accumulation_steps": 4}, [0, 1, 2]),
    "several rollouts a step": ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, [0, 0, 1, 1, 2, 2]),
    "several steps a rollout": ({"steps_per_generation": 4}, [0, 4]),
    "several iterations": ({"steps_per_generation": 2, "num_iterations": 2}, [0, 4]),
}


@pytest.mark.parametrize("through", ["rollout_func", "use_vllm"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_are_pushed_when_the_optimizer_has_stepped(
    schedule: str, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, steps = SCHEDULES[schedule]
    pushes = Pushes(monkeypatch)
    more: dict[str, Any] = {"per_device_train_batch_size": SAMPLES, **settings}
    more["max_steps"] = 3 if "gradient_accumulation_steps" in settings else 8
    if through == "rollout_func":
        with rollout(engine_of("transformers")) as rolling:
            judge = Judge(rolling.engine)
            trainer(policy(), judge, rollout_func=rolling, **more).train()
    else:
        with generation(engine_of("transformers")) as replaced:
            judge = Judge(replaced.engine)
            trainer(policy(), judge, use_vllm=True, **more).train()
    judge.require_own_versions(steps)
    assert pushes.count == len(set(steps))


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "lora", [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_a_merged_push_equals_merge_and_unload_and_leaves_the_policy_as_it_was(lora: dict[str, object]) -> None:
    with rollout(engine_of("transformers")) as rolling:
        compared = 0

        def watched(prompts: list[object], training: Any) -> object:
            nonlocal compared
            before = bits(training.model)
            result = rolling(prompts, training)
            assert bits(training.model) == before
            merged = bits(copy.deepcopy(training.model).merge_and_unload())
            for spec in rolling.engine.weight_manifest().tensors:
                assert rolling.engine.get_weights_by_name(spec.name).data == merged[spec.name], spec.name
                compared += 1
            return result

        training = trainer(policy(lora), rollout_func=watched, max_steps=3, learning_rate=1e-2)
        start = bits(training.model)
        training.train()
        assert bits(training.model) != start
    assert compared > 3 * 20


def test_an_engine_that_sleeps_between_rollouts_gets_its_weights_again() -> None:
    with rollout(engine_of("transformers"), sleep=True) as rolling:
        judge = Judge(rolling.engine)
        training = trainer(policy(), judge, rollout_func=rolling, max_steps=STEPS)
        training.train()
        assert rolling.engine.state.value == "asleep"
    judge.require_own_versions(range(STEPS))
    assert logged(training, "reward")[-1] > 0.8


def test_an_engine_of_the_callers_stays_open_for_the_next_trainer() -> None:
    with sync_engine(engine_of("transformers")) as engine:
        for _ in range(2):
            with rollout(engine) as rolling:
                judge = Judge(engine)
                trainer(policy(), judge, rollout_func=rolling).train()
            judge.require_own_versions([0, 1])
        assert engine.generate("x", {"max_new_tokens": 1}).completions


@pytest.mark.parametrize("through", ["rollout_func", "use_vllm"])
def test_evaluation_is_generated_with_the_weights_of_the_last_step(through: str) -> None:
    opened: Any = rollout if through == "rollout_func" else generation
    with opened(engine_of("transformers")) as way:
        judge = Judge(way.engine)
        more = {"rollout_func": way} if through == "rollout_func" else {"use_vllm": True}
        training = trainer(policy(), judge, num_generations_eval=2, per_device_eval_batch_size=8, **more)
        training.train()
        training.evaluate()
    judge.require_own_versions([0, 1, *[2] * (len(judge.seen) - 2)])
    assert len(judge.seen) > 2


def test_prompts_come_back_as_they_went_each_with_its_own_completions() -> None:
    with rollout(engine_of("transformers")) as rolling:
        training = trainer(policy(), rollout_func=rolling)
        prompts: list[Any] = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[2]]
        found = rolling(prompts, training)
    assert found["prompt_ids"] == training.processing_class(prompts)["input_ids"]
    assert [len(ids) for ids in found["completion_ids"]] == [len(one) for one in found["logprobs"]]
    model = policy()
    for prompt, ids, logprobs in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        assert logprobs == pytest.approx(own, abs=1e-4)
    assert found["completion_ids"][0] != found["completion_ids"][1]
