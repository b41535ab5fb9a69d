"""Run every row of a check on one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.pause_and_sleep import SLEEP_CAPABILITY
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError, InvalidConfig, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.modes import MemoryTag
from drivetrain.types.outputs import Completion
from drivetrain_conformance.check.compared_answers import Answers, Measure
from drivetrain_conformance.check.comparison import Comparison
from drivetrain_conformance.check.prompt_set import make_prompts
from drivetrain_conformance.check.reference import Reference, device_for, require_transformers
from drivetrain_conformance.check.report import FORMAT, CheckReport, CheckRow, Outcome
from drivetrain_conformance.harness.report_files import today
from drivetrain_conformance.harness.verdict import describe

LONG_PROMPT: Final = 1024
"""Default length of the long prompt in tokens."""
PERTURBED: Final = "check-perturbed"
"""Version of the perturbed weights."""
RESTORED: Final = "check-restored"
"""Version of the checkpoint's weights, pushed back."""
_SHOWN: Final = (
    Capability.LOGPROBS_RAW,
    Capability.PROMPT_LOGPROBS,
    Capability.PREFIX_CACHE,
    Capability.VERSION_SPANS,
    Capability.READ_WEIGHTS,
    Capability.HIDDEN_STATES,
    Capability.SLEEP_WEIGHTS,
    Capability.SLEEP_KV_CACHE,
    Capability.SLEEP_KEEPS_WEIGHTS,
)
"""Capabilities that rows depend on, beside logprobs and transports of weights."""

Tell = Callable[[str], None]
"""Takes the stage that the check is at."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Finding of a row."""

    passed: bool
    seen: str
    against: str
    worst: float | None = None

    @classmethod
    def of(cls, comparison: Comparison, before: str = "", more: str = "") -> Seen:
        """Make a finding of a comparison, with words before and after its figures."""
        seen = "; ".join(part for part in (before, comparison.seen, more) if part)
        return cls(comparison.agrees, seen, comparison.against, comparison.worst)


async def check_engine(
    config: EngineConfig,
    *,
    tell: Tell | None = None,
    row_done: Callable[[CheckRow], None] | None = None,
    long_prompt: int = LONG_PROMPT,
    reference_device: str | None = None,
) -> CheckReport:
    """Start an engine and check that it computes its model as transformers does.

    An engine that does not start is a failed row. The engine is torn down at the end.

    Args:
        config: The engine's configuration.
        tell: Called with each stage.
        row_done: Called with each row once it is known.
        long_prompt: Most tokens of the long prompt; use more than the width of the model's sliding windows.
        reference_device: Torch device of the reference; None: a GPU with enough free memory once the engine runs, else
            the CPU.

    Raises:
        MissingDependency: torch or transformers is not installed in this process's environment.
        BackendError: no plugin provides the backend, or its engine is not installed.
        InvalidConfig: a field is wrong, transformers cannot load the model, the model does not generate, or rounding
            to its dtype alone moves its logprobs beyond the tolerance.
        UnsupportedCapability: a field needs a capability that the engine does not have here.
    """
    require_transformers()
    _require_generation(config)
    engine = create_engine(config)
    _require_model(config)
    begun = time.monotonic()
    check = _Check(engine, tell or _nobody, row_done or _nobody)
    try:
        await check.run(long_prompt, reference_device)
    finally:
        await check.engine.teardown()
    return CheckReport(
        format=FORMAT,
        backend=config.backend,
        model=config.model,
        reference=check.described_reference,
        claims={one.value: check.engine.supports(one) for one in _SHOWN},
        versions=dict(check.engine.versions),
        date=today(),
        seconds=round(time.monotonic() - begun, 1),
        rows=check.rows,
    )


def _require_generation(config: EngineConfig) -> None:
    if config.task is not Task.GENERATE:
        raise InvalidConfig(
            f"task={config.task.value!r}: a check compares logprobs, which only task='generate' has", field="task"
        )


