"""Train a small policy with GRPO through the routes of an inference server, as slime does, without drivetrain.

The policy learns to write lower-case letters. Each step rolls out at the server, takes one optimizer step, and
broadcasts the weights in a ``torch.distributed`` group that the server has joined. It needs torch, transformers and
httpx, and the server's model in a folder:

    drivetrain serve --backend transformers --model FOLDER &
    python examples/train_over_http.py --url http://127.0.0.1:8000 --model FOLDER
"""

from __future__ import annotations

import argparse
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ("Say something.", "Who is there?", "1 + 1 =", "Once upon a time")
SAMPLES, TOKENS = 16, 12
GROUP = "0"  # the name that torch gives to the first group of a process


class InferenceServer:
    """The server's routes, and the group in which it receives weights."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600)
        self._threads = ThreadPoolExecutor(1)
        self._group: Any = None

    def wait(self, seconds: float) -> None:
        """Wait until the server is healthy."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._client.get("/health").raise_for_status()
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def post(self, path: str, **body: object) -> Any:
        """Call a route; raise on any answer but success."""
        response = self._client.post(path, json=body)
        if response.is_error:
            raise SystemExit(f"{path}: {response.status_code} {response.text}")
        return response.json()

    def join(self) -> None:
        """Form the group: this process is rank 0, the server rank 1."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        joined = self._later(
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name=GROUP,
            backend="gloo",
        )
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=120))
        dist.init_process_group("gloo", store=dist.PrefixStore(GROUP, store), rank=0, world_size=2)
        joined.result()

    def push(self, policy: Any, version: str) -> None:
        """Give the server the policy's weights."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in policy.named_parameters()}
        self.post("/pause_generation", mode="retract")
        received = self._later(
            "/update_weights_from_distributed",
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name=GROUP,
            weight_version=version,
        )
        for tensor in tensors.values():
            dist.broadcast(tensor, 0)
        received.result()
        self.post("/continue_generation")

    def _later(self, path: str, **body: object) -> Future[Any]:
        return self._threads.submit(self.post, path, **body)


def roll_out(server: InferenceServer, prompts: list[list[int]], version: str) -> tuple[list[list[int]], Tensor]:
    """Return the ids that the server drew for each prompt, and their logprobs of shape (prompts, TOKENS)."""
    params = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    answers = server.post("/generate", input_ids=prompts, sampling_params=params, return_logprob=True)
    for answer in answers:
        found = answer["meta_info"]["weight_version"]
        if found != version:
            raise SystemExit(f"an answer is of the weights {found!r}, not {version!r}")
    logprobs = torch.tensor([[entry[0] for entry in one["meta_info"]["output_token_logprobs"]] for one in answers])
    return [answer["output_ids"] for answer in answers], logprobs


def logprobs_of(policy: Any, prompts: list[list[int]], drawn: list[list[int]]) -> Tensor:
    """Return the policy's own logprobs of the drawn ids, of shape (prompts, TOKENS)."""
    rows = []
    for prompt in dict.fromkeys(map(tuple, prompts)):
        ids = torch.tensor([[*prompt, *one] for at, one in zip(prompts, drawn, strict=True) if tuple(at) == prompt])
        logits = policy(input_ids=ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        rows.append(logits.gather(-1, ids[:, len(prompt) :, None])[..., 0])
    return torch.cat(rows)


def main(url: str, model: str, steps: int) -> None:
    """Train, and exit with 1 unless the reward has risen and the logprobs agree."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(SAMPLES)]
    server = InferenceServer(url)
    server.wait(300)
    server.join()

    rewards_of_steps, gap = [], 0.0
    for step in range(steps):
        begun = time.perf_counter()
        server.push(policy, version := str(step))
        pushed = time.perf_counter()
        drawn, theirs = roll_out(server, prompts, version)
        texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
        rewards = torch.tensor([sum("a" <= letter <= "z" for letter in text) / TOKENS for text in texts])

        groups = rewards.view(len(PROMPTS), SAMPLES)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()[:, None]
        ours = logprobs_of(policy, prompts, drawn)
        ratio = (ours - theirs).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        rewards_of_steps.append(rewards.mean().item())
        gap = max(gap, (ours - theirs).abs().max().item())
        print(
            f"step {step:2}  reward {rewards_of_steps[-1]:.3f}  largest logprob difference {gap:.1e}  "
            f"push {1000 * (pushed - begun):.0f} ms  step {1000 * (time.perf_counter() - begun):.0f} ms  {texts[0]!r}",
            flush=True,
        )
    server.post("/destroy_weights_update_group", group_name=GROUP)
    if rewards_of_steps[-1] < rewards_of_steps[0] + 0.3 or gap > 1e-3:
        raise SystemExit("the reward did not rise by 0.3, or the logprobs differ by more than 0.001")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Address of the server.")
    parser.add_argument("--model", required=True, help="Folder of the model that it serves.")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    main(given.url, given.model, given.steps)
