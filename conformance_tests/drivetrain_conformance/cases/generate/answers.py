"""Answers: tokens, ends, samples, prompts, lengths, and the models that make them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DeadlineExceeded, EngineStartError, InvalidConfig, InvalidRequest
from drivetrain.testing import tiny_model
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import Completion, FinishReason, GenerationOutput, VersionSpan, group_outputs_by_prompt
from drivetrain.types.prompts import ChatPrompt, Message, PromptLike, TextPrompt, TokenPrompt
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.assertions.common_checks import assert_idle_soon, ending_prompt, fields_of_sampling
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assertions.same_answers import check_greedy, check_same
from drivetrain_conformance.engine_model.field_batches import field_batch
from drivetrain_conformance.engine_model.mixed_fields import Repeats, check_honoured
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, TooLate, end_requests, in_time, until_running
from drivetrain_conformance.harness.time_limits import until_ended, within

_FORCE = 100.0
"""A bias that no difference of logits outweighs."""
_SAMPLING_OF_A_FOLDER: Final[Mapping[str, Any]] = {
    "do_sample": True,
    "temperature": 0.01,
    "top_k": 1,
    "top_p": 0.3,
    "min_p": 0.4,
    "repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "max_new_tokens": 2,
    "min_new_tokens": 2,
}
"""Sampling fields that a folder's generation config may set."""
_OUTGROWS: Final = 160
"""Tokens of samples that outgrow the buffers of a new batch."""
_MESSAGES = (
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Who rows? Die Ruderin, 舟."},
)


@case()
async def greedy_takes_the_most_likely_token(bench: Bench) -> None:
    """At temperature 0 each token is the most likely one, as an independent forward pass computes it."""
    prompts = [*bench.prompts(3), bench.prompt(200)]
    for completion in await bench.greedy(prompts):
        rows = bench.output_logits(completion)
        for row, token in zip(rows, completion.token_ids, strict=True):
            assert row.max() - row[token] <= bench.tolerance(), (
                f"token {token} is {row.max() - row[token]:.3g} nats below the most likely one, {row.argmax()}"
            )
    # Longer samples, beside others of another length, outgrow the buffers that an engine makes for a batch.
    own: dict[str, object] = (
        {"logprobs": 0, "logprobs_mode": LogprobsMode.RAW} if bench.claims(Capability.LOGPROBS_RAW) else {}
    )
    fields = {"max_new_tokens": _OUTGROWS, "temperature": 0, "ignore_eos": bench.claims(Capability.IGNORE_EOS)} | own
    output = await bench.engine.generate([bench.prompt(3), bench.prompt(89)], SamplingParams.model_validate(fields))
    for completion in output.completions:
        check_greedy(bench, completion)
        wanted = bench.output_logprobs(completion)
        for at, found in enumerate(completion.logprobs or ()):
            assert abs(found - wanted[at]) <= bench.tolerance(), (
                f"the logprob of token {at} of {len(wanted)} is {abs(found - wanted[at]):.3g} nats off"
            )


@case()
async def at_most_max_new_tokens(bench: Bench) -> None:
    """A completion that ends by its length has exactly max_new_tokens tokens; none has more."""
    for count in (1, 2, 7):
        for completion in await bench.greedy(bench.prompts(3), max_new_tokens=count):
            assert len(completion.token_ids) <= count
            if completion.finish_reason is FinishReason.LENGTH:
                assert len(completion.token_ids) == count


# Prompts -------------------------------------------------------------------------------------------------------------


@case()
async def token_ids_reach_the_model_as_they_are(bench: Bench) -> None:
    """A prompt of token ids reaches the model unchanged: nothing is added, removed or tokenised again."""
    vocabulary = bench.engine.model_info.vocab_size
    # These ids, some of them special, would change if their text were tokenised again.
    prompts = [bench.prompt(), bench.prompt(1), [0, vocabulary - 1, 0], [bench.rng.randrange(vocabulary)] * 9]
    prompts += [[*bench.prompt(3), eos, *bench.prompt(3)] for eos in bench.engine.model_info.eos_token_ids]
    completions = await bench.greedy(prompts, 2)
    assert [completion.prompt_token_ids for completion in completions] == prompts


@case()
async def text_is_tokenised_by_the_models_tokenizer(bench: Bench) -> None:
    """A text prompt becomes the ids that the model's tokenizer gives, with its special tokens or without."""
    inner = bench.engine.tokenizer.inner
    for text in ("one", "Ein Boot ~ 舟 ~ 🛶\n\n\tthat's it ", "x" * 70):
        plain = list(inner(text, add_special_tokens=False)["input_ids"])
        expected = [list(inner(text)["input_ids"]), list(inner(text)["input_ids"]), plain]
        prompts: list[PromptLike] = [text, TextPrompt(text=text), TextPrompt(text=text, add_special_tokens=False)]
        output = await bench.engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=6))
        by_ids = await bench.greedy(expected, 6)
        for completion, ids, reference in zip(output.completions, expected, by_ids, strict=True):
            assert completion.prompt_token_ids == ids
            check_same(bench, [completion], [reference])


