"""Wrong arguments are refused before any work, with an error that names the field, and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from inspect import isawaitable
from typing import Any, Final

import numpy as np

from drivetrain.errors import DrivetrainError, InvalidConfig, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.outputs import GenerationOutput
from drivetrain.types.prompts import ChatPrompt, Message, TextPrompt, TokenPrompt
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_same
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, until_idle

Fields = Mapping[str, Any]

_NAN, _INFINITY = float("nan"), float("inf")
_NO_FLAG: Final[Sequence[object]] = ("perhaps", 7, None, [])

WRONG_PARAMS: Final[Mapping[str, Sequence[object]]] = {
    "n": (0, -1, 1.5, "two", True, None, 10**6, 2**31),
    "max_new_tokens": (-1, 1.5, "many", True, [3]),
    "min_new_tokens": (-1, 1.5, "few", True, None),
    "temperature": (-0.1, 1e-30, 1e-40, 5e-324, 1e39, 1e308, _NAN, _INFINITY, "hot", "0.5", True, None, [1.0]),
    "top_p": (0, -0.5, 1e-40, 5e-324, 1.01, _NAN, "most", True, None),
    "top_k": (-1, 2**31, 2**63, 1.5, "all", True, None),
    "min_p": (-0.1, 1.01, _NAN, "some", True, None),
    "repetition_penalty": (0, -1, 1e-40, 1e39, _NAN, _INFINITY, "high", True, None),
    "frequency_penalty": (-2.1, 2.1, _NAN, "high", None),
    "presence_penalty": (-2.1, 2.1, _NAN, "high", None),
    "logit_bias": (
        *("up", [5], {"five": 1.0}, {-1: 1.0}, {1.5: 1.0}, {5: "up"}, {5: True}, None),
        *({5: _NAN}, {5: _INFINITY}, {5: 1e39}, {5: -1e39}, {5: 0.5, 6: 1e39}),
    ),
    "seed": (-1, 2**63, 1.5, "lucky", True),
    "stop": ("", ["end", ""], "\ud800", 3, [3], [["end"]], None),
    "stop_token_ids": (-1, [-1], [1.5], ["end"], "end", [True], None),
    "stop_regex": ("", "(", "a" * 5000, "(a{9999}){9999}", "a*", "a|", ["a+", "b?"], "\ud800", 3, [3], None),
    "include_stop_str_in_output": _NO_FLAG,
    "ignore_eos": _NO_FLAG,
    "skip_special_tokens": _NO_FLAG,
    "logprobs": (-1, 1.5, "all", True),
    "prompt_logprobs": (-1, 1.5, "all", True),
    "logprobs_mode": ("cooked", 3, ["raw"]),
    "structured_output": ("json", {"kind": "poem"}, {"kind": "regex"}, {"kind": "regex", "regex": 3}, [], {}),
    "logit_processors": (
        "mask",
        [{"kind": "magic"}],
        [{"kind": "action_mask", "allowed_token_ids": []}],
        [{"kind": "disallowed_tokens", "token_ids": [-1]}],
        [{"kind": "disallowed_tokens", "token_ids": [1], "more": 2}],
        [{"kind": "temperature_schedule", "start": 0, "end": 1.0, "steps": 5}],
        [{"kind": "temperature_schedule", "start": 1.0, "end": 1.0, "steps": 0}],
        [{"kind": "temperature_schedule", "start": 1e-40, "end": 1.0, "steps": 3}],
        [{"kind": "temperature_schedule", "start": 1.0, "end": 1e39, "steps": 3}],
        [{"kind": "temperature_schedule", "start": 1.0, "end": 1.0, "steps": 2**31}],
        # masks that together allow no token
        [{"kind": "action_mask", "allowed_token_ids": [5]}, {"kind": "disallowed_tokens", "token_ids": [5, 6]}],
        [{"kind": "action_mask", "allowed_token_ids": [5]}, {"kind": "action_mask", "allowed_token_ids": [6]}],
        None,
    ),
    "return_prompt_ranks": _NO_FLAG,
    "return_hidden_states": _NO_FLAG,
    "return_routed_experts": _NO_FLAG,
    "return_prompt_routed_experts": _NO_FLAG,
    "return_sampling_mask": _NO_FLAG,
}
"""Invalid values of each sampling param: of a wrong type, out of range, beyond float32, or meaningless."""

VALID_PARAMS: Final[Mapping[str, Sequence[Fields]]] = {
    "n": ({"n": 3},),
    "max_new_tokens": ({"max_new_tokens": 5}, {"max_new_tokens": 0}),
    "min_new_tokens": ({"min_new_tokens": 2},),
    "temperature": ({"temperature": 0.5}, {"temperature": 0}),
    "top_p": ({"top_p": 0.5},),
    "top_k": ({"top_k": 5},),
    "min_p": ({"min_p": 0.1},),
    "repetition_penalty": ({"repetition_penalty": 1.2},),
    "frequency_penalty": ({"frequency_penalty": 0.5},),
    "presence_penalty": ({"presence_penalty": -0.5},),
    "logit_bias": ({"logit_bias": {5: 1.0}},),
    "seed": ({"seed": 5}, {"seed": 0}),
    "stop": ({"stop": "end"}, {"stop": ["end", "stop"]}),
    "stop_token_ids": ({"stop_token_ids": [5]}, {"stop_token_ids": [0]}),
    "stop_regex": ({"stop_regex": "e+nd"},),
    "include_stop_str_in_output": (
        {"stop": "end", "include_stop_str_in_output": True},
        {"stop_regex": "e+nd", "include_stop_str_in_output": True},
    ),
    "ignore_eos": ({"ignore_eos": True},),
    "skip_special_tokens": ({"skip_special_tokens": False},),
    "logprobs": ({"logprobs": 0}, {"logprobs": 2}),
    "prompt_logprobs": ({"prompt_logprobs": 0}, {"prompt_logprobs": 2}),
    "logprobs_mode": tuple({"logprobs": 0, "logprobs_mode": mode} for mode in ("raw", "temperature", "processed")),
    "structured_output": (
        {"structured_output": {"kind": "json_schema", "json_schema": '{"type": "boolean"}'}},
        {"structured_output": {"kind": "regex", "regex": "[ab]{2}"}},
        {"structured_output": {"kind": "ebnf", "ebnf": 'root ::= "a" | "b"'}},
    ),
    "logit_processors": (
        {"logit_processors": [{"kind": "action_mask", "allowed_token_ids": [5, 6]}]},
        {"logit_processors": [{"kind": "disallowed_tokens", "token_ids": [5]}]},
        {"logit_processors": [{"kind": "temperature_schedule", "start": 1.0, "end": 0.5, "steps": 2}]},
    ),
    "return_prompt_ranks": ({"prompt_logprobs": 0, "return_prompt_ranks": True},),
    "return_hidden_states": ({"return_hidden_states": True},),
    "return_routed_experts": ({"return_routed_experts": True},),
    "return_prompt_routed_experts": ({"return_prompt_routed_experts": True},),
    "return_sampling_mask": ({"return_sampling_mask": True},),
}
"""Valid values of each sampling param that differ from its default."""


_CHAT: Final = ChatPrompt(messages=(Message(role="user", content="hello"),))
_NO_NAME: Final[Sequence[object]] = (3, "", [], {}, "\ud800", "a\0b", "x" * 5000, None)
_NO_PATH: Final[Sequence[object]] = (3, "", [], "a\0b", b"a", None)
WRONG_ARGUMENTS: Final[Mapping[tuple[str, str], Sequence[object]]] = {
    ("abort", "request_id"): _NO_NAME,
    ("close_session", "session_id"): _NO_NAME,
    ("open_session", "session_id"): _NO_NAME[:-1],
    ("open_session", "capacity"): (0, -1, 1.5, "much", True, None),
    ("unload_lora_adapter", "lora_name"): _NO_NAME,
    ("load_lora_adapter", "lora_name"): _NO_NAME,
    ("load_lora_adapter", "lora_path"): _NO_PATH,
    ("update_weight_version", "version"): _NO_NAME,
    ("load_weights_from_disk", "version"): _NO_NAME,
    ("load_weights_from_disk", "path"): _NO_PATH,
    ("load_weights_from_disk", "mode"): ("later", 3, [], None),
    ("check_weight_sync_integrity", "expected_version"): _NO_NAME,
    ("get_weights_by_name", "name"): _NO_NAME,
    ("destroy_weight_update_communicator", "group_name"): _NO_NAME,
    ("update_named_weights", "request"): ({}, None, "request"),
    ("save_remote_model", "url"): _NO_NAME,
    ("start_profile", "directory"): _NO_PATH,
    ("decode", "token_ids"): (3, "ab", [-1], ["a"], [1.5], [2**70], None),
    ("supports", "capability"): ("flight", {}, 3, None),
}
"""Invalid arguments by method and name, whatever the engine can do: they are checked before capabilities."""
_GOOD: Final[Mapping[str, Fields]] = {
    "open_session": {"capacity": 8},
    "load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "load_weights_from_disk": {"version": "v", "path": "/nowhere"},
}
"""The other, valid arguments of those methods."""


# Sampling params -----------------------------------------------------------------------------------------------------


@case()
async def no_sampling_param_takes_a_wrong_value(bench: Bench) -> None:
    """Each sampling param refuses values of a wrong type or out of range, naming the param and the value.

    Params that were copied with another value are checked, too: pydantic's ``model_copy`` checks nothing.
    """
    assert set(WRONG_PARAMS) == set(SamplingParams.model_fields), "a sampling param has no wrong values to try here"
    prompt = bench.prompt()
    async with _unharmed(bench):
        for name, values in WRONG_PARAMS.items():
            for value in values:
                with _refused(f"sampling_params.{name}", f"{name}={value!r}"):
                    await bench.engine.generate([prompt], {name: value})
                with _refused(f"sampling_params.{name}", f"{name}={value!r} beside another prompt's params"):
                    await bench.engine.generate([prompt, prompt], [{}, {name: value}])
                with _refused(f"sampling_params.{name}", f"{name}={value!r} of a copy"):
                    await bench.engine.generate([prompt], SamplingParams().model_copy(update={name: value}))


@case()
async def every_sampling_param_is_honoured_or_refused(bench: Bench) -> None:
    """Each sampling param, set to a value other than its default, is honoured, or refused as unclaimed."""
    assert set(VALID_PARAMS) == set(SamplingParams.model_fields), "a sampling param has no valid values to try here"
    claimed = {capability.value for capability in bench.engine.capabilities}
    async with _unharmed(bench):
        for name, choices in VALID_PARAMS.items():
            for fields in choices:
                try:
                    output = await bench.engine.generate([bench.prompt()], {"max_new_tokens": 3, **fields})
                except (UnsupportedCapability, InvalidRequest) as error:
                    _check_honest_refusal(error, claimed, f"sampling_params.{name}", f"{fields}")
                    continue
                count = fields.get("n", 1)
                assert len(output.completions) == count, f"{fields}: {len(output.completions)} completions"
                most = fields.get("max_new_tokens", 3)
                assert all(len(completion.token_ids) <= most for completion in output.completions), f"{fields}"


@case()
async def an_unknown_sampling_param_is_refused_with_its_likely_name(bench: Bench) -> None:
    """An unknown sampling param is refused, and the error suggests the likely name."""
    slips = {name[:-2] + name[-1] + name[-2]: name for name in SamplingParams.model_fields if len(name) > 5}
    slips |= {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "stops": "stop",
        "stop_ids": "stop_token_ids",
    }
    slips |= {
        "temprature": "temperature",
        "top_n": "top_",
        "logprob": "logprobs",
        "include_stop_str": "include_stop_str",
    }
    async with _unharmed(bench):
        for wrong, meant in slips.items():
            with refused(InvalidRequest, field=f"sampling_params.{wrong}", naming=f"did you mean '{meant}"):
                await bench.engine.generate([bench.prompt()], {wrong: 1, "max_new_tokens": 1})
        for name, value, meant in (("top_k", -1, "0 is off"), ("stop", None, "()"), ("logprobs", True, "0 is for")):
            with refused(InvalidRequest, field=f"sampling_params.{name}", naming=meant):
                await bench.engine.generate([bench.prompt()], {name: value, "max_new_tokens": 1})
        for wrong in ("best_of", "use_beam_search", "zzz"):
            with refused(InvalidRequest, field=f"sampling_params.{wrong}", naming="there is no such field"):
                await bench.engine.generate([bench.prompt()], {wrong: None, "max_new_tokens": 1})


@case()
async def an_error_quotes_a_long_value_in_part(bench: Bench) -> None:
    """The error for a value of a megabyte names its field and shows only a part of the value."""
    long, prompt = "x" * 10**6, bench.prompt()
    for field in ("temperature", "stop_regex", "lora"):
        params = {} if field == "lora" else {field: f"({long}"}
        where = "lora" if field == "lora" else f"sampling_params.{field}"
        said = ""
        try:
            await bench.engine.generate([prompt], params, lora=long if field == "lora" else None)
        except InvalidRequest as error:
            said = str(error)
        assert where in said, f"the error does not name {where}: {said:.500}"
        assert len(said) < 2000, f"the error quotes {len(said)} characters of {where}: {said:.500}"
    for name, what in (("dtype", {"dtype": long}), ("x", {long: 1})):
        with refused(InvalidConfig, field=name):
            bench.create(**what)


@case()
async def params_that_contradict_each_other_are_refused(bench: Bench) -> None:
    """Sampling params that are valid each but contradict each other are refused, naming them."""
    pairs: list[tuple[dict[str, object], tuple[str, ...]]] = [
        ({"max_new_tokens": 2, "min_new_tokens": 3}, ("min_new_tokens=3", "max_new_tokens=2")),
        ({"max_new_tokens": 0, "min_new_tokens": 1}, ("min_new_tokens=1", "max_new_tokens=0")),
        ({"max_new_tokens": 0, "n": 2}, ("max_new_tokens=0", "n=2")),
        ({"include_stop_str_in_output": True}, ("include_stop_str_in_output", "stop")),
        ({"logprobs_mode": "raw"}, ("logprobs_mode", "logprobs=0")),
        ({"return_prompt_ranks": True}, ("return_prompt_ranks", "prompt_logprobs=0")),
    ]
    async with _unharmed(bench):
        for params, names in pairs:
            for name in names:
                with refused(InvalidRequest, field="sampling_params", naming=name):
                    await bench.engine.generate([bench.prompt()], params)


@case()
async def sampling_params_are_one_for_all_or_one_for_each(bench: Bench) -> None:
    """A list of sampling params whose length is not that of the prompts is refused; nothing is repeated or cut."""
    prompts, one = bench.prompts(3), {"max_new_tokens": 1}
    async with _unharmed(bench):
        for params in ([], [one], [one] * 2, [one] * 4, (one,)):
            with refused(InvalidRequest, field="sampling_params", naming=f"{len(params)} entries for 3 prompts"):
                await bench.engine.generate(prompts, params)
        no_params: tuple[Any, ...] = ("greedy", 3, True, b"x", [one, one, "greedy"], [one, None, 3], {3: 1})
        for given in no_params:
            with _refused("sampling_params", f"sampling_params={given!r}"):
                await bench.engine.generate(prompts, given)


@case(Capability.STOP_TOKEN_IDS)
async def stop_token_ids_outside_the_vocabulary_are_refused(bench: Bench) -> None:
    """A stop token id outside the vocabulary is refused, as it could never occur."""
    await _check_vocabulary(bench, "stop_token_ids", lambda token: {"stop_token_ids": [1, token]})


@case(Capability.LOGIT_BIAS)
async def logit_bias_outside_the_vocabulary_is_refused(bench: Bench) -> None:
    """A bias for a token id outside the vocabulary is refused."""
    await _check_vocabulary(bench, "logit_bias", lambda token: {"logit_bias": {1: 0.5, token: 1.0}})


@case(Capability.LOGIT_PROCESSORS)
async def logit_processors_outside_the_vocabulary_are_refused(bench: Bench) -> None:
    """An action mask or ban with a token id outside the vocabulary is refused."""

    def mask(token: int) -> Fields:
        return {"logit_processors": [{"kind": "action_mask", "allowed_token_ids": [1, token]}]}

    def ban(token: int) -> Fields:
        return {"logit_processors": [{"kind": "disallowed_tokens", "token_ids": [1, token]}]}

    await _check_vocabulary(bench, "logit_processors", mask)
    await _check_vocabulary(bench, "logit_processors", ban)


@case(Capability.TOP_LOGPROBS, Capability.LOGPROBS_TEMPERATURE)
async def more_alternatives_than_tokens_are_refused(bench: Bench) -> None:
    """More alternatives per token than the vocabulary holds are refused; any smaller number is not cut."""
    vocabulary = bench.engine.model_info.vocab_size
    async with _unharmed(bench):
        with refused(InvalidRequest, field="sampling_params.logprobs", naming=str(vocabulary + 1)):
            await bench.engine.generate([bench.prompt()], {"logprobs": vocabulary + 1})
        few = min(20, vocabulary)
        assert await _alternatives(bench, "logprobs", few) == {few}
        await _are_not_cut(bench, "logprobs")


@case(Capability.PROMPT_LOGPROBS)
async def more_prompt_alternatives_than_tokens_are_refused(bench: Bench) -> None:
    """More alternatives per prompt token than the vocabulary holds are refused."""
    vocabulary = bench.engine.model_info.vocab_size
    async with _unharmed(bench):
        with refused(InvalidRequest, field="sampling_params.prompt_logprobs", naming=str(vocabulary + 1)):
            await bench.engine.generate([bench.prompt()], {"prompt_logprobs": vocabulary + 1})
        assert await _alternatives(bench, "prompt_logprobs", 1) == {1}
        await _are_not_cut(bench, "prompt_logprobs")


async def _are_not_cut(bench: Bench, field: str) -> None:
    """Check that many alternatives are all returned, unless the engine refuses so many."""
    many = min(200, bench.engine.model_info.vocab_size)
    try:
        found = await _alternatives(bench, field, many)
    except InvalidRequest as error:
        if error.field != f"sampling_params.{field}":
            raise
        return
    assert found == {many}, f"{field}={many} alternatives were asked for, and {sorted(found)} are returned"


async def _alternatives(bench: Bench, field: str, count: int) -> set[int]:
    """Request ``count`` alternatives; return how many the tokens came with, once each."""
    params = {field: count, "max_new_tokens": 2, "temperature": 1.0}
    (completion,) = (await bench.engine.generate([bench.prompt()], params)).completions
    tops = completion.top_logprobs if field == "logprobs" else completion.prompt_top_logprobs
    assert tops is not None
    return {len(top) for top in tops if top is not None}


@case(Capability.STOP_STRINGS)
async def a_stop_string_that_can_never_match_is_refused(bench: Bench) -> None:
    """A special token's text as a stop string is refused while special tokens are left out of the text."""
    inner, prompt = bench.engine.tokenizer.inner, bench.prompt()
    async with _unharmed(bench):
        for special in inner.all_special_tokens:
            with refused(InvalidRequest, field="sampling_params.stop", naming="stop_token_ids"):
                await bench.engine.generate([prompt], {"stop": ["end", special]})
            params = {"stop": special, "skip_special_tokens": False, "max_new_tokens": 1}
            await bench.engine.generate([prompt], params)


