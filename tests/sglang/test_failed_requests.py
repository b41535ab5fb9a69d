"""A row from which no token can be drawn ends its request, in the scheduler and in the backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.backend.base import GenerateRequest
from drivetrain.errors import NonFiniteLogits, NoTokenAllowed
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_sglang import translate
from drivetrain_sglang.in_engine import failed_requests
from drivetrain_sglang.in_engine.worker import Worker


def request(**fields: object) -> GenerateRequest:
    params = SamplingParams.model_validate(fields)
    return GenerateRequest("r", [1, 2], params, params.max_new_tokens or 0, (), LogprobsMode.RAW)


def ended(request: GenerateRequest, message: str) -> None:
    collected = translate.Collected(request)
    reason = {"type": "abort", "message": message}
    collected.add({"output_ids": [7, 0], "meta_info": {"finish_reason": reason}})
    collected.result("v")


def test_a_failed_row_becomes_the_error_that_names_the_request() -> None:
    nan = translate.RowFailure(no_token=False, token=1, is_cached=True)
    assert translate.RowFailure.of({"meta_info": {"finish_reason": {"type": "abort", "message": nan.message()}}}) == nan
    with pytest.raises(NonFiniteLogits, match=r"request r: .* output token 1"):
        ended(request(max_new_tokens=4), nan.message())
    with pytest.raises(NonFiniteLogits, match="its prompt"):
        ended(request(max_new_tokens=0), nan.message())
    masked = translate.RowFailure(no_token=True, token=1, is_cached=False)
    with pytest.raises(NoTokenAllowed) as caught:
        ended(request(max_new_tokens=4, min_new_tokens=3), masked.message())
    assert caught.value.field == "sampling_params.min_new_tokens"
    ended(request(max_new_tokens=4), "Aborted")  # by its caller
    assert translate.RowFailure.of({"meta_info": {"finish_reason": {"type": "length"}}}) is None


def req(**fields: Any) -> Any:
    known = {"is_retracted": False, "inflight_middle_chunks": 0, "finished": lambda: False}
    return SimpleNamespace(**{**known, **fields})


def test_rows_end_alone_and_a_chunk_that_failed_ends_its_request_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[object, int, bool]] = []
    monkeypatch.setattr(
        failed_requests, "_end", lambda one, failure, *, is_cached: said.append((one, failure, is_cached))
    )
    fine, nan, empty, chunk, over = req(), req(), req(), req(inflight_middle_chunks=1), req(finished=lambda: True)
    logits = torch.zeros(5, 3)
    logits[1, 2], logits[2], logits[3, 0], logits[4] = torch.nan, -torch.inf, torch.inf, torch.nan
    step = SimpleNamespace(logits_output=SimpleNamespace(), copy_done=None)
    assert failed_requests.end_failed(SimpleNamespace(reqs=[fine]), step) == []
    assert failed_requests.note(step.logits_output, logits.amax(-1)).tolist() == [False, True, True, True, True]
    batch = SimpleNamespace(reqs=[fine, nan, empty, chunk, over])
    assert failed_requests.end_failed(batch, step) == [nan, empty]
    assert [(one is nan, is_cached) for one, _, is_cached in said] == [(True, False), (False, False)]
    chunk.inflight_middle_chunks = 0
    failed_requests.note(step.logits_output, torch.zeros(1))
    assert failed_requests.end_failed(SimpleNamespace(reqs=[chunk]), step) == [chunk]
    assert said[-1][2], "the first chunk is in the prefix cache"


@pytest.mark.parametrize("at", ["req", "kv"])
def test_what_a_failed_request_wrote_is_zeroed_and_no_more(at: str) -> None:
    held = [torch.full((9, 2, 3), torch.nan), torch.full((9, 2, 3), torch.nan)]
    scales = torch.ones(2)
    cache = SimpleNamespace(k_buffer=held[:1], v_buffer=held[1:], scales=scales)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: cache, size=8),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.tensor([[0, 0, 0, 0], [3, 5, 7, 1]], dtype=torch.int32)),
        enable_overlap=False,
        waiting_queue=[],
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        is_fully_idle=lambda: True,
        flush_cache=lambda: True,
    )
    worker = Worker(scheduler)
    found = {"req_pool_idx": 1, "cache_protected_len": 1}
    kv = SimpleNamespace(kv_allocated_len=3, **(found if at == "kv" else {}))
    worker.erase([req(kv=kv, **(found if at == "req" else {}))])
    for tensor in held:
        assert [row for row in range(9) if not tensor[row].isnan().any()] == [5, 7]
    worker.reset_prefix_cache()
    assert not any(tensor.isnan().any() for tensor in held), "an idle engine's cache is cleaned as a whole"
    assert scales.tolist() == [1, 1]
    held[0].fill_(2.0)
    worker.reset_prefix_cache()
    assert held[0].eq(2).all(), "only after a request failed"
