"""Roll out with engines in Ray actors, and train in another actor that pushes its weights to all of them.

Run it with ``python examples/ray_rollouts.py``; it needs ``pip install 'drivetrain[ray,transformers]'`` and no GPU.
"""

from __future__ import annotations

import argparse
import asyncio

import ray

from drivetrain import EngineHandle, SamplingParams, attach
from drivetrain.testing import tiny_model
from drivetrain_fleet.ray import start_engines


@ray.remote
class Trainer:
    """A trainer's rank: holds the policy, changes it, and pushes it."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self.policy = AutoModelForCausalLM.from_pretrained(model)

    async def train(self, samples: list[list[int]], engines: EngineHandle, version: str) -> float:
        """Take one step on the samples, push the weights, and return the loss."""
        import torch

        from drivetrain_weight_sync import WeightSync

        optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        losses = [self.policy(input_ids=ids, labels=ids).loss for ids in map(torch.tensor, ([one] for one in samples))]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()

        fleet = await attach(engines)  # a connection to the process that serves it, not through Ray
        async with WeightSync.connect(self.policy, fleet) as sync:
            await sync.push(version=version)
        await fleet.teardown()
        return float(loss.detach())


async def main(engines: int, steps: int, address: str | None) -> None:
    """Start engines and trainer, and take some steps."""
    ray.init(address=address, log_to_driver=False)
    model = str(tiny_model())
    params = SamplingParams(max_new_tokens=8, n=2, ignore_eos=True)
    trainer = Trainer.options(num_cpus=0).remote(model)
    async with (
        await start_engines({"backend": "transformers", "model": model, "device": "cpu"}, engines) as actors,
        await actors.fleet() as fleet,
    ):
        handle = await fleet.handle()
        for step in range(1, steps + 1):
            output = await fleet.generate(["Name a colour.", "Name a fruit."], params)
            samples = [one.prompt_token_ids + one.token_ids for one in output.completions]
            loss = await trainer.train.remote(samples, handle, f"step-{step}")
            versions = ", ".join(f"{member.name}: {member.version}" for member in fleet.members)
            print(f"step {step}: {len(samples)} samples, loss {loss:.2f}; {versions}")
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=2, help="number of engines")
    parser.add_argument("--steps", type=int, default=2, help="number of training steps")
    parser.add_argument("--address", default=None, help="address of a Ray cluster; by default one is started here")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.engines, arguments.steps, arguments.address))