# Prompts and the other arguments -------------------------------------------------------------------------------------


@case()
async def prompts_that_no_model_could_take_are_refused(bench: Bench) -> None:
    """A prompt that is empty, of a wrong type or not valid text is refused, naming its place in the list."""
    good, vocabulary = bench.prompt(), bench.engine.model_info.vocab_size
    user = {"role": "user", "content": "hello"}
    wrong: list[tuple[Any, str]] = [
        (None, "prompts"),
        ([], "prompts"),
        ((), "prompts"),
        (3, "prompts"),
        ({"text": "hello"}, "prompts"),
        (object(), "prompts"),
        (np.array([1, 2]), "prompts"),
        (b"hello", "prompts"),
        ("", "prompts[0]"),
        ([[]], "prompts[0]"),
        ([None], "prompts[0]"),
        ([good, ""], "prompts[1]"),
        ([good, []], "prompts[1]"),
        ([good, None], "prompts[1]"),
        ([good, 3], "prompts[1]"),
        ([good, b"hello"], "prompts[1]"),
        ([good, good, [*good, vocabulary]], "prompts[2]"),
        ([vocabulary + 1000], "prompts"),
        ([[2**70]], "prompts[0]"),
        ([[-1]], "prompts[0]"),
        ([-1, 5], "prompts"),
        ([[1, 2.5]], "prompts[0]"),
        ([[1, "2"]], "prompts[0]"),
        ([[1, None]], "prompts[0]"),
        ([[True, 1]], "prompts[0]"),
        ([[[1, 2]]], "prompts[0]"),
        (["hello", "\ud800"], "prompts"),
        ([{"role": "user", "content": "\ud800"}], "prompts"),
        ([{"content": "nobody says this"}], "prompts[0]"),
        ([[{"content": "nobody says this"}]], "prompts[0].messages.0.role"),
        ([user, {"content": "nobody says this"}], "prompts.messages.1.role"),
        ([{"role": "user", "content": 3}], "prompts.messages.0.content"),
        ([{"role": 3, "content": "hello"}], "prompts.messages.0.role"),
        ([[user, "hello"]], "prompts[0].messages.1"),
        ([good, [user, 3]], "prompts[1].messages.1"),
        # Copies with another value, which pydantic does not check.
        ([TokenPrompt(token_ids=(1,)).model_copy(update={"token_ids": (1, -5)})], "prompts[0].token_ids"),
        ([TokenPrompt(token_ids=(1,)).model_copy(update={"token_ids": None})], "prompts[0].token_ids"),
        (TextPrompt(text="hello").model_copy(update={"text": 3}), "prompts"),
        (_CHAT.model_copy(update={"messages": (_CHAT.messages[0].model_copy(update={"content": 3}),)}), "prompts"),
    ]
    async with _unharmed(bench):
        for prompts, field in wrong:
            with _refused(field, f"prompts={prompts!r}"):
                await bench.engine.generate(prompts, {"max_new_tokens": 1})


