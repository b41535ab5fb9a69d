# pyright: reportMissingImports=false
"""slime's own rollouts, behind its own router, against ``drivetrain serve``: ``make test-slime``."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from slime.rollout.data_source import RolloutDataSourceWithBuffer  # type: ignore[import-not-found]
from slime.rollout.sglang_rollout import (  # type: ignore[import-not-found]
    GenerateState,
    generate,
    generate_and_rm_group,
    generate_rollout,
)
from slime.utils.async_utils import run  # type: ignore[import-not-found]
from slime.utils.eval_config import EvalDatasetConfig  # type: ignore[import-not-found]
from slime.utils.http_utils import init_http_client  # type: ignore[import-not-found]
from slime.utils.misc import SingletonMeta  # type: ignore[import-not-found]
from slime.utils.types import Sample  # type: ignore[import-not-found]

from tool_conversation import CALL, END, QUESTION, TOOLS, Score, require_own_logprobs

LONG: Final = 900
"""Most tokens of a response; that to ``QUESTION`` ends long before."""
STREAMED: Final = "slime.rollout.sglang_streaming_rollout.generate_streaming"
DEADLINE: Final = 120.0


async def reward(args: Namespace, sample: Sample, **_: object) -> float:
    """Reward the call that the model was taught."""
    return float(sample.response.startswith(CALL))


async def long_unless_called(args: Namespace, sample: Sample, params: dict[str, Any]) -> Sample:
    """Generate as slime does; only where the model may call a tool, its end token ends the response."""
    return await generate(args, sample, {**params, "ignore_eos": "tools" not in sample.metadata})


@pytest.fixture(scope="session")
def serve_sglang(serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """Address of a server that speaks SGLang's routes."""
    with serve("--dialect", "sglang") as url:
        yield url


@pytest.fixture(scope="session")
def router(serve_sglang: str) -> Iterator[int]:
    """Port of a router that slime's way of starting it knows the server of: its checks of health are off."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--disable-circuit-breaker", "--disable-health-check"]
    command += ["--log-level", "warn"]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
            until(lambda: answers(client, process))
            worker = {"url": serve_sglang, "worker_type": "regular"}  # as SGLangEngine._register_to_router
            client.post("/workers", json=worker).raise_for_status()
            until(lambda: client.get("/workers").json()["workers"])
        yield port
    finally:
        process.kill()
        process.wait()


def answers(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return client.get("/workers").is_success
    except httpx.TransportError:
        return False


def until(is_so: Callable[[], object]) -> None:
    ends = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.1)


@pytest.fixture
def settings(router: int, model: Path, tmp_path: Path) -> Namespace:
    """slime's arguments: of four prompts, two are answered by the call, and two with all tokens."""
    prompts = tmp_path / "prompts.jsonl"
    asked = [{"role": "user", "content": QUESTION}]
    rows = [{"prompt": asked, "tools": TOOLS}] * 2 + [{"prompt": [{"role": "user", "content": "a"}]}] * 2
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Namespace(
        hf_checkpoint=str(model),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=router,
        sglang_server_concurrency=64,
        sglang_dp_size=1,
        sglang_enable_deterministic_inference=True,
        rollout_num_engines=1,
        use_distributed_post=False,
        router_policy="consistent_hashing",
        ci_test=True,
        rollout_global_dataset=True,
        prompt_data=str(prompts),
        input_key="prompt",
        label_key=None,
        tool_key="tools",
        metadata_key="metadata",
        multimodal_keys=None,
        apply_chat_template=True,
        apply_chat_template_kwargs=None,
        rollout_shuffle=False,
        rollout_max_prompt_len=None,
        dump_details=None,
        buffer_filter_path=None,
        rollout_seed=7,
        rollout_batch_size=2,
        over_sampling_batch_size=2,
        n_samples_per_prompt=3,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=LONG,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        use_rollout_routing_replay=False,
        custom_generate_function_path=None,
        custom_rm_path="slime_rollout.reward",
        group_rm=False,
        rm_type=None,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        eval_datasets=[],
        eval_max_prompt_len=None,
        eval_reward_key=None,
        reward_key=None,
    )
    SingletonMeta._instances.pop(GenerateState, None)  # it keeps the arguments of the last test
    init_http_client(made)
    return made


def require_trainable(sample: Sample, score: Score) -> None:
    """Require that a sample's logprobs are the model's own, and that its parts fit together."""
    size = sample.response_length
    assert size == len(sample.rollout_log_probs) == len(sample.loss_mask)
    require_own_logprobs(score, sample.tokens[:-size], sample.tokens[-size:], sample.rollout_log_probs)


