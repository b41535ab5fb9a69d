"""SkyRL's calls that generate, against the engine's own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Capability, InferenceEngine, InvalidRequest, UnsupportedCapability
from drivetrain_trainers.skyrl import SkyRLInferenceEngine
from engines import until_idle
from scripted_backend import CALL, scripted_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
CHAT = [{"role": "user", "content": "Say something."}]


async def test_sizes_are_methods(skyrl: SkyRLInferenceEngine) -> None:
    assert (skyrl.tp_size(), skyrl.pp_size(), skyrl.dp_size(), skyrl.ep_size()) == (1, 1, 1, 1)


async def test_outputs_are_parallel_lists(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    output = await skyrl.generate({"prompt_token_ids": PROMPTS, "sampling_params": {**GREEDY, "n": 2}})
    expected = await engine.generate(
        PROMPTS, {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, "n": 2}
    )
    assert output["response_ids"] == [one.token_ids for one in expected.completions]
    assert output["responses"] == [one.text for one in expected.completions]
    for found, one in zip(output["response_logprobs"] or [], expected.completions, strict=True):
        assert found == pytest.approx(one.logprobs, abs=1e-4)
    assert output["stop_reasons"] == ["length"] * 4
    assert output["weight_version"] == engine.get_weight_version()
    assert output["n_per_prompt"] == 2
    assert output["request_ids"] is not None
    assert len(set(output["request_ids"])) == 4
    assert output["hidden_states"] is None


async def test_what_was_not_asked_for_is_none(skyrl: SkyRLInferenceEngine) -> None:
    output = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": {"max_tokens": 2}})
    assert output["response_logprobs"] is None
    assert output["n_per_prompt"] is None


async def test_chats_are_rendered_by_the_models_template(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    output = await skyrl.generate({"prompts": [CHAT], "sampling_params": GREEDY})
    (expected,) = (
        await engine.generate([CHAT], {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True})
    ).completions
    assert output["response_ids"] == [expected.token_ids]


async def test_a_stop_string_that_spans_tokens_ends_generation(skyrl: SkyRLInferenceEngine) -> None:
    mask = {"action_mask": [ord("a"), ord("b")], "max_tokens": 64, "seed": 3, "temperature": 1.0}
    whole = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": mask})
    text = whole["responses"][0]
    end = text.index("ab") + 2
    kept = await skyrl.generate(
        {"prompt_token_ids": [[5]], "sampling_params": {**mask, "stop": ["ab"], "no_stop_trim": True}}
    )
    cut = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": {**mask, "stop": "ab"}})
    by_regex = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": {**mask, "stop_regex": "a{1}b"}})
    assert (kept["responses"], kept["stop_reasons"]) == ([text[:end]], ["stop"])
    assert kept["response_ids"] == [whole["response_ids"][0][:end]]
    assert cut["responses"] == [text[: end - 2]]
    assert by_regex["responses"] == [text[: end - 2]]


async def test_masks_decide_which_tokens_are_drawn(skyrl: SkyRLInferenceEngine) -> None:
    params = {"max_tokens": 40, "temperature": 1.0, "n": 4}
    only = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": {**params, "action_mask": [70, 71]}})
    assert {token for ids in only["response_ids"] for token in ids} == {70, 71}
    both = {**params, "action_mask": [70, 71, 72], "disallowed_tokens": [72]}
    without = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": both})
    assert {token for ids in without["response_ids"] for token in ids} == {70, 71}


async def test_the_least_number_of_tokens_holds(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    eos = engine.model_info.eos_token_ids[0]
    params = {"max_tokens": 9, "logit_bias": {str(eos): 50.0}, "temperature": 1.0}
    none = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": params})
    some = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": {**params, "min_tokens": 4}})
    assert none["response_ids"] == [[eos]]
    assert len(some["response_ids"][0]) == 5
    assert some["stop_reasons"] == ["stop"]


async def test_a_seed_repeats(skyrl: SkyRLInferenceEngine) -> None:
    params = {"max_tokens": 16, "temperature": 1.0, "sampling_seed": 11}
    first, again = [
        (await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": params}))["response_ids"] for _ in range(2)
    ]
    other = await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": {**params, "sampling_seed": 12}})
    assert first == again != other["response_ids"]


@pytest.mark.parametrize("field", ["bad_words", "unheard_of"])
async def test_unknown_parameters_are_refused_by_name(skyrl: SkyRLInferenceEngine, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        await skyrl.generate({"prompt_token_ids": [[5]], "sampling_params": {field: ["a"]}})


async def test_what_the_engine_cannot_do_is_refused_by_name(
    skyrl: SkyRLInferenceEngine, engine: InferenceEngine
) -> None:
    if not engine.supports(Capability.IMAGES):
        with pytest.raises(UnsupportedCapability, match="image"):
            await skyrl.generate({"prompt_token_ids": [[5]], "image_data": ["https://example.org/a.png"]})
    if not engine.supports(Capability.HIDDEN_STATES):
        with pytest.raises(UnsupportedCapability, match="hidden_states"):
            await skyrl.generate({"prompt_token_ids": [[5]], "return_hidden_states": True})
    else:
        output = await skyrl.generate(
            {
                "prompt_token_ids": [[5]],
                "return_hidden_states": True,
                "sampling_params": {"max_tokens": 3, "ignore_eos": True},
            }
        )
        assert output["hidden_states"] is not None
        assert [len(states) for states in output["hidden_states"]] == [3]


# Streams -------------------------------------------------------------------------------------------------------------


async def test_a_stream_has_every_token_once(skyrl: SkyRLInferenceEngine) -> None:
    params = {**GREEDY, "n": 2}
    whole = await skyrl.generate({"prompt_token_ids": PROMPTS, "sampling_params": params})
    ids: list[list[int]] = [[], [], [], []]
    texts, logprobs, ends = ["", "", "", ""], [[], [], [], []], ["", "", "", ""]  # type: ignore[var-annotated]
    async for chunk in skyrl.generate_stream({"prompt_token_ids": PROMPTS, "sampling_params": params}):
        index = chunk["index"]
        assert not ends[index], "a chunk came after the last one"
        texts[index] += chunk["delta_text"]
        if chunk["delta_token_id"] is not None:
            ids[index].append(chunk["delta_token_id"])
            logprobs[index].append(chunk["delta_logprob"])
        assert chunk["cumulative_token_ids"] == ids[index]
        assert chunk["cumulative_text"] == texts[index]
        assert chunk["is_finished"] is (chunk["stop_reason"] is not None)
        ends[index] = chunk["stop_reason"] or ""
    assert ids == whole["response_ids"]
    assert texts == whole["responses"]
    assert ends == whole["stop_reasons"]
    for found, expected in zip(logprobs, whole["response_logprobs"] or [], strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert skyrl.supports_streaming() is True


async def test_closing_a_stream_aborts(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    params = {"max_tokens": 900, "ignore_eos": True}
    async with aclosing(skyrl.generate_stream({"prompt_token_ids": [[5]], "sampling_params": params})) as stream:
        async for _ in stream:
            break
    await until_idle(engine)


async def test_a_stream_holds_no_hidden_states(skyrl: SkyRLInferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="return_hidden_states"):
        await anext(skyrl.generate_stream({"prompt_token_ids": [[5]], "return_hidden_states": True}))


# Sessions ------------------------------------------------------------------------------------------------------------


async def test_a_turn_continues_the_one_that_it_names(skyrl: SkyRLInferenceEngine) -> None:
    assert skyrl.supports_sessions() is True
    session = await skyrl.open_session(capacity_of_str_len=200)
    first = await skyrl.generate_with_session(session, {"prompt_token_ids": [[5, 6]], "sampling_params": GREEDY})
    (rid,) = first["request_ids"] or [""]
    second = await skyrl.generate_with_session(
        session, {"prompt_token_ids": [[7]], "sampling_params": GREEDY}, rid=rid, offset=-1
    )
    whole = [5, 6, *first["response_ids"][0], 7]
    expected = await skyrl.generate({"prompt_token_ids": [whole], "sampling_params": GREEDY})
    assert second["response_ids"] == expected["response_ids"]
    anew = await skyrl.generate_with_session(session, {"prompt_token_ids": [[5, 6]], "sampling_params": GREEDY})
    assert anew["response_ids"] == first["response_ids"]
    await skyrl.close_session(session)


async def test_replacing_discards_the_turns_that_followed(skyrl: SkyRLInferenceEngine) -> None:
    session = await skyrl.open_session(session_id="mine")
    assert session == "mine"
    batch: Any = {"prompt_token_ids": [[7]], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    first = await skyrl.generate_with_session(session, batch)
    (rid,) = first["request_ids"] or [""]
    (kept,) = (await skyrl.generate_with_session(session, batch, rid=rid))["request_ids"] or [""]
    await skyrl.generate_with_session(session, batch, rid=rid)
    await skyrl.generate_with_session(session, batch, rid=kept)
    await skyrl.generate_with_session(session, batch, rid=rid, replace=True)
    with pytest.raises(InvalidRequest, match="no such turn"):
        await skyrl.generate_with_session(session, batch, rid=kept)
    await skyrl.close_session(session)


async def test_sessions_refuse_what_they_cannot_honour(skyrl: SkyRLInferenceEngine) -> None:
    session = await skyrl.open_session(capacity_of_str_len=8)
    batch: Any = {"prompt_token_ids": [[7]], "sampling_params": {"max_tokens": 2}}
    with pytest.raises(InvalidRequest, match="open already"):
        await skyrl.open_session(session_id=session)
    with pytest.raises(InvalidRequest, match="capacity"):
        await skyrl.generate_with_session(session, {"prompt_token_ids": [[7] * 9]})
    with pytest.raises(UnsupportedCapability, match="offset"):
        await skyrl.generate_with_session(session, batch, offset=1)
    with pytest.raises(UnsupportedCapability, match="drop_previous_output"):
        await skyrl.generate_with_session(session, batch, drop_previous_output=True)
    with pytest.raises(UnsupportedCapability, match="lora_name"):
        await skyrl.generate_with_session(session, {"prompt_token_ids": [[7]], "sampling_params": {"lora_name": "one"}})
    await skyrl.close_session(session)
    with pytest.raises(InvalidRequest, match="not open"):
        await skyrl.generate_with_session(session, batch)


# OpenAI --------------------------------------------------------------------------------------------------------------


async def test_bodies_are_wrapped(skyrl: SkyRLInferenceEngine, engine: InferenceEngine) -> None:
    body = {
        "model": engine.config.model,
        "max_tokens": 6,
        "temperature": 0,
        "session_id": "trajectory",
        "stream": False,
    }
    chat: Any = await skyrl.chat_completion({"json": {**body, "messages": CHAT}, "headers": {"authorization": "x"}})
    expected = await skyrl.generate({"prompts": [CHAT], "sampling_params": {"max_tokens": 6, "temperature": 0}})
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["content"] == expected["responses"][0]
    assert chat["choices"][0]["token_ids"] == expected["response_ids"][0]
    text: Any = await skyrl.completion({"json": {**body, "prompt": PROMPTS, "n": 2}, "headers": {}})
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("payload", "code", "param"),
    [
        ({"json": {"model": "another"}, "headers": {}}, 404, "model"),
        ({"json": {"temperature": -1}, "headers": {}}, 400, "temperature"),
        ({"json": {"cache_salt": "s"}, "headers": {}}, 400, "cache_salt"),
        ({"body": {}}, 400, "json"),
        ({"json": {}, "temperature": 0}, 400, "json"),
    ],
)
async def test_errors_are_returned(skyrl: SkyRLInferenceEngine, payload: dict[str, Any], code: int, param: str) -> None:
    for call, prompt in ((skyrl.chat_completion, {"messages": CHAT}), (skyrl.completion, {"prompt": "a"})):
        given = {**payload, "json": {**payload["json"], **prompt}} if "json" in payload else payload
        answer: Any = await call(given)
        assert answer.keys() == {"error"}
        assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)
        assert param in answer["error"]["message"]


async def test_tool_calls_are_parsed(model: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    async with scripted_engine(model, tmp_path / "model") as (engine, backend):
        backend.says = [CALL]
        answer: Any = await SkyRLInferenceEngine(engine).chat_completion(
            {"json": {"messages": CHAT, "tools": tools, "tool_choice": "auto"}, "headers": {}}
        )
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_adapters_are_named_by_the_parameters(skyrl: SkyRLInferenceEngine, adapters: Path) -> None:
    plain = await skyrl.generate({"prompt_token_ids": PROMPTS, "sampling_params": GREEDY})
    await skyrl.load_lora_adapter("first", str(adapters / "one"), pinned=True)
    named = {"prompt_token_ids": PROMPTS, "sampling_params": {**GREEDY, "lora_name": "first"}}
    with_adapter, without = await asyncio.gather(
        skyrl.generate(named),  # type: ignore[arg-type]
        skyrl.generate({"prompt_token_ids": PROMPTS, "sampling_params": GREEDY}),
    )
    assert without["response_ids"] == plain["response_ids"] != with_adapter["response_ids"]
    await skyrl.unload_lora_adapter("first")
    with pytest.raises(InvalidRequest, match="first"):
        await skyrl.generate(named)  # type: ignore[arg-type]
