"""vLLM's requests with token ids and logprobs."""

from __future__ import annotations

import math
import uuid
from typing import Final

from drivetrain_conformance.routes.case import route_case
from drivetrain_conformance.routes.cases.openai import BIG_SEED, chat, complete
from drivetrain_conformance.routes.server_answers import Field
from drivetrain_conformance.routes.server_under_test import Target, ok

PROMPTS: Final = [[5, 6], [7]]
OF_TRL: Final = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}


async def of_a_step(target: Target) -> list[Field]:
    """Return the choices of TRL's request for two prompts with two samples each."""
    return (await complete(target, prompt=PROMPTS, n=2, **OF_TRL))["choices"].entries()


async def generate(target: Target, **params: object) -> Field:
    """Return the answer of ``/inference/v1/generate`` to at most four tokens with logprobs."""
    asked = {"max_tokens": 4, "temperature": 0, "logprobs": 1, "skip_special_tokens": False, **params}
    body = {"model": target.model, "token_ids": [5, 6], "sampling_params": asked}
    return (await target.post("/inference/v1/generate", body)).json()


@route_case
async def cards_state_the_context_length(target: Target) -> None:
    """The model's card has ``max_model_len``, ``root`` and ``parent``. TRL's async trainer and renderers read it."""
    card = (await target.get("/v1/models")).json()["data"][0]
    card["max_model_len"].integer()
    card["root"].text()
    assert card["parent"].is_null(), card.shown


@route_case
async def choices_go_prompt_by_prompt(target: Target) -> None:
    """Choices of several prompts are numbered prompt by prompt. TRL takes every n-th for a prompt."""
    choices = await of_a_step(target)
    indices = [choice["index"].integer() for choice in choices]
    assert indices == [0, 1, 2, 3], f"choices are numbered {indices}"
    prompts = [choice["prompt_token_ids"].ids() for choice in choices]
    assert prompts == [[5, 6], [5, 6], [7], [7]], f"the choices' prompts are {prompts}"


@route_case
async def prompt_ids_are_on_each_choice(target: Target) -> None:
    """A completion's ``prompt_token_ids`` are on each choice. TRL takes them from every n-th."""
    for choice, prompt in zip(await of_a_step(target), ([5, 6], [5, 6], [7], [7]), strict=True):
        choice["prompt_token_ids"].equals(prompt)


@route_case
async def ids_and_logprobs_have_equal_lengths(target: Target) -> None:
    """Each choice has as many ``token_ids`` as tokens, token logprobs and top logprobs. TRL zips them strictly."""
    for choice in await of_a_step(target):
        ids = choice["token_ids"].ids()
        assert ids, f"{choice['token_ids'].path} is empty"
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            listed = choice["logprobs"][name]
            found = len(listed.entries())
            assert found == len(ids), f"{listed.path} has {found} entries for {len(ids)} tokens"


@route_case
async def logprobs_are_finite(target: Target) -> None:
    """Every token's logprob is a finite number up to 0. TRL's tensors would hold null or NaN otherwise."""
    for choice in await of_a_step(target):
        for logprob in choice["logprobs"]["token_logprobs"].numbers():
            assert logprob <= 0, f"a logprob is {logprob}"


@route_case
async def logprobs_of_zero_give_the_sampled_token(target: Target) -> None:
    """With ``logprobs: 0`` each entry of ``top_logprobs`` holds the sampled token alone. TRL reads the first."""
    for choice in await of_a_step(target):
        logprobs = choice["logprobs"]["token_logprobs"].numbers()
        for entry, logprob in zip(choice["logprobs"]["top_logprobs"].entries(), logprobs, strict=True):
            values = list(entry.mapping().values())
            assert values == [logprob], f"{entry.path} is {entry.shown}; expected only the sampled token's {logprob}"


@route_case
async def token_strings_name_their_ids(target: Target) -> None:
    """With ``return_tokens_as_token_ids`` each token is ``token_id:N``, in ``top_logprobs`` too. TRL parses it."""
    for choice in await of_a_step(target):
        expected = [f"token_id:{token}" for token in choice["token_ids"].ids()]
        choice["logprobs"]["tokens"].equals(expected)
        for entry, name in zip(choice["logprobs"]["top_logprobs"].entries(), expected, strict=True):
            assert name in entry.mapping(), f"{entry.path} is {entry.shown}; expected the key {name}"