@case()
async def prompts_longer_than_the_context_are_refused(bench: Bench) -> None:
    """A prompt that does not fit the context, alone or with max_new_tokens, is refused with both numbers."""
    context = bench.engine.model_info.context_length
    good = bench.prompt()
    async with _unharmed(bench):
        for length in (context, context + 1):
            with refused(InvalidRequest, field="prompts[1]", naming=f"{length} tokens"):
                await bench.engine.generate([good, bench.prompt(length)])
        with refused(InvalidRequest, field="sampling_params.max_new_tokens", naming=str(context - len(good))):
            await bench.engine.generate([good], {"max_new_tokens": context})


@case()
async def one_bad_prompt_refuses_the_whole_call(bench: Bench) -> None:
    """A call with one bad prompt among many is refused as a whole before any of the others is started."""
    good = bench.prompts(12)
    vocabulary, context = bench.engine.model_info.vocab_size, bench.engine.model_info.context_length
    async with _unharmed(bench):
        for bad in ([], [vocabulary], [-1], [1] * (context + 1), ""):
            for place in (0, 7, 12):
                prompts: list[Any] = [*good[:place], bad, *good[place:]]
                with refused(InvalidRequest, field=f"prompts[{place}]"):
                    await bench.engine.generate(prompts, bench.long(), request_ids=[f"r{i}" for i in range(13)])
                stats = await bench.engine.stats()
                assert (stats.running, stats.waiting) == (0, 0), "the good prompts were begun"
        params = [{"max_new_tokens": 2}] * 11 + [{"max_new_tokens": 2, "min_new_tokens": 3}]
        with refused(InvalidRequest, field="sampling_params"):
            await bench.engine.generate(good, params)


