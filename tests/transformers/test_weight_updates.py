"""Weight updates: their effect on answers and on requests in flight, and the engine's state after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import oracle
from drivetrain import (
    Completion,
    DeadlineExceeded,
    DiskSource,
    EngineState,
    EngineStateError,
    InferenceEngine,
    InvalidRequest,
    MemoryTag,
    PauseMode,
    SamplingParams,
    VersionSpan,
    WeightProbeFailed,
    WeightSyncError,
    WeightUpdateRequest,
    WeightVerifyFailed,
)
from drivetrain.types.weights import PrepareUpdate, WeightMessage, WeightReply
from drivetrain_weight_sync import LogprobProbe, WeightSync
from engines import HANGING, OpenEngine, until_generating

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAMPLED = SamplingParams(max_new_tokens=12, logprobs=0, ignore_eos=True, n=2)


LONG = 900
"""Tokens of a request that is still in flight when a push comes, also on a busy machine."""


def trained(model: Path, seed: int) -> PreTrainedModel:
    """Return the model after a step that changed every parameter."""
    torch.manual_seed(seed)
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    policy.eval()
    return policy


async def assert_serves(engine: InferenceEngine, policy: PreTrainedModel, version: str) -> None:
    """Check that the engine answers with this policy's logprobs, under this version."""
    output = await engine.generate(["a prompt of some tokens", "b"], SAMPLED)
    for completion in output.completions:
        assert_logprobs(completion, policy)
        assert completion.weight_versions == (VersionSpan(version, 0, 12),)
    assert engine.get_weight_version() == version


def assert_logprobs(completion: Completion, policy: PreTrainedModel) -> None:
    expected = oracle.logprobs_of(policy, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=2e-4)


@pytest_asyncio.fixture(loop_scope="session")
async def restored(engine: InferenceEngine, model: Path) -> AsyncIterator[None]:
    """Restore the shared engine's initial weights at the end."""
    yield
    await engine.load_weights_from_disk(str(model), "initial")


