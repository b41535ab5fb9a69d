"""Drive `drivetrain serve` by AReaL's own client, `RemoteSGLangEngine`, through rollouts and weight updates.

AReaL changes the weights while it generates: a pause ends the requests in flight, and the client asks again with what
it has got. Version 1 comes from a folder, the others from a ``torch.distributed`` group, in buckets, by the calls and
in the order of AReaL's FSDP engine. Each token's logprob must be that of the version that AReaL counts it to. AReaL
1.0.4 pins many packages that its client does not import; these are enough:

    pip install --no-deps areal==1.0.4
    pip install torch torchdata 'transformers<=5.3' datasets 'peft<=0.18.1' pybase64 uvloop aiohttp ray orjson numba \
        omegaconf==2.4.0.dev2 hydra-core tenacity flask lark requests pillow pydantic
    drivetrain serve --backend transformers --model FOLDER --dialect sglang &
    python examples/areal_rollouts.py --server 127.0.0.1:8000 --model FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from areal.api import ModelAllocation, ModelRequest, ModelResponse, ParamSpec, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.infra.platforms import current_platform
from areal.utils import name_resolve, names
from areal.utils.network import find_free_ports, gethostip
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [[5, 6, 7 + at] for at in range(8)]
TOKENS = 400
BUCKETS = 3


async def roll_out(engine: RemoteSGLangEngine) -> list[ModelResponse]:
    """Return a response for each prompt, sampled at temperature 1."""
    asked = GenerationHyperparameters(n_samples=1, max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True)
    return await asyncio.gather(*(engine.agenerate(ModelRequest(input_ids=ids, gconfig=asked)) for ids in PROMPTS))


def update_from_disk(engine: RemoteSGLangEngine, policy: Any, tokenizer: Any, folder: Path) -> None:
    """Give the server a folder, as ``FSDPEngine._update_weights_from_disk`` does; AReaL deletes it afterwards."""
    engine.pause_generation()
    updated = engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=str(folder)))
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = engine.config
    saved = names.update_weights_from_disk(config.experiment_name, config.trial_name, engine.get_version())
    name_resolve.add(saved, str(datetime.now().timestamp()), keepalive_ttl=120)
    updated.result()
    engine.continue_generation()


def form_group(engine: RemoteSGLangEngine) -> tuple[WeightUpdateMeta, Any]:
    """Form the group of this process and the server, as ``FSDPEngine._init_weight_update_from_distributed`` does."""
    meta = WeightUpdateMeta.from_fsdp_xccl(ModelAllocation.from_str(engine.config.backend, name="rollout"))
    meta.nccl_master_address, (meta.nccl_master_port,) = gethostip(), find_free_ports(1)
    meta.nccl_group_name = "update_weight_group"
    joined = engine.init_weights_update_group(meta)
    group = init_custom_process_group(
        backend=current_platform.communication_backend,
        world_size=2,
        init_method=f"tcp://{meta.nccl_master_address}:{meta.nccl_master_port}",
        rank=0,
        group_name=meta.nccl_group_name,
    )
    joined.result()
    return meta, group


def update_by_group(engine: RemoteSGLangEngine, policy: Any, meta: WeightUpdateMeta, group: Any) -> None:
    """Broadcast the weights in buckets, as ``FSDPEngine._update_weights_from_distributed`` does."""
    engine.pause_generation()
    tensors = [(name, tensor.detach()) for name, tensor in policy.named_parameters()]
    ends = [len(tensors) * at // BUCKETS for at in range(BUCKETS + 1)]
    for begin, end in pairwise(ends):
        bucket = tensors[begin:end]
        specs = [ParamSpec(name, tuple(one.shape), str(one.dtype).split("torch.")[1]) for name, one in bucket]
        received = engine.update_weights_from_distributed(meta, specs)
        for handle in [dist.broadcast(one, src=0, group=group, async_op=True) for _, one in bucket]:
            handle.wait()
        received.result()
    engine.continue_generation()


def largest_gap(response: ModelResponse, policies: list[Any]) -> float:
    """Return the largest difference of a token's logprob from that of the version that made it."""
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    drawn = torch.tensor(response.output_tokens)[:, None]
    gap = 0.0
    for version in set(response.output_versions):
        with torch.no_grad():
            logits = policies[version](input_ids=ids).logits[0, len(response.input_tokens) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, drawn)[:, 0]
        made = torch.tensor([one == version for one in response.output_versions])
        gap = max(gap, (own - torch.tensor(response.output_logprobs))[made].abs().max().item())
    return gap


def main(server: str, model: str) -> None:
    """Update three times during rollouts; exit with 1 unless every token is of the version that AReaL says."""
    torch.manual_seed(0)
    policies: list[Any] = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)]
    for _ in range(3):
        policies.append(copy.deepcopy(policies[-1]))
        for parameter in policies[-1].parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(1) as threads:
        name_resolve.reconfigure(NameResolveConfig(nfs_record_root=str(Path(folder, "names"))))
        config = InferenceEngineConfig(backend="sglang:d1t1", experiment_name="drivetrain", trial_name="areal")
        engine = RemoteSGLangEngine(config)
        engine.initialize(addr=[server])
        meta, group = form_group(engine)
        update_by_group(engine, policies[0], meta, group)  # whatever the server served before
        pending = threads.submit(asyncio.run, roll_out(engine))
        for version in range(1, 4):
            time.sleep(0.5)
            engine.pause()
            begun = time.perf_counter()
            if version == 1:
                update_from_disk(engine, policies[1], AutoTokenizer.from_pretrained(model), Path(folder, "weights"))
            else:
                update_by_group(engine, policies[version], meta, group)
            print(f"version {version}: {time.perf_counter() - begun:.2f} s", flush=True)
            engine.set_version(version)
            engine.resume()
        responses = pending.result()
        responses += threads.submit(asyncio.run, roll_out(engine)).result()
        engine.destroy()

    gap = max(largest_gap(response, policies) for response in responses)
    counts = [sum(response.output_versions.count(version) for response in responses) for version in range(4)]
    print(f"tokens of versions 0 to 3: {counts}; largest logprob difference {gap:.1e}")
    if gap > 1e-3 or sum(counts) != 2 * len(PROMPTS) * TOKENS or counts[3] < len(PROMPTS) * TOKENS:
        raise SystemExit("tokens are missing, or not of the version that AReaL says")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:8000", help="Host and port of the server.")
    parser.add_argument("--model", required=True, help="Folder of the model that it serves.")
    given = parser.parse_args()
    main(given.server, given.model)
