"""Scores beside vLLM's own prompt logprobs, with its second model runner, which runs on GPUs only."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from drivetrain.types.token_scores import Scoring
from drivetrain_vllm.in_engine import prompt_scores
from drivetrain_vllm.translate import SCORES, SCORING

PROMPT, VOCABULARY, OWN = [3, 1, 4, 1], 8, 2
UPDATE = "_update_prompt_logprobs"


class Tensors(NamedTuple):
    """VLLM's ``LogprobsTensors``."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


class Worker:
    """VLLM's ``PromptLogprobsWorker``: it gives prompt logprobs once, also if a request is preempted afterwards."""

    def __init__(self) -> None:
        self.given: set[str] = set()

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Take note of a new or resumed request."""

    def remove_request(self, req_id: str) -> None:
        """Forget a finished or preempted request."""

    def compute_prompt_logprobs(
        self, logits_fn: Any, hidden_states: Any, batch: Any, all_token_ids: Any, computed: Any, lengths: Any
    ) -> dict[str, Tensors]:
        new = set(batch.req_ids) - self.given
        self.given |= new
        rows = len(PROMPT) - 1
        own = Tensors(torch.ones(rows, OWN, dtype=torch.int32), torch.full((rows, OWN), -1.0), torch.ones(rows))
        return dict.fromkeys(new, own)


class Processor:
    """VLLM's ``LogprobsProcessor``."""

    num_prompt_logprobs: int | None = OWN - 1
    prompt_logprobs: Any = None

    def keep(self, tensors: Tensors) -> None:
        """Keep the prompt logprobs; vLLM's name is private."""
        self.prompt_logprobs = SimpleNamespace(came=tensors)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    # Registering changes these classes.
    found = SimpleNamespace(
        worker=type("Worker", (Worker,), {}), processor=type("Processor", (Processor,), {UPDATE: Processor.keep})
    )
    runner = type("Runner", (), {"_update_states": None, "_get_prompt_logprobs_dict": None})
    contents = {
        "vllm.v1.engine.logprobs": {"LogprobsProcessor": found.processor},
        "vllm.v1.outputs": {"LogprobsTensors": Tensors},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": runner},
        "vllm.v1.worker.gpu.sample.prompt_logprob": {"PromptLogprobsWorker": found.worker},
    }
    for path, names in contents.items():
        parents = path.split(".")
        for end in range(1, len(parents) + 1):
            name = ".".join(parents[:end])
            if name not in contents or name == path:
                module = ModuleType(name)
                vars(module).update(names if name == path else {})
                monkeypatch.setitem(sys.modules, name, module)
    prompt_scores.register()
    return found


def step(worker: Worker) -> dict[str, Tensors]:
    """Read the whole prompt of a request in one step."""
    batch = SimpleNamespace(
        req_ids=["a"],
        idx_mapping_np=np.array([0]),
        query_start_loc_np=np.array([0, len(PROMPT)]),
        num_computed_prefill_tokens_np=np.array([0]),
    )
    states = torch.randn(len(PROMPT), VOCABULARY)
    return worker.compute_prompt_logprobs(
        lambda rows: rows, states, batch, torch.tensor([PROMPT]), None, np.array([len(PROMPT)])
    )


@pytest.mark.parametrize("prompt_logprobs", [None, OWN - 1])
def test_a_preempted_request_does_not_get_scores_as_its_prompt_logprobs(
    vllm: SimpleNamespace, prompt_logprobs: int | None
) -> None:
    worker = vllm.worker()
    params = SimpleNamespace(extra_args={SCORING: Scoring(2, 1.0, 0, 0, b"")}, prompt_logprobs=prompt_logprobs)
    worker.given = {"a"} if prompt_logprobs is None else set()
    worker.add_request("a", 0, params)
    (found,) = step(worker).values()
    own = 0 if prompt_logprobs is None else OWN
    assert found.logprobs.shape[1] == own + 1
    worker.remove_request("a")
    worker.add_request("a", 0, params)
    assert len(step(worker)) == (prompt_logprobs is None)


def test_scores_are_split_off_prompt_logprobs(vllm: SimpleNamespace) -> None:
    worker, processor = vllm.worker(), vllm.processor()
    params = SimpleNamespace(extra_args={SCORING: Scoring(2, 1.0, 0, 0, b"")}, prompt_logprobs=OWN - 1)
    worker.add_request("a", 0, params)
    (found,) = step(worker).values()
    getattr(processor, UPDATE)(found)
    assert processor.prompt_logprobs.came.logprobs.tolist() == [[-1.0] * OWN] * (len(PROMPT) - 1)
    _, scores = getattr(processor.prompt_logprobs, SCORES)
    assert scores.shape == (len(PROMPT) - 1, 1)
    assert (scores[-2:] < 0).all()
