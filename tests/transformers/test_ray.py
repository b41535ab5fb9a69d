"""An engine inside a Ray actor."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@ray.remote
class Rollout:
    """A trainer's rollout worker."""

    async def generate(self, model: str, isolation: str) -> tuple[list[int], str, bool]:
        from drivetrain import SamplingParams, create_engine

        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
        async with create_engine("transformers", model=model, isolation=isolation) as engine:
            output = await engine.generate("hello", SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True))
            after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
            return output.completions[0].token_ids, engine.isolation.value, before == after


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_engine_starts_in_a_ray_actor_and_leaves_its_signal_handlers_alone(model: Path) -> None:
    actor = Rollout.remote()  # type: ignore[attr-defined]
    ids = []
    for isolation in ("inline", "process"):
        # Ray adds `remote` to methods at run time; its types declare it on classes only.
        call = actor.generate.remote(str(model), isolation)  # pyright: ignore[reportFunctionMemberAccess]
        token_ids, where, untouched = ray.get(call, timeout=200)
        assert where == isolation
        assert len(token_ids) == 5
        assert untouched
        ids.append(token_ids)
    assert ids[0] == ids[1]
