"""A fleet takes no more memory, threads or descriptors as it answers 10,000 requests and takes 200 updates."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from drivetrain import SamplingParams
from drivetrain_conformance.assertions.memory_use import check_steady, held_by
from drivetrain_weight_sync import WeightSync
from fleets import fleet_of, tensors_for

REQUESTS, UPDATES = 1000, 20
"""One piece of work; the test does ten."""
WARM_UP, MEASURED = 4, 6
ROOM = {"bytes of memory": 1 << 18, "threads": 0, "descriptors": 0}
"""Growth per piece of work: 262 bytes per request. An allocator's pages come and go in blocks of that size."""


@pytest.mark.slow
async def test_a_fleet_is_flat_over_ten_thousand_requests_and_two_hundred_updates(model: Path) -> None:
    async with fleet_of(2, model, max_staleness=1) as fleet:
        versions = (f"v{number}" for number in itertools.count())
        prompts = [[1 + index % 250, 2 + index // 250] for index in range(REQUESTS // UPDATES)]
        params = SamplingParams(max_new_tokens=2, temperature=0.0)
        async with WeightSync.connect(await tensors_for(fleet), fleet) as sync:

            async def work() -> dict[str, int]:
                for _ in range(UPDATES):
                    version = next(versions)
                    await sync.push(version=version)
                    output = await fleet.generate(prompts, params, weight_version=version)
                    assert len(output.completions) == len(prompts)
                return await held_by(fleet)

            for _ in range(WARM_UP):
                await work()
            await check_steady(work, ROOM, f"{REQUESTS} requests and {UPDATES} updates", MEASURED)
        assert [one.samples for one in fleet.members] == [0, 0]
        assert [one.tokens for one in fleet.members] == [0, 0]
