"""Play a history on an engine and on the contract's model, and compare the engine with the model at each step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import WeightTransferFailed
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason
from drivetrain.types.sampling import SamplingParams
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
from drivetrain_conformance.engine_model.replay import (
    Live,
    ended,
    from_disk,
    load,
    look,
    proceed,
    push,
    refused,
    settle,
    start,
)
from drivetrain_conformance.engine_model.replay_script import Script
from drivetrain_conformance.engine_model.strategies import AbortPoint
from drivetrain_conformance.harness.testbench import until_idle
from drivetrain_conformance.harness.time_limits import within

SHORT: Final = 4
"""Length of a request that ends soon, in tokens."""
_DRAIN_SECONDS: Final = 30.0
_RECOVERIES: Final[Mapping[PauseMode, frozenset[Capability]]] = {
    PauseMode.RETRACT: frozenset({Capability.PAUSE_RETRACT, Capability.WEIGHT_UPDATE_IN_FLIGHT_RETRACT}),
    PauseMode.IN_PLACE: frozenset({Capability.PAUSE_IN_PLACE, Capability.WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE}),
}
"""Modes of an update that keep requests in flight, with the capabilities that each needs."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that the engine has admitted."""

    live: Live
    variable: str
    tokens: int
    samples: int
    streamed: bool
    fields: Fields


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
        self._requests: dict[str, _Asked] = {}
        self._taken: set[str] = set()
        self._begun: set[str] = set()
        """Requests that must have made a token, as a later request has been answered."""
        self._updates = 0
        config = engine.config.model_dump(mode="json", exclude_unset=True, exclude={"backend", "model"})
        self._script = Script(
            prompts, len(answers.folders), config, answers.tolerance, answers.styles, adapted=bool(answers.adapted)
        )
        self.raced: list[bool] = []
        """For each long request aborted while it ran: True if it nevertheless came back whole."""

    async def play(self, history: History) -> None:
        """Play the history. A failure carries the script that reproduces it as a note.

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
            error.add_note(f"This script reproduces it:\n\n{self._script.text(error)}")
            raise
        finally:
            for asked in self._requests.values():
                await asked.live.drop()

    async def _step(self, action: Action) -> None:
        await self._observe()
        before = self._contract
        self._script.add("", f"# {action}")
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
                await self._do(self._contract.abort(None), "engine.abort_generation()", self._engine.abort_generation)
            case Pause(mode):
                await self._pause(mode)
            case Continue():
                ruling = self._contract.continue_generation()
                await self._do(ruling, "engine.continue_generation()", self._engine.continue_generation)
            case Sleep(tags, in_flight):
                await self._sleep(tags, in_flight)
            case WakeUp(tags):
                ruling = self._contract.wake_up(tags)
                await self._do(ruling, f"engine.wake_up({_names(tags)})", lambda: self._engine.wake_up(tags))
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
        for name in self._contract.under_way():
            await self._await_end(name)
        if self._contract.version != self._answers.original:
            await self._update(Update(0), self._answers.original)
        await self._look()
        assert self._contract.state == "ready", f"the history leaves the engine {self._contract.state}"
        self._script.add("await until_idle(engine)")
        await until_idle(self._engine)

    # Observing ---------------------------------------------------------------------------------------------------

    async def _observe(self) -> None:
        """Check the requests that have come back since the last step."""
        done = [name for name in self._contract.under_way() if self._requests[name].live.done]
        for name in done:
            if self._contract.requests[name].fate is Fate.RUNNING:
                await self._await_end(name)  # it has come back; in a replay it may take longer
            else:
                await self._look()

    async def _settle(self, before: Contract) -> None:
        """Check the requests that must come back because of this step, or that ended just before it."""
        in_flight = [self._requests[name] for name in self._contract.in_flight()]
        self._script.add(f"await settle({', '.join(['engine', *(asked.variable for asked in in_flight)])})")
        await settle(self._engine, *(asked.live for asked in in_flight))
        for name in self._contract.having(Fate.FROZEN):
            if self._requests[name].live.done and before.requests[name].fate is Fate.RUNNING:
                self._contract = self._contract.ended_by_itself(name)
        for name, request in self._contract.requests.items():
            if not request.under_way and name not in self._taken:
                await self._take(name, by_now=request.fate is Fate.DONE)

    async def _await_end(self, name: str) -> None:
        self._contract = self._contract.ended_by_itself(name)
        await self._take(name, by_now=False)

    async def _take(self, name: str, *, by_now: bool) -> None:
        """Check a request that has ended against the contract and its expected answer."""
        asked, request = self._requests[name], self._contract.requests[name]
        end = _end(request)
        arguments = [asked.variable, "answers", str(asked.tokens), f"End.{end.name}", str(list(request.versions))]
        stale = sorted(request.stale)
        least = int(name in self._begun)
        arguments += [f"stale={stale}"] * bool(stale) + [f"samples={asked.samples}"] * (asked.samples > 1)
        arguments += [f"least={least}"] * bool(least) + [f"fields={asked.fields}"] * (asked.fields != PLAIN)
        self._script.add(f"await ended({', '.join(arguments + ['by_now=True'] * by_now)})")
        self._taken.add(name)
        completions = await ended(
            asked.live,
            self._answers,
            asked.tokens,
            end,
            request.versions,
            stale,
            samples=asked.samples,
            fields=asked.fields,
            least=least,
            by_now=by_now,
        )
        if end is End.ABORTED_OR_WHOLE and asked.tokens == LONG:
            self.raced += [completion.finish_reason is not FinishReason.ABORT for completion in completions]

    async def _look(self) -> None:
        contract = self._contract
        by_fate = {fate: [self._requests[n] for n in contract.having(fate)] for fate in _STANDING}
        shown = "".join(
            f", {fate.value}=[{', '.join(asked.variable for asked in found)}]"
            for fate, found in by_fate.items()
            if found
        )
        where = f"state={contract.state!r}, version={contract.version!r}, paused={contract.is_paused}"
        self._script.add(f"await look(engine, {where}{shown})")
        await look(
            self._engine,
            state=contract.state,
            version=contract.version,
            paused=contract.is_paused,
            running=[asked.live for asked in by_fate[Fate.RUNNING]],
            frozen=[asked.live for asked in by_fate[Fate.FROZEN]],
            waiting=[asked.live for asked in by_fate[Fate.WAITING]],
        )

    # Acting ------------------------------------------------------------------------------------------------------

    async def _do(self, ruling: Ruling, code: str, call: Callable[[], Awaitable[None]], *, target: str = "") -> bool:
        """Make a call, check its result against the contract's rule, and return True if the engine accepted it."""
        refusal, at = ruling.refusal, len(self._script.lines)
        if refusal is not None and not refusal.unless_ended:
            with self._script.block(_refused(refusal)):
                self._script.add(f"await {code}")
            with refused(refusal.error, refusal.state):
                async with within(code):
                    await call()
            return False
        self._script.add(f"{target}await {code}")
        try:
            async with within(code):
                await call()
        except Exception as error:
            if refusal is None or not isinstance(error, refusal.error):
                raise
            del self._script.lines[at:]
            with self._script.block(_refused(refusal)):
                self._script.add(f"await {code}")
            return False
        self._contract = ruling.after
        return True

    async def _generate(
        self, prompt: int, tokens: int, samples: int, streamed: bool, fields: Fields = PLAIN
    ) -> str | None:
        """Make a request; return its name if it was admitted."""
        # Each id begins with all earlier ones, so an abort by prefix would end others too.
        name = "r" * (len(self._requests) + 1)
        variable = f"r{len(self._requests) + 1}"
        stops = self._answers.stops(self._prompts[prompt], fields)
        params = params_of(self._engine, tokens, samples, fields, stops)
        lora = ADAPTER if fields.lora else None
        method = "generate_stream" if streamed else "generate"
        more = f", lora={lora!r}" * fields.lora + f", priority={fields.priority}" * bool(fields.priority)
        code = f"engine.{method}(PROMPTS[{prompt}], {_code(params)}, request_ids=[{name!r}]{more})"
        token_ids, ids = list(self._prompts[prompt]), [self._id(name)]
        made: list[Live] = []

        async def begin() -> None:
            call = self._engine.generate_stream if streamed else self._engine.generate
            asked = call(token_ids, params, request_ids=ids, lora=lora, priority=fields.priority)
            made.append(await start(self._engine, asked))

        ruling = self._contract.generate(name)
        if not await self._do(ruling, f"start(engine, {code})", begin, target=f"{variable} = "):
            return None
        self._requests[name] = _Asked(made[0], variable, tokens, samples, streamed, fields)
        return name

    async def _ask(self) -> None:
        earlier = self._contract.having(Fate.RUNNING)
        name = await self._generate(len(self._requests) % len(self._prompts), SHORT, 1, streamed=False)
        if name is not None and self._contract.requests[name].fate is Fate.RUNNING:
            await self._await_end(name)
            self._begun.update(earlier)

    async def _proceed(self, names: Sequence[str], tokens: int) -> None:
        running = [self._requests[name] for name in names if self._requests[name].streamed]
        if running:
            shown = ", ".join(asked.variable for asked in running)
            self._script.add(f"await proceed({shown}, tokens={tokens})")
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
        ruling = self._contract.abort(name)
        await self._do(ruling, f"engine.abort({name!r})", lambda: self._engine.abort(self._id(name)))

    async def _pause(self, mode: PauseMode) -> None:
        ruling, code = self._contract.pause(mode), f"engine.pause_generation({mode.value!r})"
        await self._do(ruling, code, lambda: self._engine.pause_generation(mode))

    async def _sleep(self, tags: frozenset[MemoryTag], in_flight: InFlight) -> None:
        abort, drain = in_flight is InFlight.ABORT, 0.0
        if in_flight is InFlight.DRAIN:
            # Frozen requests never end, so a short timeout is enough.
            drain = 0.02 if self._contract.having(Fate.FROZEN) else _DRAIN_SECONDS
        code = f"engine.sleep({_names(tags)}, abort_first={abort}, drain_timeout={drain})"
        ruling = self._contract.sleep(tags, in_flight)
        await self._do(ruling, code, lambda: self._engine.sleep(tags, abort_first=abort, drain_timeout=drain))

    async def _update(self, action: Update | BrokenUpdate, version: str) -> None:
        self._answers.made_by[version] = action.weights
        self._script.add(f"answers.made_by[{version!r}] = {action.weights}")
        ruling, at = self._contract.begin_update(action.mode), len(self._script.lines)
        refusal = ruling.refusal
        if isinstance(action, Update) and action.source is Source.MEMORY:
            await self._push(action, version)
        elif refusal is not None and not refusal.unless_ended:
            with self._script.block(_refused(refusal)), refused(refusal.error, refusal.state):
                await self._load(action, version, ruling)
        else:
            try:
                await self._load(action, version, ruling)
            except Exception as error:
                if refusal is None or not isinstance(error, refusal.error):
                    raise
                del self._script.lines[at:]
                with self._script.block(_refused(refusal)), self._script.block(_opening(action, version)):
                    self._script.add("await load(update)")

    async def _push(self, action: Update, version: str) -> None:
        """Update by WeightSync."""
        begun = self._contract.begin_update(action.mode)
        ruling = replace(begun, after=begun.after.commit_update(version))
        folder, plan, mode = self._answers.folders[action.weights], action.plan, action.mode
        code = f"push(engine, folders[{action.weights}], {version!r}, {mode.value!r}, plan={plan})"
        await self._do(ruling, code, lambda: push(self._engine, folder, version, mode, plan=plan))

    async def _load(self, action: Update | BrokenUpdate, version: str, ruling: Ruling) -> None:
        """Update from disk, bucket by bucket, with the action's event in the middle."""
        request = from_disk(self._answers.folders[action.weights], version, action.mode)
        async with within("a weight update"):
            if isinstance(action, BrokenUpdate):
                broken = Refusal(WeightTransferFailed)
                with self._script.block(_refused(broken)), self._script.block(_opening(action, version)):
                    self._script.add(f"await load(update, 0.0, {action.loaded})")
                    with refused(broken.error):
                        async with self._engine.weight_update(request) as update:
                            self._contract = ruling.after
                            await load(update, 0.0, action.loaded)
                            self._script.add('raise RuntimeError("the trainer failed")')
                            raise _TrainerFailed
                self._contract = self._contract.break_update()
                return
            order = action.plan.order
            with self._script.block(_opening(action, version)):
                self._script.add(f"await load(update, 0.0, 0.5, order={order})")
                async with self._engine.weight_update(request) as update:
                    self._contract = ruling.after
                    await load(update, 0.0, 0.5, order=order)
                    if action.meanwhile is Meanwhile.REQUEST:
                        await self._generate(0, SHORT, 1, streamed=False)
                    elif action.meanwhile is Meanwhile.PAUSE:
                        await self._pause(action.mode)
                    self._script.add(f"await load(update, 0.5, 1.0, order={order})")
                    await load(update, 0.5, 1.0, order=order)
            self._contract = self._contract.commit_update(version)

    def _id(self, name: str) -> str:
        """Return a request id that no other history uses, as an engine may remember ids."""
        return f"history-{self._number}-{name}"


