# pyright: reportMissingImports=false
"""TRL's distillation loop with ``drivetrain serve`` as its student and its teacher: ``make test-trl-teacher``."""

from __future__ import annotations

import importlib
import multiprocessing
import queue
import threading
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer
from trl.experimental.async_distillation.async_rollout_worker import _AsyncRolloutLoop

from tool_conversation import QUESTION, Score

SAMPLES: Final = 6
TOP: Final = 3
"""Number of the teacher's most likely tokens at each position."""


def rollouts(url: str, model: Path) -> list[Any]:
    """Run TRL's loop until it has sampled and scored ``SAMPLES`` completions."""
    importlib.import_module("accelerate").PartialState()  # as TRL's worker process does, for its logs
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples, failures = queue.Queue[Any](), queue.Queue[Any]()
    shared = multiprocessing.get_context("spawn")
    loop = _AsyncRolloutLoop(
        model_name="policy",
        dataset=datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": QUESTION}]]}),
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=samples,
        model_version_value=shared.Value("i", 0),
        heartbeat_value=shared.Value("d", 0.0),
        failed_event=shared.Event(),
        exception_info_queue=failures,
        metrics_queue=queue.Queue(),
        max_inflight_tasks=2,
        vllm_server_url=url,
        teacher_server_urls={"default": url},
        teacher_top_k=TOP,
        max_tokens=12,
        temperature=2.0,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    found: list[Any] = []
    try:
        while len(found) < SAMPLES:
            try:
                found.append(samples.get(timeout=1))
            except queue.Empty:
                assert thread.is_alive(), failures.get(timeout=1)
    finally:
        if thread.is_alive():
            loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join()
    return found


def test_a_teacher_scores_tokens_at_any_rank(url: str, model: Path, score: Score) -> None:
    unlikely = 0
    for sample in rollouts(url, model):
        ids = sample.input_ids.tolist()
        expected = [0.0, *score(ids)]
        assert sample.completion_mask.sum() > 0
        for at in np.flatnonzero(sample.completion_mask):
            scores = zip(sample.teacher_topk_ids[at].tolist(), sample.teacher_topk_logprobs[at].tolist(), strict=True)
            found = {token: logprob for token, logprob in scores if token >= 0}
            assert found[ids[at]] == pytest.approx(expected[at], abs=1e-3)
            assert [*found.values()] == sorted(found.values(), reverse=True), "the most likely token is not first"
            assert len(found) in (TOP, TOP + 1)
            unlikely += len(found) > TOP
    assert unlikely, "no sampled token was outside of the most likely ones"
