# pyright: reportMissingImports=false
"""SkyRL's own client of inference servers against ``drivetrain serve``: ``make test-skyrl-client``."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    PauseMode,
    RemoteInferenceClient,
)

from tool_conversation import QUESTION, Score, require_own_logprobs

_T = TypeVar("_T")
Serve = Callable[..., AbstractContextManager[str]]
"""Serves the taught model with these options, and yields the address."""
InTheProject = Callable[..., AbstractContextManager["subprocess.Popen[str]"]]
"""Runs a script, with its arguments, in the project's environment."""
try:
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient as SYNC
except ImportError:
    SYNC = None
"""The class that sends weights; None if the client of inference servers does, as in SkyRL 0.3.0."""
of_the_sync_client = pytest.mark.skipif(SYNC is None, reason="SkyRL 0.3.0: RemoteInferenceClient sends weights")
HELPERS = Path(__file__).parent.with_name("helpers")
PROMPT = [5, 6, 7]
PARAMS: dict[str, Any] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 12,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 0,
    "stop": None,
}
"""Parameters that SkyRL makes of its configuration."""


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[str]:
    """Address of a server that also serves adapters."""
    with serve("--set", "enable_lora=true", "--set", "max_lora_rank=8") as url:
        yield url


@pytest.fixture(scope="module")
def adapters(model: Path, score: Score, in_the_project: InTheProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters ``one`` and ``two`` of the taught model."""
    folder = tmp_path_factory.mktemp("adapters")
    with in_the_project(str(HELPERS / "tiny_adapters.py"), str(model), str(folder)) as process:
        assert process.wait() == 0
    return folder


def with_client(server: str, use: Callable[[RemoteInferenceClient], Awaitable[_T]]) -> _T:
    """Call a client whose data and control both go to ``server``."""

    async def run() -> _T:
        client = RemoteInferenceClient(server, [server], data_parallel_size=1, model_name="policy")
        try:
            return await use(client)
        finally:
            await client.teardown()

    return asyncio.run(run())


async def started(client: RemoteInferenceClient, url: str, **params: Any) -> asyncio.Task[Any]:
    """Begin a long request, and return once it runs."""
    batch = {"prompt_token_ids": [PROMPT], "sampling_params": {**PARAMS, "ignore_eos": True, **params}}
    task = asyncio.create_task(client.generate(batch))
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/load") as answer:
                if (await answer.json())["server_load"]:
                    return task
            await asyncio.sleep(0.01)


def test_rollouts(server: str, score: Score) -> None:
    batch = {"prompt_token_ids": [PROMPT] * 4, "sampling_params": PARAMS, "session_ids": [*"abcd"], "cache_salt": "s"}
    output = with_client(server, lambda client: client.generate(batch))
    for ids, logprobs in zip(output["response_ids"], output["response_logprobs"], strict=True):
        require_own_logprobs(score, PROMPT, ids, logprobs)
    assert set(output["stop_reasons"]) <= {"stop", "length"}
    assert all(isinstance(text, str) for text in output["responses"])


@of_the_sync_client
def test_rollouts_with_the_ids_that_were_left(server: str, score: Score) -> None:
    """Sample support, by ``/skyrl/v1/generate``: SkyRL 0.3.0 has none."""

    async def use(client: RemoteInferenceClient) -> None:
        client.enable_return_sample_support_set = True
        params = {**PARAMS, "top_k": 4, "top_p": 0.95}
        batch = {"prompt_token_ids": [PROMPT] * 2, "sampling_params": params, "return_sample_support": True}
        output = await client.generate(batch)
        for ids, rows in zip(output["response_ids"], output["rollout_sample_support"], strict=True):
            assert rows.shape == (len(ids), 4)
            assert all(token_id in row[row >= 0] for token_id, row in zip(ids, rows, strict=True))
        assert output["rollout_expert_indices"] is None
        with pytest.raises(aiohttp.ClientResponseError, match="expected a number above 1"):
            await client.generate({**batch, "sampling_params": PARAMS})

    with_client(server, use)


@of_the_sync_client
def test_rollouts_with_their_experts(in_the_project: InTheProject) -> None:
    """Experts of a mixture, by ``/skyrl/v1/generate``."""
    with in_the_project("-c", "from drivetrain.testing import tiny_model; print(tiny_model('qwen3_moe'))") as process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
    config = json.loads((Path(folder) / "config.json").read_text())
    options = ["--backend", "transformers", "--model", folder, "--served-model-name", "policy", "--port", "0"]

    async def use(client: RemoteInferenceClient) -> None:
        client.enable_return_routed_experts = True
        batch = {"prompt_token_ids": [PROMPT] * 2, "sampling_params": PARAMS, "routed_experts_prompt_starts": [0, 2]}
        output = await client.generate(batch)
        of_samples = zip(output["response_ids"], output["rollout_expert_indices"], [0, 2], strict=True)
        for ids, experts, first in of_samples:
            tokens = len(PROMPT) - first + len(ids) - 1
            assert experts.shape == (tokens, config["num_hidden_layers"], config["num_experts_per_tok"])
            assert len(set(experts.flatten().tolist())) > 1

    with in_the_project("-m", "drivetrain", "serve", *options) as process:
        assert process.stdout is not None
        with_client(process.stdout.readline().split()[-1], use)


def test_samples_of_the_tinker_api(server: str, score: Score) -> None:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 6, "temperature": 1.0, "top_k": -1},
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "session_id": "a",
    }
    answer = with_client(server, lambda client: client.sample({"json": body}))
    for sequence in answer["sequences"]:
        require_own_logprobs(score, PROMPT, sequence["tokens"], sequence["logprobs"])
    assert len(answer["sequences"]) == 2
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert others == pytest.approx(score(PROMPT), abs=1e-3)
    assert [one and len(one) for one in answer["topk_prompt_logprobs"]] == [None, 3, 3]


def test_openai_requests(server: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]

    async def use(client: RemoteInferenceClient) -> None:
        chat = await client.chat_completion(
            {"json": {"messages": messages, "max_tokens": 6, "temperature": 0, "session_id": "a"}, "headers": {}}
        )
        assert chat["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        text = await client.completion({"json": {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}, "headers": {}})
        assert text["usage"]["completion_tokens"] == 6
        with pytest.raises(aiohttp.ClientResponseError, match="temperature"):
            await client.completion({"json": {"prompt": PROMPT, "temperature": -1}, "headers": {}})
        rendered = await client.render_chat_completion({"json": {"messages": messages}})
        assert rendered["token_ids"]
        (ids,) = await client.tokenize(["some text"])
        assert await client.detokenize([ids]) == ["some text"]

    with_client(server, use)


def test_requests_are_kept_by_a_pause(server: str) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        task = await started(client, server, max_tokens=400)
        await client.pause_generation()
        await asyncio.sleep(0.2)
        assert not task.done()
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.resume_generation()
        assert (await task)["stop_reasons"] == ["length"]

    with_client(server, use)


def test_requests_are_aborted_by_a_pause(server: str) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        task = await started(client, server, max_tokens=900)
        await client.pause(PauseMode.ABORT)
        output = await task
        assert output["stop_reasons"] == ["abort"]
        assert len(output["response_ids"][0]) < 900
        await client.resume()

    with_client(server, use)


def test_sleep_level_2_drops_the_weights(server: str, model: Path) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        await client.sleep(level=2)
        await client.wake_up(tags=["weights"])
        async with aiohttp.ClientSession() as session:  # by no call of the client's
            body = {"weight_dir": str(model), "weight_version": "1"}
            async with session.post(f"{server}/update_weights", json=body) as answer:
                assert answer.status == 200, await answer.text()
        await client.wake_up(tags=["kv_cache"])
        await client.resume()
        output = await client.generate({"prompt_token_ids": [PROMPT], "sampling_params": PARAMS})
        assert output["response_ids"][0]

    with_client(server, use)


def test_the_size_of_the_group(server: str) -> None:
    assert with_client(server, lambda client: client.get_world_size()) == (1, 1)


def test_an_adapter_is_loaded_twice_and_unloaded(server: str, adapters: Path) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        async def ids(model: str) -> list[int]:
            body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
            answer = await client.completion({"json": body, "headers": {}})
            sampled: list[int] = answer["choices"][0]["token_ids"]
            return sampled

        found = []
        for name in ("one", "two", "one"):
            (answer,) = (await client.load_lora_adapter("adapter", str(adapters / name))).values()
            assert answer["status"] == 200
            assert json.loads(answer["body"]) == {"status": "ok", "lora_name": "adapter", "lora_int_id": None}
            found.append(await ids("adapter"))
        assert found[0] != await ids("policy")
        assert found[0] != found[1]
        assert found[0] == found[2], "the name got the first folder's weights again"
        await client.unload_lora_adapter("adapter")
        with pytest.raises(aiohttp.ClientResponseError, match="adapter"):
            await ids("adapter")

    with_client(server, use)


class Sends:
    """The server of ``serving_over_gloo.py`` and its trainer's side of each update."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._reads, self._writes = process.stdout, process.stdin
        self.said: dict[str, Any] = json.loads(self._reads.readline())
        self.url: str = self.said["url"]

    def do(self, kind: str, number: int) -> None:
        """Broadcast a checkpoint or an adapter of this index, or join a group at this port; return when it is done."""
        self._writes.write(f"{kind} {number}\n")
        assert self._reads.readline() == "done\n"

    async def require_served(self, client: RemoteInferenceClient, kind: str, index: int, **model: str) -> None:
        """Require a greedy sample to have the ids and logprobs of transformers."""
        expected = self.said[kind][index]["expected"]
        asked = {"prompt_token_ids": [self.said["prompt"]], "sampling_params": self.said["sampling_params"]}
        output = await client.generate(asked, **model)
        assert output["response_ids"] == [expected["token_ids"]]
        assert output["response_logprobs"][0] == pytest.approx(expected["logprobs"], abs=1e-4)


@pytest.fixture(scope="module")
def sends(in_the_project: InTheProject) -> Iterator[Sends]:
    """A gloo group stands for SkyRL's NCCL communicator, which wants GPUs."""
    with in_the_project(str(HELPERS / "serving_over_gloo.py")) as process:
        yield Sends(process)


@pytest.mark.skipif(SYNC is not None, reason="SkyRL 0.4.0 and later: SkyrlWeightSyncClient")
def test_weights_by_calls_of_workers(sends: Sends) -> None:
    """An update as the sender of SkyRL 0.3.0 makes it."""

    async def use(client: RemoteInferenceClient) -> None:
        for index, checkpoint in enumerate(sends.said["checkpoints"]):
            await client.pause_generation()
            await client.start_weight_update(is_checkpoint_format=True)
            update = asyncio.create_task(client.update_weights_nccl({**checkpoint["metadata"], "packed": True}))
            await asyncio.to_thread(sends.do, "checkpoints", index)
            await update
            await client.finish_weight_update()
            await client.resume_generation()
            await sends.require_served(client, "checkpoints", index)
        await _refused(client.finish_weight_update(), 400, "no update is open")

    with_client(sends.url, use)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def sync(sends: Sends) -> Iterator[Any]:
    """SkyRL's client of weight updates, of a server that has joined the trainer's group by it."""
    assert SYNC is not None
    from skyrl.backends.skyrl_train.weight_sync.control_plane import nccl_init_payloads

    made = SYNC([sends.url], init_payload_fn=nccl_init_payloads)
    port = _free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    buffers = {"packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2}
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(made.init_weight_transfer_engine, {**info, **buffers})
        sends.do("join", port)
        joining.result()
    yield made
    made.close()


async def _sent(sync: Any, sends: Sends, kind: str, index: int) -> None:
    """Run one update as vLLM's trainer engine does in SkyRL: it blocks, in a thread of its own."""
    await asyncio.to_thread(sync.start_weight_update)
    update = asyncio.create_task(asyncio.to_thread(sync.update_weights, sends.said[kind][index]["metadata"]))
    await asyncio.to_thread(sends.do, kind, index)
    await update
    await asyncio.to_thread(sync.finish_weight_update)


@of_the_sync_client
def test_weights_by_the_sync_client(sync: Any, sends: Sends) -> None:
    """Updates in the orders of SkyRL's ``save_weights_for_sampler``, for trainers that do not share GPUs."""

    async def use(client: RemoteInferenceClient) -> None:
        await client.pause_generation()
        await asyncio.gather(
            _sent(sync, sends, "checkpoints", 0), client.reset_prefix_cache(reset_running_requests=True)
        )
        await client.resume_generation()
        await sends.require_served(client, "checkpoints", 0)

        await client.sleep()
        await client.wake_up(tags=["weights"])
        await _sent(sync, sends, "checkpoints", 1)
        await client.wake_up(tags=["kv_cache"])
        await sends.require_served(client, "checkpoints", 1)

    with_client(sends.url, use)


@of_the_sync_client
def test_requests_outlast_a_sleep_for_weight_sync(sync: Any, sends: Sends) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        for index, offload_kv in ((0, True), (1, False)):
            running = await started(client, sends.url, max_tokens=400)
            await client.pause_generation()
            await client.sleep_for_weight_sync(offload_kv=offload_kv)
            await client.wake_for_weight_sync(tags=["weights"])
            await _sent(sync, sends, "checkpoints", index)
            await client.wake_for_weight_sync(tags=["kv_cache"])
            assert not running.done()
            await client.resume_generation()
            output = await running
            assert output["stop_reasons"] == ["length"]
            assert len(output["response_ids"][0]) == 400
            await sends.require_served(client, "checkpoints", index)
        await _refused(client.sleep_for_weight_sync(), 400, "in a pause only")

    with_client(sends.url, use)


@of_the_sync_client
def test_an_adapter_as_tensors(sync: Any, sends: Sends) -> None:
    """SkyRL's ``lora.sync_mode=memory``: the order of its ``_publish_lora_adapter_in_memory``."""
    from skyrl.backends.skyrl_train.weight_sync.lora_target import build_lora_receive_target

    async def use(client: RemoteInferenceClient) -> None:
        for index, adapter in enumerate(sends.said["adapters"]):
            await client.set_lora_receive_target(build_lora_receive_target("adapter", adapter["config"], {}))
            await _sent(sync, sends, "adapters", index)
            await client.load_lora_adapter("adapter", in_memory=True)
            await sends.require_served(client, "adapters", index, model="adapter")
            await sends.require_served(client, "checkpoints", 1)
        await client.unload_lora_adapter("adapter")
        with pytest.raises(aiohttp.ClientResponseError, match="no tensors of the adapter"):
            await client.load_lora_adapter("adapter", in_memory=True)

    with_client(sends.url, use)


@of_the_sync_client
def test_transfers_that_are_not_answered(sends: Sends) -> None:
    """The other backends of SkyRL's ``weight_sync_backend``, and drafters: each is refused before any broadcast."""
    assert SYNC is not None
    sync = SYNC([sends.url])
    for info, text in (
        ({"packed": True}, "handles of GPU memory"),
        ({"base_model_path": "m", "local_checkpoint_dir": "/d"}, "deltas of a checkpoint"),
        ({"trainer_actor_names": ["a"]}, "pulls by RDMA"),
    ):
        with pytest.raises(RuntimeError, match=rf"501.*{text}"):
            sync.init_weight_transfer_engine(info)
    with pytest.raises(RuntimeError, match=r"501.*deltas of a checkpoint"):
        sync.fetch_weights(1, sync_dir="/d")
    with sync.draft_session(), pytest.raises(RuntimeError, match=r"501.*draft models"):
        sync.start_weight_update()
    with pytest.raises(RuntimeError, match=r"400.*no update is open"):
        sync.finish_weight_update()
    handles = {"names": [], "dtype_names": [], "shapes": [], "ipc_handles": [("rebuild", (1,))]}
    with pytest.raises(RuntimeError, match=r"501.*unpickles nothing"):
        sync.update_weights(handles)
    sync.close()


@of_the_sync_client
def test_a_sender_does_not_wait_for_a_server_without_a_gpu(server: str) -> None:
    """The order of vLLM's ``NCCLTrainerWeightTransferEngine.trainer_init``: the call in a thread, and the store."""
    assert SYNC is not None
    from datetime import timedelta

    from skyrl.backends.skyrl_train.weight_sync.control_plane import nccl_init_payloads
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    sync = SYNC([server], init_payload_fn=nccl_init_payloads)
    port = _free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "packed": True}
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(sync.init_weight_transfer_engine, info)
        with pytest.raises(IndexError, match="stoi"):
            TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=300), use_libuv=False)
        with pytest.raises(RuntimeError, match=r"501.*this engine has no GPU"):
            joining.result()
    sync.close()