@case()
async def request_ids_must_differ(bench: Bench) -> None:
    """Request ids that are not one string per prompt, or already in use, are refused; running requests are unharmed."""
    good = bench.prompts(2)
    params: Any = {"max_new_tokens": 8, "temperature": 0}
    wrong: list[Any] = [
        [],
        ["one"],
        ["one", "two", "three"],
        "one",
        ["one", "one"],
        ["one", ""],
        ["one", 2],
        ["one", "\ud800"],
        [None] * 2,
    ]
    async with _unharmed(bench):
        for ids in [*wrong, 5, {"one": 1}]:
            with _refused("request_ids", f"request_ids={ids!r}"):
                await bench.engine.generate(good, params, request_ids=ids)
        # A sample's id may not equal another request's id either.
        taken = await bench.engine.generate(good[:1], {**params, "n": 2}, request_ids=["one"])
        with refused(InvalidRequest, field="request_ids"):
            ids = ["one", taken.completions[1].request_id]
            await bench.engine.generate(good, [{**params, "n": 2}, params], request_ids=ids)
        # Both calls begin before either ends.
        calls = [bench.engine.generate([prompt], params, request_ids=["same"]) for prompt in good]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, GenerationOutput), f"the call that had the id first ended in {first!r}"
        assert isinstance(second, InvalidRequest), f"an id that was under way was given again: {second!r}"
        assert second.field == "request_ids"
        check_same(bench, first.completions, await bench.greedy(good[:1], 8))
        again = await bench.engine.generate(good[1:], params, request_ids=["same"])
        assert again.completions[0].request_id == "same", "an id is free again when its request has ended"


