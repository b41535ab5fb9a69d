"""The same requests to a real SGLang server and to ours: the same statuses, and every field that SGLang writes.

Run in the environment that holds SGLang: ``make test-sglang-routes``.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from sglang_torch_cpu_server import launch_of

from drivetrain import EngineConfig, create_engine
from drivetrain.testing import tiny_model
from drivetrain_conformance.harness.server_suite import Server as SGLangServer
from drivetrain_serving import Server, ServerConfig
from two_servers import Asked, answers, compare

MESSAGES: Final = [{"role": "user", "content": "hello"}]
SHORT: Final = {"max_new_tokens": 4, "temperature": 0}

# Counts that the engine page does not have.
_META: Final = (
    *("meta_info.num_retractions", "meta_info.reasoning_tokens", "meta_info.cached_tokens_details"),
    *("meta_info.dp_rank", "meta_info.response_sent_to_client_ts"),
)
_BATCH: Final = tuple(f"[].{name}" for name in _META)
# Fields of other features: reasoning, speculative decoding, hidden states.
_OPENAI: Final = (
    *("choices.[].matched_stop", "choices.[].hidden_states", "choices.[].message.reasoning_content"),
    *("choices.[].delta.reasoning_content", "choices.[].message.tool_calls", "metadata", "usage.reasoning_tokens"),
    *("metadata.weight_version", "metadata.weight_versions", "metadata.weight_versions.[].version"),
    *("metadata.weight_versions.[].start", "metadata.weight_versions.[].end", "[].choices.[].delta.reasoning_content"),
)
# Counts of SGLang's scheduler.
_LOADS: Final = (
    *("loads.[].cache_hit_rate", "loads.[].decode_moments", "loads.[].gen_throughput"),
    *("loads.[].max_total_num_tokens", "loads.[].num_active_tokens", "loads.[].num_prealloc_ready_tokens"),
    *("loads.[].num_total_tokens", "loads.[].num_used_tokens", "loads.[].num_waiting_uncached_tokens"),
    *("loads.[].token_usage", "loads.[].total_prefill_busy_us", "loads.[].total_prefill_uncached_tokens"),
    "loads.[].utilization",
)
_INTERNAL: Final = ("http_worker_ipc", "rid")
_EFFORTS: Final[tuple[object, ...]] = ("none", "low", 0.5, True, {})
"""Fields of SGLang's messages between its processes."""


def generate(name: str, lacks: tuple[str, ...] = _META, **body: object) -> Asked:
    """Return a request to ``/generate``."""
    return Asked(name, "POST", "/generate", body, lacks)


def sampled(name: str, **params: object) -> Asked:
    """Return a request with these sampling parameters."""
    return generate(name, input_ids=[5, 6], sampling_params={**SHORT, **params})


