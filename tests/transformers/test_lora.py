"""LoRA adapters chosen per request, held against peft's own model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import oracle
from drivetrain import (
    Completion,
    EngineBusy,
    GenerationOutput,
    InvalidRequest,
    InvalidWeights,
    LoraSource,
    SamplingParams,
    WeightSyncError,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import LoraSync, WeightSync
from engines import OpenEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARAMS = SamplingParams(max_new_tokens=20, logprobs=0, ignore_eos=True, n=2)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters with other targets and ranks, both far from doing nothing."""
    folders: dict[str, Path] = {}
    for seed, (name, targets, rank) in enumerate([("a", ["q_proj", "down_proj"], 4), ("b", ["v_proj", "lm_head"], 8)]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        with torch.no_grad():
            for parameter_name, parameter in wrapped.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_(std=0.3)
        folders[name] = tmp_path_factory.mktemp(name)
        wrapped.save_pretrained(str(folders[name]))
    return folders


def folders_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def with_adapter(model: Path, folder: Path | None) -> PreTrainedModel:
    base = AutoModelForCausalLM.from_pretrained(model)
    return (PeftModel.from_pretrained(base, folder) if folder else base).eval()  # type: ignore[return-value]


def assert_made_by(reference: PreTrainedModel, completion: Completion) -> None:
    expected = oracle.logprobs_of(reference, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_requests_in_one_batch_use_different_adapters(
    open_engine: OpenEngine, model: Path, adapters: dict[str, Path], isolation: str
) -> None:
    prompt = "the same prompt for all of them, long enough to be cached"
    async with open_engine(enable_lora=True, isolation=isolation) as engine:
        for name, folder in adapters.items():
            await engine.load_lora_adapter(name, str(folder))
        names = [None, "a", "b"]
        outputs: list[GenerationOutput] = []
        for _ in range(2):
            outputs = await asyncio.gather(*(engine.generate(prompt, PARAMS, lora=name) for name in names))
            for chosen, output in zip(names, outputs, strict=True):
                for completion in output.completions:
                    assert_made_by(with_adapter(model, adapters.get(chosen or "")), completion)
        assert outputs[1].completions[0].cached_tokens > 0, "each adapter has its own prefixes"


async def test_an_unloaded_adapter_is_refused_and_the_base_is_as_before(
    open_engine: OpenEngine, model: Path, adapters: dict[str, Path]
) -> None:
    async with open_engine(enable_lora=True) as engine:
        await engine.load_lora_adapter("a", str(adapters["a"]))
        task = asyncio.create_task(
            engine.generate("x", SamplingParams(max_new_tokens=300, ignore_eos=True), lora="a", request_ids=["r"])
        )
        await asyncio.sleep(0.05)
        with pytest.raises(EngineBusy, match="1 requests under way"):
            await engine.unload_lora_adapter("a")
        await engine.abort("r")
        await task
        await engine.unload_lora_adapter("a")
        with pytest.raises(InvalidRequest, match="lora='a' is not loaded; loaded: none"):
            await engine.generate("x", lora="a")
        with pytest.raises(InvalidRequest, match="'a' is not loaded"):
            await engine.unload_lora_adapter("a")
        output = await engine.generate("x", PARAMS)
        assert_made_by(oracle.load(model), output.completions[0])
        # The same name may come back as another adapter, and must not find the caches of the first.
        await engine.load_lora_adapter("a", str(adapters["b"]))
        output = await engine.generate("x", PARAMS, lora="a")
        assert_made_by(with_adapter(model, adapters["b"]), output.completions[0])


async def test_limits_and_bad_folders_are_refused_by_name(
    open_engine: OpenEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    async with open_engine(enable_lora=True, max_loras=1, max_lora_rank=4) as engine:
        with pytest.raises(InvalidRequest, match="max_lora_rank=4"):
            await engine.load_lora_adapter("b", str(adapters["b"]))
        with pytest.raises(InvalidRequest, match=r"adapter_config\.json"):
            await engine.load_lora_adapter("c", str(tmp_path))
        await engine.load_lora_adapter("a", str(adapters["a"]))
        with pytest.raises(InvalidRequest, match="max_loras=1"):
            await engine.load_lora_adapter("again", str(adapters["a"]))
        with pytest.raises(InvalidRequest, match="is loaded already"):
            await engine.load_lora_adapter("a", str(adapters["a"]))


async def test_the_base_can_be_updated_beneath_an_adapter(
    open_engine: OpenEngine, model: Path, adapters: dict[str, Path]
) -> None:
    async with open_engine(enable_lora=True) as engine:
        await engine.load_lora_adapter("a", str(adapters["a"]))
        policy = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
        async with WeightSync.connect(policy, engine) as sync:
            await sync.push(version="step-1")
        output = await engine.generate("x", PARAMS, lora="a")
        reference = PeftModel.from_pretrained(policy, adapters["a"]).eval()
        assert_made_by(reference, output.completions[0])  # type: ignore[arg-type]
        assert output.completions[0].weight_version == "step-1"


async def test_a_trainer_pushes_its_adapter_after_every_step(
    open_engine: OpenEngine, model: Path, tmp_path: Path
) -> None:
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules=["q_proj"]))
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    lora_b = next(p for name, p in policy.named_parameters() if "lora_B" in name)
    async with open_engine(enable_lora=True, max_loras=1) as engine:
        base = await engine.generate("x", greedy)
        async with LoraSync(policy, engine, directory=tmp_path) as sync:
            for step in range(3):
                with torch.no_grad():
                    lora_b.copy_(torch.randn(lora_b.shape, generator=torch.Generator().manual_seed(step)))
                result = await sync.push(version=f"step-{step}")
                assert result.version == engine.get_weight_version() == f"step-{step}"
                assert result.tensors > 0
                assert 0 < result.update_seconds < result.total_seconds
                assert len(folders_in(tmp_path)) == 1
                output = await engine.generate("x", PARAMS, lora="policy")
                assert_made_by(policy.eval(), output.completions[0])  # type: ignore[arg-type]
                assert (await engine.generate("x", greedy)).completions[0].token_ids == base.completions[0].token_ids
            with torch.no_grad():
                lora_b[0, 0] = torch.nan
            with pytest.raises(InvalidWeights, match="lora_B"):
                await sync.push(version="step-3")
            with pytest.raises(InvalidRequest, match="version"):
                await sync.push(version="")
        assert not folders_in(tmp_path)
        with pytest.raises(WeightSyncError, match="closed"):
            await sync.push(version="step-4")
        assert engine.get_weight_version() == "step-2"
        output = await engine.generate("x", PARAMS, lora="policy")
        assert output.completions[0].weight_version == "step-2"


async def test_an_adapter_is_no_update_of_all_weights(open_engine: OpenEngine, adapters: dict[str, Path]) -> None:
    async with open_engine(enable_lora=True) as engine:
        request = WeightUpdateRequest(version="v", source=LoraSource(lora_name="a", path=str(adapters["a"])))
        with pytest.raises(InvalidRequest, match="update_named_weights"):
            await engine.prepare_weight_update(request)
        with pytest.raises(InvalidRequest, match="update_named_weights"):
            async with engine.weight_update(request):
                pass
        with pytest.raises(ValueError, match="no keep_prefix_cache"):
            WeightUpdateRequest(version="v", source=request.source, keep_prefix_cache=True)


async def test_a_model_without_the_adapter_is_refused(model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(InvalidRequest, match="no adapter 'default'; it has: none"):
        LoraSync(plain, None)  # type: ignore[arg-type]
    policy = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(InvalidRequest, match="no adapter 'critic'; it has: default"):
        LoraSync(policy, None, adapter="critic")  # type: ignore[arg-type]
