"""Embeddings: one vector for each prompt, independent of the batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drivetrain.errors import InvalidConfig, InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.prompts import PromptLike, TextPrompt, TokenPrompt
from drivetrain_conformance.assertions.pooled_inputs import (
    SHORT_CONTEXT,
    after_other_calls,
    check_inputs_leave_nothing,
    check_one_version,
    check_takes_no_adapter,
    longest_input,
    many_lengths,
)
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.served_models import copy_model
from drivetrain_conformance.assets.weight_sources import tensors_of, write_checkpoint
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench, NoOracle
from drivetrain_conformance.references.oracle import HiddenStatesOracle, Logits

_CONFIG: Final = {"task": "embed"}
_POOLED: Final[Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = {
    "mean_tokens": lambda states: np.asarray(states.mean(axis=0)),
    "cls_token": lambda states: states[0],
}
"""Poolings by sentence-transformers' names: from the states of all tokens, shape (tokens, width), to a vector."""
_ROUNDING: Final = 2e-5
"""Most that a number of a unit vector may be off in float32; one that passed through float16 is up to 1e-4 off."""


@case(Capability.EMBED, config=_CONFIG, changes_weights=True)
async def each_prompt_has_a_vector(bench: Bench) -> None:
    """Each prompt's vector has the direction of its last token's state in the last layer, in the order of the prompts.

    This holds for models whose folder names no other pooling. After an update it holds for the new weights, and a call
    during an update has vectors of one version. A long prompt is not cut off.
    """
    prompts = [bench.prompt(length) for length in (1, 6, longest_input(bench), 40)]
    vectors = np.array(await bench.engine.encode(prompts))
    assert vectors.ndim == 2
    assert len(vectors) == len(prompts)
    assert np.isfinite(vectors).all()
    assert (np.abs(vectors).max(axis=1) > 0).all()
    _assert_states(bench, vectors, prompts, bench.model)
    if bench.claims(Capability.WEIGHTS_DISK):
        for model in (bench.other_weights(), bench.model):
            await bench.engine.load_weights_from_disk(str(await _without_head(bench, model)), model.name)
            _assert_states(bench, np.array(await bench.engine.encode(prompts)), prompts, model)
    backwards = np.array(await bench.engine.encode(prompts[::-1]))
    _assert_near(bench, backwards[::-1], vectors)
    if bench.claims(Capability.WEIGHTS_DISK):
        checkpoints = [(model, await _without_head(bench, model)) for model in (bench.model, bench.other_weights())]
        expect, off = partial(_vectors_of, bench), partial(_difference, bench)
        await check_one_version(bench, bench.engine.encode, expect, off, checkpoints)


@case(Capability.EMBED, config=_CONFIG, own_engine=True, slow=True)
async def the_pooling_of_the_folder_is_applied_or_refused(bench: Bench) -> None:
    """A folder whose sentence-transformers files ask for the mean of all tokens' states gets it, or is refused.

    So does one whose files ask for the first token's state. Several poolings, an unknown one, or a further layer are
    refused. A deterministic engine gives a prompt the same vector alone and beside others, to the last bit.
    """
    fields = {"deterministic": True} if bench.create().supports(Capability.DETERMINISTIC) else {}
    for mode, pooled in _POOLED.items():
        folder = _with_pooling(bench, mode)
        with suppress(InvalidConfig):
            async with bench.open(model=str(folder), **fields) as engine:
                prompts = [bench.prompt(length, engine) for length in (3, 1, 24)]
                together = await engine.encode(prompts)
                vectors = _directions(np.array(together))
                wanted = np.array([pooled(states) for states in _states_of(bench, prompts, folder)])
                cosines = (vectors * _directions(wanted)).sum(axis=1)
                assert cosines.min() > 1 - bench.tolerance(engine), (
                    f"the folder asks for {mode}; cosines with that are {cosines.round(4).tolist()}"
                )
                if fields:
                    alone = [await engine.encode_single(prompt) for prompt in prompts]
                    assert alone == together, "a vector of a deterministic engine depends on the prompts beside it"
                    async for what in after_other_calls(engine):
                        assert await engine.encode(prompts) == alone, f"vectors are others after {what}"
    for modes, layers in ((("max_tokens",), ()), (("lasttoken", "mean_tokens"), ()), (("lasttoken",), ("Dense",))):
        with refused(InvalidConfig, field="model", naming=layers[0] if layers else modes[-1]):
            async with bench.open(model=str(_with_pooling(bench, *modes, layers=layers))):
                pass