@pytest.mark.parametrize("generates", [None, STREAMED], ids=["whole", "streamed"])
def test_a_rollout_has_what_slime_trains_on(settings: Namespace, score: Score, generates: str | None) -> None:
    settings.custom_generate_function_path = generates
    groups = generate_rollout(settings, 0, RolloutDataSourceWithBuffer(settings)).samples
    assert [len(group) for group in groups] == [3, 3]
    for sample in (sample for group in groups for sample in group):
        require_trainable(sample, score)
        assert sample.status is Sample.Status.COMPLETED
        assert sample.tokens[-1] == END
        assert sample.weight_versions == ["initial"]
        assert sample.prefix_cache_info.total_prompt_tokens == len(sample.tokens) - sample.response_length
    assert sum(sample.reward for group in groups for sample in group) >= 4, "the model was taught the call"


def test_samples_that_are_aborted_go_on_in_the_next_rollout(
    settings: Namespace, score: Score, serve_sglang: str
) -> None:
    settings.partial_rollout, settings.over_sampling_batch_size = True, 4
    settings.custom_generate_function_path = "slime_rollout.long_unless_called"
    source = RolloutDataSourceWithBuffer(settings)
    groups = generate_rollout(settings, 0, source).samples
    assert {sample.status for group in groups for sample in group} == {Sample.Status.COMPLETED}
    parts = {sample.index: list(sample.tokens) for group in source.buffer for sample in group}
    assert source.get_buffer_length() == 2
    aborted = [sample for group in source.buffer for sample in group if sample.status is Sample.Status.ABORTED]
    assert len(aborted) == 6, [(one.status, one.response_length) for group in source.buffer for one in group]
    for sample in aborted:
        assert 0 < sample.response_length < LONG
        assert sample.weight_versions == ["initial"]
        require_trainable(sample, score)
    httpx.post(f"{serve_sglang}/update_weight_version", json={"new_version": "1"}).raise_for_status()
    settings.over_sampling_batch_size = 2
    groups = generate_rollout(settings, 1, source).samples
    httpx.post(f"{serve_sglang}/update_weight_version", json={"new_version": "initial"}).raise_for_status()
    for sample in (sample for group in groups for sample in group):
        require_trainable(sample, score)
        before = parts[sample.index]
        assert sample.tokens[: len(before)] == before
        assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, LONG)
        assert sample.weight_versions[-1] == "1"


@pytest.mark.parametrize("generates", [None, STREAMED], ids=["whole", "streamed"])
def test_with_top_p_samples_have_the_ids_that_were_left(
    settings: Namespace, score: Score, serve_sglang: str, generates: str | None
) -> None:
    """slime computes its logprobs over these ids alone, and refuses samples without them.

    Its requests go to the server itself: the registry's router 0.3.2 drops the parameter that asks for the ids.
    """
    settings.rollout_top_p, settings.custom_generate_function_path = 0.9, generates
    settings.sglang_router_port = int(serve_sglang.rpartition(":")[2])
    groups = RolloutDataSourceWithBuffer(settings).get_samples(4)
    several = 0
    for group in groups:
        params = {**GenerateState(settings).sampling_params, "max_new_tokens": 100}
        for sample in run(generate_and_rm_group(settings, group, params)):
            several += require_ids_left(sample, score)
    assert several


def require_ids_left(sample: Sample, score: Score) -> int:
    """Require each token among the ids that were left, and its logprob over them; return how often it had others."""
    size, several = sample.response_length, 0
    offsets = [int(one) for one in sample.rollout_top_p_token_offsets]
    assert len(offsets) == size + 1
    assert offsets[-1] == len(sample.rollout_top_p_token_ids)
    alone = score(sample.tokens)[-size:]
    for place, token in enumerate(sample.tokens[-size:]):
        left = [int(one) for one in sample.rollout_top_p_token_ids[offsets[place] : offsets[place + 1]]]
        assert token in left
        several += len(left) > 1
        # The probabilities of the ids that were left are 0.9 to 1 in sum, so that each has at most 1/0.9 of its own.
        assert -1e-3 < sample.rollout_log_probs[place] - alone[place] < 0.106
        assert len(left) > 1 or abs(sample.rollout_log_probs[place]) < 1e-3
    return several


def test_an_evaluation_has_its_rewards(settings: Namespace, score: Score) -> None:
    of: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_response_len": LONG}
    data = EvalDatasetConfig(
        "calls", settings.prompt_data, n_samples_per_eval_prompt=2, input_key="prompt", tool_key="tools",
        metadata_key="metadata", custom_rm_path="slime_rollout.reward", **of,
    )  # fmt: skip
    settings.eval_datasets = [data]
    found = generate_rollout(settings, 0, None, evaluation=True).data["calls"]
    assert found["rewards"][:4] == [1.0] * 4
    for sample in found["samples"]:
        require_trainable(sample, score)
