"""Every type of the Backend page crosses the wire unchanged."""

from __future__ import annotations

import inspect
import math

import msgspec
import pytest
from pydantic import JsonValue

from drivetrain import (
    AudioInput,
    Backend,
    CommunicatorSpec,
    CudaIpcSource,
    DisallowedTokens,
    DiskSource,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ImageInput,
    InProcessSource,
    JsonSchema,
    LogprobsMode,
    LoraTensors,
    MemoryTag,
    ModelInfo,
    PauseMode,
    SamplingParams,
    ShardsSource,
    SharedMemorySource,
    TensorData,
    TensorSpec,
    TokenDelta,
    VersionSpan,
    VideoInput,
    WeightManifest,
    WeightPlan,
    WeightReport,
    WeightUpdateRequest,
    WireError,
)
from drivetrain.backend.base import ReadMedium
from drivetrain.process import HostedBackend
from drivetrain.process.codec import forget_params
from drivetrain.process.rpc_methods import METHODS
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling import ActionMask, TemperatureSchedule
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain.types.token_scores import Scoring, TokenScores
from drivetrain.types.weights import (
    AbortUpdate,
    ApplyUpdate,
    BeginUpdate,
    Bucket,
    CommitUpdate,
    LoadBuckets,
    PlacedTensor,
    PluginSource,
    PrepareUpdate,
    ReleaseSources,
    VerifyUpdate,
    WeightReply,
)

SPEC = TensorSpec("model.layers.0.weight", "bfloat16", (2, 3))
PLAN = WeightPlan((Bucket((PlacedTensor(SPEC, 256, 12),), 512), Bucket((), 0)))
PARAMS = SamplingParams(
    max_new_tokens=7,
    temperature=0.3,
    top_p=0.9,
    logit_bias={3: -1.5, 70000: 2.0},
    seed=2**62,
    stop=("é\n", "b"),
    stop_regex=(r"\d+",),
    stop_token_ids=(1, 2),
    include_stop_str_in_output=True,
    logprobs=2,
    logprobs_mode=LogprobsMode.RAW,
    structured_output=JsonSchema(json_schema="{}"),
    logit_processors=(
        ActionMask(allowed_token_ids=(1,)),
        DisallowedTokens(token_ids=(4,)),
        TemperatureSchedule(start=1.0, end=0.5, steps=3),
    ),
)
REQUEST = GenerateRequest(
    "r-1",
    [0, 5, 2**40],
    PARAMS,
    7,
    (1, 2),
    LogprobsMode.PROCESSED,
    seed=2**63 - 1,
    lora="a",
    priority=-3,
    media=(ImageInput(data=b"\0\xff"), VideoInput(url="http://a"), AudioInput(path="/a")),
    scoring=Scoring(2, 0.5, 1, 1, b"\0\xff\x80\1" * 2),
)
RESULT = GenerateResult(
    [1, 2],
    FinishReason.STOP,
    [VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 2)],
    matched_stop=2,
    logprobs=[-0.1, -math.inf],
    top_logprobs=[[(1, -0.1), (2, -3.0)], []],
    prompt_logprobs=[None, -1.0],
    prompt_top_logprobs=[None, [(4, -1.0)]],
    prompt_ranks=[None, 2],
    cached_tokens=3,
    hidden_states=[[0.5, 1e-9]],
    routed_experts=RoutedExperts.of([[[1, 2], [3, 400]]]),
    prompt_routed_experts=RoutedExperts.of([[[1, 2], [3, 4]]] * 3),
    sampling_mask=SamplingMask.of(40, [range(40), range(1, 20)]),
    scores=TokenScores(2, 0.5, b"\0" * 8, 1, b"\xff" * 8, 1, b"\1" * 8, b"\2" * 8),
)
LORA: dict[str, JsonValue] = {"r": 2, "lora_alpha": 1.5, "target_modules": ["x"], "use_rslora": True, "bias": None}
UPDATES = [
    WeightUpdateRequest(version="v2", source=InProcessSource(key="k"), plan=PLAN, digests={SPEC.name: 2**64 - 1}),
    WeightUpdateRequest(version="v2", source=DiskSource(path="/w"), mode=PauseMode.ABORT, keep_prefix_cache=True),
    WeightUpdateRequest(
        version="v3",
        source=SharedMemorySource(path="/proc/1/fd/3", nbytes=512, bucket_offsets=(0, 512)),
        plan=PLAN,
        digests={},
    ),
    WeightUpdateRequest(
        version="v3",
        source=CudaIpcSource(name="a", gpus=("GPU-0",), segments=b"\0\x80\xff", places=b"\xff" * 16),
        plan=PLAN,
        digests={},
    ),
    WeightUpdateRequest(
        version="v3",
        source=ShardsSource(
            ranks=tuple(
                CudaIpcSource(name=name, gpus=("GPU-0",), segments=b"\0\x80\xff", places=b"\xff" * 16) for name in "ab"
            ),
            parts=(b"\0" * 24, b"\xff" * 24),
        ),
        plan=PLAN,
        digests={},
    ),
    WeightUpdateRequest(
        version="v3",
        source=PluginSource(transport="delta", data={"base": None, "files": [1, -2], "more": {"a": [0.5, "b", True]}}),
        plan=PLAN,
        digests={},
    ),
]