def _with_pooling(bench: Bench, *modes: str, layers: Sequence[str] = ()) -> Path:
    """Write a folder of the bench's model, with the files that sentence-transformers writes beside it."""
    folder = bench.folder("pooled")
    copy_model(bench.model, folder, without="modules.json")
    kinds = ("Transformer", "Pooling", *layers, "Normalize")
    kind_of = "sentence_transformers.models.{}".format
    parts = [{"idx": index, "type": kind_of(kind), "path": f"{index}_{kind}"} for index, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "1_Pooling").mkdir()
    named = {"pooling_mode_lasttoken": False, **{f"pooling_mode_{mode}": True for mode in modes}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(named))
    return folder


@case(Capability.EMBED, config=_CONFIG)
async def text_and_its_ids_have_the_same_vector(bench: Bench) -> None:
    """A text and its token ids have the same vector, through encode() and through encode_single()."""
    text = bench.engine.decode(bench.prompt(12))
    ids = [int(token) for token in bench.engine.tokenizer.inner(text)["input_ids"]]
    both: list[PromptLike] = [TextPrompt(text=text), TokenPrompt(token_ids=tuple(ids))]
    vectors = np.array(await bench.engine.encode(both))
    single = np.array([await bench.engine.encode_single(text), await bench.engine.encode_single(ids)])
    _assert_near(bench, vectors[1], vectors[0])
    _assert_near(bench, single, vectors)


@case(Capability.EMBED, config=_CONFIG)
async def different_prompts_differ(bench: Bench) -> None:
    """Different prompts have different vectors, even if only their first or last token differs."""
    prompt, other = bench.prompt(10), bench.prompt(10)
    prompts = [prompt, other, [*prompt[:-1], other[-1]], [other[0], *prompt[1:]], prompt[::-1]]
    prompts = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    vectors = _directions(np.array(await bench.engine.encode(prompts)))
    cosines = vectors @ vectors.T - np.eye(len(prompts))
    assert cosines.max() < 1 - 1e-4, f"two different prompts point the same way: {cosines.round(4).tolist()}"


@case(Capability.EMBED, config=_CONFIG, slow=True)
async def a_batch_changes_no_vector(bench: Bench) -> None:
    """A prompt's vector is the same alone and among prompts of other lengths, within rounding.

    This holds for batches that take several forward passes, and after pauses, sleeps and resets of the cache. Prompts
    that were embedded leave nothing behind.
    """
    for lengths in ((2, 5, 9, 33, 5), many_lengths(bench)):
        prompts = [bench.prompt(length) for length in lengths]
        alone = np.array([await bench.engine.encode_single(prompt) for prompt in prompts])
        _assert_near(bench, np.array(await bench.engine.encode(prompts)), alone)
    async for _ in after_other_calls(bench.engine):
        _assert_near(bench, np.array(await bench.engine.encode(prompts)), alone)
    await check_inputs_leave_nothing(bench, bench.engine.encode)


@case(Capability.EMBED, config=_CONFIG)
async def similarity_is_a_cosine(bench: Bench) -> None:
    """Equal prompts have similarity 1; other similarities are the cosine of the vectors, and symmetric."""
    one, other = bench.prompt(8), bench.prompt(8)
    assert abs(await bench.engine.compute_similarity(one, one) - 1) <= bench.tolerance()
    a, b = _directions(np.array(await bench.engine.encode([one, other])))
    found = await bench.engine.compute_similarity(one, other)
    assert -1 <= found < 1
    assert abs(found - float(a @ b)) <= bench.tolerance()
    assert abs(await bench.engine.compute_similarity(other, one) - found) <= bench.tolerance()


@case(Capability.EMBED, config=_CONFIG)
async def dimensions_shorten_a_vector(bench: Bench) -> None:
    """With dimensions=8 a vector has eight numbers, in the direction of the full vector's first eight.

    It is scaled to length 1.
    """
    prompts = bench.prompts(2)
    whole = np.array(await bench.engine.encode(prompts))
    short = np.array(await bench.engine.encode(prompts, dimensions=8))
    single = np.array(await bench.engine.encode_single(prompts[0], dimensions=8))
    assert short.shape == (2, 8)
    _assert_near(bench, _directions(short), _directions(whole[:, :8]))
    _assert_near(bench, single, short[0])
    _assert_near(bench, np.linalg.norm(short, axis=1), np.ones(2))


