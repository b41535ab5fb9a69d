"""Play a history on an engine and on the contract's model, and compare the engine with the model at each step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.errors import EngineStateError, WeightTransferFailed
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason
from drivetrain_conformance.assets.weight_sources import from_disk, tensors_of
from drivetrain_conformance.engine_model.actions import (
    LONG,
    PLAIN,
    Abort,
    AbortAll,
    Action,
    Ask,
    BrokenUpdate,
    Continue,
    Ending,
    Generate,
    History,
    Meanwhile,
    Pause,
    Proceed,
    Sleep,
    Source,
    Update,
    WakeUp,
)
from drivetrain_conformance.engine_model.contract import Contract, Fate, InFlight, Refusal, Request, Ruling, Weights
from drivetrain_conformance.engine_model.expected_answers import ADAPTER, Answers, End, Fields, params_of
from drivetrain_conformance.engine_model.live_requests import Live, held_by, proceed, settle, until_taken
from drivetrain_conformance.engine_model.replay_script import script_of
from drivetrain_conformance.engine_model.strategies import AbortPoint, WeightPlanChoice, shuffled
from drivetrain_conformance.harness.testbench import until_idle
from drivetrain_conformance.harness.time_limits import within
from drivetrain_weight_sync import WeightSync

SHORT: Final = 4
"""Length of a request that ends soon, in tokens."""
_DRAIN_SECONDS: Final = 30.0
_IN_THE_PIPE: Final = 32
"""Tokens of a frozen request that may still arrive, because they were made before it was frozen."""
_RECOVERIES: Final[Mapping[PauseMode, frozenset[Capability]]] = {
    PauseMode.RETRACT: frozenset({Capability.PAUSE_RETRACT, Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT}),
    PauseMode.IN_PLACE: frozenset({Capability.PAUSE_IN_PLACE, Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE}),
}
"""Modes of an update that keep requests in flight, with the capabilities that each needs."""


@dataclass(slots=True)
class _Asked:
    """A request that the engine has admitted."""

    live: Live
    tokens: int
    samples: int
    streamed: bool
    fields: Fields
    frozen_at: int | None = None
    """Number of tokens that its stream had brought when it was frozen; None if it is not frozen."""


_numbers: Final = count()


class _TrainerFailed(Exception):
    """The exception that breaks an update."""


class Player:
    """Plays one history on an engine that is ready and idle, checking the contract at each step.

    Args:
        engine: The engine.
        answers: Its expected answers.
        prompts: The prompts of the requests, for which ``answers`` were recorded.
        contract: The contract to check; default: the design's.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        answers: Answers,
        prompts: Sequence[Sequence[int]],
        contract: Contract | None = None,
    ) -> None:
        self._engine = engine
        self._answers = answers
        self._prompts = prompts
        self._contract = contract or contract_of(engine)
        self._number = next(_numbers)
        self._step_name = "the beginning"
        self._requests: dict[str, _Asked] = {}
        self._taken: set[str] = set()
        self._begun: set[str] = set()
        """Requests that must have made a token, as a later request has been answered."""
        self._updates = 0
        self.raced: list[bool] = []
        """For each long request aborted while it ran: True if it nevertheless came back whole."""

    async def play(self, history: History) -> None:
        """Play the history. A failure carries its step, and the script that reproduces it, as notes.

        Raises:
            AssertionError: the engine broke the contract.
            DrivetrainError: the engine refused or failed where it must not.
        """
        try:
            await self._look()
            for action in history.actions:
                await self._step(action)
            await self._finish(history.ending)
        except Exception as error:
            error.add_note(f"It failed at {self._step_name}.")
            script = script_of(error, history, self._engine, self._answers, self._prompts)
            error.add_note(f"This script reproduces it:\n\n{script}")
            raise
        finally:
            for asked in self._requests.values():
                await asked.live.drop()

    async def _step(self, action: Action) -> None:
        self._step_name = str(action)
        await self._observe()
        before = self._contract
        match action:
            case Generate(prompt, long, samples, streamed, fields):
                await self._generate(prompt, LONG if long else SHORT, samples, streamed, fields)
            case Ask():
                await self._ask()
            case Proceed(tokens):
                await self._proceed(self._contract.having(Fate.RUNNING), tokens)
            case Abort(which, point):
                await self._abort(which, point)
            case AbortAll():
                await self._do(self._contract.abort(None), self._engine.abort_generation)
            case Pause(mode):
                await self._pause(mode)
            case Continue():
                await self._do(self._contract.continue_generation(), self._engine.continue_generation)
            case Sleep(tags, in_flight):
                await self._sleep(tags, in_flight)
            case WakeUp(tags):
                await self._do(self._contract.wake_up(tags), lambda: self._engine.wake_up(tags))
            case Update() | BrokenUpdate():
                self._updates += 1
                await self._update(action, f"update-{self._updates}")
        await self._settle(before)
        await self._look()

    async def _finish(self, ending: Ending) -> None:
        """Return the engine to its initial condition; each step is checked as any other."""
        claims = self._engine.capabilities
        if Capability.ABORT in claims and ending is Ending.ABORT:
            await self._step(AbortAll())
        if self._contract.asleep:
            await self._step(WakeUp(self._contract.asleep))
        if self._contract.weights is Weights.DIRTY:
            mode = next((mode for mode, needed in _RECOVERIES.items() if needed <= claims), PauseMode.ABORT)
            await self._step(Update(0, mode))
        if self._contract.paused:
            await self._step(Continue())
        self._step_name = "the end"
        for name in self._contract.under_way():
            await self._await_end(name)
        if self._contract.version != self._answers.original:
            await self._update(Update(0), self._answers.original)
        await self._look()
        assert self._contract.state == "ready", f"the history leaves the engine {self._contract.state}"
        await until_idle(self._engine)

    # Observing ---------------------------------------------------------------------------------------------------

    async def _observe(self) -> None:
        """Check the requests that have come back since the last step."""
        done = [name for name in self._contract.under_way() if self._requests[name].live.done]
        for name in done:
            if self._contract.requests[name].fate is Fate.RUNNING:
                await self._await_end(name)
            else:
                await self._look()

    async def _settle(self, before: Contract) -> None:
        """Check the requests that must come back because of this step, or that ended just before it."""
        await settle(self._engine, *(self._requests[name].live for name in self._contract.in_flight()))
        for name in self._contract.having(Fate.FROZEN):
            if self._requests[name].live.done and before.requests[name].fate is Fate.RUNNING:
                self._contract = self._contract.ended_by_itself(name)
        for name, request in self._contract.requests.items():
            if not request.under_way and name not in self._taken:
                if request.fate is Fate.DONE:
                    assert self._requests[name].live.done, "a request that must have run to its end has not come back"
                await self._take(name)

    async def _await_end(self, name: str) -> None:
        self._contract = self._contract.ended_by_itself(name)
        await self._take(name)

    async def _take(self, name: str) -> None:
        """Wait for a request to come back, and check each of its samples against its expected answer."""
        asked, request = self._requests[name], self._contract.requests[name]
        self._taken.add(name)
        completions, end = await asked.live.result(), _end(request)
        assert [completion.sample_index for completion in completions] == list(range(asked.samples))
        # Samples end one by one: some may have ended by themselves before the request was frozen and then aborted.
        of_each = End.ABORTED_OR_WHOLE if end is End.ABORTED and asked.samples > 1 else end
        if end is End.ABORTED:
            assert any(completion.finish_reason is FinishReason.ABORT for completion in completions), (
                "it was aborted while it was frozen, and every sample ended by itself"
            )
        for completion in completions:
            self._answers.check(
                completion, asked.tokens, of_each, request.versions, sorted(request.stale), asked.fields
            )
            assert completion.token_ids or name not in self._begun, "it had made a token, and came back with []"
        if end is End.ABORTED_OR_WHOLE and asked.tokens == LONG:
            self.raced += [completion.finish_reason is not FinishReason.ABORT for completion in completions]

    async def _look(self) -> None:
        """Assert that the engine reports the contract's state, and that waiting and frozen requests do not progress."""
        engine, contract = self._engine, self._contract
        state, paused, version = engine.state.value, engine.is_paused, engine.get_weight_version()
        assert state == contract.state, f"the engine is {state}, where it must be {contract.state}"
        assert paused is contract.is_paused, f"is_paused is {paused}, where it must be {contract.is_paused}"
        assert version == contract.version, f"the weight version is {version!r}, where it must be {contract.version!r}"
        running, waiting, frozen = (
            [self._requests[name] for name in contract.having(fate)]
            for fate in (Fate.RUNNING, Fate.WAITING, Fate.FROZEN)
        )
        for asked in running:
            asked.frozen_at = None
        for asked in waiting:
            assert not asked.live.done, "a request that waits has ended"
            assert asked.live.seen == 0, f"a request that waits has made {asked.live.seen} tokens"
        for asked in frozen:
            assert not asked.live.done, "a frozen request has ended"
            asked.frozen_at = asked.live.seen if asked.frozen_at is None else asked.frozen_at
            made = asked.live.seen - asked.frozen_at
            assert made <= _IN_THE_PIPE, f"a frozen request made {made} tokens"
        # Give a frozen request that wrongly continues a moment to show it.
        await asyncio.sleep(0.002 if frozen or waiting else 0)

    # Acting ------------------------------------------------------------------------------------------------------

    async def _do(self, ruling: Ruling, call: Callable[[], Awaitable[None]]) -> bool:
        """Make a call, check its result against the contract's rule, and return True if the engine accepted it."""
        with _as_ruled(ruling.refusal):
            async with within(self._step_name):
                await call()
            self._contract = ruling.after
            return True
        return False

    async def _generate(
        self, prompt: int, tokens: int, samples: int, streamed: bool, fields: Fields = PLAIN
    ) -> str | None:
        """Make a request; return its name if it was admitted."""
        # Each id begins with all earlier ones, so an abort by prefix would end others too.
        name = "r" * (len(self._requests) + 1)
        params = params_of(self._engine, tokens, samples, fields, self._answers.stops(self._prompts[prompt], fields))
        token_ids, ids, lora = list(self._prompts[prompt]), [self._id(name)], ADAPTER if fields.lora else None
        made: list[Live] = []
        ruling = self._contract.generate(name)

        async def begin() -> None:
            before = await held_by(self._engine)
            call = self._engine.generate_stream if streamed else self._engine.generate
            live = Live(call(token_ids, params, request_ids=ids, lora=lora, priority=fields.priority))
            await settle(self._engine)
            if ruling.refusal is not None:
                await until_taken(self._engine, live, before)
            if live.done:
                await live.result()  # raises the refusal
            elif ruling.refusal is not None:
                await live.drop()
            made.append(live)

        if not await self._do(ruling, begin):
            return None
        self._requests[name] = _Asked(made[0], tokens, samples, streamed, fields)
        return name

    async def _ask(self) -> None:
        earlier = self._contract.having(Fate.RUNNING)
        name = await self._generate(len(self._requests) % len(self._prompts), SHORT, 1, streamed=False)
        if name is not None and self._contract.requests[name].fate is Fate.RUNNING:
            await self._await_end(name)
            # Some engines score a prompt in a pass of its own, before the request's first token.
            self._begun.update(one for one in earlier if not self._requests[one].fields.scores)

    async def _proceed(self, names: Sequence[str], tokens: int) -> None:
        running = [self._requests[name] for name in names if self._requests[name].streamed]
        await proceed(*(asked.live for asked in running), tokens=tokens)

    async def _abort(self, which: int, point: AbortPoint) -> None:
        under_way = self._contract.under_way()
        name = under_way[which % len(under_way)] if under_way else "nobody"
        if under_way and self._contract.requests[name].fate is Fate.RUNNING:
            if point.tokens is None:
                await self._await_end(name)
            elif point.tokens and self._requests[name].streamed:
                await self._proceed([name], point.tokens)
            elif point.tokens:
                await self._ask()
            await self._observe()
        await self._do(self._contract.abort(name), lambda: self._engine.abort(self._id(name)))

    async def _pause(self, mode: PauseMode) -> None:
        await self._do(self._contract.pause(mode), lambda: self._engine.pause_generation(mode))

    async def _sleep(self, tags: frozenset[MemoryTag], in_flight: InFlight) -> None:
        abort, drain = in_flight is InFlight.ABORT, 0.0
        if in_flight is InFlight.DRAIN:
            # Frozen requests never end, so a short timeout is enough.
            drain = 0.02 if self._contract.having(Fate.FROZEN) else _DRAIN_SECONDS
        ruling = self._contract.sleep(tags, in_flight)
        await self._do(ruling, lambda: self._engine.sleep(tags, abort_first=abort, drain_timeout=drain))

    async def _update(self, action: Update | BrokenUpdate, version: str) -> None:
        self._answers.made_by[version] = action.weights
        ruling, folder = self._contract.begin_update(action.mode), self._answers.folders[action.weights]
        if isinstance(action, Update) and action.source is Source.MEMORY:
            whole = replace(ruling, after=ruling.after.commit_update(version))
            await self._do(whole, lambda: _push(self._engine, folder, version, action.mode, action.plan))
            return
        with _as_ruled(ruling.refusal):
            async with within("a weight update"):
                if isinstance(action, BrokenUpdate):
                    await self._break(action, folder, version, ruling)
                else:
                    await self._load(action, folder, version, ruling)

    async def _break(self, action: BrokenUpdate, folder: Path, version: str, ruling: Ruling) -> None:
        """Begin an update from disk, and fail in the middle."""
        with _as_ruled(Refusal(WeightTransferFailed)):
            async with self._engine.weight_update(from_disk(folder, version, mode=action.mode)) as update:
                self._contract = ruling.after
                await _load_share(update, 0.0, action.loaded)
                raise _TrainerFailed
        self._contract = self._contract.break_update()

    async def _load(self, action: Update, folder: Path, version: str, ruling: Ruling) -> None:
        """Update from disk, bucket by bucket, with the action's event in the middle."""
        async with self._engine.weight_update(from_disk(folder, version, mode=action.mode)) as update:
            self._contract = ruling.after
            await _load_share(update, 0.0, 0.5, action.plan.order)
            if action.meanwhile is Meanwhile.REQUEST:
                await self._generate(0, SHORT, 1, streamed=False)
            elif action.meanwhile is Meanwhile.PAUSE:
                await self._pause(action.mode)
            await _load_share(update, 0.5, 1.0, action.plan.order)
        self._contract = self._contract.commit_update(version)

    def _id(self, name: str) -> str:
        """Return a request id that no other history uses, as an engine may remember ids."""
        return f"history-{self._number}-{name}"