@case()
async def other_arguments_of_a_wrong_type_are_refused(bench: Bench) -> None:
    """Invalid priorities, timeouts, names, paths and token ids are refused by name, by each method."""
    wrong: list[tuple[str, Any]] = [("priority", value) for value in ("high", 1.5, True, None, [1])]
    no_seconds: list[Any] = ["soon", 0, -1, _NAN, True, [1]]
    wrong += [("timeout", value) for value in no_seconds]
    async with _unharmed(bench):
        for name, value in wrong:
            with _refused(name, f"{name}={value!r}"):
                await bench.engine.generate([bench.prompt()], {"max_new_tokens": 1}, **{name: value})
        for value in no_seconds:
            with _refused("timeout", f"pause_generation(timeout={value!r})"):
                await bench.engine.pause_generation("wait", timeout=value)
            assert not bench.engine.is_paused
        for (method, field), values in WRONG_ARGUMENTS.items():
            for value in values:
                with _refused(field, f"{method}({field}={value!r})"):
                    answer = getattr(bench.engine, method)(**{**_GOOD.get(method, {}), field: value})
                    if isawaitable(answer):
                        await answer


@case(Capability.LORA, config={"enable_lora": True})
async def an_adapter_that_is_not_loaded_is_refused(bench: Bench) -> None:
    """A request for a LoRA adapter that is not loaded is refused, and not answered by the base model."""
    wrong: tuple[Any, ...] = ("nobody", "", 3)
    async with _unharmed(bench):
        for lora in wrong:
            with _refused("lora", f"lora={lora!r}"):
                await bench.engine.generate([bench.prompt()], {"max_new_tokens": 1}, lora=lora)


