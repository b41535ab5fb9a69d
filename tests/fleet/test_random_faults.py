"""Random changes of a fleet under load, with calls of random engines that fail, hang or lose their answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from drivetrain import (
    Completion,
    DrivetrainError,
    EngineInternalError,
    MemoryTag,
    PauseMode,
    SamplingParams,
    WeightUpdateRequest,
)
from drivetrain.process.shared_engine import SharedEngine
from drivetrain.types.weights import DiskSource
from drivetrain_conformance.harness.time_limits import within
from fleets import BOUND, Fleet, Spoiled, local

CALLS = {
    "push": ("prepare_weight_update", "pause_generation", "apply_update", "continue_generation", "break_off_update"),
    "by hand": ("prepare_weight_update", "begin_update", "load_buckets", "commit_update", "forget_weight_update"),
    "pause": ("pause_generation", "abort_samples", "continue_generation"),
    "go on": ("continue_generation", "pause_generation"),
    "sleep": ("sleep", "wake_up", "abort_samples"),
    "wake": ("wake_up",),
    "relabel": ("update_weight_version",),
    "reset": ("reset_prefix_cache",),
    "abort": ("abort_samples",),
}
"""Changes, and the calls of engines that each makes."""
OFTEN = ("push", "push", "push", "by hand", "by hand", "go on", "go on", "wake", "wake")
STEPS = 25


class History:
    """Steps of one random history, and what its requests gave."""

    def __init__(self, seed: int, model: Path, fleet: Fleet) -> None:
        self.rng = random.Random(seed)
        self.model = model
        self.fleet = fleet
        self.committed = {fleet.get_weight_version()}
        self.completions: list[Completion] = []
        self.steps: list[str] = []
        self.over = False

    async def request(self) -> None:
        """Make requests until the history is over; each ends in completions or a typed error."""
        while not self.over:
            params = SamplingParams(max_new_tokens=self.rng.choice([4, 60, 300]), temperature=0.0, ignore_eos=True)
            try:
                output = await self.fleet.generate([[self.rng.randrange(200)], [7] * 50], params)
            except DrivetrainError:
                await asyncio.sleep(0.01)
            else:
                self.completions += output.completions

    def spoil(self, what: str) -> Callable[[], None]:
        """Let one call of one engine fail, hang or lose its answer, perhaps; return what mends it."""
        if self.rng.random() < 0.3:
            return lambda: None
        member = self.rng.choice(list(self.fleet.backend.members))
        name, kind = self.rng.choice(CALLS[what]), self.rng.choice(["fails", "hangs", "loses its answer"])
        calls = member.calls
        self.steps.append(f"{member.name}.{name} {kind}")

        async def instead(*arguments: object) -> object:
            if kind == "hangs":
                await asyncio.sleep(30)
            if kind == "loses its answer":
                await cast(Callable[..., Awaitable[object]], getattr(calls, name))(*arguments)
            raise EngineInternalError(f"{name} {kind}")

        member.calls = cast(SharedEngine, Spoiled(calls, **{name: instead}))

        def mend() -> None:
            member.calls = calls

        return mend

    async def step(self, number: int) -> None:
        """Change something."""
        fleet, rng, version = self.fleet, self.rng, f"v{number}"
        mode = rng.choice([PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.ABORT])
        what = rng.choice([*CALLS, *OFTEN])
        self.steps.append(f"{number}: {what} {mode.value}")
        mend = self.spoil(what)
        try:
            match what:
                case "push":
                    await fleet.load_weights_from_disk(self.model, version, mode=mode)
                case "by hand":
                    request = WeightUpdateRequest(version=version, source=DiskSource(path=str(self.model)), mode=mode)
                    async with fleet.weight_update(request) as update:
                        for index in range(update.buckets):
                            await update.load([index])
                case "pause":
                    await fleet.pause_generation(mode, timeout=rng.choice([None, 0.05]))
                case "go on":
                    await fleet.continue_generation()
                case "sleep":
                    await fleet.sleep([MemoryTag.KV_CACHE], abort_first=True)
                case "wake":
                    await fleet.wake_up()
                case "relabel":
                    await fleet.update_weight_version(version)
                case "reset":
                    await fleet.reset_prefix_cache()
                case "abort":
                    await fleet.abort_generation()
        except DrivetrainError as error:
            self.steps.append(f"   {type(error).__name__}: {str(error)[:200]}")
        finally:
            mend()
        self.committed.add(fleet.get_weight_version())
        self.steps.append(f"   {fleet.state.value} {fleet.get_weight_version()} {fleet.health()}")

    async def recover(self) -> None:
        """Bring the fleet back without faults; all engines must serve again."""
        fleet = self.fleet
        await fleet.wake_up()
        for member in fleet.backend.members:  # one whose sleep could not be undone is its owner's to wake up
            await member.engine.wake_up()
        await fleet.load_weights_from_disk(self.model, "last")
        self.committed.add("last")
        await fleet.continue_generation()
        assert (fleet.state.value, fleet.health()) == ("ready", ["ready"] * len(fleet.members))
        output = await fleet.generate([[i] for i in range(6)], SamplingParams(max_new_tokens=4))
        assert {completion.weight_version for completion in output.completions} == {"last"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_nothing_uncommitted_is_served_whatever_fails(model: Path, seed: int) -> None:
    timeouts = {"control": 2.0, "weight_update": 2.0}
    engines = [local(model, timeouts=timeouts) for _ in range(3)]
    async with Fleet(engines, min_engines=1 + seed % 3, max_samples_per_engine=6) as fleet:
        history = History(seed, model, fleet)
        requests = [asyncio.create_task(history.request()) for _ in range(6)]
        try:
            for number in range(STEPS):
                await history.step(number)
                await asyncio.sleep(history.rng.choice([0, 0.01, 0.1]))
            await history.recover()
            history.over = True
            async with within(seconds=BOUND):
                await asyncio.gather(*requests)
            found = {span.version for completion in history.completions for span in completion.weight_versions}
            assert found <= history.committed, found - history.committed
            assert [(one.samples, one.tokens) for one in fleet.members] == [(0, 0)] * 3
            assert not fleet.backend.sending.waiting
        except BaseException:
            print("\n".join(history.steps))
            raise
        finally:
            history.over = True
            for task in requests:
                task.cancel()