def contract_of(engine: InferenceEngine) -> Contract:
    """Return the contract of an engine that is ready and idle."""
    return Contract(
        version=engine.get_weight_version(),
        capabilities=engine.capabilities,
        keeps_weights=engine.config.sleep_keeps_weights,
    )


@contextmanager
def _as_ruled(refusal: Refusal | None) -> Iterator[None]:
    """Require the block to be refused or accepted as the contract says."""
    try:
        yield
    except Exception as error:
        if refusal is None or not isinstance(error, refusal.error):
            raise
        state = error.state if isinstance(error, EngineStateError) else None
        assert refusal.state in (None, state), f"refused for state {state!r}, where it is {refusal.state!r}"
    else:
        if refusal is not None and not refusal.unless_ended:
            in_state = f" ({refusal.state})" if refusal.state else ""
            raise AssertionError(f"accepted, where {refusal.error.__name__} must refuse{in_state}")


def _end(request: Request) -> End:
    if request.fate is Fate.DONE:
        return End.WHOLE
    if not request.versions:
        return End.EMPTY
    return End.ABORTED_OR_WHOLE if request.raced else End.ABORTED


async def _load_share(update: WeightTransaction, begin: float, end: float, order: int = 0) -> None:
    """Load a share of an update's buckets, one by one, in the order that ``order`` determines."""
    indices = shuffled(range(update.buckets), order)
    for index in indices[round(begin * len(indices)) : round(end * len(indices))]:
        await update.load([index])


async def _push(engine: InferenceEngine, folder: Path, version: str, mode: PauseMode, plan: WeightPlanChoice) -> None:
    """Update from tensors of this process, by the fastest strategy that the engine claims."""
    tensors = await asyncio.to_thread(tensors_of, folder)
    source = {name: tensors[name] for name in shuffled(sorted(tensors), plan.order)}
    async with WeightSync.connect(source, engine, mode=mode, bucket_bytes=plan.bucket_bytes, cast=True) as sync:
        await sync.push(version=version)
