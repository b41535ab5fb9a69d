"""Structured output: every field beside a grammar, its logprobs, interruptions, and how grammars are compiled."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
import xgrammar

import oracle
from drivetrain import (
    ActionMask,
    Capability,
    Completion,
    DeadlineExceeded,
    DisallowedTokens,
    EbnfGrammar,
    FinishReason,
    GenerationOutput,
    InferenceEngine,
    InvalidRequest,
    JsonSchema,
    LogprobsMode,
    PauseMode,
    RegexGrammar,
    SamplingParams,
    UnsupportedCapability,
    create_engine,
)
from drivetrain.backend.base import GenerateRequest
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain_transformers import TransformersBackend, grammars, translate
from drivetrain_transformers.grammars import FIELD
from engines import HANGING, OpenEngine, until, until_running

pytestmark = pytest.mark.asyncio(loop_scope="session")

CODE = RegexGrammar(regex="(cat|dog)-[0-9]{3}")
LONG = RegexGrammar(regex="[a-p]{300}")
SCHEMA = JsonSchema(
    json_schema=json.dumps(
        {
            "type": "object",
            "properties": {"name": {"enum": ["a", "b"]}, "count": {"enum": [1, 22]}},
            "required": ["name", "count"],
            "additionalProperties": False,
        }
    )
)
SENTENCE = EbnfGrammar(ebnf='root ::= answer " " digit\nanswer ::= "yes" | "no"\ndigit ::= [0-9]\n')
EOS = (256, 258)
"""Ids at which the tiny model ends."""


# Fields beside a grammar ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "(cat|dog)-[0-9]{3}"),
        ({"ignore_eos": True}, "(cat|dog)-[0-9]{3}"),
        ({"stop": ("-",)}, "cat|dog"),
        ({"stop": ("-",), "include_stop_str_in_output": True}, "(cat|dog)-"),
        ({"stop_regex": ("[0-9]{2}",), "ignore_eos": True}, "(cat|dog)-"),
        ({"stop_token_ids": (ord("-"),)}, "cat|dog"),
        ({"stop_token_ids": EOS, "ignore_eos": True}, "(cat|dog)-[0-9]{3}"),
        ({"max_new_tokens": 5}, "(cat|dog)-[0-9]"),
        ({"min_new_tokens": 7}, "(cat|dog)-[0-9]{3}"),
        ({"min_new_tokens": 5, "stop": ("-",)}, "(cat|dog)-[0-9]{3}"),
        ({"logit_bias": {ord("d"): 50.0, ord("1"): 50.0}}, "dog-111"),
        ({"logit_processors": (DisallowedTokens(token_ids=(ord("c"), *b"02468")),)}, "dog-[13579]{3}"),
        ({"logit_processors": (ActionMask(allowed_token_ids=(*b"cat-7", *EOS)),)}, "cat-777"),
        ({"temperature": 0}, "(cat|dog)-[0-9]{3}"),
        ({"top_k": 1, "repetition_penalty": 1.3}, "(cat|dog)-[0-9]{3}"),
        ({"top_p": 0.5, "min_p": 0.1, "frequency_penalty": 1.0}, "(cat|dog)-[0-9]{3}"),
    ],
)
async def test_a_grammar_holds_beside_any_other_field(
    engine: InferenceEngine, fields: dict[str, Any], expected: str
) -> None:
    params = SamplingParams(**{"max_new_tokens": 40, "n": 4, "seed": 3, "structured_output": CODE, **fields})
    free = SamplingParams(max_new_tokens=12, temperature=0)
    alone = (await engine.generate("beside", free)).completions[0]
    output = await engine.generate(["one", "beside"], [params, free])
    for completion in output.completions[:4]:
        assert re.fullmatch(expected, completion.text), completion.text
        ended = FinishReason.LENGTH if "max_new_tokens" in fields else FinishReason.STOP
        assert completion.finish_reason is ended
    assert output.completions[4].token_ids == alone.token_ids


@pytest.mark.parametrize("grammar", [CODE, SCHEMA, SENTENCE])
async def test_a_stream_and_a_whole_sample_are_the_same(engine: InferenceEngine, grammar: Any) -> None:
    params = SamplingParams(max_new_tokens=60, seed=4, structured_output=grammar)
    (whole,) = (await engine.generate("x", params)).completions
    streamed = [token async for chunk in engine.generate_stream("x", params) for token in chunk.token_ids]
    assert streamed == whole.token_ids


async def test_special_tokens_are_no_text_of_a_grammar(engine: InferenceEngine) -> None:
    special = [257, 259]
    params = SamplingParams(
        max_new_tokens=20,
        n=4,
        structured_output=RegexGrammar(regex="[<|a-z_>]{12}"),
        logit_bias=dict.fromkeys(special, 80.0),
    )
    for completion in (await engine.generate("x", params)).completions:
        assert not {*special} & {*completion.token_ids}
        assert len(completion.text) == 12


async def test_a_model_without_eos_ends_with_its_grammar(tmp_path: Path) -> None:
    folder = tmp_path / "endless"
    folder.mkdir()
    for file in tiny_model("llama").iterdir():
        content = file.read_bytes()
        if file.name.endswith("config.json"):
            fields = {key: value for key, value in json.loads(content).items() if not key.startswith("eos_token")}
            content = json.dumps({**fields, "eos_token_id": None} if file.name == "config.json" else fields).encode()
        (folder / file.name).write_bytes(content)
    async with create_engine("transformers", model=str(folder), isolation="inline") as engine:
        assert engine.model_info.eos_token_ids == ()
        output = await engine.generate("x", SamplingParams(max_new_tokens=40, n=4, structured_output=CODE))
        for completion in output.completions:
            assert completion.finish_reason is FinishReason.STOP
            assert re.fullmatch(CODE.regex, completion.text)


# Logprobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LogprobsMode)
async def test_logprobs_belong_to_the_declared_distribution(
    engine: InferenceEngine, model: Path, mode: LogprobsMode
) -> None:
    params = SamplingParams(
        max_new_tokens=20, n=3, seed=5, temperature=0.6, logprobs=4, logprobs_mode=mode, structured_output=CODE
    )
    reference = oracle.load(model)
    for completion in (await engine.generate("x", params)).completions:
        logits = oracle.logits_of(reference, completion.prompt_token_ids, completion.token_ids)
        if mode is not LogprobsMode.RAW:
            logits = logits / 0.6
        if mode is LogprobsMode.PROCESSED:
            logits = logits.masked_fill(~allowed(completion), -torch.inf)
        expected = logits.log_softmax(-1)
        ids = torch.tensor(completion.token_ids)[:, None]
        assert completion.logprobs is not None
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.gather(-1, ids)[:, 0], rtol=0, atol=1e-4)
        assert completion.top_logprobs is not None
        for row, top in zip(expected, completion.top_logprobs, strict=True):
            for token_id, logprob in top:
                assert abs(float(row[token_id]) - logprob) < 1e-4


def allowed(completion: Completion) -> torch.Tensor:
    """Return which tokens the grammar allows at each of a completion's tokens, by the ``regex`` package."""
    rows = torch.zeros(len(completion.token_ids), 260, dtype=torch.bool)
    for row, _ in enumerate(completion.token_ids):
        before = bytes(completion.token_ids[:row]).decode()
        for byte in range(128):
            rows[row, byte] = regex.fullmatch(CODE.regex, before + chr(byte), partial=True) is not None
        rows[row, list(EOS)] = regex.fullmatch(CODE.regex, before) is not None
    return rows