@case()
async def messages_are_rendered_by_the_chat_template(bench: Bench) -> None:
    """Chat messages become the ids of the text that the model's chat template renders."""
    inner, engine = bench.engine.tokenizer.inner, bench.engine
    ask: list[tuple[PromptLike, dict[str, Any]]] = [
        (list(_MESSAGES), {"add_generation_prompt": True}),
        ([Message.model_validate(message) for message in _MESSAGES], {"add_generation_prompt": True}),
        (ChatPrompt.model_validate({"messages": _MESSAGES}), {"add_generation_prompt": True}),
        (
            ChatPrompt.model_validate({"messages": _MESSAGES, "add_generation_prompt": False}),
            {"add_generation_prompt": False},
        ),
        (
            ChatPrompt.model_validate({"messages": _MESSAGES, "continue_final_message": True}),
            {"continue_final_message": True},
        ),
    ]
    for prompt, arguments in ask:
        if not inner.chat_template:
            with refused(InvalidRequest, field="prompts", naming="chat template"):
                await engine.generate([prompt])
            continue
        rendered = inner.apply_chat_template([dict(m) for m in _MESSAGES], tokenize=False, **arguments)
        assert isinstance(rendered, str)
        expected = inner(rendered, add_special_tokens=False)["input_ids"]
        output = await engine.generate([prompt], SamplingParams(max_new_tokens=1))
        assert output.completions[0].prompt_token_ids == expected, f"with {arguments}"


@case()
async def prompts_of_all_kinds_mix_in_one_call(bench: Bench) -> None:
    """One call takes ids, text and prompt objects side by side, and each completion belongs to its own prompt."""
    inner, ids = bench.engine.tokenizer.inner, bench.prompts(3)
    prompts: list[PromptLike] = [
        ids[0],
        "some text",
        tuple(ids[1]),
        TokenPrompt(token_ids=tuple(ids[2])),
        TextPrompt(text="more text"),
        "some text",
    ]
    some, more = (list(inner(text)["input_ids"]) for text in ("some text", "more text"))
    output = await bench.engine.generate(prompts, SamplingParams(max_new_tokens=2))
    assert [c.prompt_token_ids for c in output.completions] == [ids[0], some, ids[1], ids[2], more, some]
    assert [c.prompt_index for c in output.completions] == list(range(6))


@case()
async def one_prompt_is_a_batch_of_one(bench: Bench) -> None:
    """A prompt given by itself and the same prompt in a list are the same request."""
    prompt, params = bench.prompt(), {"temperature": 0, "max_new_tokens": 4}
    alone, listed = await bench.engine.generate(prompt, params), await bench.engine.generate([prompt], params)
    assert [c.prompt_token_ids for c in (*alone.completions, *listed.completions)] == [prompt, prompt]
    check_same(bench, [alone.completions[0]], [listed.completions[0]])


# Outputs -------------------------------------------------------------------------------------------------------------


@case()
async def samples_are_grouped_by_prompt(bench: Bench) -> None:
    """n=3 gives three completions of each prompt, in the order of the prompts and of the samples."""
    prompts = bench.prompts(3)
    output = await bench.engine.generate(prompts, SamplingParams(n=3, max_new_tokens=4))
    assert [(c.prompt_index, c.sample_index) for c in output.completions] == [
        (p, s) for p in range(3) for s in range(3)
    ]
    assert [c.prompt_token_ids for c in output.completions] == [prompts[p] for p in range(3) for _ in range(3)]
    assert len({c.request_id for c in output.completions}) == 9


@case()
async def each_prompt_can_have_params_of_its_own(bench: Bench) -> None:
    """With a list of sampling params each prompt is generated with its own params, and samples group by prompt.

    So it remains while other requests of the batch end, whatever fields they set.
    """
    prompts, counts = bench.prompts(4), (3, 1, 2, 1)
    params: list[SamplingParams | Mapping[str, object]] = [
        SamplingParams(n=n, temperature=0, max_new_tokens=6 - n) for n in counts
    ]
    params[1] = {"temperature": 0, "max_new_tokens": 7}
    output = await bench.engine.generate(prompts, params)
    groups = output.by_prompt()
    assert output.completions == [c for group in groups for c in group], "completions are not in order of the prompts"
    assert [[c.sample_index for c in group] for group in groups] == [list(range(n)) for n in counts]
    assert [group[0].prompt_token_ids for group in groups] == prompts
    assert groups == group_outputs_by_prompt(reversed(output.completions)), "grouping depends on the order"
    for most, prompt, group in zip((3, 7, 4, 5), prompts, groups, strict=True):
        (alone,) = await bench.greedy([prompt], most)
        for completion in group:
            check_same(bench, [completion], [alone])
    await check_honoured(bench, field_batch(bench), Repeats(), streamed=False)


@case()
async def greedy_samples_of_a_prompt_are_alike(bench: Bench) -> None:
    """At temperature 0 all n samples of a prompt are the same."""
    (prompt,) = bench.prompts(1)
    output = await bench.engine.generate([prompt], SamplingParams(n=3, temperature=0, max_new_tokens=8))
    first, *others = output.completions
    assert len(others) == 2
    for other in others:
        check_same(bench, [other], [first])


