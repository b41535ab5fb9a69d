# pyright: reportMissingImports=false
"""One rank of TRL's trainer, by DDP or FSDP2; a test reads its results: ``trl_rank.py OUT SETTINGS``, with RANK set."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from transformers import TrainerCallback

from drivetrain import DrivetrainError, EngineHandle, create_engine, sync_engine
from drivetrain_fleet import InferenceEngineClient
from drivetrain_trainers.trl import generation, rollout
from tiny_grpo import PROMPTS, SAMPLES, engine_of, letters, logged, policy, trainer

RANK = int(os.environ["RANK"])


def gap_of(model: Any, found: dict[str, list[Any]]) -> float:
    """Return the largest difference between the engine's logprobs and those of this rank's policy."""
    largest = 0.0
    for prompt, ids, logprobs in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        largest = max(largest, float((own - torch.tensor(logprobs)).abs().max()))
    return largest


FSDP2: Final = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"}}


def take_fsdp_on_a_cpu() -> None:
    """Let accelerate take FSDP2 on a CPU, which it does on accelerators alone: fully_shard and gloo need none."""
    state: Any = importlib.import_module("accelerate.state")
    made = state.AcceleratorState.__init__

    def on_a_cpu(self: object, *args: Any, **more: Any) -> None:
        state.PartialState(cpu=True).distributed_type = state.DistributedType.MULTI_XPU
        made(self, *args, **more)
        state.AcceleratorState.__init__ = made  # all later ones find the state

    state.AcceleratorState.__init__ = on_a_cpu


class Strike(TrainerCallback):
    """Does something to this rank, its policy or its engine once a step is over."""

    def __init__(self, what: str, step: int, way: Any) -> None:
        self.what = what
        self.step = step
        self.way = way

    def on_step_end(self, args: object, state: Any, control: object, model: Any = None, **_: object) -> None:
        """Strike, if the step is this one."""
        if state.global_step != self.step:
            return
        match self.what:
            case "refuse":
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))
            case "engine":
                os.kill(self.way.engine.engine.host_pid, signal.SIGKILL)


@contextmanager
def engine_in(out: Path, settings: dict[str, Any]) -> Iterator[object]:
    """Yield the engine's configuration; a fleet of such engines; or the handle of one that rank 0 owns."""
    config = engine_of(settings["backend"], **settings.get("engine", {}))
    if settings.get("fleet"):
        members = {f"engine-{index}": create_engine({**config, "seed": index}) for index in range(settings["fleet"])}
        yield InferenceEngineClient(members)
        return
    if not settings.get("one_handle"):
        yield config
        return
    told = out / "handle"
    with sync_engine(config) if RANK == 0 else nullcontext() as engine:
        if engine is not None:
            (out / "writing").write_text(json.dumps(asdict(engine.handle())))
            (out / "writing").rename(told)
        while not told.exists():
            time.sleep(0.05)
        yield EngineHandle(**json.loads(told.read_text()))


def main(out: Path, settings: dict[str, Any]) -> None:
    """Train, and write what this rank saw."""
    through, share = settings["through"], settings["share"]
    if settings.get("fsdp"):
        take_fsdp_on_a_cpu()
    strike = settings.get("strike") if settings.get("on") == RANK else None
    seen: dict[str, Any] = {"steps": [], "gaps": [], "first": None, "error": None}
    opened: Any = rollout if through == "rollout_func" else generation
    names = {"lora_name": "policy"} if settings.get("adapter") == "alone" else {}
    with engine_in(out, settings) as engine, opened(engine, share=share, **names) as way:

        def judge(completions: Sequence[str], trainer_state: Any, **more: Any) -> list[float]:
            versions = {*(more.get("weight_version") or ()), way.engine.get_weight_version()}
            seen["steps"].append([trainer_state.global_step, sorted(versions)])
            seen["first"] = seen["first"] or list(completions)
            return letters(completions)

        def watched(prompts: list[object], training: Any) -> object:
            if strike == "kill" and training.state.global_step == settings["at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            found = way(prompts, training)
            seen["gaps"].append(gap_of(training.model, found))
            return found

        # Half of a prompt's samples on each rank, so that both sample the same prompt.
        more: dict[str, Any] = {"per_device_train_batch_size": len(PROMPTS) * SAMPLES // 2}
        more |= {"max_steps": settings["steps"], **(FSDP2 if settings.get("fsdp") else {})}
        more |= {"learning_rate": 1e-2} if settings.get("adapter") else {}
        more |= {"rollout_func": watched} if through == "rollout_func" else {"use_vllm": True}
        try:
            training = trainer(policy({} if settings.get("adapter") else None), judge, **more)
            if strike is not None:
                training.add_callback(Strike(strike, settings["at"], way))
            seen["kind"] = str(training.accelerator.distributed_type.value)
            training.train()
            seen["rewards"] = logged(training, "reward")
            seen["trl_gaps"] = logged(training, "sampling/sampling_logp_difference/max")
        except DrivetrainError as error:
            seen["error"] = [type(error).__name__, str(error)]
        (out / f"{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
