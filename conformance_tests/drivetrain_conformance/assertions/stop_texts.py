"""Texts to stop at, taken from samples that nothing stopped."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from drivetrain.engine.engine import InferenceEngine
from drivetrain.text.tokenizer import REPLACEMENT
from drivetrain.types.outputs import Completion
from drivetrain.types.prompts import TextPrompt
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.harness.testbench import Bench, ordinary_ids

TOKENS = 24
"""Length of a free sample, in tokens."""


Fields = Mapping[str, object]
"""Fields of sampling params."""


def stop_params(fields: Fields) -> SamplingParams:
    """Return greedy params of a free sample's length; without stops on text, drop ``include_stop_str_in_output``."""
    given = {"temperature": 0, "max_new_tokens": TOKENS, **fields}
    if not given.get("stop") and not given.get("stop_regex"):
        given.pop("include_stop_str_in_output", None)
    return SamplingParams.model_validate(given)


async def free_samples(bench: Bench, count: int, **fields: object) -> list[Completion]:
    """Return greedy completions that end only by EOS or length, each with some text to stop at."""
    params = SamplingParams.model_validate({"temperature": 0, "max_new_tokens": TOKENS, **fields})
    found: list[Completion] = []
    for _ in range(8):
        output = await bench.engine.generate(bench.prompts(count), params)
        found += [c for c in output.completions if pieces(c.text, 3) and len(set(pieces(c.text, 1))) >= 4]
        if len(found) >= count:
            return found[:count]
    raise AssertionError(f"the model's greedy completions hold too little text to stop at: {[c.text for c in found]}")


async def samples_of_spanning_characters(bench: Bench, count: int) -> list[Completion]:
    """Return greedy completions that each contain a character made of several tokens.

    Half of the prompts end in such a character: some models write none by themselves, but continue with them.
    """
    ids = bench.engine.tokenizer.encode(TextPrompt(text="é", add_special_tokens=False))
    prompts = [bench.prompt(), [*bench.prompt(2), *ids]]
    while len(prompts) < count:
        prompts += [bench.prompt(), [*bench.prompt(2), *ids]]
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS)
    output = await bench.engine.generate(prompts[:count], params)
    found = [completion for completion in output.completions if spanning_characters(completion, bench.engine)]
    assert found, "no completion holds a character that took several tokens"
    return found


def plain(text: str) -> bool:
    """Return True if a text can serve as a stop: not empty, and free of broken UTF-8."""
    return bool(text) and REPLACEMENT not in text


def pieces(text: str, least: int, most: int | None = None) -> list[str]:
    """Return every substring with ``least`` to ``most`` characters, in order, that is free of broken UTF-8.

    The replacement character shown for a character's first bytes disappears when the rest arrives, so it cannot be a
    stop.
    """
    lengths = range(least, (most or least) + 1)
    found = [text[at : at + n] for at in range(len(text)) for n in lengths if at + n <= len(text)]
    return [piece for piece in found if REPLACEMENT not in piece]


def expressions(rng: random.Random, text: str) -> list[str]:
    """Return regexes that match somewhere in a text, and end with a character of it."""
    (one, other) = (re.escape(rng.choice(pieces(text, 1))) for _ in range(2))
    pair = rng.choice(pieces(text, 2))
    first, last = re.escape(pair[0]), re.escape(pair[1])
    return [f"({one}|{other})", f"{first}{last}", f"{first}+{last}", f"{first}.?{last}", f"(?<={first}){last}"]


def letter_ids(engine: InferenceEngine, count: int) -> list[int]:
    """Return ids that decode to one ASCII letter each, wherever they occur."""
    found = [
        token
        for token in ordinary_ids(engine)
        if (text := engine.decode([token])).isalpha() and text.isascii() and engine.decode([token] * 3) == text * 3
        if len(text) == 1
    ]
    assert len(found) >= count, "the model's tokenizer has no tokens for single letters"
    return found[:count]


def spanning_characters(run: Completion, engine: InferenceEngine) -> list[int]:
    """Return the places in a text of characters that were incomplete until their last token was generated."""
    texts = [engine.decode(run.token_ids[:count]) for count in range(len(run.token_ids) + 1)]
    return [
        at
        for at, character in enumerate(run.text)
        if character.isprintable()
        and character != REPLACEMENT
        and any(REPLACEMENT == text[at : at + 1] for text in texts)
    ]