@case()
async def the_text_is_the_decoding_of_the_ids(bench: Bench) -> None:
    """A completion's text is the decoding of its ids, without the EOS that ended it."""
    output = await bench.engine.generate(bench.prompts(6), SamplingParams(n=4, max_new_tokens=24))
    ended = await bench.greedy([ending_prompt(bench).token_ids], 4)  # random samples end by EOS only by chance
    decode = bench.engine.tokenizer.inner.decode
    for completion in [*output.completions, *ended]:
        ids = completion.token_ids[: -1 if completion.finish_reason is FinishReason.STOP else None]
        assert completion.text == (decode(ids, skip_special_tokens=True) if ids else "")
        assert all(0 <= token < bench.engine.model_info.vocab_size for token in completion.token_ids)


@case()
async def decode_turns_ids_into_text(bench: Bench) -> None:
    """decode() gives the tokenizer's text of any ids, with or without special tokens."""
    engine, inner = bench.engine, bench.engine.tokenizer.inner
    special = _special_id(engine)
    ids = [*bench.prompt(5), special, *bench.prompt(5)]
    assert engine.decode(ids) == inner.decode(ids, skip_special_tokens=True)
    kept = engine.decode(ids, skip_special_tokens=False)
    assert kept == inner.decode(ids, skip_special_tokens=False)
    assert str(inner.convert_ids_to_tokens(special)) in kept
    assert engine.decode([]) == ""
    text = "Ein Boot ~ 舟 ~ 🛶"
    assert engine.decode(inner(text, add_special_tokens=False)["input_ids"]) == text


@case(Capability.LOGIT_BIAS)
async def special_tokens_stay_in_the_ids_and_in_the_text_if_asked_for(bench: Bench) -> None:
    """A sampled special token is in the ids; skip_special_tokens decides if it is in the text."""
    special = _special_id(bench.engine)
    params = {"temperature": 0, "max_new_tokens": 3, "logit_bias": {special: _FORCE}}
    prompt = bench.prompt()
    for skip, text in ((True, ""), (False, bench.engine.decode([special] * 3, skip_special_tokens=False))):
        output = await bench.engine.generate([prompt], {**params, "skip_special_tokens": skip})
        (completion,) = output.completions
        assert completion.token_ids == [special] * 3, "100 on one token's logit must draw it each time"
        assert completion.text == text, f"skip_special_tokens={skip}"


@case()
async def request_ids_come_back(bench: Bench) -> None:
    """A completion carries its given id, made unique for each sample, or a new id if none was given."""
    prompts = bench.prompts(2)
    given = await bench.engine.generate(prompts, SamplingParams(max_new_tokens=1), request_ids=["first", "second"])
    assert [completion.request_id for completion in given.completions] == ["first", "second"]
    again = await bench.engine.generate(prompts, SamplingParams(max_new_tokens=1, n=2), request_ids=["first", "second"])
    ids = [completion.request_id for completion in again.completions]
    assert len(set(ids)) == 4, f"ids of samples must differ: {ids}"
    assert all(
        request_id.startswith(base) for request_id, base in zip(ids, ["first"] * 2 + ["second"] * 2, strict=True)
    )
    made_up = [await bench.engine.generate(prompts, SamplingParams(max_new_tokens=1)) for _ in range(3)]
    assert len({c.request_id for output in made_up for c in output.completions}) == 6


# Endings -------------------------------------------------------------------------------------------------------------


def _assert_ends_lawfully(engine: InferenceEngine, completion: Completion) -> None:
    """Assert that EOS occurs only as the last token, and then is named as the stop."""
    eos, ids = engine.model_info.eos_token_ids, completion.token_ids
    assert not set(ids[:-1]) & set(eos), f"it went on past EOS: {ids}"
    if completion.finish_reason is FinishReason.STOP:
        assert ids[-1:] == [completion.matched_stop], "the EOS that ended it stays in the ids"
        assert completion.matched_stop in eos
        assert completion.text == engine.decode(ids[:-1]), "EOS is no part of the text"
    else:
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.matched_stop is None
        assert not ids or ids[-1] not in eos


@case()
async def eos_ends_a_completion(bench: Bench) -> None:
    """EOS ends a completion, stays in its ids, is left out of its text, and is named as the stop."""
    output = await bench.engine.generate(bench.prompts(4), SamplingParams(n=8, max_new_tokens=48))
    for completion in output.completions:
        _assert_ends_lawfully(bench.engine, completion)
    ending = ending_prompt(bench)
    (completion,) = await bench.greedy([ending.token_ids], 4)
    assert (completion.token_ids, completion.text) == ([ending.eos], "")
    _assert_ends_lawfully(bench.engine, completion)