@case(Capability.STREAMING)
async def streams_refuse_what_generate_refuses(bench: Bench) -> None:
    """A stream refuses invalid requests with the same errors as generate(), before its first chunk."""
    good = bench.prompt()
    wrong: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("prompts", [], None, {}),
        ("prompts[1]", [good, []], None, {}),
        ("prompts[0]", [[bench.engine.model_info.vocab_size]], None, {}),
        ("sampling_params.top_p", [good], {"top_p": 2}, {}),
        ("sampling_params.max_tokens", [good], {"max_tokens": 2}, {}),
        ("sampling_params", [good], {"max_new_tokens": 1, "min_new_tokens": 2}, {}),
        ("sampling_params", [good], [{}, {}], {}),
        ("request_ids", [good], {"max_new_tokens": 1}, {"request_ids": ["one", "two"]}),
        ("priority", [good], {"max_new_tokens": 1}, {"priority": "high"}),
        ("timeout", [good], {"max_new_tokens": 1}, {"timeout": -1}),
    ]
    async with _unharmed(bench):
        for field, prompts, params, arguments in wrong:
            with _refused(field, f"prompts={prompts!r}, {params!r}, {arguments!r}"):
                async with aclosing(bench.engine.generate_stream(prompts, params, **arguments)) as stream:
                    async for _ in stream:
                        pass


@case(Capability.SCORE_TOKENS, Capability.PROMPT_LOGPROBS)
async def sequences_that_cannot_be_scored_are_refused(bench: Bench) -> None:
    """Sequences to score that are empty, outside the vocabulary or too long are refused, naming them."""
    good, model = bench.prompt(), bench.engine.model_info
    wrong: list[Any] = [[], [[]], [good, []], [[model.vocab_size]], [[-1]], [[1] * (model.context_length + 1)]]
    async with _unharmed(bench):
        for sequences in wrong:
            with _refused("prompts", f"sequences={sequences!r:.100}"):
                await bench.engine.compute_logprobs(sequences)
        with _refused("sequences", "sequences=None"):
            await bench.engine.compute_logprobs(None)  # type: ignore[arg-type]
        for top_k in (-1, "all", 1.5):
            with _refused("top_k", f"top_k={top_k!r}"):
                await bench.engine.compute_logprobs([good], top_k=top_k)  # type: ignore[arg-type]
        with _refused("sampling_params.prompt_logprobs", "more alternatives than there are tokens"):
            await bench.engine.compute_logprobs([good], top_k=model.vocab_size + 1)
        await bench.engine.compute_logprobs([good])


@case(Capability.SCORE_TOKENS, Capability.SCORE_AT)
async def scores_that_cannot_be_computed_are_refused(bench: Bench) -> None:
    """Wrong ids, shapes, positions and temperatures of compute_logprobs() are refused, naming the argument."""
    one, model = bench.prompt(5), bench.engine.model_info
    ids = np.zeros((5, 3), dtype=np.int64)
    outside, negative = ids.copy(), ids.copy()
    outside[4, 2], negative[0, 1] = model.vocab_size, -1
    many = np.zeros((5, model.vocab_size + 1), dtype=np.int32)
    values: dict[str, Sequence[Any]] = {
        "temperature": (0, -1.0, 1e-40, 1e39, _NAN, _INFINITY, "hot", True, [1.0]),
        "last_n": (0, -1, 6, 2**70, 1.5, "all", True, [0], [5, 5], [6], [None], []),
        "top_k": (-1, model.vocab_size + 1, 2**31, 1.5, "all", True),
        "at": (3, "ids", b"ids", {}, [], [ids, ids]),
        "lora": (3, ""),
        "timeout": (-1, "long"),
    }
    arrays: Sequence[Any] = (
        *(
            outside,
            negative,
            ids[:4],
            ids[0],
            ids[None],
            ids[:, :0],
            many,
            ids.astype(np.float32),
            ids.astype(np.bool_),
        ),
        *(None, [], [[]] * 5, [["a"]] * 5, [[2**70]] * 5, [[1], [1, 2], [1], [1], [1]]),
    )
    wrong = [
        *((name, {"last_n": 5, name: value}) for name, given in values.items() for value in given),
        *(("at[0]", {"at": [array]}) for array in arrays),
        ("at[0]", {"at": [ids], "last_n": 4}),
    ]
    unscorable: list[Any] = [[[]], [one, []], [[model.vocab_size]], [[-1]], [[1] * (model.context_length + 1)]]
    async with _unharmed(bench):
        for field, arguments in wrong:
            with _refused(field, f"{arguments!r:.200}"):
                await bench.engine.compute_logprobs([one], **arguments)
        for sequences in unscorable:
            with _refused("prompts", f"sequences={sequences!r:.100}"):
                await bench.engine.compute_logprobs(sequences, last_n=1)
        (scored,) = (await bench.engine.compute_logprobs([one], at=[ids], last_n=5)).completions
        assert scored.scores is not None


# Control -------------------------------------------------------------------------------------------------------------


@case()
async def an_unknown_pause_mode_is_refused(bench: Bench) -> None:
    """An unknown pause mode is refused, naming the valid ones, and the engine serves on."""
    modes: tuple[Any, ...] = ("sometimes", "", "ABORT", None, 3, [])
    async with _unharmed(bench):
        for mode in modes:
            with refused(InvalidRequest, field="mode", naming="'in_place'"):
                await bench.engine.pause_generation(mode)
            assert not bench.engine.is_paused


@case()
async def unknown_memory_tags_are_refused(bench: Bench) -> None:
    """Unknown or missing memory tags are refused by sleep() and wake_up(), and nothing falls asleep."""
    wrong: tuple[Any, ...] = (["cache"], "cache", ["weights", "everything"], [], (), [None], 3, [3])
    async with _unharmed(bench):
        for tags in wrong:
            with _refused("tags", f"sleep({tags!r})"):
                await bench.engine.sleep(tags)
            with _refused("tags", f"wake_up({tags!r})"):
                await bench.engine.wake_up(tags)
            assert bench.engine.status.describe() == "ready"