# Interruptions -------------------------------------------------------------------------------------------------------

# Recomputed values are rounded differently, and a greedy choice is far from a tie.
INTERRUPTED = SamplingParams(max_new_tokens=400, temperature=0, structured_output=LONG)


@asynccontextmanager
async def in_flight(engine: InferenceEngine) -> AsyncIterator[asyncio.Task[GenerationOutput]]:
    task = asyncio.create_task(engine.generate(["one", "two"], INTERRUPTED))
    await until_running(engine, 2)
    try:
        yield task
    finally:
        await asyncio.wait_for(task, HANGING)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_pause_changes_no_token_of_a_grammar(engine: InferenceEngine, mode: PauseMode) -> None:
    whole = (await engine.generate(["one", "two"], INTERRUPTED)).completions
    async with in_flight(engine) as task:
        for _ in range(3):
            await engine.pause_generation(mode)
            await engine.continue_generation()
    for completion, expected in zip(task.result().completions, whole, strict=True):
        assert re.fullmatch(LONG.regex, completion.text)
        assert completion.token_ids == expected.token_ids


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_grammar_goes_on_over_a_weight_update(open_engine: OpenEngine, mode: PauseMode) -> None:
    async with open_engine() as engine:
        async with in_flight(engine) as task:
            await engine.load_weights_from_disk(str(tiny_model("qwen2", seed=1)), "other", mode=mode)
        for completion in task.result().completions:
            assert re.fullmatch(LONG.regex, completion.text)
            assert [span.version for span in completion.weight_versions][-1] == "other"