@case(Capability.LOGPROBS_TEMPERATURE)
async def eos_has_its_logprob(bench: Bench) -> None:
    """The EOS that ended a completion was sampled, so it has a logprob like every other token."""
    ending = ending_prompt(bench)
    params = SamplingParams(temperature=0, max_new_tokens=4, logprobs=0)
    (completion,) = (await bench.engine.generate([ending.token_ids], params)).completions
    assert completion.token_ids == [ending.eos]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 1
    assert abs(completion.logprobs[0] - bench.output_logprobs(completion)[0]) <= bench.tolerance()


@case(Capability.LOGIT_BIAS)
async def every_eos_of_the_model_ends_a_completion(bench: Bench) -> None:
    """Each of the model's EOS ids ends a completion at once, not only the first of them."""
    for eos in bench.engine.model_info.eos_token_ids:
        params = SamplingParams(temperature=0, max_new_tokens=5, logit_bias={eos: _FORCE})
        for completion in (await bench.engine.generate(bench.prompts(2), params)).completions:
            assert completion.token_ids == [eos]
            _assert_ends_lawfully(bench.engine, completion)


@case(Capability.IGNORE_EOS)
async def ignore_eos_goes_on_past_it(bench: Bench) -> None:
    """With ignore_eos a completion continues past EOS to its full length, and EOS is a token like any other."""
    ending = ending_prompt(bench)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    (completion,) = (await bench.engine.generate([ending.token_ids], params)).completions
    assert completion.token_ids[0] == ending.eos
    assert len(completion.token_ids) == 12
    assert (completion.finish_reason, completion.matched_stop) == (FinishReason.LENGTH, None)
    assert completion.text == bench.engine.decode(completion.token_ids)
    lag = [row.max() - row[id] for row, id in zip(bench.output_logits(completion), completion.token_ids, strict=True)]
    assert max(lag) <= bench.tolerance(), f"past EOS it is no longer greedy: {lag}"


@case(Capability.IGNORE_EOS, Capability.LOGIT_BIAS)
async def nothing_but_eos_is_a_full_completion_if_ignored(bench: Bench) -> None:
    """With ignore_eos a model that draws nothing but EOS still generates max_new_tokens of them."""
    eos = bench.engine.model_info.eos_token_ids[0]
    params = {"temperature": 0, "max_new_tokens": 7, "ignore_eos": True, "logit_bias": {eos: _FORCE}}
    for skip in (True, False):
        output = await bench.engine.generate([bench.prompt()], {**params, "skip_special_tokens": skip})
        assert output.completions[0].token_ids == [eos] * 7
        assert output.completions[0].finish_reason is FinishReason.LENGTH
        assert output.completions[0].text == bench.engine.decode([eos] * 7, skip_special_tokens=skip)


@case(Capability.MIN_NEW_TOKENS)
async def min_new_tokens_keeps_eos_away(bench: Bench) -> None:
    """Before min_new_tokens no EOS is drawn, even where the model would have ended at once."""
    ending, eos = ending_prompt(bench), set(bench.engine.model_info.eos_token_ids)
    for least in (1, 5):
        params = SamplingParams(temperature=0, max_new_tokens=9, min_new_tokens=least)
        (completion,) = (await bench.engine.generate([ending.token_ids], params)).completions
        assert len(completion.token_ids) >= least, f"min_new_tokens={least}: it ended after {completion.token_ids}"
        assert not eos & set(completion.token_ids[:least]), f"min_new_tokens={least}: EOS in {completion.token_ids}"
        rows = bench.output_logits(completion)[:least]
        rows[:, list(eos)] = -np.inf
        for row, token in zip(rows, completion.token_ids, strict=False):
            assert row.max() - row[token] <= bench.tolerance(), "EOS is kept away, and nothing else is changed"


@case(Capability.MIN_NEW_TOKENS, Capability.LOGIT_BIAS)
async def eos_comes_right_after_min_new_tokens(bench: Bench) -> None:
    """An EOS that the model insists on comes as the first token after min_new_tokens."""
    eos = bench.engine.model_info.eos_token_ids[0]
    params = SamplingParams(temperature=0, max_new_tokens=9, min_new_tokens=4, logit_bias={eos: _FORCE})
    (completion,) = (await bench.engine.generate([bench.prompt()], params)).completions
    assert len(completion.token_ids) == 5, f"4 tokens and EOS expected: {completion.token_ids}"
    _assert_ends_lawfully(bench.engine, completion)
    assert completion.matched_stop == eos
    await _check_each_has_its_least(bench, eos)


async def _check_each_has_its_least(bench: Bench, eos: int) -> None:
    """Check that requests of one batch have their own min_new_tokens, whichever other field of sampling they set."""
    beside = [field for field in fields_of_sampling(bench) if "logit_bias" not in field]
    fixed = {"max_new_tokens": 2 * len(beside) + 1, "logit_bias": {eos: _FORCE}}
    params = [
        SamplingParams.model_validate({**field, **fixed, "min_new_tokens": least})
        for least, field in enumerate((*beside, *beside), start=1)
    ]
    output = await bench.engine.generate(bench.prompts(len(params)), params)
    for one, completion in zip(params, output.completions, strict=True):
        asked = one.model_dump(exclude_defaults=True, exclude={"max_new_tokens", "logit_bias"})
        assert len(completion.token_ids) == one.min_new_tokens + 1, f"{asked}: EOS came after {completion.token_ids}"


