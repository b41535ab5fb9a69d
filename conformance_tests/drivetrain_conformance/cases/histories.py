"""Random histories and random requests: the contract holds for every sequence and mixture of features."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.pause_and_sleep import PAUSE_CAPABILITY
from drivetrain.text.tokenizer import REPLACEMENT
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assets.made_adapters import Adapter, make_adapter, merge
from drivetrain_conformance.assets.weight_sources import tensors_of, write_checkpoint
from drivetrain_conformance.engine_model.actions import (
    Abort,
    AbortAll,
    Action,
    BrokenUpdate,
    Continue,
    Ending,
    Family,
    Generate,
    History,
    Pause,
    Proceed,
    Sleep,
    Update,
    WakeUp,
    steps,
)
from drivetrain_conformance.engine_model.contract import InFlight
from drivetrain_conformance.engine_model.expected_answers import ADAPTER, Fields
from drivetrain_conformance.engine_model.mixed_fields import OtherTokens, Repeats, check_honoured
from drivetrain_conformance.engine_model.random_history import Checker, prepare
from drivetrain_conformance.engine_model.strategies import AbortPoint, Batch, batches, lasting_batches
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.random_property import random_property
from drivetrain_conformance.harness.testbench import Bench, ordinary_ids
from drivetrain_conformance.references.tolerances import tolerance_of

_KV_CACHE = frozenset({MemoryTag.KV_CACHE})
_LONG = Generate(0, long=True)
_MOST = 0.7
_SOME = 0.6
"""Shares of the profile's histories. Histories without updates do less, so they get the smaller share."""
_ADAPTED = Fields(lora=True)
_OUTLASTS_A_PAUSE = (24, 96)
_LONG_OUTPUTS = (96, 900)
_LONG_PROMPTS = (6, 24)
"""Tokens of requests."""
_CONTEXT = 1000
_APART = 8.0
"""Factor of the logits of a model that is sure of its choices."""


def _keeps_the_contract(
    bench: Bench, *families: Family, begins: tuple[Action, ...], share: float = 1.0, adapter: Adapter | None = None
) -> None:
    """Play one history that needs every capability of the case, then random ones from these families.

    Args:
        bench: The workplace.
        families: The families of actions that random histories are made of.
        begins: The first history: an accepted call for each of the case's capabilities.
        share: Share of the profile's number of histories.
        adapter: An adapter that the engine has loaded, for requests to use.
    """
    engine = bench.engine
    weight_sets = 3 if Family.UPDATES in families else 1
    answers, prompts = bench.run(prepare(bench, weight_sets, adapter=adapter))
    checker = Checker(bench.run, engine, answers, prompts)
    checker.check(History(begins, Ending.FINISH))
    step = steps(
        frozenset(families),
        engine.capabilities,
        prompts=len(prompts),
        weight_sets=weight_sets,
        weight_bytes=sum(file.stat().st_size for file in bench.model.glob("*.safetensors")),
        keeps_weights=engine.config.sleep_keeps_weights,
        styles=answers.styles,
        adapted=bool(answers.adapted),
    )
    examples = max(1, round(bench.profile.histories * share))
    checker.check_random(step, examples=examples, steps=bench.profile.steps, seeded_by=bench.seed)


@case(Capability.STREAMING, Capability.ABORT)
def random_requests_keep_the_contract(bench: Bench) -> None:
    """In any order of requests, streams and aborts, each request comes back as the contract says.

    A request that was not aborted is complete; an aborted one has the first tokens of its answer.
    """
    begins = (Generate(0, long=True, streamed=True), _LONG, Proceed(4), Abort(0, AbortPoint(8)), AbortAll())
    _keeps_the_contract(bench, Family.REQUESTS, begins=begins, share=_SOME)


@case(Capability.ABORT, Capability.PAUSE_ABORT, Capability.PAUSE_WAIT)
def random_pauses_keep_the_contract(bench: Bench) -> None:
    """In any order of requests, aborts and pauses, requests wait, freeze, end and continue as the pause modes say."""
    pauses = (_LONG, Pause(PauseMode.ABORT), Generate(1), Continue(), Generate(2), Pause(PauseMode.WAIT), Continue())
    begins = (*pauses, _LONG, Abort())
    _keeps_the_contract(bench, Family.REQUESTS, Family.PAUSES, begins=begins, share=_SOME)


@case(Capability.ABORT, Capability.PAUSE_ABORT, Capability.SLEEP_KV_CACHE, slow=True)
def random_sleeps_keep_the_contract(bench: Bench) -> None:
    """In any order of requests, aborts, pauses and sleeps, nothing runs while asleep, and all continues once awake."""
    asleep = Sleep(_KV_CACHE, InFlight.ABORT)
    begins = (_LONG, asleep, _LONG, WakeUp(_KV_CACHE), Generate(1), Pause(PauseMode.ABORT), Continue())
    _keeps_the_contract(bench, Family.REQUESTS, Family.PAUSES, Family.SLEEPS, begins=begins, share=_SOME)