def _require_model(config: EngineConfig) -> None:
    folder = Path(config.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidConfig(f"model={config.model!r}: it holds no config.json; give a model's folder", field="model")


def _nobody(_: object) -> None:
    pass


class _Check:
    """One check of one engine."""

    def __init__(self, engine: InferenceEngine, tell: Tell, row_done: Callable[[CheckRow], None]) -> None:
        self.engine = engine
        self.rows: list[CheckRow] = []
        self.described_reference = "none"
        self._tell = tell
        self._row_done = row_done
        self._answers: Answers | None = None
        self._labels: list[tuple[str, str, str]] = []
        """After the start and each push: expected version, the engine's, and that of its answers."""
        self._first: list[list[int]] = []
        """Tokens of the first greedy answers."""
        self._last: list[list[int]] = []
        """Tokens of the greedy answers after the last push."""
        self._failed: Measure | None = None
        """The first measure of logprobs that failed, or the rounding's, which tells more."""
        self._misloaded: list[str] = []
        """Tensors that differed from the checkpoint once the engine had started."""

    @property
    def answers(self) -> Answers:
        """The engine's answers, once it has started."""
        assert self._answers is not None, "the engine has not started"
        return self._answers

    async def run(self, long_prompt: int, reference_device: str | None) -> None:
        """Add every row. If logprobs are wrong, weights are read back before a push can mend them."""
        await self._row("load", self._load)
        if self.engine.state is not EngineState.READY:
            return
        self._answers = Answers(
            self.engine, await self._loaded_reference(reference_device), make_prompts(self.engine, long_prompt)
        )
        answers = self.answers
        await answers.require_checkable()
        await self._measured("greedy", self._greedy)
        await self._measured("sampled", answers.sampled, answers.lacking)
        await self._measured("long prompt", answers.long)
        await self._measured("prompt logprobs", answers.of_prompt, (Capability.PROMPT_LOGPROBS,))
        if answers.is_narrow:
            await self._measured("rounding", answers.rounding, answers.lacking)
        await self._measured("batch", answers.batch)
        await self._row("cached prefix", self._cached_prefix, (Capability.PREFIX_CACHE,))
        if self._failed is not None:
            await self._row("loaded weights", self._as_stored, (Capability.READ_WEIGHTS,))
        await self._row("pushed weights", self._pushed)
        await self._row("first weights again", self._restored)
        await self._row("versions", self._versions)
        await self._row("sleep and wake", self._slept)
        if self._failed is not None:
            await self._row("where it differs", self._located)

    # Rows ------------------------------------------------------------------------------------------------------------

    async def _row(self, name: str, body: Callable[[], Awaitable[Seen]], needs: Iterable[Capability] = ()) -> bool:
        """Run a body and add its row; return True if it passed."""
        begun = time.monotonic()
        self._tell(name)
        outcome, found = await self._judged(body, [one for one in needs if not self.engine.supports(one)])
        row = CheckRow(name, outcome, found.seen, found.against, round(time.monotonic() - begun, 2), worst=found.worst)
        self.rows.append(row)
        self._row_done(row)
        return outcome is Outcome.PASSED

    async def _judged(self, body: Callable[[], Awaitable[Seen]], missing: list[Capability]) -> tuple[Outcome, Seen]:
        if missing:
            return Outcome.NOT_CLAIMED, Seen(False, ", ".join(one.value for one in missing), "")
        if self.rows and self.engine.state not in (EngineState.READY, EngineState.DIRTY):
            return Outcome.NOT_RUN, Seen(False, f"the engine is {self.engine.status.describe()}", "")
        try:
            found = await body()
        except NotRun as why:
            return Outcome.NOT_RUN, Seen(False, str(why), "")
        except UnsupportedCapability as error:
            claimed = error.capability in {one.value for one in self.engine.capabilities}
            return Outcome.FAILED if claimed else Outcome.NOT_CLAIMED, Seen(False, str(error), "")
        except (DrivetrainError, TimeoutError) as error:
            return Outcome.FAILED, Seen(False, describe(error), "no error")
        return Outcome.PASSED if found.passed else Outcome.FAILED, found

    async def _measured(self, name: str, measure: Measure, needs: Iterable[Capability] = ()) -> None:
        """Add the row of a measure, and remember the first one that fails."""

        async def body() -> Seen:
            found = await measure()
            if not found.agrees and (self._failed is None or measure == self.answers.rounding):
                self._failed = measure
            return Seen.of(found)

        await self._row(name, body, needs)

    async def _load(self) -> Seen:
        begun = time.monotonic()
        await self.engine.start(self._tell)
        info, asked = self.engine.model_info, self.engine.config.dtype
        seen = (
            f"{info.architecture}, {info.dtype}, {_count(info.parameters)} parameters, context of "
            f"{info.context_length} tokens, on {info.device} in {time.monotonic() - begun:.1f} s"
        )
        return Seen(asked in ("auto", info.dtype), seen, f"dtype {asked}")

    async def _loaded_reference(self, device: str | None) -> Reference:
        self._tell("loading the reference")
        chosen = device or device_for(2 * self.engine.model_info.parameters)
        reference = await asyncio.to_thread(Reference, self.engine.config, chosen)
        self.described_reference = f"transformers on {chosen}: {reference.dtype} weights, float32 arithmetic"
        return reference

    # Answers ---------------------------------------------------------------------------------------------------------

    async def _greedy(self) -> Comparison:
        completions = await self.answers.greedy_completions()
        self._first = [completion.token_ids for completion in completions]
        self._note_labels(self.engine.config.weight_version, completions)
        return await self.answers.compared(completions)

    async def _cached_prefix(self) -> Seen:
        comparison, cached = await self.answers.cached()
        found = Seen.of(comparison, f"{cached} of {len(self.answers.prompts.extended)} prompt tokens cached")
        return Seen(found.passed and cached > 0, found.seen, f"{found.against}; tokens cached", found.worst)

    # Weights ---------------------------------------------------------------------------------------------------------

    async def _as_stored(self) -> Seen:
        found = await self._differing()
        if found is None:
            raise NotRun("the engine's tensors cannot be compared one by one: they are too large, or have no manifest")
        self._misloaded = found
        seen = f"otherwise than stored: {_listed(found)}" if found else "every tensor is as stored"
        return Seen(not found, seen, "the checkpoint's tensors")

    async def _pushed(self) -> Seen:
        """Push perturbed weights; prompts are those whose prefixes older weights have cached."""
        reference = self.answers.reference
        before = [await asyncio.to_thread(reference.score, prompt) for prompt in self.answers.prompts.short]
        changed = await asyncio.to_thread(reference.perturb)
        after = [await asyncio.to_thread(reference.score, prompt) for prompt in self.answers.prompts.short]
        moved = max(float(abs(one.own - other.own).max()) for one, other in zip(before, after, strict=True))
        found, how = await self._push_and_compare(PERTURBED)
        more = "" if found.agrees else await self._why_wrong_after_push()
        seen = Seen.of(found, f"{how}, {changed} tensors perturbed, which moves logprobs by {moved:.2g}", more)
        if moved <= 4 * self.answers.tolerance:
            return Seen(False, f"{seen.seen}; too little to be told from rounding", seen.against, seen.worst)
        return seen

    async def _restored(self) -> Seen:
        await asyncio.to_thread(self.answers.reference.restore)
        found, how = await self._push_and_compare(RESTORED)
        same = sum(one == other for one, other in zip(self._last, self._first, strict=True))
        return Seen.of(found, f"{how}, {same} of {len(self._first)} greedy answers as at first")

    async def _push_and_compare(self, version: str) -> tuple[Comparison, str]:
        """Push the reference's weights; return the comparison of short and long prompts, and the push in words."""
        from drivetrain_conformance.check.weights import push

        result = await push(self.engine, self.answers.reference, version)
        completions = await self.answers.greedy_completions()
        self._last = [completion.token_ids for completion in completions]
        self._note_labels(version, completions)
        found = await self.answers.compared(completions)
        long = await self.answers.long()
        worse = min((found, long), key=lambda one: (one.agrees, -one.worst))
        return worse, f"{result.nbytes / 1e6:.1f} MB by {result.strategy.value} in {result.total_seconds:.2g} s"

    async def _why_wrong_after_push(self) -> str:
        differing = await self._differing()
        if differing:
            return f"not as pushed: {_listed(differing)}"
        if self.engine.supports(Capability.PREFIX_CACHE):
            await self.engine.reset_prefix_cache()
            if (await self.answers.greedy()).agrees and (await self.answers.long()).agrees:
                return "right once the prefix cache is reset: entries of older weights were used"
        return "every tensor is as pushed" if differing is not None else ""

    async def _differing(self) -> list[str] | None:
        from drivetrain_conformance.check.weights import differing_tensors

        self._tell("reading the engine's tensors")
        return await differing_tensors(self.engine, self.answers.reference)

    def _note_labels(self, expected: str, completions: Sequence[Completion]) -> None:
        shown = ", ".join(sorted({str(completion.weight_version) for completion in completions}))
        self._labels.append((expected, self.engine.get_weight_version(), shown))

    async def _versions(self) -> Seen:
        if len(self._labels) < 2:
            raise NotRun("no weights were pushed")
        spans = self.engine.supports(Capability.VERSION_SPANS)
        expected, engines, answers = (list(labels) for labels in zip(*self._labels, strict=True))
        of_answers = " → ".join(answers) if spans else "have none (version_spans is not claimed)"
        seen = f"engine {' → '.join(engines)}; answers {of_answers}"
        return Seen(engines == expected and (not spans or answers == expected), seen, " → ".join(expected))

    # Sleep -----------------------------------------------------------------------------------------------------------

    async def _slept(self) -> Seen:
        engine = self.engine
        come_back = engine.config.sleep_keeps_weights or len(self._labels) > 1  # weights that sleep are pushed again
        slept = [
            tag
            for tag, capability in SLEEP_CAPABILITY.items()
            if engine.supports(capability) and (come_back or tag is not MemoryTag.WEIGHTS)
        ]
        if not slept and engine.supports(Capability.SLEEP_WEIGHTS):
            raise NotRun("weights would be lost: they cannot be pushed again")
        begun = time.monotonic()
        await engine.sleep(slept or None)
        asleep = time.monotonic()
        await engine.wake_up(slept)
        how = (
            f"{', '.join(tag.value for tag in slept)} asleep in {asleep - begun:.2g} s, "
            f"awake in {time.monotonic() - asleep:.2g} s"
        )
        if engine.state is EngineState.READY:
            return Seen.of(await self.answers.greedy(), how)
        found, pushed = await self._push_and_compare(RESTORED)
        return Seen.of(found, f"{how}; weights pushed again: {pushed}")

    # The place -------------------------------------------------------------------------------------------------------

    async def _located(self) -> Seen:
        from drivetrain_conformance.check.locate import first_wrong_layer, hidden_states_off
        from drivetrain_conformance.check.weights import push

        assert self._failed is not None
        if self._misloaded:
            return Seen(
                False, f"weights that were loaded wrongly: {_listed(self._misloaded)}", "the checkpoint's tensors"
            )
        try:
            await push(self.engine, self.answers.reference, RESTORED)
        except UnsupportedCapability:
            if not self.engine.supports(Capability.HIDDEN_STATES):
                raise
            off = await hidden_states_off(self.answers)
            place = "the head" if off <= self.answers.tolerance else "before the head"
            return Seen(
                False, f"{place}: hidden states {off:.2g} of their largest value off", "no weights can be pushed"
            )
        whole = await self._failed()
        if whole.agrees:
            return Seen(False, "the weights as loaded: right once they were pushed", "right as loaded")
        context = (await self.answers.batch()).right_up_to
        place = await first_wrong_layer(self.answers, self._failed, whole, self._tell)
        window = self.answers.reference.sliding_window
        if context > 2:
            place += f"; right with up to {context} tokens of context"
            place += f", and sliding windows hold {window}" if window else ""
        return Seen(False, place, whole.against)


class NotRun(Exception):
    """A row cannot be run; the message says why."""


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return f"{parameters / 1000:.0f}K"
