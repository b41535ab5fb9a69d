"""The token-capture gateway: agents speak OpenAI, and the trainer reads the ids."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from pydantic import ValidationError

from drivetrain import InferenceEngine, TextPrompt, create_engine
from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain_serving import Server, ServerConfig, SessionConfig
from drivetrain_serving.gateway.records import Record, RecordStore, SpillFile
from engines import HANGING, require_ready_and_idle, until, until_generating, until_idle, until_running
from gateways import Gateway, gateway_of, ids_of, require_own_logprobs, sampled, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

API, CONTROL = "a-key-for-requests", "a-key-for-weights!"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def talking(model: Path) -> AsyncIterator[InferenceEngine]:
    async with create_engine("transformers", model=str(model), max_num_seqs=16) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(talking: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    yield talking
    await require_ready_and_idle(talking)


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(engine: InferenceEngine) -> AsyncIterator[Gateway]:
    async with gateway_of(engine) as gateway:
        yield gateway


# Turns ---------------------------------------------------------------------------------------------------------------


async def test_each_prompt_extends_the_ids_before_it(gateway: Gateway, engine: InferenceEngine) -> None:
    _, answers = await gateway.talk(["hello", "and then?", "go on", "really?"], seed=3)
    for before, after in itertools.pairwise(answers):
        assert after.prompt_token_ids[: len(ids_of(before))] == ids_of(before)
    (branch,) = await gateway.branches()
    assert branch["token_ids"] == ids_of(answers[-1])
    assert sampled(branch) == [answer.choices[0].token_ids for answer in answers]
    assert [value is not None for value in branch["logprobs"]] == [one == 1 for one in branch["loss_mask"]]
    assert branch["turns"] == [0, 1, 2, 3]
    await require_own_logprobs(engine, branch)


async def test_each_turn_says_how_it_was_sampled(gateway: Gateway) -> None:
    await gateway.ask([user("hello")], temperature=0.5, seed=7, top_k=20)
    await gateway.ask([user("hello")], presence_penalty=0.5)
    first, second = (await gateway.http.get("/sessions/a/trajectory")).json()["turns"]
    off = {"top_p": 1, "top_k": 0, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
    assert first["sampling_params"] == {**off, "temperature": 0.5, "top_k": 20, "seed": 7}
    assert second["sampling_params"] == {**off, "temperature": 1, "presence_penalty": 0.5, "seed": None}


async def test_ids_stay_as_sampled_where_their_text_has_others(gateway: Gateway, engine: InferenceEngine) -> None:
    _, answers = await gateway.talk(["hello", "and then?", "go on"], seed=5, ignore_eos=True)
    drifted = [
        ids
        for answer in answers
        if engine.tokenizer.encode(TextPrompt(text=engine.decode(ids := answer.choices[0].token_ids))) != ids
    ]
    assert drifted, "no text of the model has other ids; take another seed"
    (branch,) = await gateway.branches()
    assert sampled(branch) == [answer.choices[0].token_ids for answer in answers]


async def test_the_first_prompt_is_that_of_the_route_without_a_session(gateway: Gateway) -> None:
    answer = await gateway.ask([user("hello")], temperature=0)
    body = {"messages": [user("hello")], "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    other = (await gateway.http.post("/v1/chat/completions", json=body)).json()
    assert ids_of(answer) == other["prompt_token_ids"] + other["choices"][0]["token_ids"]
    assert answer.choices[0].message.content == other["choices"][0]["message"]["content"]


async def test_logprobs_are_recorded_and_returned_only_if_asked_for(gateway: Gateway) -> None:
    plain, asked = [await gateway.ask([user("hello")], seed=1, logprobs=logprobs) for logprobs in (False, True)]
    assert plain.choices[0].logprobs is None
    assert len(asked.choices[0].logprobs.content) == len(asked.choices[0].token_ids)
    first, second = await gateway.branches()
    assert first["logprobs"] == pytest.approx(second["logprobs"], nan_ok=True)


# Branches ------------------------------------------------------------------------------------------------------------


async def test_an_edited_history_is_a_branch_of_its_own(gateway: Gateway, engine: InferenceEngine) -> None:
    messages, answers = await gateway.talk(["hello", "and then?"], seed=2)
    other = await gateway.ask([*messages[:2], user("something else")], seed=2)
    assert other.prompt_token_ids[: len(ids_of(answers[0]))] == ids_of(answers[0])
    edited = [messages[0], {"role": "assistant", "content": "I never said so"}, user("and then?")]
    new = await gateway.ask(edited, seed=2)
    first, second, third = await gateway.branches()
    assert (first["turns"], second["turns"], third["turns"]) == ([0, 1], [0, 2], [3])
    assert second["shared_length"] == len(ids_of(answers[0]))
    assert (first["shared_length"], third["shared_length"]) == (0, 0)
    assert third["token_ids"] == ids_of(new)
    assert sampled(third) == [new.choices[0].token_ids], "an answer that was not sampled has no loss"
    assert "no earlier turn" in third["begins_because"]
    for branch in (first, second, third):
        await require_own_logprobs(engine, branch)


async def test_a_subagent_and_parallel_calls_are_told_apart(gateway: Gateway) -> None:
    messages, answers = await gateway.talk(["hello"], seed=2)
    system = {"role": "system", "content": "You are a helper."}
    follow_ups = [[*messages, user(text)] for text in ("one", "two", "three")]
    asked = [gateway.ask(each) for each in (*follow_ups, [system, user("hello")])]
    *parallel, helper = await asyncio.gather(*asked)
    branches = await gateway.branches()
    assert {tuple(branch["token_ids"]) for branch in branches} == {tuple(ids_of(one)) for one in (*parallel, helper)}
    assert all(one.prompt_token_ids[: len(ids_of(answers[0]))] == ids_of(answers[0]) for one in parallel)
    assert sorted(len(branch["turns"]) for branch in branches) == [1, 2, 2, 2]


async def test_each_of_several_choices_can_be_continued(gateway: Gateway) -> None:
    answer = await gateway.ask([user("hello")], n=2, seed=4)
    for choice in answer.choices:
        more = await gateway.ask([user("hello"), choice.message.model_dump(exclude_none=True), user("go on")])
        assert more.prompt_token_ids[: len(ids_of(answer, choice.index))] == ids_of(answer, choice.index)
    assert [branch["turns"] for branch in await gateway.branches()] == [[0, 2], [1, 3]]


# Streams and clients that go -----------------------------------------------------------------------------------------


async def test_a_stream_is_recorded_as_a_whole_answer_is(gateway: Gateway) -> None:
    content, usage = "", None
    async with await gateway.api.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}], max_tokens=30, seed=3, stream=True,
        stream_options={"include_usage": True},
    ) as chunks:  # fmt: skip
        async for chunk in chunks:
            content += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
    (branch,) = await gateway.branches()
    assert usage is not None
    assert usage.completion_tokens == sum(branch["loss_mask"])
    ids = branch["token_ids"]
    more = await gateway.ask([user("hello"), {"role": "assistant", "content": content}, user("go on")])
    assert more.prompt_token_ids[: len(ids)] == ids
    assert len(await gateway.branches()) == 1
    whole = await gateway.session("b").ask([user("hello")], seed=3, max_tokens=30)
    assert ids_of(whole) == ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_leaves_a_partial_turn(
    gateway: Gateway, engine: InferenceEngine, stream: bool
) -> None:
    body = {"messages": [user("hello")], "max_tokens": 900, "ignore_eos": True, "stream": stream}

    async def ask() -> None:
        async with gateway.http.stream("POST", "/sessions/a/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                pass

    asking = asyncio.ensure_future(ask())
    await until_generating(engine, 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until_idle(engine)

    async def recorded() -> bool:
        return bool((await gateway.http.get("/sessions/a/trajectory")).json()["turns"])

    await until(recorded)
    (branch,) = await gateway.branches()
    assert branch["finish_reason"] == "disconnect"
    assert 0 < sum(branch["loss_mask"]) < 900
    await require_own_logprobs(engine, branch)
    (found,) = (await gateway.http.get("/sessions")).json()["sessions"]
    assert found["in_flight"] == 0


async def test_a_refused_request_leaves_no_turn(gateway: Gateway) -> None:
    for stream in (False, True):
        body = {"messages": [user("hello")], "temperature": -1, "stream": stream}
        refused = await gateway.http.post("/sessions/a/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert await gateway.branches() == []


async def test_requests_that_generate_nothing_make_no_session(gateway: Gateway) -> None:
    count = {"model": "policy", "messages": [user("hello")]}
    assert (await gateway.http.post("/sessions/a/v1/messages/count_tokens", json=count)).status_code == 200
    for body in ({"messages": 5}, {"messages": [user("hello")], "model": "nobody"}):
        assert (await gateway.http.post("/sessions/a/v1/chat/completions", json=body)).status_code in (400, 404)
    assert (await gateway.http.get("/sessions")).json() == {"sessions": []}


# Weights -------------------------------------------------------------------------------------------------------------


async def test_an_update_between_turns_shows_in_the_spans(
    gateway: Gateway, engine: InferenceEngine, model: Path
) -> None:
    before = engine.get_weight_version()
    messages, answers = await gateway.talk(["hello"], seed=1)
    await engine.load_weights_from_disk(model, "step-1")
    last = await gateway.ask([*messages, user("go on")], seed=1)
    (branch,) = await gateway.branches()
    ends = [len(ids_of(answer)) for answer in (answers[0], last)]
    begins = [len(answer.prompt_token_ids) for answer in (answers[0], last)]
    assert branch["weight_versions"] == [
        {"version": before, "start": begins[0], "end": ends[0]},
        {"version": "step-1", "start": begins[1], "end": ends[1]},
    ]


# The trainer's routes ------------------------------------------------------------------------------------------------


async def test_a_trajectory_comes_as_messagepack_too(gateway: Gateway) -> None:
    await gateway.talk(["hello", "go on"])
    packed = await gateway.http.get("/sessions/a/trajectory", headers={"accept": "application/msgpack"})
    assert packed.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(packed.content) == await gateway.trajectory()
    for accept, kind in (
        ("application/msgpack;q=0", "json"),
        ("application/json, application/msgpack; Q=0.5", "json"),
        ("application/msgpack;q=none", "json"),
        ("text/x;a=application/msgpack", "json"),
        ("*/*", "json"),
        ("APPLICATION/X-MSGPACK;q=0.5, application/json;q=0.1", "msgpack"),
        ("application/json, application/vnd.msgpack", "msgpack"),
    ):
        answer = await gateway.http.get("/sessions/a/trajectory", headers={"accept": accept})
        assert answer.headers["content-type"] == f"application/{kind}", accept


async def test_sessions_are_listed_and_deleted(gateway: Gateway) -> None:
    other = gateway.session("b-2")
    await asyncio.gather(gateway.talk(["hello"]), other.talk(["hello"]))
    listed = (await gateway.http.get("/sessions")).json()["sessions"]
    assert sorted((one["session_id"], one["turns"]) for one in listed) == [("a", 1), ("b-2", 1)]
    assert (await gateway.http.delete("/sessions/a")).status_code == 204
    for method, path in (("DELETE", "/sessions/a"), ("GET", "/sessions/a/trajectory")):
        gone = await gateway.http.request(method, path)
        assert (gone.status_code, gone.json()["drivetrain"]["error"]) == (404, "SessionNotFound")
    assert len(await other.branches()) == 1


@pytest.mark.parametrize("name", ["a b", "-a", "a" * 129, "a%2Fb", "a%00b", "%2e%2e"])
async def test_a_wrong_session_id_is_refused(gateway: Gateway, name: str) -> None:
    response = await gateway.http.post(f"/sessions/{name}/v1/chat/completions", json={"messages": [user("hello")]})
    assert response.status_code in (400, 404)
    assert (await gateway.http.get("/sessions")).json() == {"sessions": []}


async def test_agents_and_trainers_have_keys_of_their_own(engine: InferenceEngine) -> None:
    config = ServerConfig(port=0, api_key=API, control_key=CONTROL)
    body = {"messages": [user("hello")], "max_tokens": 2}
    async with Server(engine, config) as server, httpx.AsyncClient(base_url=server.url, timeout=HANGING) as http:

        async def status(method: str, path: str, key: str | None, **fields: Any) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return (await http.request(method, path, headers=headers, **fields)).status_code

        chat = "/sessions/a/v1/chat/completions"
        assert [await status("POST", chat, key, json=body) for key in (None, API, CONTROL)] == [401, 200, 200]
        assert await status("GET", "/sessions/a/v1/models", API) == 200
        for path in ("/sessions", "/sessions/a/trajectory"):
            assert [await status("GET", path, key) for key in (None, API, CONTROL)] == [401, 401, 200]
        assert [await status("DELETE", "/sessions/a", key) for key in (None, API, CONTROL)] == [401, 401, 204]


# Bounds --------------------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_session_expires_after_a_time_without_use(engine: InferenceEngine) -> None:
    async with gateway_of(engine, timeout=0.2) as gateway:
        await gateway.talk(["hello"])

        async def gone() -> bool:
            return bool((await gateway.http.get("/sessions")).json() == {"sessions": []})

        await until(gone)
        assert (await gateway.http.get("/sessions/a/trajectory")).status_code == 404


async def test_records_beyond_the_memory_go_to_disk_and_come_back(engine: InferenceEngine, tmp_path: Path) -> None:
    async with gateway_of(engine, memory_bytes=1, folder=str(tmp_path)) as gateway:
        other = gateway.session("b")
        _, answers = await gateway.talk(["hello", "and then?", "go on"], seed=3)
        await other.talk(["hello"])
        (made,) = files_in(tmp_path)
        assert len(list(made.glob("*.records"))) == 2, "one file for each session"
        (branch,) = await gateway.branches()
        assert branch["token_ids"] == ids_of(answers[-1])
        await require_own_logprobs(engine, branch)
        await gateway.http.delete("/sessions/a")
        assert len(list(made.glob("*.records"))) == 1
        assert len(await other.branches()) == 1
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("bounds", "status", "error"),
    [
        ({"most_turns": 1}, 400, "SessionFull"),
        ({"memory_bytes": 1, "disk_bytes": 0}, 503, "GatewayFull"),
    ],
)
async def test_a_turn_beyond_a_bound_is_refused(
    engine: InferenceEngine, bounds: dict[str, int], status: int, error: str
) -> None:
    async with gateway_of(engine, **bounds) as gateway:
        await gateway.talk(["hello"])
        with pytest.raises(openai.APIStatusError) as refused:
            await gateway.ask([user("hello")])
        assert refused.value.status_code == status
        assert refused.value.response.json()["drivetrain"] == {"error": error}
        assert len(await gateway.branches()) == 1, "earlier turns stay"


async def test_choices_count_as_turns(engine: InferenceEngine) -> None:
    async with gateway_of(engine, most_turns=2) as gateway:
        with pytest.raises(openai.BadRequestError, match="and the request makes 3"):
            await gateway.ask([user("hello")], n=3)
        await gateway.ask([user("hello")], n=2)


async def test_choices_in_flight_count_as_turns(engine: InferenceEngine) -> None:
    async with gateway_of(engine, most_turns=4) as gateway:
        long = asyncio.ensure_future(gateway.ask([user("hello")], n=3, max_tokens=700, ignore_eos=True))
        await until_running(engine, 3)
        with pytest.raises(openai.BadRequestError, match="and the request makes 2"):
            await gateway.ask([user("hello")], n=2)
        await gateway.ask([user("hello")])
        await long
        assert len((await gateway.http.get("/sessions/a/trajectory")).json()["turns"]) == 4


async def test_folders_of_killed_servers_are_removed(engine: InferenceEngine, tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys; from drivetrain_serving.gateway.records import *\n"
        "async def spill():\n"
        "    store = RecordStore(1, 1 << 20, sys.argv[1]); store.put(Record(b'', b'', b''), SpillFile())\n"
        "    await store.spill(); os.kill(os.getpid(), 9)\n"
        "asyncio.run(spill())"
    )
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(tmp_path))
    assert await asyncio.wait_for(killed.wait(), HANGING) == -9
    (left,) = files_in(tmp_path)
    async with gateway_of(engine, memory_bytes=1, folder=str(tmp_path)) as gateway:
        await gateway.talk(["hello"])
        (made,) = files_in(tmp_path)
        assert made != left


async def test_a_folder_of_turns_that_cannot_be_removed_is_left_to_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(folder: OwnedFolder) -> None:
        raise OSError("the folder is in use")

    store = RecordStore(1, 1 << 20, str(tmp_path))
    store.put(Record(b"", b"", b""), SpillFile())
    await store.spill()
    with monkeypatch.context() as in_use:
        in_use.setattr(OwnedFolder, "remove", busy)
        store.close()
    assert "the folder of recorded turns stays: the folder is in use" in caplog.text
    assert files_in(tmp_path)
    remove_orphans(tmp_path, "drivetrain-sessions-")
    assert not files_in(tmp_path)


async def test_a_session_beyond_the_bound_is_refused(engine: InferenceEngine) -> None:
    async with gateway_of(engine, most_sessions=1) as gateway:
        await gateway.talk(["hello"])
        with pytest.raises(openai.InternalServerError, match="most_sessions"):
            await gateway.session("b").ask([user("hello")])
        await gateway.http.delete("/sessions/a")
        await gateway.session("b").ask([user("hello")])


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(ValidationError, match="a folder that this process can write to"):
            SessionConfig(folder=str(tmp_path / name))


async def test_without_a_disk_memory_keeps_the_turns(engine: InferenceEngine, tmp_path: Path) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    async with gateway_of(engine, memory_bytes=1, folder=str(folder)) as gateway:
        folder.rmdir()
        _, answers = await gateway.talk(["hello"])
        with pytest.raises(openai.InternalServerError, match=f"{folder} could not be written"):
            await gateway.ask([user("hello")])
        (branch,) = await gateway.branches()
        assert branch["token_ids"] == ids_of(answers[0])