@case(Capability.EMBED, config=_CONFIG)
async def dimensions_that_cannot_be_are_refused(bench: Bench) -> None:
    """Dimensions that are zero, negative or too large are refused, naming the field, and the engine serves on."""
    for dimensions in (0, -3, 10**7):
        with refused(InvalidRequest, field="dimensions"):
            await bench.engine.encode(bench.prompts(2), dimensions=dimensions)
    assert await bench.engine.encode_single(bench.prompt())


@case(Capability.EMBED, config={**_CONFIG, "context_length": SHORT_CONTEXT})
async def bad_prompts_are_refused(bench: Bench) -> None:
    """Prompts that are empty, too long or outside the vocabulary are refused before any work.

    Too long is what exceeds the configured ``context_length``.
    """
    info = bench.engine.model_info
    assert info.context_length == SHORT_CONTEXT, f"context_length={SHORT_CONTEXT} was asked for: {info.context_length}"
    too_long = bench.prompt(1) * (info.context_length + 1)
    wrongs: list[list[list[int]]] = [[[]], [bench.prompt(), [info.vocab_size]], [too_long], []]
    for wrong in wrongs:
        with refused(InvalidRequest, field="prompts"):
            await bench.engine.encode(wrong)
    assert await bench.engine.encode_single(bench.prompt())


@case(Capability.EMBED, config=_CONFIG)
async def an_embedding_engine_does_not_generate(bench: Bench) -> None:
    """An engine made for embeddings refuses generate(), naming the task, and serves on.

    It refuses adapters too, which no call that embeds takes, and its vectors stay what they were.
    """
    with refused(InvalidRequest, field="task"):
        await bench.engine.generate(bench.prompt(), {"max_new_tokens": 2})
    prompts = bench.prompts(4, 9)
    await check_takes_no_adapter(bench, partial(bench.engine.encode, prompts), partial(_difference, bench))


@case(Capability.EMBED)
async def a_generating_engine_does_not_embed(bench: Bench) -> None:
    """An engine made for generation refuses encode(), naming the task, and serves on."""
    with refused(InvalidRequest, field="task"):
        await bench.engine.encode(bench.prompts(2))
    assert (await bench.greedy([bench.prompt()]))[0].token_ids


async def _without_head(bench: Bench, model: Path) -> Path:
    """Write a folder with only the tensors of ``model`` that the engine holds, as it may have no use for the head."""
    held = {spec.name for spec in (await bench.engine.weight_manifest()).tensors}
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name in held}
    return write_checkpoint(bench.folder("headless"), model, tensors)


def _assert_states(bench: Bench, vectors: NDArray[np.float64], prompts: Sequence[list[int]], model: Path) -> None:
    """Assert that vectors have the direction of the prompts' last-token states, computed by the oracle."""
    difference = _difference(bench, vectors.tolist(), _vectors_of(bench, prompts, model))
    assert not difference, difference


def _vectors_of(bench: Bench, prompts: Sequence[list[int]], model: Path) -> list[list[float]]:
    return [list(map(float, rows[-1])) for rows in _states_of(bench, prompts, model)]


def _difference(bench: Bench, vectors: list[list[float]], states: list[list[float]]) -> str:
    """Say how the directions of vectors differ from those of the last tokens' states; "" if they do not."""
    found, expected = _directions(np.array(vectors)), _directions(np.array(states))
    cosines = (found * expected).sum(axis=1)
    if not cosines.min() > 1 - bench.tolerance():
        return f"cosines with the last tokens' states are {cosines.round(4).tolist()}"
    off = float(np.abs(found - expected).max())
    if bench.engine.model_info.dtype == "float32" and off > _ROUNDING:
        return f"a number is {off:.3g} off the last tokens' states; {_ROUNDING:g} is allowed"
    return ""


def _states_of(bench: Bench, prompts: Sequence[list[int]], model: Path) -> list[Logits]:
    oracle = bench.oracle(model)
    if not isinstance(oracle, HiddenStatesOracle):
        raise NoOracle
    return [oracle.hidden_states(prompt) for prompt in prompts]


def _directions(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _assert_near(bench: Bench, found: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    assert found.shape == expected.shape, f"expected shape {expected.shape}, got {found.shape}"
    worst = float(np.abs(found - expected).max())
    allowed = bench.tolerance() * max(1.0, float(np.abs(expected).max()))
    assert worst <= allowed, f"a number is off by {worst:.3g}; {allowed:.3g} is allowed"