@case()
async def a_completion_may_fill_the_context(bench: Bench) -> None:
    """Prompt and completion may fill the context to its last token and no further, whatever max_new_tokens says."""
    context = bench.engine.model_info.context_length
    for room in (1, 5):
        prompt = bench.prompt(context - room)
        for most in (None, room):
            params = SamplingParams(temperature=0, max_new_tokens=most)
            (completion,) = (await bench.engine.generate([prompt], params)).completions
            assert completion.prompt_token_ids == prompt, "a long prompt is not cut"
            assert 1 <= len(completion.token_ids) <= room
            assert completion.finish_reason is FinishReason.STOP or len(completion.token_ids) == room
        with refused(InvalidRequest, field="sampling_params.max_new_tokens", naming=f"at most {room}"):
            await bench.engine.generate([prompt], SamplingParams(max_new_tokens=room + 1))


@case(Capability.IGNORE_EOS)
async def without_max_new_tokens_the_context_is_filled(bench: Bench) -> None:
    """With max_new_tokens=None generation continues until the context is full, and finishes by length."""
    context = bench.engine.model_info.context_length
    prompts = [bench.prompt(context - room) for room in (9, 1, 4)]
    output = await bench.engine.generate(prompts, SamplingParams(ignore_eos=True))
    assert [len(completion.token_ids) for completion in output.completions] == [9, 1, 4]
    assert {completion.finish_reason for completion in output.completions} == {FinishReason.LENGTH}


@case()
async def a_prompt_that_fills_the_context_is_refused(bench: Bench) -> None:
    """A prompt that leaves no room for a token is refused with its length, and is not cut to fit."""
    context = bench.engine.model_info.context_length
    for length in (context, context + 1, 2 * context):
        with refused(InvalidRequest, field="prompts[0]", naming=f"{length} tokens"):
            await bench.engine.generate([bench.prompt(length)])


# Together ------------------------------------------------------------------------------------------------------------


@case()
async def a_batch_equals_each_prompt_alone(bench: Bench) -> None:
    """Greedy completions of many prompts of all lengths in one call are those of each prompt by itself."""
    prompts = [bench.prompt(length) for length in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)]
    prompts += [prompts[4], prompts[7] + bench.prompt(2), prompts[9][:70]]  # common prefixes may share a cache
    together = await bench.greedy(prompts, 10)
    assert [completion.prompt_token_ids for completion in together] == prompts
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = await bench.greedy([prompt], 10)
        check_same(bench, [completion], [alone])


@case()
async def calls_at_once_do_not_mix(bench: Bench) -> None:
    """Concurrent generate() calls each get the completions of their own prompts."""
    counts = [bench.rng.choice((1, 3, 8, 16)) for _ in range(24)]
    prompts = [bench.prompt(bench.rng.choice((1, 4, 9, 33))) for _ in counts]
    alone = [(await bench.greedy([prompt], count))[0] for prompt, count in zip(prompts, counts, strict=True)]

    async def ask(prompt: Sequence[int], count: int) -> Completion:
        await asyncio.sleep(bench.rng.random() * 0.05)  # spread over the other calls' generation
        (completion,) = await bench.greedy([prompt], count)
        return completion

    together = await asyncio.gather(*(ask(prompt, count) for prompt, count in zip(prompts, counts, strict=True)))
    assert [completion.prompt_token_ids for completion in together] == prompts
    for one, other in zip(alone, together, strict=True):
        check_same(bench, [other], [one])


@case()
async def cancelling_a_call_ends_its_requests(bench: Bench) -> None:
    """Cancelling a generate() call ends its requests in the engine; concurrent calls go on."""
    prompt = bench.prompt()
    (alone,) = await bench.greedy([prompt], 24)
    doomed = asyncio.create_task(bench.engine.generate(bench.prompts(4), bench.long()))
    try:
        await _until_seen(bench.engine, doomed)
        beside = asyncio.create_task(bench.greedy([prompt], 24))
        await asyncio.sleep(0)
        doomed.cancel()
        assert await until_ended(doomed), "a cancelled call did not return"
        (completion,) = await beside
        check_same(bench, [completion], [alone])
        await assert_idle_soon(bench, "requests of a cancelled call are still there")
    finally:
        await end_requests(bench.engine, doomed)


@case()
async def a_timeout_is_a_typed_error_and_the_engine_serves_on(bench: Bench) -> None:
    """timeout= ends a call in DeadlineExceeded, naming what was waited for; its requests end, others go on."""
    prompt = bench.prompt()
    (alone,) = await bench.greedy([prompt], 24)
    with refused(DeadlineExceeded, naming="completions"):
        await bench.engine.generate(bench.prompts(4), bench.long(), timeout=1e-9)
    beside = asyncio.create_task(bench.greedy([prompt], 24))
    late = asyncio.create_task(bench.engine.generate(bench.prompts(4), bench.long(), timeout=0.1))
    assert await until_ended(late), "a call outlived its deadline"
    assert late.exception() is None or isinstance(late.exception(), DeadlineExceeded)
    (completion,) = await beside
    check_same(bench, [completion], [alone])
    await assert_idle_soon(bench, "requests of a call that timed out are still there")


