"""A tiny model that calls a tool, and its logprobs by transformers alone.

``taught_model.py FOLDER`` makes the model, then answers each line of token ids with their logprobs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain.testing import tiny_model
from tool_conversation import ANSWER, CALL, MARKS, QUESTION, TEMPLATE, TOOLS

STEPS: Final = 400


def teach(folder: Path) -> None:
    """Train a tiny model to call ``add`` when it is asked, and to say the result."""
    tiny_model("qwen2", directory=folder, vocab_size=260 + len(MARKS))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.chat_template = TEMPLATE
    tokenizer.unk_token = None  # as in the tokenizers of Qwen
    tokenizer.save_pretrained(folder)
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    lessons = [(messages, CALL)]
    messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    lessons.append((messages, ANSWER))
    inputs, labels = [], []
    for conversation, says in lessons:
        text = tokenizer.apply_chat_template(conversation, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text)
        output = tokenizer.encode(says + tokenizer.eos_token)
        inputs.append([*prompt, *output])
        labels.append([-100] * len(prompt) + output)
    longest = max(map(len, inputs))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in inputs])
    wanted = torch.tensor([ids + [-100] * (longest - len(ids)) for ids in labels])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss = torch.tensor(float("inf"))
    for _ in range(STEPS):
        loss = model(input_ids=padded, labels=wanted).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 1e-2:  # likely enough that it also says it when sampled, and not certain
            break
    else:
        raise SystemExit(f"the model did not learn its answers: loss {loss}")
    model.save_pretrained(folder)


def score(folder: Path) -> None:
    """Answer each line of token ids with the logprob of each but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        ids = torch.tensor([json.loads(line)])
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        print(json.dumps(logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    teach(Path(sys.argv[1]))
    print("taught", flush=True)
    score(Path(sys.argv[1]))
