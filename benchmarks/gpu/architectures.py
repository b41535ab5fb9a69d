"""Pushes of a bfloat16 policy to engines of many architectures, compared with engines that were loaded afresh.

    python benchmarks/gpu/architectures.py {sglang,vllm} [--only llama deepseek_v3 …] [--beside 5] [--minutes 8]
        [--json FILE] [--python PATH] [--device cpu] [--engine-kwargs JSON] [--blocks] [--sleep]

For each architecture two tiny models are made with random weights in bfloat16: a base and a changed one. One engine is
started from each. The base's engine then takes the changed policy, a module of transformers, through shared memory,
must answer as the changed model's engine does, and takes the base's weights back through CUDA IPC, then the changed
ones over a new connection twice, and over another one five times. Answers are greedy tokens, their logprobs and the
prompts' logprobs, asked for one request at a time; a model of vision is also asked about an image. One line of JSON is
printed for each architecture and step:

- equal: the answers are those of the engine that was loaded afresh; ``gap`` is the largest difference in nats.
- refused: the engine took nothing, and ``reason`` is its typed error.
- failed: anything else, with ``reason``.

``--engine-kwargs`` are more of the engine's own, such as ``{"quantization": "fp8_per_channel"}``: an engine that
quantises must answer as one that quantised the changed model as it loaded it.

``--blocks`` writes the models in fp8 with one scale for each 128 x 128 block, as SGLang wants them; the policy that is
pushed is in bfloat16, and the engine quantises it in the update.

With ``--sleep``, the base's engine then takes the base's weights over a connection that was used before it slept, and
the changed ones over a new one, its weights alone awake both times.

``--python`` names the interpreter of an environment that holds the engine. On a CPU only shared memory is used, and
SGLang's attention in plain torch does not run MLA.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from engine_fields import ENVIRONMENT, sglang_fields, vllm_fields
from PIL import Image
from safetensors.torch import load_file, save_file

from drivetrain import (
    ChatPrompt,
    ImageInput,
    InferenceEngine,
    MemoryTag,
    Message,
    SamplingParams,
    TokenPrompt,
    create_engine,
)
from drivetrain.errors import InvalidWeights, UnsupportedCapability, WeightPlanMismatch, WeightSyncError
from drivetrain.testing import byte_tokenizer, tiny_model
from drivetrain_weight_sync import WeightSync
from drivetrain_weight_sync.tensors.block_quantisation import quantise_blocks

REFUSALS: Final = (WeightPlanMismatch, InvalidWeights, UnsupportedCapability, WeightSyncError)
TOLERANCE: Final = 0.02
"""Nats. The same kernels run on the same weights; the order of atomic sums may differ."""
NEW_TOKENS: Final = 24
GRAPHS: Final = [1, 2]

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
_GROUPED: Final[dict[str, Any]] = {**_COMMON, "num_key_value_heads": 2}
_EXPERTS: Final[dict[str, Any]] = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_MLA: Final[dict[str, Any]] = {
    **_COMMON,
    **_EXPERTS,
    "max_position_embeddings": 163840,
    "rope_parameters": _YARN,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    # Engines read this field of published configurations:
    "moe_layer_freq": 1,
}

ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "llama": {**_GROUPED, "head_dim": 64},
    "gemma3_text": {
        **_GROUPED,
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {**_GROUPED, "head_dim": 64},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "head_dim": 64, "num_experts": 16},
    "deepseek_v2": {
        **_MLA,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    },
    "deepseek_v3": {
        **_MLA,
        "q_lora_rank": 256,  # whole blocks: engines fuse its projection with another
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        **_GROUPED,
        **_EXPERTS,
        "head_dim": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "ernie4_5_moe": {
        **_GROUPED,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 128,
        "moe_k": 4,
        "moe_num_experts": 16,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "qwen3_next": {
        **_GROUPED,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_experts": 16,
        "shared_expert_intermediate_size": 128,
        "layer_types": [*3 * ["linear_attention"], "full_attention"],
        "full_attention_interval": 4,
    },
    "falcon_h1": {
        **_GROUPED,
        "head_dim": 64,
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "gpt_oss": {
        **_GROUPED,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "minimax_m2": {
        **_GROUPED,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "rotary_dim": 64,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "num_mtp_modules": 0,
        "attn_type_list": [1, 1],
    },
    "apertus": {**_GROUPED, "hidden_act": "xielu", "max_position_embeddings": 65536},
    # Kimi-K2 is a DeepSeek-V3 of one group of experts.
    "kimi_k2": {
        **_MLA,
        "model_type": "deepseek_v3",
        "rope_parameters": {**_YARN, "rope_theta": 50000.0, "beta_fast": 1.0},
        "q_lora_rank": 192,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 24,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
    "llama4_text": {
        **_GROUPED,
        "head_dim": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "intermediate_size_mlp": 256,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 8192,
    },
}
"""Architecture → fields of its configuration, of sizes that GPU kernels take. A name is a ``model_type`` of
transformers, unless the fields name one."""
VISION: Final = ("qwen2_5_vl", "qwen3_vl")
"""Architectures that see images, of the sizes of ``tiny_model``."""

ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": {**sglang_fields(GRAPHS, share=0.85, cache_tokens=8192), "max_num_seqs": 4},
    "vllm": {**vllm_fields(GRAPHS, share=0.02, cache_bytes=1_000_000_000), "max_num_seqs": 4},
}
OF_ARCHITECTURE: Final[dict[tuple[str, str], dict[str, Any]]] = {
    # Or the states of recurrent layers take most of the GPU.
    ("sglang", "qwen3_next"): {"max_mamba_cache_size": 32},
    ("sglang", "falcon_h1"): {"max_mamba_cache_size": 32},
    # Wheels of 0.26 lack its own kernel for Hopper.
    ("vllm", "qwen3_next"): {"additional_config": {"gdn_prefill_backend": "triton"}},
    **{("sglang", architecture): {"mm_attention_backend": "triton_attn"} for architecture in VISION},
}
"""More of ``engine_kwargs`` on a GPU."""
ON_CPU: Final[dict[str, dict[str, Any]]] = {"sglang": {}, "vllm": {}}
Answers = list[tuple[list[int], list[float]]]
"""For each prompt: the sampled tokens, and the logprobs of prompt and sample."""


@dataclass(frozen=True)
class Policy:
    """Two models of one architecture."""

    base: Path
    changed: Path
    module: transformers.PreTrainedModel
    """The changed one, in bfloat16."""
    base_module: transformers.PreTrainedModel


def make(architecture: str, root: Path, *, blocks: bool) -> Policy:
    """Write both models to folders beneath ``root``."""
    if architecture in VISION:
        return make_vision(architecture, root)
    fields = {name: value for name, value in ARCHITECTURES[architecture].items() if name != "model_type"}
    model_type = ARCHITECTURES[architecture].get("model_type", architecture)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base = _save(_shaken(model, 0.1, alike=False), root / architecture / "base", fields)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = _save(_shaken(model, 0.3, alike=True), root / architecture / "changed", fields)
    base_model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base_model.load_state_dict(kept)
    if blocks:
        in_blocks(base)
        in_blocks(changed)
    return Policy(base, changed, model.to(torch.bfloat16).eval(), base_model.to(torch.bfloat16).eval())


def make_vision(architecture: str, root: Path) -> Policy:
    """Write both models, with the files of their processors."""
    base, changed = (root / architecture / name for name in ("base", "changed"))
    tiny_model(architecture, directory=base, dtype="bfloat16")
    read = partial(transformers.AutoModelForImageTextToText.from_pretrained, dtype=torch.bfloat16)
    module = read(base).eval()
    torch.manual_seed(0)
    _shaken(module, 0.3, alike=True)
    shutil.copytree(base, changed)
    module.save_pretrained(changed)
    return Policy(base, changed, module, read(base).eval())


@torch.no_grad()
def _shaken(model: transformers.PreTrainedModel, share: float, *, alike: bool) -> transformers.PreTrainedModel:
    """Change every value by a share of itself; first, ``alike`` values of vectors by that much, too."""
    tensors = [*model.parameters(), *(held for name, held in model.named_buffers() if name.endswith("_bias"))]
    for tensor in tensors:
        if not alike:
            if tensor.ndim <= 1 and tensor.numel() > 1:  # biases begin as zeros, norms as ones
                tensor.add_(share * torch.randn_like(tensor))
        else:
            tensor.mul_(1 + share * torch.randn_like(tensor))
    return model


def _save(model: transformers.PreTrainedModel, folder: Path, fields: dict[str, Any]) -> Path:
    """Write the model in bfloat16, with a tokenizer and what engines ask of the configuration."""
    own = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    own.load_state_dict(model.state_dict())
    own.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(model_max_length=fields["max_position_embeddings"]).save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {name: value for name, value in fields.items() if name not in config}
    config["dtype"] = "bfloat16"
    if config.get("pad_token_id") is None:
        config["pad_token_id"] = fields["pad_token_id"]
    file.write_text(json.dumps(config, indent=2))
    return folder


def in_blocks(folder: Path) -> None:
    """Quantise the matrices of a folder's layers, except those of routers."""
    for file in folder.glob("*.safetensors"):
        made: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(file).items():
            if tensor.ndim == 2 and ".layers." in name and not name.endswith(".gate.weight"):
                made[name], made[f"{name}_scale_inv"] = quantise_blocks(tensor)
            else:
                made[name] = tensor
        save_file(made, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def engine_of(args: argparse.Namespace, architecture: str, folder: Path) -> InferenceEngine:
    """An engine of that folder, not started."""
    own = dict((ENGINES if args.device == "cuda" else ON_CPU)[args.backend])
    if args.device == "cuda":
        own["engine_kwargs"] = own["engine_kwargs"] | OF_ARCHITECTURE.get((args.backend, architecture), {})
    own["engine_kwargs"] = own.get("engine_kwargs", {}) | args.engine_kwargs
    fields: dict[str, Any] = {
        "backend": args.backend,
        "model": str(folder),
        "dtype": "bfloat16",
        "device": args.device,
        "enable_sleep": args.sleep,
        "context_length": 512,
        "timeouts": {"start": 60.0 * args.minutes},
        **own,
    }
    if args.python:
        fields["python"] = args.python
    return create_engine(fields)


def prompts_of(architecture: str) -> list[tuple[TokenPrompt | ChatPrompt, int | None]]:
    """Prompts, and what to ask of their logprobs; those of an image's places are asked of no engine."""
    prompts: list[tuple[TokenPrompt | ChatPrompt, int | None]] = []
    for seed, length in enumerate((3, 40, 90)):
        draw = torch.Generator().manual_seed(seed)
        prompts.append((TokenPrompt(token_ids=torch.randint(0, 256, (length,), generator=draw).tolist()), 0))
    if architecture in VISION:
        pixels = torch.randint(0, 256, (56, 84, 3), generator=torch.Generator().manual_seed(9), dtype=torch.uint8)
        parts: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        image = ImageInput.from_pil(Image.fromarray(pixels.numpy()))
        prompts.append((ChatPrompt(messages=(Message(role="user", content=parts),), media=(image,)), None))
    return prompts


async def answers(engine: InferenceEngine, architecture: str) -> Answers:
    """Ask the engine a few prompts, one request at a time."""
    found: Answers = []
    for prompt, of_prompts in prompts_of(architecture):
        params = SamplingParams(
            max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=of_prompts
        )
        (completion,) = (await engine.generate([prompt], params)).completions
        of_prompt = [number for number in completion.prompt_logprobs or () if number is not None]
        found.append((list(completion.token_ids), [*of_prompt, *(completion.logprobs or ())]))
    return found


def compared(got: Answers, wanted: Answers) -> dict[str, Any]:
    """The verdict over two engines' answers."""
    gap = max(
        (abs(one - other) for (_, ours), (_, theirs) in zip(got, wanted, strict=True)
         for one, other in zip(ours, theirs, strict=True)),
        default=math.inf,
    )  # fmt: skip
    same = [ours == theirs for (ours, _), (theirs, _) in zip(got, wanted, strict=True)]
    if all(same) and gap <= TOLERANCE:
        return {"verdict": "equal", "gap": gap}
    reason = f"answers are not those of a fresh load: {same.count(False)} of {len(same)} prompts have other tokens"
    return {"verdict": "failed", "gap": gap, "reason": reason}


def said(error: Exception) -> str:
    """An error as a reason: its beginning and its end, where the log of a dead engine has its own error."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 1500 else f"{text[:500]} … {text[-1000:]}"


class Report:
    """Prints a line for each step, and keeps them."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._begun = time.monotonic()
        self.lines: list[dict[str, Any]] = []

    def line(self, backend: str, architecture: str, step: str, found: dict[str, Any]) -> None:
        """Print one."""
        line = {"backend": backend, "architecture": architecture, "step": step, **found}
        line["at_s"] = round(time.monotonic() - self._begun, 1)
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        if self._file:
            Path(self._file).write_text(json.dumps(self.lines, indent=2))


async def push(
    args: argparse.Namespace,
    engine: InferenceEngine,
    architecture: str,
    module: Any,
    strategy: str,
    wanted: Answers,
    *,
    times: int = 1,
    sleep_before_last: bool = False,
) -> Any:
    """Push a module's weights and compare what the engine says then.

    With ``times``, they are pushed so often, every second time with other signs and at last with their own: from the
    second time on, an engine on a GPU replays its copies. With ``sleep_before_last``, the engine sleeps before the last
    push, which its weights alone are awake for.
    """
    source = module.to(args.device) if strategy == "cuda_ipc" else module
    async with WeightSync.connect(source, engine, strategy=strategy) as sync:
        try:
            for number in range(times):
                if number or times % 2 == 0:
                    _negate(source)
                if sleep_before_last and number == times - 1:
                    await engine.sleep()
                    await engine.wake_up([MemoryTag.WEIGHTS])
                result = await sync.push(version=strategy)
        except REFUSALS as error:
            kind = "failed" if engine.state.value == "dirty" else "refused"
            return {"verdict": kind, "reason": said(error)}
        if sleep_before_last:
            await engine.wake_up()
        found = compared(await answers(engine, architecture), wanted)
        return {**found, "tensors": result.tensors}


@torch.no_grad()
def _negate(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.neg_()


async def sweep(args: argparse.Namespace, report: Report, architecture: str, policy: Policy) -> None:
    """All steps of one architecture."""

    def say(step: str, **found: Any) -> None:
        report.line(args.backend, architecture, step, found)

    step = "start"
    try:
        async with AsyncExitStack() as stack:
            first, fresh = (engine_of(args, architecture, folder) for folder in (policy.base, policy.changed))
            if args.device == "cuda":
                await asyncio.gather(*(stack.enter_async_context(engine) for engine in (first, fresh)))
                before, wanted = await answers(first, architecture), await answers(fresh, architecture)
            else:  # one engine at a time: the machine is small
                async with fresh:
                    wanted = await answers(fresh, architecture)
                await stack.enter_async_context(first)
                before = await answers(first, architecture)
            if before == wanted:
                say("start", verdict="failed", reason="the changed model answers as the base does")
                return
            say("start", verdict="started", versions=first.versions)
            step = "shared_memory"
            say(step, **await push(args, first, architecture, policy.module, step, wanted))
            if args.device == "cuda":
                step = "cuda_ipc"
                say(step, **await push(args, first, architecture, policy.base_module, step, before))
                for step, times in (("cuda_ipc, second push", 2), ("cuda_ipc, fifth push", 5)):
                    say(step, **await push(args, first, architecture, policy.module, "cuda_ipc", wanted, times=times))
            strategy = "cuda_ipc" if args.device == "cuda" else "shared_memory"
            for step, module, expected, times in [
                ("asleep, old connection", policy.base_module, before, 5),
                ("asleep, new connection", policy.module, wanted, 1),
            ] * args.sleep:
                found = await push(
                    args, first, architecture, module, strategy, expected, times=times, sleep_before_last=True
                )
                say(step, **found)
    except asyncio.CancelledError:
        say(step, verdict="failed", reason=f"not over after {args.minutes:g} minutes")
        raise
    except Exception as error:
        say(step, verdict="failed", reason=said(error))


async def measure(args: argparse.Namespace) -> int:
    report = Report(args.json)
    beside = asyncio.Semaphore(args.beside)
    making = asyncio.Lock()
    names = args.only or [*ARCHITECTURES, *VISION]

    async def one(architecture: str, root: Path) -> None:
        async with beside:
            try:
                async with making:  # models are drawn from torch's random state
                    policy = await asyncio.to_thread(make, architecture, root, blocks=args.blocks)
            except Exception as error:
                report.line(args.backend, architecture, "model", {"verdict": "failed", "reason": said(error)})
                return
            await sweep(args, report, architecture, policy)

    with tempfile.TemporaryDirectory(prefix="architectures-") as root:
        try:
            async with asyncio.timeout(60 * args.minutes), asyncio.TaskGroup() as group:
                for architecture in names:
                    group.create_task(one(architecture, Path(root)))
        except TimeoutError:
            print(f"stopped after {args.minutes:g} minutes", file=sys.stderr, flush=True)
    verdicts = [line["verdict"] for line in report.lines]
    print(json.dumps({kind: verdicts.count(kind) for kind in ("equal", "refused", "failed")}), file=sys.stderr)
    return 0 if {"refused", "failed"}.isdisjoint(verdicts) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(ENGINES))
    parser.add_argument("--only", nargs="+", choices=sorted([*ARCHITECTURES, *VISION]), help="these architectures")
    parser.add_argument("--beside", type=int, default=5, help="architectures at once; each has two engines")
    parser.add_argument("--minutes", type=float, default=8, help="end after so long")
    parser.add_argument("--json", help="write all lines there after each")
    parser.add_argument("--python", help="interpreter of the engine's environment")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine-kwargs", type=json.loads, default={}, metavar="JSON", help="more of the engine's own")
    parser.add_argument("--blocks", action="store_true", help="engines of checkpoints in fp8 blocks")
    parser.add_argument("--sleep", action="store_true", help="also pushes to an engine that has slept")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    transformers.utils.logging.disable_progress_bar()
    sys.exit(asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