@case(Capability.PRIORITY, config={"max_num_seqs": 1})
async def higher_priority_starts_sooner(bench: Bench) -> None:
    """Waiting requests start and end in the order of their priority, highest first.

    A retraction meanwhile ends none of them, and an update and a sleep before leave ``max_num_seqs`` in force.
    """
    engine = bench.engine
    if bench.claims(Capability.WEIGHTS_DISK):
        await engine.load_weights_from_disk(str(bench.model), engine.get_weight_version())
    if bench.claims(Capability.SLEEP_KV_CACHE):
        await engine.sleep({MemoryTag.KV_CACHE})
        await engine.wake_up({MemoryTag.KV_CACHE})
    ended, streamed = list[int](), list[int]()  # compared one by one: a stream's end is noticed a few turns later
    lengths: dict[int, int] = {}
    priorities = (-2, 0, 1, 6, -1, 3)  # in no order that a queue without some of them would keep

    async def ask(priority: int) -> None:
        params = SamplingParams(max_new_tokens=32, ignore_eos=bench.claims(Capability.IGNORE_EOS))
        if priority % 2 and bench.claims(Capability.STREAMING):
            chunks = [chunk async for chunk in engine.generate_stream([bench.prompt()], params, priority=priority)]
            streamed.append(priority)
            lengths[priority] = sum(len(chunk.token_ids) for chunk in chunks)
        else:
            (completion,) = (await engine.generate([bench.prompt()], params, priority=priority)).completions
            ended.append(priority)
            lengths[priority] = len(completion.token_ids)

    async def block() -> GenerationOutput:
        output = await engine.generate([bench.prompt()], bench.long(250), priority=7)
        ended.append(7)
        return output

    blocker = await until_running(engine, 1, block)
    ended.clear()
    asking: list[asyncio.Task[None]] = []
    try:
        asking = [asyncio.create_task(ask(priority)) for priority in priorities]
        async with within():
            while (stats := await engine.stats()).waiting < len(priorities):
                assert stats.running <= 1, f"{stats.running} requests ran at once, where max_num_seqs is 1"
                if blocker.done():
                    raise TooLate("the request that runs ended before the others had come")
                await asyncio.sleep(0.002)
            for _ in range(3):  # the first look may precede the step that admits them
                stats = await engine.stats()
                assert stats.running <= 1, f"{stats.running} requests ran at once, where max_num_seqs is 1"
        with in_time(blocker):
            assert not ended + streamed, "more requests ran at once than max_num_seqs=1 allows"
        if bench.claims(Capability.PAUSE_RETRACT):
            await engine.pause_generation(PauseMode.RETRACT)
            await engine.continue_generation()
        await until_ended(blocker, *asking)
    finally:
        blocker.cancel()
        await until_ended(blocker, *asking)
    assert ended, "none of the requests ended in time"
    assert ended.pop(0) == 7, "the request that was retracted ran after others of lower priority"
    assert sorted(ended + streamed) == sorted(priorities)
    assert all(lengths.values()), f"requests that waited their turn ended without a token: {lengths}"
    assert ended == sorted(ended, reverse=True)
    assert streamed == sorted(streamed, reverse=True)


# Self-description ----------------------------------------------------------------------------------------------------


@case(Capability.VERSION_SPANS)
async def version_spans_cover_every_token(bench: Bench) -> None:
    """A completion's version spans cover all of its tokens without gaps."""
    engine = bench.engine
    version = engine.get_weight_version()
    try:
        await engine.update_weight_version("relabelled")
        output = await engine.generate(bench.prompts(3), SamplingParams(n=2, max_new_tokens=9))
    finally:
        await engine.update_weight_version(version)
    for completion in output.completions:
        assert completion.weight_versions == (VersionSpan("relabelled", 0, len(completion.token_ids)),)
        assert completion.weight_version == "relabelled"
    (after,) = await bench.greedy(bench.prompts(1), 3)
    assert after.weight_version == version


@case()
async def the_description_is_the_engines_own(bench: Bench) -> None:
    """describe() states the engine's identity, state and capabilities as plain data that can be serialised."""
    engine = bench.engine
    description = engine.describe()
    assert description.backend == engine.config.backend
    assert description.state == "ready"
    assert description.isolation == engine.isolation.value
    assert description.weight_version == engine.get_weight_version()
    assert set(description.capabilities) == {capability.value for capability in engine.capabilities}
    assert description.model == engine.model_info
    assert {"python", "drivetrain"} < set(description.versions), "the engine's own version is missing"
    json.dumps([description.config, description.versions, description.capabilities])
    assert (engine.host_pid is not None) == bench.is_hosted


@case()
async def the_model_info_is_true(bench: Bench) -> None:
    """model_info states the vocabulary size, and the EOS ids of the model's configurations and tokenizer."""
    info = bench.engine.model_info
    assert info.vocab_size == bench.oracle().logits(bench.prompt(2)).shape[-1]
    assert set(info.eos_token_ids) == _named_ends(bench.model, bench.engine.tokenizer)
    assert len(bench.engine.tokenizer) <= info.vocab_size