@route_case
async def logprobs_may_be_true(target: Target) -> None:
    """``logprobs: true`` of a completion is 1. SkyRL's Tinker server sends it."""
    choice = (await complete(target, logprobs=True, return_token_ids=True))["choices"][0]
    found, tokens = len(choice["logprobs"]["token_logprobs"].numbers()), len(choice["token_ids"].ids())
    assert found == tokens, f"{found} logprobs for {tokens} tokens"


@route_case
async def prompt_logprobs_begin_with_the_prompts_token(target: Target) -> None:
    """``prompt_logprobs`` is null and then an object per token, whose first key is the prompt's token.

    prime-rl and AReaL read the first.
    """
    prompt = [5, 6, 7]
    answered = (await complete(target, prompt=prompt, prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
    first, *rest = answered.entries()
    assert first.is_null(), f"{first.path} is {first.shown}; expected null"
    assert len(rest) == 2, f"{answered.path} has {len(rest) + 1} entries for 3 tokens"
    for entry, token in zip(rest, prompt[1:], strict=True):
        keys = list(entry.mapping())
        assert keys[:1] == [str(token)], f"{entry.path} begins with {keys[:1]}; expected {token}"
        entry[str(token)]["logprob"].number()


_SUM_DIFFERS: Final = 1e-2


@route_case
async def logprobs_of_minus_one_are_of_the_vocabulary(target: Target) -> None:
    """``logprobs: -1`` gives the logprob of each id, whose probabilities add up to 1. Distillation reads them all."""
    answer = await complete(target, max_tokens=1, logprobs=-1, return_tokens_as_token_ids=True)
    (found,) = answer["choices"][0]["logprobs"]["top_logprobs"].entries()
    _require_distribution([found[name].number() for name in found.mapping()], found.path)


@route_case
async def prompt_logprobs_of_minus_one_are_of_the_vocabulary(target: Target) -> None:
    """``prompt_logprobs: -1`` gives those of each id at each prompt token. TRL's distillation reads the teacher's."""
    answer = await complete(target, prompt=[5, 6, 7], max_tokens=1, prompt_logprobs=-1)
    _, *found = answer["choices"][0]["prompt_logprobs"].entries()
    assert len(found) == 2, f"{len(found) + 1} prompt logprobs for 3 tokens"
    for position in found:
        _require_distribution([position[name]["logprob"].number() for name in position.mapping()], position.path)


def _require_distribution(logprobs: list[float], path: str) -> None:
    total = math.fsum(map(math.exp, logprobs))
    assert abs(total - 1) < _SUM_DIFFERS, f"the {len(logprobs)} probabilities of {path} add up to {total:.3f}, not 1"


@route_case
async def the_header_gives_a_request_its_id(target: Target) -> None:
    """``X-Request-Id`` is the end of the answer's ``id``. Gateways abort and trace requests by it."""
    name = f"conformance-{uuid.uuid4().hex}"
    for path, fields in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        body = {"model": target.model, "max_tokens": 1, **fields}
        answer = ok(await target.ask("POST", path, body, headers={"X-Request-Id": name}))
        found = answer.json()["id"].text()
        assert found.endswith(name), f"{path}: the answer's id is {found!r}; expected one that ends in {name!r}"


@route_case
async def prompt_logprobs_have_ranks(target: Target) -> None:
    """Each entry of ``prompt_logprobs`` has a ``rank`` from 1 on, also of an unlikely token. TRL sorts by it."""
    answered = (await complete(target, prompt=[5, 6, 7, 8, 9, 10], prompt_logprobs=2))["choices"][0]["prompt_logprobs"]
    for entry in answered.entries()[1:]:
        ranks = [entry[token]["rank"].integer() for token in entry.mapping()]
        assert {1, 2} <= set(ranks), f"{entry.path} has the ranks {ranks}; 1 and 2 are of the most likely tokens"
        assert len(set(ranks)) == len(ranks), f"{entry.path} has a rank twice: {ranks}"


@route_case
async def a_length_ends_in_length(target: Target) -> None:
    """A request that reaches ``max_tokens`` ends in ``length`` with that many ids. AReaL loops on other reasons."""
    choice = (await complete(target, ignore_eos=True, return_token_ids=True))["choices"][0]
    choice["finish_reason"].equals("length")
    assert len(choice["token_ids"].ids()) == 4, choice["token_ids"].shown


@route_case
async def a_stop_token_is_among_the_ids(target: Target) -> None:
    """A stop token ends in ``stop``, is ``stop_reason``, and is the last of ``token_ids``. Trainers train on it."""
    fields = {"prompt": [5, 6], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    token = (await complete(target, **fields))["choices"][0]["token_ids"].ids()[0]
    choice = (await complete(target, stop_token_ids=[token], **fields))["choices"][0]
    choice["finish_reason"].equals("stop")
    choice["stop_reason"].equals(token)
    choice["token_ids"].equals([token])


@route_case
async def every_field_may_be_null(target: Target) -> None:
    """Sampling fields may be null, and ``model`` absent. AReaL sends no model; SkyRL sends nulls."""
    nulls = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs")
    await target.post("/v1/completions", {"prompt": [5], "max_tokens": 4, **dict.fromkeys(nulls)})


@route_case
async def top_k_of_minus_one_is_off(target: Target) -> None:
    """``top_k: -1`` is taken. SkyRL sends it."""
    await complete(target, top_k=-1)


@route_case
async def unknown_fields_are_ignored(target: Target) -> None:
    """Unknown fields are ignored. NeMo-Gym sends ``required_prefix_token_ids``, SkyRL ``session_id``."""
    await complete(target, session_id="one", required_prefix_token_ids=[5], of_a_later_release=1)


@route_case
async def generation_takes_seeds_of_63_bits(target: Target) -> None:
    """``/inference/v1/generate`` takes seeds of 63 bits. SkyRL passes its own on."""
    await generate(target, seed=BIG_SEED)


@route_case
async def an_unknown_model_is_not_found(target: Target) -> None:
    """A model that is not served is 404 with vLLM's error body. TRL's async trainer reads it as a wrong name."""
    answer = await target.ask("POST", "/v1/completions", {"model": "of-nobody", "prompt": [5], "max_tokens": 4})
    assert answer.status == 404, f"{answer.shown}; expected 404"
    error = answer.json()["error"]
    error["message"].text()
    error["code"].equals(404)


@route_case
async def chats_have_prompt_ids_at_the_top(target: Target) -> None:
    """A chat's ``prompt_token_ids`` are at the top, ``token_ids`` on the choice, one logprob each. rLLM reads both."""
    answer = await chat(target, **{**OF_TRL, "logprobs": True, "top_logprobs": 0})
    assert answer["prompt_token_ids"].ids(), "prompt_token_ids is empty"
    choice = answer["choices"][0]
    names = [entry["token"].text() for entry in choice["logprobs"]["content"].entries()]
    expected = [f"token_id:{token}" for token in choice["token_ids"].ids()]
    assert names == expected, f"the tokens are {names}; expected {expected}"


@route_case
async def streamed_ids_are_deltas(target: Target) -> None:
    """A streamed completion has the prompt's ids first, and each event the new ids. Recording gateways add them up."""
    fields = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    whole = (await complete(target, **fields))["choices"][0]["token_ids"].ids()
    async with target.streaming("/v1/completions", {"model": target.model, **fields}) as stream:
        choices = [event["choices"][0] for event in await stream.rest() if event["choices"].entries()]
    choices[0]["prompt_token_ids"].equals([5, 6])
    parts = [choice["token_ids"] for choice in choices]
    ids = [token for part in parts if not part.is_null() for token in part.ids()]
    assert ids == whole, f"the stream's ids are {ids}; unstreamed they are {whole}"


@route_case
async def generated_ids_have_a_logprob_each(target: Target) -> None:
    """``/inference/v1/generate`` answers ids and one finite logprob each. SkyRL, verifiers and renderers count them."""
    choice = (await generate(target))["choices"][0]
    entries = choice["logprobs"]["content"].entries()
    assert len(entries) == len(choice["token_ids"].ids()), choice.shown
    for entry in entries:
        entry["logprob"].number()


@route_case
async def generated_logprobs_name_their_tokens(target: Target) -> None:
    """Each entry of a generated ``logprobs.content`` has ``token: "token_id:N"``. renderers and TRL index it."""
    choice = (await generate(target))["choices"][0]
    for entry, token in zip(choice["logprobs"]["content"].entries(), choice["token_ids"].ids(), strict=True):
        entry["token"].equals(f"token_id:{token}")


@route_case
async def generation_has_a_finish_reason_and_an_id(target: Target) -> None:
    """``/inference/v1/generate`` answers a finish reason and the request's id. SkyRL indexes them."""
    answer = await generate(target, ignore_eos=True)
    answer["choices"][0]["finish_reason"].equals("length")
    answer["request_id"].text()


@route_case
async def a_chat_is_tokenized(target: Target) -> None:
    """``/tokenize`` takes messages and answers ``tokens`` and ``count``. NeMo-Gym takes its prompt ids from it."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "hello"}]}
    answer = (await target.post("/tokenize", body)).json()
    answer["count"].equals(len(answer["tokens"].ids()))