ARGUMENTS: dict[str, list[tuple[object, ...]]] = {
    "start": [()],
    "close": [()],
    "stats": [()],
    "generate": [(REQUEST,), (GenerateRequest("r", [], SamplingParams(), 0, (), LogprobsMode.RAW),)],
    "stream": [(REQUEST,)],
    "read_media": [(REQUEST.media,), ((),)],
    "abort": [(["a", "b"],), ([],)],
    "freeze": [(mode,) for mode in PauseMode],
    "unfreeze": [()],
    "sleep": [(frozenset(MemoryTag),), (frozenset(),)],
    "wake_up": [(frozenset({MemoryTag.KV_CACHE}),)],
    "reset_prefix_cache": [()],
    "clear_hicache_storage": [()],
    "weight_manifest": [()],
    "receive_weights": [
        *((PrepareUpdate(update),) for update in UPDATES),
        (PrepareUpdate(UPDATES[0].model_copy(update={"plan": WeightPlan(())}), kept_plan="a hash"),),
        (BeginUpdate(),),
        (LoadBuckets((0, 3)),),
        (VerifyUpdate(),),
        (CommitUpdate("v2"),),
        (AbortUpdate(),),
        (ReleaseSources(),),
    ],
    "apply_weights": [(ApplyUpdate("v2", 3, True),), (ApplyUpdate("v2", 1, False, PauseMode.IN_PLACE),)],
    "validate_weights": [()],
    "set_weight_version": [("v2",)],
    "init_communicator": [
        (CommunicatorSpec(master_address="h", master_port=1, rank_offset=1, world_size=2, group_name="g"),)
    ],
    "destroy_communicator": [("g",)],
    "read_weight": [(SPEC.name,)],
    "save_sharded": [("/a",)],
    "save_remote": [("s3://a",)],
    "load_lora_adapter": [("a", "/a", True)],
    "load_lora_tensors": [
        ("a", UPDATES[0].model_copy(update={"lora": LoraTensors(lora_name="b", config=LORA)}), True),
    ],
    "unload_lora_adapter": [("a",)],
    "embed": [([[1, 2], []], None), ([], 64)],
    "reward_score": [([[1, 2]],)],
    "start_profile": [("/a",)],
    "stop_profile": [()],
}
RESULTS: dict[str, object] = {
    "start": ModelInfo(256, 4096, (0, 1), "float32", "Fake", 10**10, "cpu"),
    "stats": EngineStats(1, 2, 3, 4),
    "generate": RESULT,
    "stream": TokenDelta([1], [-0.5], [[(1, -0.5)]], RESULT, sampling_mask=SamplingMask.of(9, [[1, 3]])),
    "read_media": [ReadMedium(3, 5, b"\0\xff", follows=2), ReadMedium(4, 1)],
    "weight_manifest": WeightManifest((SPEC,), {"a": "b"}),
    "receive_weights": WeightReply(3, 2**40, keeps_plan=True),
    "apply_weights": WeightReply(nbytes=2**40, seconds=0.009),
    "validate_weights": WeightReport(3, ("a",), (), ("b",)),
    "read_weight": TensorData(SPEC, bytes(range(256))),
    "embed": [[0.5, -1.0], []],
    "reward_score": [0.5],
    "stop_profile": "/a/trace.json",
}