@pytest.mark.usefixtures("restored")
async def test_a_probe_compares_logprobs_after_each_commit(engine: InferenceEngine, model: Path) -> None:
    policy = trained(model, 6)
    sequences = [[1, 2, 3, 4, 5], [7, 8]]
    wrong = 0.0

    def logprobs() -> list[list[float]]:
        with torch.no_grad():
            rows = [policy(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in sequences]
        return [
            [row[i, ids[i + 1]].item() + wrong for i in range(len(ids) - 1)]
            for row, ids in zip(rows, sequences, strict=True)
        ]

    async with WeightSync.connect(policy, engine, probe=LogprobProbe(sequences, logprobs, 1e-3)) as sync:
        result = await sync.push(version="one")
        assert result.probe_gap is not None
        assert result.probe_gap < 2e-4
        wrong = 0.5
        with pytest.raises(WeightProbeFailed, match=r"differ from the trainer's by up to 0\.5") as failed:
            await sync.push(version="two")
        assert failed.value.gap == pytest.approx(0.5, abs=1e-3)
        assert engine.state is EngineState.READY
        await assert_serves(engine, policy, "two")
        wrong = float("nan")
        with pytest.raises(WeightProbeFailed, match="inf nats"):
            await sync.push(version="three")
        await engine.pause_generation("retract")
        assert (await sync.push(version="four")).probe_gap is None, "a paused engine scores nothing"
        await engine.continue_generation()
    few = LogprobProbe(sequences, lambda: [[0.0], [0.0]], 1e-3)
    async with WeightSync.connect(policy, engine, probe=few) as sync:
        with pytest.raises(InvalidRequest, match="one number for each token but the first"):
            await sync.push(version="five")
    for bad in ([], [[1]]):
        with pytest.raises(InvalidRequest, match="two tokens or more"):
            LogprobProbe(bad, logprobs, 1e-3)
    with pytest.raises(InvalidRequest, match="positive"):
        LogprobProbe(sequences, logprobs, 0.0)


@pytest.mark.usefixtures("restored")
async def test_a_plan_travels_once(engine: InferenceEngine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[PrepareUpdate] = []
    receive = engine.parts.backend.receive_weights

    async def noting(message: WeightMessage) -> WeightReply:
        if isinstance(message, PrepareUpdate):
            sent.append(message)
        return await receive(message)

    monkeypatch.setattr(engine.parts.backend, "receive_weights", noting)
    async with WeightSync.connect(trained(model, 5), engine) as sync:
        for version in ("one", "two"):
            await sync.push(version=version)
        with pytest.raises(InvalidRequest, match="digests"):
            await engine.prepare_weight_update(sent[0].request.model_copy(update={"digests": {}}))
        await sync.push(version="three")
        await sync.push(version="four")
    with_plan = [message.kept_plan is None for message in sent]
    assert with_plan == [True, False, True, True, False], "after one that failed nothing is known to be kept"
    for message, whole in zip(sent, with_plan, strict=True):
        assert message.request.plan is not None
        assert bool(message.request.plan.buckets) is whole


@pytest.mark.usefixtures("restored")
async def test_requests_stay_frozen_when_an_update_in_one_call_fails(
    engine: InferenceEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained(model, 9)
    in_flight = asyncio.create_task(engine.generate("in flight", SamplingParams(max_new_tokens=LONG, ignore_eos=True)))
    await until_generating(engine, 1)

    async with WeightSync.connect(policy, engine, mode=PauseMode.IN_PLACE) as sync:
        with monkeypatch.context() as patch:
            receive = engine.parts.backend.receive_weights

            async def spoiling(message: WeightMessage) -> WeightReply:
                if isinstance(message, PrepareUpdate):
                    digests = dict.fromkeys(message.request.digests or {}, 0)
                    message = replace(message, request=message.request.model_copy(update={"digests": digests}))
                return await receive(message)

            patch.setattr(engine.parts.backend, "receive_weights", spoiling)
            with pytest.raises(WeightVerifyFailed):
                await sync.push(version="bad")
        assert engine.state is EngineState.DIRTY
        done = (await engine.stats()).running
        await asyncio.sleep(0.3)
        assert not in_flight.done()
        assert done == (await engine.stats()).running == 1
        await sync.push(version="good")
    (completion,) = (await asyncio.wait_for(in_flight, HANGING)).completions
    assert [span.version for span in completion.weight_versions] == ["initial", "good"]
    await assert_serves(engine, policy, "good")


@pytest.mark.usefixtures("restored")
async def test_an_update_that_loads_at_once_takes_no_single_buckets(engine: InferenceEngine, model: Path) -> None:
    request = WeightUpdateRequest(version="new", source=DiskSource(path=str(model)))
    async with engine.weight_update(request, at_once=True):
        pass
    assert engine.get_weight_version() == "new"
    with pytest.raises(EngineStateError):
        async with engine.weight_update(request, at_once=True) as transaction:
            await transaction.load([0])
    assert engine.state is EngineState.DIRTY


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("indices", [5, "ab", ["a"], [-1], [2**70], [True], None])
async def test_what_is_no_index_of_a_bucket_is_refused_by_name(
    engine: InferenceEngine, model: Path, indices: list[int]
) -> None:
    request = WeightUpdateRequest(version="new", source=DiskSource(path=str(model)))
    with pytest.raises(InvalidRequest, match="indices="):
        async with engine.weight_update(request) as transaction:
            await transaction.load(indices)
    assert engine.state is EngineState.DIRTY


async def test_an_unexpected_error_before_an_update_begins_is_typed_and_the_engine_serves_on(
    open_engine: OpenEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(message: object) -> None:
        raise OSError("no space left on device")

    async with open_engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.parts.backend, "receive_weights", broken)
            with pytest.raises(WeightSyncError, match="'new' could not be prepared: OSError: no space left"):
                await engine.load_weights_from_disk(str(model), "new")
        await assert_serves(engine, oracle.load(model), "initial")


async def test_a_tensor_that_was_read_can_still_sleep(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        manifest = await engine.weight_manifest()
        await engine.get_weights_by_name(manifest.tensors[0].name)
        await engine.sleep_weights_only()
        assert (await engine.stats()).weight_bytes < 1000
        await engine.wake_up_weights_only()


async def test_weights_whose_sleep_timed_out_sleep_again_and_come_back(
    open_engine: OpenEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine() as engine:
        backend = engine.parts.backend
        sleep = backend.sleep

        async def late(tags: frozenset[MemoryTag]) -> None:
            await sleep(tags)
            raise DeadlineExceeded("timed out after 0 s waiting for the engine to fall asleep")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "sleep", late)
            with pytest.raises(DeadlineExceeded):
                await engine.sleep()
        await engine.sleep()
        assert (await engine.stats()).weight_bytes < 1000
        await engine.wake_up()
        await engine.load_weights_from_disk(str(model), "new")
        await assert_serves(engine, oracle.load(model), "new")
