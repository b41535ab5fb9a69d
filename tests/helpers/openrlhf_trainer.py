"""A Ray actor that does what OpenRLHF's ``ActorPPOTrainer`` does with its engines (``trainer/ray/ppo_actor.py``).

Ray's workers cannot import tests: pass the module to ``ray.cloudpickle.register_pickle_by_value``.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file

import trainer_process


class PolicyActor:
    """Rank 0 of a group with every rank of the engines."""

    def init_group(self, engines: list[Any], tensor_parallel_size: int = 1, backend: str = "gloo") -> None:
        """Call ``init_process_group`` of every engine, join, and wait for them, as ``_init_vllm_sync_group``."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as listening:
            listening.bind(("", 0))
            port = listening.getsockname()[1]
        world_size = len(engines) * tensor_parallel_size + 1
        refs = [
            engine.init_process_group.remote(
                address,
                port,
                number * tensor_parallel_size + 1,
                world_size,
                "openrlhf",
                backend=backend,
                use_ray=False,
            )
            for number, engine in enumerate(engines)
        ]
        if backend == "gloo":
            self.group = trainer_process.join(address, port, world_size, "openrlhf", backend)
        else:
            self.group = trainer_process.join_communicator(address, port, world_size)
        ray.get(refs)

    def broadcast(
        self,
        engines: list[Any],
        folder: Path,
        first: int = 0,
        stop: int | None = None,
        named: dict[str, str] | None = None,
        marks_end: bool = True,
    ) -> int:
        """Announce each tensor to every engine, broadcast it, and wait for them, as ``broadcast_to_vllm``.

        Args:
            engines: The engines.
            folder: The checkpoint to send.
            first: Number of the first tensor that is sent.
            stop: Number of the first tensor that is not sent.
            named: Names under which tensors are announced instead of their own.
            marks_end: Mark the last tensor that is sent as the last one.
        """
        tensors = list(load_file(folder / "model.safetensors").items())[first:stop]
        for count, (name, tensor) in enumerate(tensors, 1):
            refs = [
                engine.update_weight.remote(
                    (named or {}).get(name, name),
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    empty_cache=marks_end and count == len(tensors),
                )
                for engine in engines
            ]
            trainer_process.broadcast(self.group, [tensor])
            ray.get(refs)
        return len(tensors)

    def share(self, engines: list[Any], folder: Path) -> int:
        """Share each tensor through CUDA IPC, as ``_handle_cuda_ipc``."""
        reduce_tensor: Any = torch.multiprocessing.reductions.reduce_tensor
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        tensors = list(load_file(folder / "model.safetensors").items())
        for count, (name, tensor) in enumerate(tensors, 1):
            weight = tensor.cuda()
            handles = {uuid: reduce_tensor(weight)}
            torch.cuda.synchronize()
            ray.get(
                [
                    engine.update_weight_cuda_ipc.remote(
                        name,
                        dtype=tensor.dtype,
                        shape=tensor.shape,
                        ipc_handles=handles,
                        empty_cache=count == len(tensors),
                    )
                    for engine in engines
                ]
            )
        return len(tensors)