@case(own_engine=True, slow=True)
async def frequencies_that_depend_on_length_are_right_or_refused(bench: Bench) -> None:
    """A longrope model rotates each row by the factors for its own length, as rows grow, or refuses to start.

    It may instead require a context_length within which one set of factors serves all rows, and say so. Each token is
    compared with a plain forward pass over the tokens before it. To mend it: a long row must not change a short one
    beside it, and a row that grows past the short length needs its cache computed anew. A model whose configuration
    caps its logits or has dynamic frequencies is right or refused, too.
    """
    for what in _UNUSUAL:
        await _check_unusual_model(bench, what)
    short, reaches = 64, 12
    model = tiny_model("phi3", dtype=bench.models.dtype, max_position_embeddings=512, **_longrope(short))
    engine, refusal = await _started_or_refused(bench, model)
    if engine is None:
        if not (isinstance(refusal, InvalidConfig) and refusal.field == "context_length"):
            return  # the engine does not serve this kind of model
        assert f"context_length={short}" in f"{refusal}", f"the refusal names no length that is served: {refusal}"
        engine = bench.create(model=model, context_length=short)
        await engine.start()
    try:
        lengths = (5, short - reaches - 1) if refusal else (5, short - reaches // 2, short + 20)
        prompts = [bench.prompt(length, engine) for length in lengths]
        output = await engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=reaches))
        for completion in output.completions:
            ids = completion.prompt_token_ids + completion.token_ids
            for at in range(len(completion.prompt_token_ids), len(ids)):
                row = bench.oracle(model).logits(ids[:at])[-1]
                lacking = row.max() - row[ids[at]]
                assert lacking <= 2 * bench.tolerance(engine), (
                    f"token {at} of a row of {len(completion.prompt_token_ids)} tokens beside rows of {lengths}: "
                    f"{lacking:.3f} less likely than the likeliest"
                )
    finally:
        await engine.teardown()