@case(Capability.VERSION_SPANS)
async def a_version_that_says_nothing_is_refused(bench: Bench) -> None:
    """A weight version that is empty or not a string is refused, and the previous one stays."""
    version = bench.engine.get_weight_version()
    wrong: tuple[Any, ...] = ("", None, 3, ["v2"])
    async with _unharmed(bench):
        for label in wrong:
            with _refused("version", f"update_weight_version({label!r})"):
                await bench.engine.update_weight_version(label)
            assert bench.engine.get_weight_version() == version
    (completion,) = await bench.greedy([bench.prompt()], 2)
    assert completion.weight_version == version
    await bench.engine.update_weight_version(version)


# Configuration -------------------------------------------------------------------------------------------------------

_NO_TEXT: Final = ("a\0b", "/a\0b", "\ud800", "x" * 5000)
"""Text that no path and no argument of a process can hold."""

WRONG_CONFIG: Final[Mapping[str, Sequence[object]]] = {
    "backend": (3, None, *_NO_TEXT),
    "model": ("/no/such/folder", "./no-such-folder", "a/b/c", " ", "", *_NO_TEXT),
    "tokenizer": ("/no/such/folder", 3, *_NO_TEXT),
    "revision": (3, "", *_NO_TEXT),
    "task": ("sing", 3),
    "trust_remote_code": ("perhaps", 7, None),
    "dtype": ("int3", 3, None),
    "device": (3, "", *_NO_TEXT),
    "tensor_parallel_size": (0, 2**31, 1.5, "two", None),
    "pipeline_parallel_size": (0, 2**31, 1.5, "two", None),
    "data_parallel_size": (0, 2**31, 1.5, "two", None),
    "expert_parallel_size": (0, 2**31, 1.5, "two", None),
    "gpu_memory_utilization": (0, 1.5, "most", True),
    "max_num_batched_tokens": (0, 2**31, 1.5, "many"),
    "max_num_seqs": (0, 2**31, 1.5, "many"),
    "context_length": (0, 2**31, 1.5, "long"),
    "enable_prefix_caching": ("perhaps", 7, None),
    "attention_backend": (3, "", *_NO_TEXT),
    "enable_lora": ("perhaps", 7, None),
    "max_loras": (0, 2**31, 1.5, "many"),
    "max_lora_rank": (0, 2**31, 1.5, "high"),
    "seed": (-1, 2**63, 1.5, "lucky"),
    "logprobs_mode": ("cooked", 3, None),
    "deterministic": ("perhaps", 7, None),
    "enable_sleep": ("perhaps", 7, None),
    "sleep_keeps_weights": ("perhaps", 7, None),
    "weight_version": ("", "\ud800", "a\0b", "x" * 5000, 3, None),
    "tool_call_parser": ("esperanto", 3),
    "engine_kwargs": ("fast", ["fast"], {3: 1}, {"f": object()}, None, {"f": "\ud800"}, {"\ud800": 1}, {"f": 2**70}),
    "isolation": ("orbit", 3),
    "python": (3, ["python"], "", *_NO_TEXT),
    "endpoint": ("localhost:30000", "ftp://localhost:21", "http://", 3, "http://a\0b:1", "http://\ud800:1"),
    "endpoint_api_key": ("", 3, "a\nb", "é", *_NO_TEXT),
    "media": (
        *("small", {"max_bytes": 0}, {"max_pixels": 1.5}, {"max_video_seconds": -1}, {"max_audio_samples": 0}),
        *({"max_frames": 3}, None),
    ),
    "timeouts": (
        *("short", {"start": -1}, {"generate": 0}, {"close": "soon"}, {"begin": 3}, None),
        *({"control": _INFINITY}, {"start": _NAN}, {"generate": 10**400}, {"heartbeat": True}),
    ),
}
"""Invalid values of each configuration field."""

VALID_CONFIG: Final[Mapping[str, object]] = {
    "revision": "main",
    "task": "embed",
    "trust_remote_code": True,
    "dtype": "bfloat16",
    "device": "cpu",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "expert_parallel_size": 2,
    "gpu_memory_utilization": 0.5,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "context_length": 64,
    "enable_prefix_caching": False,
    "attention_backend": "eager",
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "seed": 5,
    "logprobs_mode": "raw",
    "deterministic": True,
    "enable_sleep": False,
    "sleep_keeps_weights": True,
    "weight_version": "v2",
    "tool_call_parser": "hermes",
    "engine_kwargs": {"an_option": 1},
    "isolation": "process",
    "endpoint": "http://127.0.0.1:30000",
    "endpoint_api_key": "not-a-secret",
    "media": {"max_bytes": 1000},
    "timeouts": {"generate": 5.0},
}
"""Valid values of each configuration field that differ from its default."""


@case()
async def no_configuration_field_takes_a_wrong_value(bench: Bench) -> None:
    """Each configuration field refuses invalid values by name when the engine is created, before it starts."""
    assert set(WRONG_CONFIG) == set(EngineConfig.model_fields), "a field has no wrong values to try here"
    for name, values in WRONG_CONFIG.items():
        for value in values:
            with _refused(name, f"{name}={value!r}", InvalidConfig):
                bench.create(**{name: value})