async def _refused(call: Awaitable[object], status: int, text: str = "") -> None:
    with pytest.raises(aiohttp.ClientResponseError) as refused:
        await call
    assert refused.value.status == status
    assert text in refused.value.message


class Info:
    """The part of SkyRL's ``BroadcastInitInfo`` that the client reads; its module needs Ray."""

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[Info]:
        return [self] * num_servers

    def to_api_payload(self) -> dict[str, object]:
        return {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


def test_calls_that_are_not_answered(server: str) -> None:
    """The rest of the client's calls, as the docs list them."""

    async def use(client: RemoteInferenceClient) -> None:
        if SYNC is None:
            await _refused(client.init_weight_update_communicator(Info()), 501, "this engine has no GPU")
            await _refused(client.start_weight_update(), 501, "this engine has no GPU")
            await _refused(client.update_weights_nccl({}), 501, "this engine has no GPU")
            await _refused(client.update_weights_ipc({}), 501, "unpickles nothing")
            await _refused(client.finish_weight_update(), 501, "this engine has no GPU")
        else:
            await _refused(client.update_named_weights({}), 501, "this engine has no GPU")
            await _refused(client.set_lora_receive_target({}), 501, "this engine has no GPU")
            await _refused(client.fetch_weights(1, sync_dir="/d"), 501, "deltas of a checkpoint")
        await _refused(client.load_lora_adapter("a", "/adapter"), 404, "there is no folder '/adapter'")
        await _refused(client.render_chat_completion({"json": {"messages": []}}), 400)
        await client.finish_session("a")  # it logs the 404, and goes on

    with_client(server, use)