_UNUSUAL: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    # The cap keeps the order of the logits, so that greedy answers are the same without it.
    "final_logit_softcapping": ("gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None}),
    # Within max_position_embeddings these frequencies are plain; some engines scale them at every length.
    "dynamic frequencies": (
        "qwen2",
        {
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}
"""Architectures with fields of a configuration that change an answer's logprobs."""


async def _check_unusual_model(bench: Bench, what: str) -> None:
    """Check that logprobs of a model with such a configuration are right, or that the model is refused."""
    architecture, fields = _UNUSUAL[what]
    model = tiny_model(architecture, dtype=bench.models.dtype, **fields)
    engine, _ = await _started_or_refused(bench, model)
    if engine is None:
        return  # the engine does not serve this kind of model
    try:
        if not engine.supports(Capability.LOGPROBS_RAW):
            return
        params = SamplingParams(temperature=0, max_new_tokens=8, logprobs=0, logprobs_mode=LogprobsMode.RAW)
        prompts = [bench.prompt(length, engine) for length in (5, 48, 100)]
        for completion in (await engine.generate(prompts, params)).completions:
            assert completion.logprobs is not None
            for found, right in zip(completion.logprobs, bench.output_logprobs(completion, model=model), strict=True):
                assert abs(found - right) <= bench.tolerance(engine), (
                    f"with {what} a logprob is {found:.4f}; a plain forward pass gives {right:.4f}"
                )
    finally:
        await engine.teardown()


@case(own_engine=True, slow=True)
async def every_file_that_names_an_end_is_heeded(bench: Bench) -> None:
    """If config.json, generation_config.json and the tokenizer each name another EOS, each of them ends a sample.

    The engine ignores the sampling fields of generation_config.json: a request's params are the only source. With
    dtype="auto" the weights keep the dtype that the folder has.
    """
    folder = bench.folder("ends") / "model"
    shutil.copytree(bench.model, folder, copy_function=shutil.copyfile)
    os.chmod(folder, 0o755)
    config, generation, tokenizer = (folder / f"{name}.json" for name in _NAMING_ENDS)
    known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    specials = [token for token in known if token["special"]]
    assert len(specials) >= 3, "the model's tokenizer has too few special tokens to name three ends"
    _change(config, eos_token_id=specials[0]["id"])
    _change(generation, eos_token_id=specials[1]["id"], **_SAMPLING_OF_A_FOLDER)
    _change(tokenizer, eos_token=specials[2]["content"])
    dtype = _in_another_dtype(folder)
    async with bench.open(model=folder) as engine:
        if engine.config.dtype == "auto" and engine.supports(Capability.READ_WEIGHTS):
            assert engine.model_info.dtype == dtype, f"a checkpoint in {dtype} is served in {engine.model_info.dtype}"
        ends = [token["id"] for token in specials[:3]]
        assert set(ends) <= set(engine.model_info.eos_token_ids), f"of the ends {ends} only some are known"
        sampled = await engine.generate(bench.prompt(engine=engine), SamplingParams(max_new_tokens=6, n=8))
        assert len({tuple(one.token_ids) for one in sampled.completions}) > 1, (
            "the generation config's sampling is used"
        )
        await _check_params_are_the_requests(bench, engine, folder)
        if not engine.supports(Capability.LOGIT_BIAS):
            return
        params = [SamplingParams(temperature=0, max_new_tokens=4, logit_bias={end: _FORCE}) for end in ends]
        completions = (await engine.generate([bench.prompt(engine=engine)] * 3, params)).completions
        assert [one.matched_stop for one in completions] == ends, f"{[one.token_ids for one in completions]}"


async def _check_params_are_the_requests(bench: Bench, engine: InferenceEngine, folder: Path) -> None:
    """Check that greedy answers, and processed logprobs of draws, are those without the folder's sampling fields."""
    prompts = bench.prompts(4, engine=engine)
    for completion in await bench.greedy(prompts, 24, engine):
        check_greedy(bench, completion, engine, folder)
    if not engine.supports(Capability.LOGPROBS_PROCESSED):
        return
    drawn = SamplingParams(max_new_tokens=16, logprobs=0, logprobs_mode=LogprobsMode.PROCESSED)
    for completion in (await engine.generate(prompts, drawn)).completions:
        assert completion.logprobs is not None
        expected = bench.output_logprobs(completion, model=folder)
        off = max(abs(one - other) for one, other in zip(completion.logprobs, expected, strict=True))
        assert off <= bench.tolerance(engine), (
            f"a processed logprob is {off:.3g} nats off the model's own: the generation config's sampling is used"
        )


def _in_another_dtype(folder: Path) -> str:
    """Cast a model folder's weights to another dtype, and return it."""
    config = json.loads((folder / "config.json").read_text())
    # Some engines have no kernels for float32 on a GPU, where the suite runs in bfloat16.
    other = "float16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"
    for file in folder.glob("*.safetensors"):
        tensors = {name: tensor.to(getattr(torch, other)) for name, tensor in load_file(file).items()}
        file.unlink()  # it may be read-only
        save_file(tensors, file, metadata={"format": "pt"})
    _change(folder / "config.json", dtype=other, torch_dtype=other)
    return other


@case(Capability.READ_WEIGHTS)
async def the_model_info_is_true_of_the_weights(bench: Bench) -> None:
    """model_info states the architecture, dtype and number of parameters of the served weights."""
    info, engine = bench.engine.model_info, bench.engine
    assert (await engine.validate_weights()).ok
    config = json.loads((bench.model / "config.json").read_text())
    assert info.architecture in config["architectures"]
    own = config.get("dtype") or config.get("torch_dtype")
    assert info.dtype == (own if engine.config.dtype == "auto" else engine.config.dtype)
    count = 0
    for file in bench.model.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            count += sum(int(np.prod(tensors.get_slice(name).get_shape())) for name in tensors.keys())
    assert info.parameters == count


# ---------------------------------------------------------------------------------------------------------------------


def _special_id(engine: InferenceEngine) -> int:
    """Return a special token that does not end a completion."""
    ids = set(engine.tokenizer.inner.all_special_ids) | set(engine.tokenizer.inner.added_tokens_decoder)
    special = [
        token
        for token in sorted(ids)
        if token not in engine.model_info.eos_token_ids
        and token < engine.model_info.vocab_size
        and engine.decode([token]) == ""
    ]
    assert special, "the model's tokenizer has no special token but EOS"
    return int(special[0])


async def _until_seen(engine: InferenceEngine, task: asyncio.Task[GenerationOutput]) -> None:
    """Return once the engine runs a request, or has finished the call."""
    async with within():
        while not task.done() and not (await engine.stats()).running:  # noqa: ASYNC110 - it may be another process
            await asyncio.sleep(0.002)


async def _started_or_refused(bench: Bench, model: Path) -> tuple[InferenceEngine | None, Exception | None]:
    """Return a started engine, or the error by which it was refused when it was created or started."""
    try:
        engine = bench.create(model=model)
        await engine.start()
    except (InvalidConfig, EngineStartError) as refusal:
        return None, refusal
    return engine, None


def _longrope(short: int) -> dict[str, Any]:
    """Return the fields of a tiny Phi-3 whose rotary frequencies change beyond ``short`` tokens."""
    factors = {"short_factor": [1.0] * 32, "long_factor": [8.0] * 32}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": short, **factors}
    return {"original_max_position_embeddings": short, "rope_parameters": rope}


_NAMING_ENDS: Final = ("config", "generation_config", "tokenizer_config")
"""Files of a model folder that name EOS tokens."""


def _named_ends(folder: Path, tokenizer: Tokenizer) -> set[int]:
    named: list[object] = [getattr(tokenizer.inner, "eos_token_id", None)]
    for file in (folder / f"{name}.json" for name in _NAMING_ENDS[:2]):
        value = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        named += value if isinstance(value, list) else [value]
    return {int(str(token_id)) for token_id in named if token_id is not None}


def _change(file: Path, **fields: object) -> None:
    held = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**held, **fields}))