ASKED: Final = (
    Asked("health", "GET", "/health"),
    Asked("health by a token", "GET", "/health_generate"),
    Asked("models", "GET", "/v1/models"),
    Asked("model", "GET", "/model_info", None, ("embedding",)),
    Asked("model by its old name", "GET", "/get_model_info", None, ("embedding",)),
    Asked("unknown route", "GET", "/nowhere", None, ("detail",)),  # FastAPI's body, not SGLang's
    generate("text", text="hello", sampling_params=SHORT),
    generate("ids", input_ids=[5, 6], sampling_params=SHORT),
    generate("texts", _BATCH, text=["hello", "you"], sampling_params=SHORT),
    generate("ids of several", _BATCH, input_ids=[[5, 6], [7]],
             sampling_params=[SHORT, {**SHORT, "min_new_tokens": 2}]),
    generate("several samples", _BATCH, input_ids=[5, 6], sampling_params={"n": 2, "max_new_tokens": 4}),
    generate("id", input_ids=[5], rid="mine", sampling_params=SHORT),
    generate("ids of requests", _BATCH, input_ids=[[5], [6]], rid=["a", "b"], sampling_params=SHORT),
    generate("too few ids of requests", input_ids=[[5], [6]], rid=["a"], sampling_params=SHORT),
    generate("the same id twice", input_ids=[[5], [6]], rid=["a", "a"], sampling_params=SHORT),
    generate("logprobs", input_ids=[5, 6], sampling_params=SHORT, return_logprob=True),
    generate("top logprobs", input_ids=[5, 6, 7], sampling_params=SHORT, return_logprob=True, top_logprobs_num=2,
             logprob_start_len=0),
    generate("logprobs of the prompt's end", input_ids=[5, 6, 7], sampling_params=SHORT, return_logprob=True,
             logprob_start_len=1),
    generate("logprobs with texts", input_ids=[5, 6], sampling_params=SHORT, return_logprob=True,
             return_text_in_logprobs=True, logprob_start_len=0),
    generate("ids of the prompt", text="hello", sampling_params=SHORT, return_prompt_token_ids=True),
    generate("stream", _BATCH,
             text="hello", sampling_params=SHORT, stream=True),
    generate("nulls", input_ids=[5], image_data=None, rid=None, lora_path=None, return_logprob=None,
             sampling_params={"max_new_tokens": 4, "stop": None, "stop_token_ids": None, "temperature": None,
                              "top_k": None, "top_p": None, "sampling_seed": None}),
    generate("unknown field", input_ids=[5], sampling_params=SHORT, of_a_later_release=1),
    generate("as many tokens as SGLang makes", input_ids=[5], sampling_params={"temperature": 0, "ignore_eos": True}),
    sampled("slime", top_p=1.0, top_k=-1, stop=None, stop_token_ids=None, skip_special_tokens=True, no_stop_trim=True,
            spaces_between_special_tokens=False),
    sampled("AReaL", top_p=1.0, top_k=10**8, ignore_eos=False, frequency_penalty=0.0, stop_token_ids=[]),
    sampled("stop token", max_new_tokens=100, temperature=1, stop_token_ids=list(range(60, 120))),
    sampled("stop string", max_new_tokens=100, logit_bias={"97": 100}, stop=["e", "a"]),  # the id of "a"
    sampled("top_k of 0", top_k=0, temperature=1),
    sampled("greedy top_k of 0", top_k=0),
    sampled("unknown parameter", max_tokens=4),
    sampled("unknown seed", seed=4),
    sampled("wrong type", max_new_tokens="four"),
    sampled("wrong temperature", temperature=-1),
    sampled("wrong penalty", repetition_penalty=3),
    sampled("wrong top_p", top_p=0),
    generate("nothing"),
    generate("no ids", input_ids=[], sampling_params=SHORT),
    generate("wrong ids", input_ids="five", sampling_params=SHORT),
    generate("too long", input_ids=[5] * 5000, sampling_params=SHORT),
    generate("unknown adapter", input_ids=[5], sampling_params=SHORT, lora_path="nobody"),
    generate("pickled code", input_ids=[5], sampling_params=SHORT, custom_logit_processor="00"),
    Asked("no json", "POST", "/generate", None, headers={"content-type": "application/json"}),
    Asked("put", "PUT", "/generate", {"input_ids": [5], "sampling_params": SHORT}, _META),
    Asked("loads", "GET", "/v1/loads?include=core", None, _LOADS),
    Asked("flush", "GET", "/flush_cache"),
    Asked("flush by post", "POST", "/flush_cache"),
    Asked("wrong mode of a pause", "POST", "/pause_generation", {"mode": "sometimes"}),
    Asked("pause", "POST", "/pause_generation", {}),
    Asked("pause in place", "POST", "/pause_generation", {"mode": "in_place"}),
    Asked("continue", "POST", "/continue_generation", {}),
    Asked("abort", "POST", "/abort_request", {"rid": "nobody"}),
    Asked("abort nothing", "POST", "/abort_request", {"rid": ""}),
    Asked("abort all", "POST", "/abort_request", {"abort_all": True}),
    Asked("label", "POST", "/update_weight_version", {"new_version": "7"}),
    Asked("weights of nowhere", "POST", "/update_weights_from_disk", {"model_path": "/nowhere"}),
    Asked("no such weight", "POST", "/get_weights_by_name", {"name": "nothing", "truncate_size": 3}),
    Asked("adapter", "POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, _INTERNAL),
    Asked("no adapter", "POST", "/unload_lora_adapter", {"lora_name": "nobody"}, _INTERNAL),
    Asked("tokenize", "POST", "/tokenize", {"prompt": "hello"}),
    Asked("tokenize several", "POST", "/v1/tokenize", {"prompt": ["hello", "you"]}),
    Asked("detokenize", "POST", "/detokenize", {"tokens": [104, 105]}),
    Asked("completion", "POST", "/v1/completions", {"model": "m", "prompt": [5, 6], "max_tokens": 4}, _OPENAI),
    Asked("chat", "POST", "/v1/chat/completions", {"model": "m", "messages": MESSAGES, "max_tokens": 4}, _OPENAI),
    *(
        Asked(f"chat with effort {effort}", "POST", "/v1/chat/completions",
              {"messages": MESSAGES, "max_tokens": 4, "reasoning_effort": effort}, _OPENAI)
        for effort in _EFFORTS
    ),
    Asked("wrong completion", "POST", "/v1/completions", {"model": "m", "prompt": [5], "temperature": -1}),
    Asked("completion without json", "POST", "/v1/completions", None, headers={"content-type": "application/json"}),
)  # fmt: skip


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, tuple[int, object]], dict[str, tuple[int, object]]]:
    folder = str(tiny_model("qwen2"))
    theirs = SGLangServer(launch_of(EngineConfig(backend="sglang-server", model=folder, endpoint="http://unused"),
                                    served_model_name="m"))  # fmt: skip
    try:
        of_sglang = answers(theirs.endpoint, ASKED)
    finally:
        theirs.stop()
    config = ServerConfig(port=0, dialect="sglang", served_model_name=("m",))

    async def serve() -> dict[str, tuple[int, object]]:
        async with create_engine("transformers", model=folder) as engine, Server(engine, config) as ours:
            return await asyncio.to_thread(answers, ours.url, ASKED)

    return of_sglang, asyncio.run(serve())


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.name)
def test_ours_answers_as_sglang_does(asked: Asked, both: Any) -> None:
    compare(asked, *both)
