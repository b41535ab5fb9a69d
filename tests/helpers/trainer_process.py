"""A trainer as slime and AReaL write it: rank 0 of a torch.distributed group of its own, without a default group.

Reads commands from standard input, one line of JSON each, and answers each with a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from drivetrain_weight_sync.trainer_groups.nccl import NcclGroup
from drivetrain_weight_sync.trainer_groups.process_messages import JoinNccl

distributed: Any = dist.distributed_c10d
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
stores: list[object] = []
"""Stores that other ranks may still read."""


def join(address: str, port: int, world_size: int, group_name: str, backend: str) -> Any:
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
        distributed.Backend(backend),
        store,
        group_name=group_name,
        backend_options=None,
        timeout=timeout,
    )
    distributed._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def join_communicator(address: str, port: int, world_size: int) -> NcclGroup:
    """Form a bare NCCL communicator as vLLM's trainers do: the id lies in a store, pickled."""
    nccl = ctypes.CDLL("libnccl.so.2")
    identity = (ctypes.c_byte * 128)()
    nccl.ncclGetUniqueId(ctypes.byref(identity))
    store = TCPStore(address, port, world_size, True, timedelta(seconds=120), use_libuv=False)
    store.set("broadcast_from/0/0", pickle.dumps(["ncclUniqueId", bytes(identity)]))
    join = JoinNccl(group_name="", rank=0, world_size=world_size, timeout=120, unique_id=bytes(identity))
    group = NcclGroup(join)
    stores.append(store)
    return group


def broadcast(group: Any, tensors: list[torch.Tensor]) -> None:
    """Launch all broadcasts, and wait for them then."""
    if isinstance(group, NcclGroup):
        for tensor in tensors:
            group.broadcast(tensor.cuda())
        torch.cuda.synchronize()
        return
    if dist.get_backend(group) == "nccl":
        tensors = [tensor.cuda() for tensor in tensors]
    handles = [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]
    for handle in handles:
        assert handle is not None
        handle.wait()
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize()


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
    """Return the tensors to send: those of a checkpoint or an adapter, or one value throughout."""
    files = [os.path.join(folder, f"{kind}.safetensors") for kind in ("model", "adapter_model")]
    stored = load_file(next(file for file in files if os.path.exists(file)))
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
                        command["address"],
                        command["port"],
                        command["world_size"],
                        command["group"],
                        command["backend"],
                    )
                case "join_communicator":
                    groups[command["group"]] = join_communicator(
                        command["address"], command["port"], command["world_size"]
                    )
                case "send":
                    tensors = made(command["folder"], command["tensors"])
                    if command["flattened"]:
                        tensors = list(chunks(tensors, command.get("chunk_bytes", sys.maxsize)))
                    broadcast(groups[command["group"]], tensors)
                case "destroy":
                    group = groups.pop(command["group"])
                    if not isinstance(group, NcclGroup):
                        dist.destroy_process_group(group)
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