@case(Capability.ABORT, Capability.PAUSE_ABORT, Capability.WEIGHTS_DISK)
def random_histories_keep_the_contract(bench: Bench) -> None:
    """In any order of requests, aborts, pauses, sleeps and weight updates, the contract is kept.

    Updates may fail halfway. Each token is the choice of the weights that its version span names. After an update every
    field of a request has its effect.
    """
    begins = (Update(1), Generate(0), BrokenUpdate(2), Generate(1), Pause(), Update(2), Continue(), _LONG, Abort())
    _keeps_the_contract(bench, *_with_sleeps(bench), begins=begins, share=_MOST)
    own, other = bench.engine.get_weight_version(), _decided(bench)
    bench.run(bench.engine.load_weights_from_disk(str(other), "others"))
    _honours_random_requests(bench, bench.profile.examples // 4, model=other)
    _honours_random_requests(bench, bench.profile.examples // 6, model=other, lasting=_OUTLASTS_A_PAUSE)
    bench.run(bench.engine.load_weights_from_disk(str(bench.model), own))


def _decided(bench: Bench) -> Path:
    """Return a folder of other weights whose logits lie far apart, if rounding is so fine that they may."""
    other = bench.other_weights()
    if bench.tolerance() > tolerance_of("float32"):
        return other
    tensors = tensors_of(other)
    last = [name for name in tensors if name.endswith("norm.weight") and ".layers." not in name]
    tensors |= {name: tensors[name] * _APART for name in last}
    return write_checkpoint(bench.folder("decided"), other, tensors)


@case(
    Capability.LORA,
    Capability.ABORT,
    Capability.PAUSE_ABORT,
    Capability.WEIGHTS_DISK,
    config={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    slow=True,
)
def random_histories_keep_the_adapter(bench: Bench) -> None:
    """In any order of requests, pauses, sleeps and base updates, a loaded adapter keeps acting on its requests alone.

    Each token is the choice of its version's weights, with or without the adapter, and every other field of a request
    has its effect with the adapter.
    """
    adapter = make_adapter(bench.model, bench.folder("adapter"), seed=1)
    bench.run(bench.engine.load_lora_adapter(ADAPTER, str(adapter.path)))
    try:
        late = Generate(1, long=True, fields=_ADAPTED)
        begins = (Update(1), Generate(0, fields=_ADAPTED), Pause(), Update(2), Continue(), late, Abort())
        _keeps_the_contract(bench, *_with_sleeps(bench), begins=begins, share=_SOME / 2, adapter=adapter)
        merged = merge(bench.model, adapter, bench.folder("merged"))
        _honours_random_requests(bench, bench.profile.examples // 4, lora=ADAPTER, model=merged)
        _honours_random_requests(
            bench, bench.profile.examples // 6, lora=ADAPTER, model=merged, lasting=_OUTLASTS_A_PAUSE
        )
    finally:
        bench.run(bench.engine.unload_lora_adapter(ADAPTER))


def _with_sleeps(bench: Bench) -> set[Family]:
    """Return all families, without sleeps if the engine cannot sleep."""
    sleeps = any(bench.claims(tag) for tag in (Capability.SLEEP_KV_CACHE, Capability.SLEEP_WEIGHTS))
    return set(Family) if sleeps else set(Family) - {Family.SLEEPS}


@case()
def random_requests_are_honoured(bench: Bench) -> None:
    """Whichever claimed fields a call's requests combine, each has its documented effect, also across a pause.

    Lengths, ends, stops, text, logprobs, masks, spans and seeds are checked, and each token must be one that an
    independent computation of the distribution could have drawn.
    """
    _honours_random_requests(bench, 3 * bench.profile.examples)  # a pair of fields meets rarely
    _honours_random_requests(bench, bench.profile.examples // 2, lasting=_OUTLASTS_A_PAUSE)
    _honours_random_requests(bench, bench.profile.examples // 6, lasting=_LONG_OUTPUTS)
    _honours_random_requests(bench, bench.profile.examples // 6, lasting=_LONG_PROMPTS)


def _honours_random_requests(
    bench: Bench,
    examples: int,
    *,
    lora: str | None = None,
    model: Path | None = None,
    lasting: tuple[int, int] | None = None,
) -> None:
    """Check random calls with any mixture of fields, as streams or not, through pauses of any mode.

    Args:
        bench: The workplace.
        examples: Number of calls.
        lora: The calls' adapter.
        model: Folder of the model that must have answered; None: the engine's own.
        lasting: Range of tokens of requests that no stop ends; they are frozen in the middle if the engine can do so.
    """
    engine = bench.engine
    ids = ordinary_ids(engine)
    repeats = Repeats()
    modes: list[PauseMode | None]
    if lasting is None:
        chat = bool(engine.tokenizer.inner.chat_template)
        calls = batches(ids, engine.capabilities, chat=chat, stops=_letters(bench))
        modes = [*(mode for mode, needed in PAUSE_CAPABILITY.items() if bench.claims(needed)), None]
    else:
        context = min(engine.model_info.context_length, _CONTEXT)
        calls = lasting_batches(ids, engine.capabilities, *lasting, context)
        modes = [*bench.freezes()] or [None]

    @random_property(max(1, examples), bench.seed)
    @given(calls, st.booleans() if bench.claims(Capability.STREAMING) else st.just(False), st.sampled_from(modes))
    def hold(batch: Batch, streamed: bool, pause: PauseMode | None) -> None:
        def check() -> None:
            bench.run(check_honoured(bench, batch, repeats, streamed=streamed, pause=pause, lora=lora, model=model))

        try:
            check()
        except OtherTokens:
            if pause is not PauseMode.RETRACT:
                raise
            check()

    hold()
    assert repeats.alike >= repeats.total / 2, (
        f"of {repeats.total} requests that fix their outcome, {repeats.alike} came again"
    )


def _letters(bench: Bench) -> list[str]:
    """Return the characters that the model writes most often, for stop strings."""
    params = [SamplingParams(max_new_tokens=24, temperature=temperature) for temperature in (0, 0, 1, 1)]
    output = bench.run(bench.engine.generate(bench.prompts(4), params))
    written = Counter("".join(completion.text for completion in output.completions))
    plain = [one for one, _ in written.most_common() if one.isprintable() and one != REPLACEMENT]
    return plain[:16] or ["e"]
