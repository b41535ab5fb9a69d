"""Train with SkyRL's Tinker server, which samples at `drivetrain serve`: neither knows the other; a URL is set.

SkyRL 0.3 trains LoRA adapters with JAX. With ``--external-inference-url`` it unpacks each adapter into a folder and
asks that server for samples by the adapter's name. The policy learns to write lower-case letters. SkyRL wants Python
3.12, and its server starts its engine by ``uv``. ``make train-skyrl`` does all of this:

    python3.12 -m venv skyrl && skyrl/bin/pip install 'skyrl[tinker,jax]==0.3.0' 'tinker<=0.24.1' uv
    drivetrain serve --backend transformers --model FOLDER --set enable_lora=true --lora-folder ADAPTERS &
    . skyrl/bin/activate
    uv run --active --no-project -m skyrl.tinker.api --base-model FOLDER --backend jax \
        --external-inference-url http://127.0.0.1:8000 --external-inference-lora-base ADAPTERS --port 8001 &
    python examples/skyrl_tinker.py --url http://127.0.0.1:8001 --model FOLDER
"""

from __future__ import annotations

import argparse
import time
import urllib.error
import urllib.request
from statistics import mean

import tinker
from tinker import types
from transformers import AutoTokenizer

PROMPTS = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
SAMPLES, TOKENS, RANK = 16, 12, 8
LEARNING_RATE = 1e-2


def wait(url: str, seconds: float) -> None:
    """Wait until SkyRL's server answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
        except (urllib.error.URLError, TimeoutError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def datum(prompt: list[int], drawn: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """Return a sample to train on: each position predicts the next id, and those of the prompt weigh nothing."""
    ids, before = [*prompt, *drawn], len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "weights": [0.0] * before + [1.0] * len(drawn),
            "logprobs": [0.0] * before + logprobs,
            "advantages": [0.0] * before + [advantage] * len(drawn),
        },
    )


def main(url: str, model: str, steps: int) -> None:
    """Train, and exit with 1 unless the reward has risen and the logprobs agree."""
    wait(url, 300)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    service = tinker.ServiceClient(base_url=url, api_key="tml-none")
    trainer = service.create_lora_training_client(base_model=model, rank=RANK, seed=0)

    rewards_of_steps, gap = [], 0.0
    for step in range(steps):
        begun = time.perf_counter()
        saved = trainer.save_weights_for_sampler(name=f"step{step}").result()
        sampler = trainer.create_sampling_client(saved.path)
        asked = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=step)
        first, *others = (types.ModelInput.from_ints(prompt) for prompt in prompts)
        # SkyRL 0.3 fails if two requests unpack an adapter at once, so the first goes alone.
        answers = [sampler.sample(first, SAMPLES, asked).result()]
        pending = [sampler.sample(other, SAMPLES, asked) for other in others]
        answers += [one.result() for one in pending]
        samples, texts, rewards = [], [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            drawn = answer.sequences
            texts += (new := [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in drawn])
            rewards += (group := [sum("a" <= letter <= "z" for letter in text) / TOKENS for text in new])
            samples += [
                datum(prompt, one.tokens, one.logprobs, reward - mean(group))
                for one, reward in zip(drawn, group, strict=True)
            ]
        rolled_out = time.perf_counter()

        trained = trainer.forward_backward(samples, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        outputs = trained.result().loss_fn_outputs
        stepped.result()
        for sample, output in zip(samples, outputs, strict=True):
            asked_for = sample.loss_fn_inputs
            for ours, theirs, weight in zip(
                output["logprobs"].data, asked_for["logprobs"].data, asked_for["weights"].data, strict=True
            ):
                gap = max(gap, weight * abs(ours - theirs))
        rewards_of_steps.append(mean(rewards))
        print(
            f"step {step:2}  reward {rewards_of_steps[-1]:.3f}  largest logprob difference {gap:.1e}  "
            f"samples {rolled_out - begun:.1f} s  step {time.perf_counter() - begun:.1f} s  {texts[0]!r}",
            flush=True,
        )
    if rewards_of_steps[-1] < rewards_of_steps[0] + 0.3 or gap > 1e-3:
        raise SystemExit("the reward did not rise by 0.3, or the logprobs differ by more than 0.001")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8001", help="Address of SkyRL's server.")
    parser.add_argument("--model", required=True, help="Folder of the model that it trains.")
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    main(given.url, given.model, given.steps)