@case()
async def every_configuration_field_is_honoured_or_refused(bench: Bench) -> None:
    """Each configuration field, set to a value other than its default, is accepted or refused by name or capability."""
    tried = {*VALID_CONFIG, "backend", "model", "tokenizer", "python"}
    assert tried == set(EngineConfig.model_fields), "a field has no valid value to try here"
    claimed = {capability.value for capability in bench.engine.capabilities}
    given = {**VALID_CONFIG, "backend": bench.engine.config.backend, "tokenizer": str(bench.model)}
    for name, value in given.items():
        fields = {name: value}
        if name == "device":
            fields["gpu_memory_utilization"] = None  # the run may set it for its GPU
        try:
            engine = bench.create(**fields)
        except (UnsupportedCapability, InvalidConfig) as error:
            _check_honest_refusal(error, claimed, name, f"{name}={value!r}")
        else:
            assert name in engine.config.model_fields_set, f"{name}={value!r} was dropped"


@case()
async def a_configuration_field_that_asks_for_nothing_is_taken(bench: Bench) -> None:
    """A field that disables or bounds a feature the engine lacks is accepted."""
    nothing: dict[str, object] = {"enable_sleep": False, "max_loras": 2, "max_lora_rank": 8}
    if not bench.claims(Capability.PREFIX_CACHE):
        nothing["enable_prefix_caching"] = False
    if not any(bench.claims(one) for one in (Capability.IMAGES, Capability.VIDEO, Capability.AUDIO)):
        nothing["media"] = {"max_bytes": 1000}
    for name, value in nothing.items():
        try:
            bench.create(**{name: value})
        except (UnsupportedCapability, InvalidConfig) as error:
            raise AssertionError(f"{name}={value!r} asks for nothing and is refused: {error}") from error


@case()
async def an_unknown_configuration_field_is_refused_with_its_likely_name(bench: Bench) -> None:
    """An unknown configuration field is refused, and the error suggests the likely name."""
    slips = {name[:-2] + name[-1] + name[-2]: name for name in EngineConfig.model_fields if name != "model"}
    slips |= {"max_num_seq": "max_num_seqs", "tensor_parallel": "tensor_parallel_size", "modell": "model"}
    for wrong, meant in slips.items():
        with refused(InvalidConfig, field=wrong, naming=f"did you mean '{meant}'"):
            bench.create(**{wrong: 1})
    with refused(InvalidConfig, field="zzz", naming="there is no such field"):
        bench.create(zzz=1)
    with refused(InvalidConfig, field="timeouts.genarate", naming="did you mean 'generate'"):
        bench.create(timeouts={"genarate": 3})
    said = _refusal(bench, endpoint_apikey=_KEY)
    assert "endpoint_api_key" in said, f"the field that is meant is not named: {said}"
    for fields in _WITH_A_KEY:
        said = _refusal(bench, **fields)
        assert _KEY not in said, f"the error repeats what may be a key: {said}"


_KEY: Final = "sk-0123456789"
_WITH_A_KEY: Final[Sequence[Mapping[str, object]]] = (
    {"endpoint_apikey": _KEY},
    {"api_key": _KEY},
    {"endpoint": f"http://user:{_KEY}@127.0.0.1:30000"},
    {"endpoint_api_key": [_KEY]},
    {"timeouts": {"api_key": _KEY}},
    {"media": {"token": _KEY}},
    {"engine_kwargs": {"api_key": {_KEY}}},
    {"engine_kwargs": {"api_key": _KEY}, "context_length": 2**30},
)
"""Configurations that hold a key, most under a mistyped name; the last one's fault is for the backend to find."""


def _refusal(bench: Bench, **fields: object) -> str:
    """Return why an engine with these fields is refused; empty if it is not."""
    try:
        bench.create(**fields)
    except DrivetrainError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _unharmed(bench: Bench) -> AsyncGenerator[None, None]:
    """Require the block to leave the engine serving as before: same answer, same state, no request left."""
    prompt, version = bench.prompt(), bench.engine.get_weight_version()
    before = await bench.greedy([prompt], 8)
    yield
    await until_idle(bench.engine)
    assert bench.engine.status.describe() == "ready"
    assert bench.engine.get_weight_version() == version
    check_same(bench, await bench.greedy([prompt], 8), before)


@contextmanager
def _refused(field: str, what: str, kind: type[InvalidRequest | InvalidConfig] = InvalidRequest) -> Iterator[None]:
    """Require the block to raise ``kind``, naming the field; ``what`` describes the attempt."""
    try:
        with refused(kind, field=field):
            yield
    except UnsupportedCapability:
        raise
    except Exception as error:
        raise AssertionError(f"{what:.300}: {type(error).__name__}: {error}") from error


def _check_honest_refusal(
    error: UnsupportedCapability | InvalidRequest | InvalidConfig, claimed: Collection[str], field: str, what: str
) -> None:
    """Assert that a refusal of ``what`` names the field, or an existing capability that is unclaimed."""
    if not isinstance(error, UnsupportedCapability):
        assert error.field.startswith(field), f"{what}: the error names {error.field!r}: {error}"
        return
    known = {capability.value for capability in Capability}
    assert error.capability in known, f"{what} is refused for {error.capability!r}, which is no capability: {error}"
    assert error.capability not in claimed, f"{what} is refused for {error.capability}, which is claimed: {error}"


async def _check_vocabulary(bench: Bench, field: str, naming: Callable[[int], Fields]) -> None:
    """Assert that a param accepts token ids up to the vocabulary's last one, and refuses larger ones."""
    vocabulary, prompt = bench.engine.model_info.vocab_size, bench.prompt()
    async with _unharmed(bench):
        for token in (vocabulary, vocabulary + 1000, 2**40):
            with refused(InvalidRequest, field=f"sampling_params.{field}", naming=str(token)):
                await bench.engine.generate([prompt], naming(token))
        await bench.engine.generate([prompt], {"max_new_tokens": 1, **naming(vocabulary - 1)})