async def test_resumed_tokens_are_the_beginning_of_the_grammar(model: Path) -> None:
    backend = TransformersBackend(EngineConfig(backend="transformers", model=str(model), device="cpu"))
    await backend.start(lambda _: None)
    try:
        params = SamplingParams(structured_output=CODE)
        whole = GenerateRequest("whole", [1, 2, 3], params, 20, EOS, LogprobsMode.RAW, seed=9)
        drawn = (await backend.generate(whole)).token_ids
        assert drawn[-1] in EOS
        for count in range(1, len(drawn)):
            prompt = [1, 2, 3, *drawn[:count]]
            rest = GenerateRequest(
                f"rest-{count}", prompt, params, 20, EOS, LogprobsMode.RAW, seed=9, resumed_tokens=count
            )
            assert (await backend.generate(rest)).token_ids == drawn[count:]
        wrong = GenerateRequest("wrong", [1, 2, 3], params, 20, EOS, LogprobsMode.RAW, seed=9, resumed_tokens=2)
        with pytest.raises(InvalidRequest, match="resumed token 0"):
            await backend.generate(wrong)
    finally:
        await backend.close()


# Compilation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (RegexGrammar(regex=r"(?=a)b"), "Lookahead"),
        (RegexGrammar(regex=r"(a)\1"), "Backreference"),
        (RegexGrammar(regex=r"\bfoo\b"), "Word boundary"),
        (RegexGrammar(regex=r"foo\Z"), "would be ignored"),
        (JsonSchema(json_schema='{"type": "number", "multipleOf": 5}'), "multipleOf at # would be ignored"),
        (JsonSchema(json_schema='{"type": "no such type"}'), "no such type"),
        (JsonSchema(json_schema="false"), "false"),
        (JsonSchema(json_schema='{"type": "string", "format": []}'), r"the format \[\] at #"),
        (EbnfGrammar(ebnf="root ::= (("), "EBNF"),
        (EbnfGrammar(ebnf='start ::= "a"'), "root"),
        (EbnfGrammar(ebnf='root ::= root "a"'), "no text is of this ebnf"),
        (EbnfGrammar(ebnf="root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "Nest"),
    ],
)
async def test_a_grammar_that_cannot_be_is_refused_before_any_work(
    engine: InferenceEngine, grammar: Any, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        await engine.generate("x", SamplingParams(max_new_tokens=8, structured_output=grammar))
    assert caught.value.field == FIELD
    assert len(str(caught.value)) < 400


@pytest.fixture
def held_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every compilation waits for this event."""
    free = threading.Event()
    compile_regex = xgrammar.GrammarCompiler.compile_regex

    def held(self: xgrammar.GrammarCompiler, expression: str) -> Any:
        free.wait(HANGING)
        return compile_regex(self, expression)

    monkeypatch.setattr(xgrammar.GrammarCompiler, "compile_regex", held)
    yield free
    free.set()


WITH_GRAMMAR = SamplingParams(max_new_tokens=20, structured_output=CODE)


async def waits_for_its_grammar(engine: InferenceEngine, request_id: str = "held") -> asyncio.Task[GenerationOutput]:
    task = asyncio.create_task(engine.generate("x", WITH_GRAMMAR, request_ids=[request_id]))

    async def is_waiting() -> bool:
        return (await engine.stats()).waiting == 1

    await until(is_waiting)
    return task


async def test_others_run_while_a_grammar_is_compiled(open_engine: OpenEngine, held_compiler: threading.Event) -> None:
    async with open_engine() as engine:
        task = await waits_for_its_grammar(engine)
        assert (await engine.generate("y", {"max_new_tokens": 4})).completions
        for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            await engine.pause_generation(mode)
            await engine.continue_generation()
        assert not task.done()
        held_compiler.set()
        (completion,) = (await asyncio.wait_for(task, HANGING)).completions
        assert re.fullmatch(CODE.regex, completion.text)


async def test_a_request_is_aborted_while_its_grammar_is_compiled(
    open_engine: OpenEngine, held_compiler: threading.Event
) -> None:
    async with open_engine() as engine:
        first = await waits_for_its_grammar(engine)
        await engine.abort("held")
        (completion,) = (await asyncio.wait_for(first, HANGING)).completions
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.token_ids == []
        again = await waits_for_its_grammar(engine)
        held_compiler.set()
        (completion,) = (await asyncio.wait_for(again, HANGING)).completions
        assert re.fullmatch(CODE.regex, completion.text)


async def test_an_engine_closes_while_a_grammar_is_compiled(
    open_engine: OpenEngine, held_compiler: threading.Event
) -> None:
    async with open_engine() as engine:
        task = await waits_for_its_grammar(engine)
    (completion,) = (await asyncio.wait_for(task, HANGING)).completions
    assert completion.finish_reason is FinishReason.ABORT


async def test_a_grammar_that_takes_too_long_is_refused(
    open_engine: OpenEngine, held_compiler: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "COMPILE_S", 0.05)
    async with open_engine() as engine:
        for text in ("aa", "bb"):
            with pytest.raises(InvalidRequest, match=r"not compiled within 0\.05 s") as caught:
                await engine.generate("x", {"structured_output": {"kind": "regex", "regex": text}})
            assert caught.value.field == FIELD
        # The two threads that compile are both taken.
        with pytest.raises(DeadlineExceeded, match="2 other grammars"):
            await engine.generate("x", {"structured_output": {"kind": "regex", "regex": "cc"}})
        assert (await engine.generate("y", {"max_new_tokens": 4})).completions
        monkeypatch.setattr(grammars, "COMPILE_S", HANGING)
        held_compiler.set()
        (completion,) = (await engine.generate("x", WITH_GRAMMAR)).completions
        assert re.fullmatch(CODE.regex, completion.text)


async def test_a_grammar_is_compiled_once_and_kept_within_bounds(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_regex = xgrammar.GrammarCompiler.compile_regex

    def counting(self: xgrammar.GrammarCompiler, expression: str) -> Any:
        compiled.append(expression)
        return compile_regex(self, expression)

    monkeypatch.setattr(xgrammar.GrammarCompiler, "compile_regex", counting)
    async with open_engine() as engine:
        ask = [engine.generate("x", WITH_GRAMMAR.model_copy(update={"n": 3})) for _ in range(4)]
        await asyncio.gather(*ask)
        await engine.generate("x", WITH_GRAMMAR)
        assert compiled == [CODE.regex]
        monkeypatch.setattr(grammars, "_KEPT_BYTES", 1)
        for text in ("aa", "bb", "bb", "aa"):
            await engine.generate("x", {"structured_output": {"kind": "regex", "regex": text}})
        assert compiled == [CODE.regex, "aa", "bb", "aa"]


async def test_without_xgrammar_the_refusal_says_how_to_install_it(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "xgrammar" else find(name, *more)
    )
    assert not translate.has_grammars()
    async with open_engine() as engine:
        assert Capability.STRUCTURED_REGEX not in engine.capabilities
        with pytest.raises(UnsupportedCapability, match=r"pip install 'drivetrain\[transformers\]'"):
            await engine.generate("x", WITH_GRAMMAR)
        assert (await engine.generate("y", {"max_new_tokens": 4})).completions
