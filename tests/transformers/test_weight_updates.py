"""Weight updates: their effect on answers and on requests in flight, and the engine's state after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import oracle
from drivetrain import (
    Capability,
    Completion,
    DiskSource,
    EngineState,
    EngineStateError,
    InferenceEngine,
    InvalidRequest,
    InvalidWeights,
    MemoryTag,
    PauseMode,
    SamplingParams,
    VersionSpan,
    WeightPlanMismatch,
    WeightProbeFailed,
    WeightSyncError,
    WeightTransferFailed,
    WeightUpdateRequest,
    WeightVerifyFailed,
)
from drivetrain.testing import tiny_model
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
async def test_each_push_is_what_is_served_next(engine: InferenceEngine, model: Path) -> None:
    policy = trained(model, 1)
    sync = WeightSync.connect(policy, engine)
    for step in range(3):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.05)
        await sync.push(version=f"step-{step}")
        await assert_serves(engine, policy, f"step-{step}")
    await sync.close()


@pytest.mark.usefixtures("restored")
async def test_a_checkpoint_on_disk_is_what_is_served_next(
    engine: InferenceEngine, model: Path, tmp_path: Path
) -> None:
    policy = trained(model, 2)
    policy.save_pretrained(tmp_path)
    await engine.load_weights_from_disk(str(tmp_path), "from-disk")
    await assert_serves(engine, policy, "from-disk")


@pytest.mark.usefixtures("restored")
async def test_a_broadcast_of_a_single_bucket_is_what_is_served_next(engine: InferenceEngine, model: Path) -> None:
    policy = trained(model, 2)
    async with WeightSync.connect(policy, engine, "broadcast") as sync, asyncio.timeout(60):
        assert (await sync.push(version="broadcast")).buckets == 1
    await assert_serves(engine, policy, "broadcast")


@pytest.mark.usefixtures("restored")
async def test_the_prefix_cache_of_older_weights_is_not_used(engine: InferenceEngine, model: Path) -> None:
    prompt = "a prompt that is long enough to be kept in the prefix cache"
    await engine.generate(prompt, SAMPLED)
    again = await engine.generate(prompt, SAMPLED)
    assert again.completions[0].cached_tokens > 0
    policy = trained(model, 3)
    sync = WeightSync.connect(policy, engine)
    await sync.push(version="new")
    output = await engine.generate(prompt, SAMPLED)
    assert [c.cached_tokens for c in output.completions] == [0, 0]
    for completion in output.completions:
        assert_logprobs(completion, policy)
    await sync.close()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("mode", PauseMode)
async def test_an_update_while_requests_are_in_flight(engine: InferenceEngine, model: Path, mode: PauseMode) -> None:
    old, new = oracle.load(model), trained(model, 4)
    sync = WeightSync.connect(new, engine, mode=mode)
    params = SamplingParams(max_new_tokens=LONG, logprobs=0, ignore_eos=True)
    task = asyncio.create_task(engine.generate(["first", "second prompt"], params))
    await until_generating(engine, 2)
    await sync.push(version="new")
    assert engine.state is EngineState.READY
    completions = (await asyncio.wait_for(task, HANGING)).completions
    for completion in completions:
        count = len(completion.token_ids)
        assert completion.logprobs is not None
        actual = torch.tensor(completion.logprobs)
        by_old, by_new = oracle.logprobs_of(old, completion), oracle.logprobs_of(new, completion)
        if mode in (PauseMode.ABORT, PauseMode.WAIT):
            assert completion.weight_versions == (VersionSpan("initial", 0, count),)
            assert count == LONG if mode is PauseMode.WAIT else 0 < count < LONG
            torch.testing.assert_close(actual, by_old, rtol=0, atol=2e-4)
            continue
        first, second = completion.weight_versions
        assert (first.version, second.version, first.start, second.end) == ("initial", "new", 0, LONG)
        assert 0 < first.end == second.start < LONG
        torch.testing.assert_close(actual[: first.end], by_old[: first.end], rtol=0, atol=2e-4)
        gap = (actual[first.end :] - by_new[first.end :]).abs().max().item()
        if mode is PauseMode.RETRACT:
            assert gap < 2e-4, "the cache was recomputed by the new weights"
        else:
            assert gap > 1e-2, "the cache of the old weights was kept, so the logprobs are neither model's own"
    await assert_serves(engine, new, "new")
    await sync.close()


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


@pytest.mark.usefixtures("restored")
async def test_an_update_while_paused_leaves_the_engine_paused(engine: InferenceEngine, model: Path) -> None:
    policy = trained(model, 5)
    sync = WeightSync.connect(policy, engine)
    await engine.pause_generation("retract")
    await sync.push(version="paused")
    assert engine.state is EngineState.PAUSED
    late = asyncio.create_task(engine.generate("late", SAMPLED))
    await asyncio.sleep(0.1)
    assert not late.done()
    await engine.continue_generation()
    for completion in (await late).completions:
        assert completion.weight_version == "paused"
    await sync.close()


@pytest.mark.usefixtures("restored")
async def test_weights_that_slept_are_not_served_before_an_update(engine: InferenceEngine, model: Path) -> None:
    policy = trained(model, 6)
    sync = WeightSync.connect(policy, engine)
    before = await engine.stats()
    await engine.sleep()
    asleep = await engine.stats()
    assert asleep.weight_bytes < before.weight_bytes / 10
    assert asleep.kv_cache_bytes == 0
    with pytest.raises(EngineStateError, match="asleep"):
        await engine.generate("x")
    with pytest.raises(EngineStateError, match="wake the weights up first"):
        await sync.push(version="too early")
    await engine.wake_up([MemoryTag.WEIGHTS])
    await sync.push(version="awake")
    await engine.wake_up([MemoryTag.KV_CACHE])
    await assert_serves(engine, policy, "awake")
    await sync.close()


async def test_waking_without_an_update_does_not_serve(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await engine.sleep_weights_only()
        await engine.wake_up_weights_only()
        assert engine.state is EngineState.DIRTY
        with pytest.raises(EngineStateError, match="not kept"):
            await engine.generate("x")
        with pytest.raises(EngineStateError, match="push a complete weight update"):
            await engine.continue_generation()


def bad_sources(policy: PreTrainedModel) -> dict[str, tuple[dict[str, torch.Tensor], type[Exception], str]]:
    good = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    nan = good[name].clone()
    nan[3, 4] = float("nan")
    return {
        "missing": ({n: t for n, t in good.items() if n != name}, WeightPlanMismatch, name),
        "extra": ({**good, "model.layers.7.ghost": torch.ones(2)}, WeightPlanMismatch, "model.layers.7.ghost"),
        "shape": ({**good, name: good[name][:-1]}, WeightPlanMismatch, name),
        "dtype": ({**good, name: good[name].double()}, WeightPlanMismatch, "float64"),
        "nan": ({**good, name: nan}, InvalidWeights, name),
    }


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "dtype", "nan"])
async def test_a_bad_tensor_is_refused_by_name_and_the_engine_serves_on(
    engine: InferenceEngine, model: Path, fault: str, tmp_path: Path
) -> None:
    tensors, error, says = bad_sources(trained(model, 7))[fault]
    sync = WeightSync.connect(tensors, engine)
    with pytest.raises(error, match=says):
        await sync.push(version="bad")
    await sync.close()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(error, match=says):
        await engine.load_weights_from_disk(str(tmp_path), "bad")
    assert engine.state is EngineState.READY
    await assert_serves(engine, oracle.load(model), "initial")


async def test_a_missing_folder_is_refused_and_the_engine_serves_on(engine: InferenceEngine, model: Path) -> None:
    with pytest.raises(Exception, match="no/such/folder"):
        await engine.load_weights_from_disk("/no/such/folder", "x")
    await assert_serves(engine, oracle.load(model), "initial")


@pytest.mark.usefixtures("restored")
async def test_an_update_that_breaks_off_leaves_the_engine_dirty_until_a_full_push(
    engine: InferenceEngine, model: Path, tmp_path: Path
) -> None:
    policy = trained(model, 8)
    policy.save_pretrained(tmp_path)
    in_flight = asyncio.create_task(
        engine.generate("in flight", SamplingParams(max_new_tokens=LONG, logprobs=0, ignore_eos=True))
    )
    await until_generating(engine, 1)
    request = WeightUpdateRequest(version="broken", source=DiskSource(path=str(tmp_path)))

    async def break_off() -> None:
        async with engine.weight_update(request) as transaction:
            await transaction.load([0])
            raise ConnectionError("the sender was lost")

    with pytest.raises(WeightTransferFailed, match="the sender was lost"):
        await break_off()
    assert engine.state is EngineState.DIRTY
    assert engine.is_paused
    assert engine.get_weight_version() == "initial"
    assert not in_flight.done(), "nothing is computed with weights that are half old and half new"
    with pytest.raises(EngineStateError, match="the sender was lost"):
        await engine.generate("x")
    await engine.load_weights_from_disk(str(tmp_path), "recovered")
    (completion,) = (await asyncio.wait_for(in_flight, HANGING)).completions
    assert [span.version for span in completion.weight_versions] == ["initial", "recovered"]
    await assert_serves(engine, policy, "recovered")


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


@pytest.mark.usefixtures("restored")
async def test_an_incomplete_update_is_not_committed(engine: InferenceEngine, model: Path) -> None:
    request = WeightUpdateRequest(version="partial", source=DiskSource(path=str(model)))
    with pytest.raises(WeightTransferFailed, match="were not loaded"):
        async with engine.weight_update(request):
            pass
    assert engine.state is EngineState.DIRTY


async def test_tensors_are_read_back_by_name_and_validated(engine: InferenceEngine, model: Path) -> None:
    reference = oracle.load(model)
    manifest = await engine.weight_manifest()
    parameters = dict(reference.named_parameters())
    for spec in manifest.tensors[:4]:
        data = await engine.get_weights_by_name(spec.name)
        tensor = torch.frombuffer(bytearray(data.data), dtype=torch.float32).reshape(data.spec.shape)
        assert torch.equal(tensor, parameters[spec.name])
    report = await engine.validate_weights()
    assert report.ok
    assert report.checked == len(manifest.tensors)
    integrity = await engine.check_weight_sync_integrity("initial")
    assert integrity.ok
    assert not (await engine.check_weight_sync_integrity("another")).ok


async def test_a_tensor_that_was_read_can_still_sleep(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        manifest = await engine.weight_manifest()
        await engine.get_weights_by_name(manifest.tensors[0].name)
        await engine.sleep_weights_only()
        assert (await engine.stats()).weight_bytes < 1000
        await engine.wake_up_weights_only()


async def test_the_weights_can_be_given_another_label(engine: InferenceEngine) -> None:
    await engine.update_weight_version("renamed")
    output = await engine.generate("x", SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert output.completions[0].weight_version == "renamed"
    await engine.update_weight_version("initial")


async def test_tied_weights_are_sent_once(open_engine: OpenEngine) -> None:
    folder = tiny_model("qwen2", tie_word_embeddings=True)
    async with open_engine(model=str(folder)) as engine:
        manifest = await engine.weight_manifest()
        assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        policy = trained(folder, 9)
        sync = WeightSync.connect(policy, engine)
        await sync.push(version="tied")
        await assert_serves(engine, policy, "tied")


async def test_sleep_really_gives_memory_back(open_engine: OpenEngine) -> None:
    import psutil

    folder = tiny_model("qwen2", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    async with open_engine(model=str(folder), isolation="process") as engine:
        host = psutil.Process(engine.host_pid or 0)
        await engine.generate(["warm up"] * 4, SamplingParams(max_new_tokens=100, ignore_eos=True))
        before, weights = host.memory_info().rss, (await engine.stats()).weight_bytes
        assert weights > 100e6
        await engine.sleep()
        asleep = host.memory_info().rss
        assert before - asleep > 0.9 * weights, (before, asleep, weights)
        await engine.wake_up()
        policy = trained(folder, 10)
        sync = WeightSync.connect(policy, engine)
        await sync.push(version="back")
        await assert_serves(engine, policy, "back")
        assert host.memory_info().rss > asleep + 0.9 * weights
        await sync.close()


async def test_the_strategy_follows_from_where_the_engine_runs(engine: InferenceEngine) -> None:
    inline = Capability.WEIGHTS_IN_PROCESS in engine.capabilities
    assert inline == (engine.isolation.value == "inline")
