"""A trainer as slime and AReaL write it: rank 0 of a torch.distributed group of its own, without a default group.

Reads commands from standard input, one line of JSON each, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

distributed: Any = dist.distributed_c10d


def join(address: str, port: int, world_size: int, group_name: str) -> Any:
    """Form the group by the steps of both trainers' ``init_process_group``."""
    timeout = timedelta(seconds=120)
    rendezvous = distributed.rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=timeout)
    store, rank, world_size = next(rendezvous)
    store.set_timeout(timeout)
    store = distributed.PrefixStore(group_name, store)
    group, _ = distributed._new_process_group_helper(
        world_size,
        rank,
        [],
        distributed.Backend("gloo"),
        store,
        group_name=group_name,
        backend_options=None,
        timeout=timeout,
    )
    distributed._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def broadcast(group: Any, tensors: list[torch.Tensor]) -> None:
    """Launch all broadcasts, and wait for them then."""
    handles = [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]
    for handle in handles:
        handle.wait()


def chunks(tensors: list[torch.Tensor], buffer_size: int) -> Iterator[torch.Tensor]:
    """Pack tensors as vLLM does: a chunk ends once its bytes exceed the buffer's size."""
    packed: list[torch.Tensor] = []
    for tensor in tensors:
        packed.append(tensor.flatten().view(torch.uint8))
        if sum(len(part) for part in packed) > buffer_size:
            yield torch.cat(packed)
            packed = []
    if packed:
        yield torch.cat(packed)


def made(folder: str, sent: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the tensors to send: those of a checkpoint, or one value throughout."""
    stored = load_file(os.path.join(folder, "model.safetensors"))
    found = []
    for one in sent:
        dtype = getattr(torch, one["dtype"].removeprefix("torch."))
        name = one.get("of", one["name"])
        if "values" in one or name not in stored or list(stored[name].shape) != one["shape"]:
            found.append(torch.full(one["shape"], one.get("values", 0.0), dtype=dtype))
        else:
            found.append(stored[name].to(dtype).contiguous())
    return found


def main() -> None:
    groups: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        answer = {"ok": True, "error": ""}
        try:
            match command["do"]:
                case "join":
                    groups[command["group"]] = join(
                        command["address"], command["port"], command["world_size"], command["group"]
                    )
                case "send":
                    tensors = made(command["folder"], command["tensors"])
                    if command["flattened"]:
                        tensors = list(chunks(tensors, command.get("chunk_bytes", sys.maxsize)))
                    broadcast(groups[command["group"]], tensors)
                case "destroy":
                    dist.destroy_process_group(groups.pop(command["group"]))
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