def test_every_coroutine_of_the_backend_page_is_a_method_and_is_hosted() -> None:
    coroutines = {
        name
        for name, member in vars(Backend).items()
        if not name.startswith("_") and (inspect.iscoroutinefunction(member) or name == "stream")
    }
    assert set(METHODS) == coroutines - {"died"}
    assert set(METHODS) <= set(vars(HostedBackend)), "HostedBackend inherits a refusal from Backend"
    assert set(ARGUMENTS) == set(METHODS), "an example of each method's arguments belongs here"


@pytest.mark.parametrize(
    ("method", "arguments"), [(name, each) for name, examples in ARGUMENTS.items() for each in examples]
)
def test_arguments_cross_unchanged(method: str, arguments: tuple[object, ...]) -> None:
    codecs = [argument.codec for argument in METHODS[method].arguments]
    got = tuple(codec.decode(codec.encode(value)) for codec, value in zip(codecs, arguments, strict=True))
    assert got == arguments
    assert [type(value) for value in got] == [type(value) for value in arguments]


@pytest.mark.parametrize("method", METHODS)
def test_results_cross_unchanged(method: str) -> None:
    result = RESULTS.get(method)
    codec = METHODS[method].result
    got = codec.decode(codec.encode(result))
    assert got == result
    assert type(got) is type(result)


def test_the_plan_of_an_update_keeps_its_hash() -> None:
    codec = METHODS["receive_weights"].arguments[0].codec
    got = codec.decode(codec.encode(PrepareUpdate(UPDATES[0])))
    assert isinstance(got, PrepareUpdate)
    assert got.request.plan is not None
    assert got.request.plan.hash == PLAN.hash


def test_requests_that_share_params_share_them_on_arrival_too() -> None:
    codec = METHODS["generate"].arguments[0].codec
    first, second = (codec.decode(codec.encode(REQUEST)) for _ in range(2))
    assert isinstance(first, GenerateRequest)
    assert isinstance(second, GenerateRequest)
    assert first.params is second.params


def test_params_that_were_changed_in_place_cross_changed() -> None:
    codec = METHODS["generate"].arguments[0].codec
    params = SamplingParams(logit_bias={1: 1.0})
    request = GenerateRequest("r", [1], params, 1, (), LogprobsMode.RAW)
    codec.encode(request)
    forget_params()
    params.logit_bias[2] = 2.0
    got = codec.decode(codec.encode(request))
    assert isinstance(got, GenerateRequest)
    assert got.params.logit_bias == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("generate", {"request_id": "r"}),
        ("generate", ["r", [1], {"temperature": -1}, 1, [], "raw", None, None, 0, None, []]),
        ("generate", ["r", [1], {"no_such_field": 1}, 1, [], "raw", None, None, 0, None, []]),
        ("generate", ["r", ["one"], {}, 1, [], "raw", None, None, 0, None, []]),
        ("generate", ["r", [1], {}, 1, [], "raw", None, None, 0, None, [["Exploit", {}]]]),
        ("receive_weights", ["CommitUpdate", {}]),
        ("receive_weights", ["Popen", {}]),
        ("receive_weights", "CommitUpdate"),
        ("freeze", "melt"),
        ("abort", "not a list"),
        ("receive_weights", ["PrepareUpdate", {"request": {"version": "", "source": {"kind": "disk", "path": "/a"}}}]),
        ("init_communicator", {"master_address": "h"}),
    ],
)
def test_values_that_are_not_of_the_type_are_refused(method: str, value: object) -> None:
    codec = METHODS[method].arguments[0].codec
    with pytest.raises(WireError):
        codec.decode(msgspec.Raw(msgspec.msgpack.encode(value)))


@pytest.mark.parametrize(("method", "value"), [("generate", "r"), ("receive_weights", REQUEST), ("abort", [object()])])
def test_values_that_cannot_cross_are_refused_before_they_are_sent(method: str, value: object) -> None:
    with pytest.raises(WireError, match="cannot cross"):
        METHODS[method].arguments[0].codec.encode(value)