_STANDING: Final = (Fate.RUNNING, Fate.FROZEN, Fate.WAITING)


def contract_of(engine: InferenceEngine) -> Contract:
    """Return the contract of an engine that is ready and idle."""
    return Contract(
        version=engine.get_weight_version(),
        capabilities=engine.capabilities,
        keeps_weights=engine.config.sleep_keeps_weights,
    )


def _end(request: Request) -> End:
    if request.fate is Fate.DONE:
        return End.WHOLE
    if not request.versions:
        return End.EMPTY
    return End.ABORTED_OR_WHOLE if request.raced else End.ABORTED


def _refused(refusal: Refusal) -> str:
    state = "" if refusal.state is None else f", {refusal.state!r}"
    return f"with refused({refusal.error.__name__}{state}):"


def _opening(action: Update | BrokenUpdate, version: str) -> str:
    request = f"from_disk(folders[{action.weights}], {version!r}, {action.mode.value!r})"
    return f"async with engine.weight_update({request}) as update:"


def _names(tags: frozenset[MemoryTag]) -> str:
    return str(sorted(tag.value for tag in tags))


def _code(params: SamplingParams) -> str:
    fields = params.model_dump(include=params.model_fields_set)
    shown = {name: value.value if isinstance(value, Enum) else value for name, value in fields.items()}
    return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
