"""The ranks of a sharded trainer, each a process in a gloo group, and what they are told to do."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from tests.weight_sync.models import Model, differing, tensors_of
from tests.weight_sync.receiver_engines import InlineEngine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from drivetrain.errors import DrivetrainError, EngineDied, to_wire
from drivetrain.types.weights import ShardsSource, WeightManifest
from drivetrain_weight_sync import WeightShard, WeightSync
from drivetrain_weight_sync.shards.carriers import NcclCarrier, SocketCarrier
from drivetrain_weight_sync.shards.gatherer import Gatherer
from drivetrain_weight_sync.shards.links import PartsStaged
from drivetrain_weight_sync.shards.part_staging import PartStager
from drivetrain_weight_sync.shards.rank_discovery import Ranks as ShardRanks
from drivetrain_weight_sync.trainer.engine_push import EnginePush
from drivetrain_weight_sync.transports.shared_memory import SharedMemorySender

TIMEOUT_S: Final = 120
"""How long the ranks wait for each other. Nothing but a fault of drivetrain makes a test wait as long."""
_connect: Final = socket.create_connection
_context: Final = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [__name__, "drivetrain_transformers.engine", "transformers.models.qwen2.modeling_qwen2"]
)  # otherwise every rank imports them


class Ranks:
    """The processes of a trainer's ranks."""

    def __init__(self, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, *arguments)`` on every rank; return the results, ``"killed"`` for a process that ended.

        An error of drivetrain is returned as :func:`to_wire` describes it; any other is raised.
        """
        for end in self._ends:
            end.send((function, arguments))
        answers = [self._answer(end) for end in self._ends]  # all of them, else the next call would get the rest
        for kind, value in answers:
            assert kind != "raised", value
        return [value for _, value in answers]

    def _answer(self, end: Connection) -> tuple[str, Any]:
        assert end.poll(TIMEOUT_S + 60), "a rank hangs"
        try:
            kind, value = end.recv()
        except EOFError:
            return "returned", "killed"
        return kind, value

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(10)
            process.kill()


@contextmanager
def ranks_of_a_trainer(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(end: Connection, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = ("returned", function(rank, *arguments))
        except DrivetrainError as error:
            answer = ("returned", to_wire(error))
        except BaseException:
            answer = ("raised", traceback.format_exc())
        end.send(answer)


# Tasks of the ranks


def sharded(seed: int = 1) -> Model:
    """Return the model of that seed, sharded over all ranks."""
    model = Model(seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def local(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor."""
    part: torch.Tensor = parameter.to_local()
    return part


def push_thrice(rank: int, strategy: str) -> tuple[list[object], list[str]]:
    """Push a model that changes from push to push; return the results and the tensors that arrived wrong."""

    async def pushes() -> tuple[list[object], list[str]]:
        trained, whole, served = sharded(), Model(1), Model(2)
        engine = InlineEngine(served) if rank == 0 else None
        results: list[object] = []
        wrong: list[str] = []
        async with WeightSync.connect(trained, engine, strategy, bucket_bytes=8192) as sync:
            for step in range(3):
                for model in (trained, whole):
                    with torch.no_grad():
                        model.model.layers[1].get_parameter("up.weight").mul_(-1.5)
                result = await sync.push(version=f"step-{step}")
                results.append((result.version, result.strategy.value, result.tensors, result.nbytes))
                if engine is not None:
                    wrong += differing(tensors_of(served), tensors_of(whole))
        return results, wrong

    return asyncio.run(pushes())


def push_in_parts(rank: int) -> tuple[list[str], list[str], list[str]]:
    """Push float32 shards of uneven sizes to an engine in bfloat16; one rank fails once, one push is staged ahead.

    Return the errors, and on the rank that pushes the kinds of the sources and the tensors that arrived wrong.
    """

    async def pushes() -> tuple[list[str], list[str], list[str]]:
        torch.manual_seed(0)
        shapes = {"matrix": (7, 33), "vector": (5,), "scalar": (), "empty": (0, 4), "small": (1, 3), "large": (90, 8)}
        whole = {name: torch.randn(shape) for name, shape in shapes.items()}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        given = {n: distribute_tensor(t, mesh, [Shard(0)]) if t.dim() else t.clone() for n, t in whole.items()}
        served = Holder({name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in whole.items()})
        engine = InlineEngine(served) if rank == 1 else None
        errors: list[str] = []
        wrong: list[str] = []

        def look() -> None:
            if engine is not None:
                wrong.extend(differing(tensors_of(served), {name: t.bfloat16() for name, t in whole.items()}))

        def multiply(factor: float, *tensors: Mapping[str, torch.Tensor]) -> None:
            for tensor in (tensor for some in tensors for tensor in some.values()):
                (local(tensor) if hasattr(tensor, "to_local") else tensor).mul_(factor)

        async with WeightSync.connect(given, engine, "shared_memory", bucket_bytes=256, cast=True) as sync:
            for step in range(3):
                stage = PartStager.stage
                if (step, rank) == (1, 2):
                    PartStager.stage = _no_memory  # type: ignore[method-assign, assignment]
                try:
                    await sync.push(version=f"step-{step}")
                except (DrivetrainError, torch.OutOfMemoryError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                PartStager.stage = stage  # type: ignore[method-assign]
                if step == 1:  # the rank that failed pushes again before the others
                    await asyncio.to_thread(dist.barrier)
                    await asyncio.sleep(0 if rank == 2 else 0.3)
                look()
                if step != 0:
                    multiply(-1.5, given, whole)
            ahead = await sync.start_weight_transfer(version="ahead")
            await ahead.wait()
            await asyncio.to_thread(dist.barrier)
            multiply(3, given)  # the trainer goes on
            await ahead.finish()
            look()
        return errors, [request.source.kind for request in engine.requests] if engine else [], wrong

    return asyncio.run(pushes())


def _no_memory(*arguments: object) -> PartsStaged:
    raise torch.OutOfMemoryError("no room for the parts")


def push_to_a_real_engine(rank: int, architecture: str, strategy: str) -> tuple[list[int], list[float]] | None:
    """Push a transformers model, sharded, and return the engine's answer; by shared memory, nothing is gathered."""
    from transformers import AutoModelForCausalLM

    from drivetrain import SamplingParams, create_engine
    from drivetrain.testing import tiny_model

    async def answer() -> tuple[list[int], list[float]] | None:
        trained: Any = AutoModelForCausalLM.from_pretrained(tiny_model(architecture, seed=1))
        for layer in trained.model.layers:
            fully_shard(layer)
        fully_shard(trained)
        if rank:
            async with WeightSync.connect(trained, None) as sync:
                await sync.push(version="step-1")
            return None
        gathered: list[object] = []
        fetch = SocketCarrier.fetch
        if strategy == "shared_memory":
            setattr(SocketCarrier, "fetch", lambda *arguments: gathered.append(arguments))  # noqa: B010
        async with create_engine("transformers", model=str(tiny_model(architecture))) as engine:
            async with WeightSync.connect(trained, engine, strategy, bucket_bytes=100_000) as sync:
                await sync.push(version="step-1")
            setattr(SocketCarrier, "fetch", fetch)  # noqa: B010
            assert not gathered
            params = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
            (output,) = (await engine.generate([[5, 6, 7]], params)).completions
            return output.token_ids, output.logprobs or []

    return asyncio.run(answer())


def push_experts(rank: int, architecture: str, strategy: str, dim: int) -> list[str]:
    """Push a mixture whose layers are sharded, its stacks of experts along ``dim``; return the tensors that differ.

    The expected tensors are those of a model that transformers loaded from the trainer's checkpoint.
    """
    from transformers import AutoModelForCausalLM

    from drivetrain.testing import tiny_model

    async def wrong() -> list[str]:
        trained: Any = AutoModelForCausalLM.from_pretrained(tiny_model(architecture, seed=1))
        for layer in trained.base_model.layers:
            # torch shards other dimensions than the first evenly, and convolutions have a dimension of one.
            fully_shard(layer, shard_placement_fn=lambda p: Shard(dim if p.ndim == 3 and p.shape[dim] > 1 else 0))
        fully_shard(trained)
        assert any(parameter.ndim == 3 and hasattr(parameter, "full_tensor") for parameter in trained.parameters())
        if rank:
            async with WeightSync.connect(trained, None) as sync:
                await sync.push(version="step-1")
            return []
        served: Any = AutoModelForCausalLM.from_pretrained(tiny_model(architecture))
        engine = InlineEngine(served)
        engine.config = engine.config.model_copy(update={"model": str(tiny_model(architecture))})
        async with WeightSync.connect(trained, engine, strategy, bucket_bytes=100_000) as sync:
            await sync.push(version="step-1")
        loaded: Any = AutoModelForCausalLM.from_pretrained(tiny_model(architecture, seed=1))
        return differing(loaded.state_dict(), served.state_dict())

    return asyncio.run(wrong())


def push_shards(rank: int, shards: Sequence[Mapping[str, WeightShard]], whole: Mapping[str, torch.Tensor]) -> list[str]:
    """Push shards that were cut by hand, each rank its own, by a function; return the tensors that arrived wrong."""

    async def wrong() -> list[str]:
        served = Holder({name: torch.zeros_like(tensor) for name, tensor in whole.items()})
        engine = InlineEngine(served) if rank == 0 else None
        async with WeightSync.connect(
            lambda: shards[rank].items(), engine, bucket_bytes=4096, group=dist.group.WORLD
        ) as sync:
            await sync.push(version="step-1")
        return differing(tensors_of(served), whole) if engine else []

    return asyncio.run(wrong())


def push_over_a_mesh(rank: int) -> list[str]:
    """Push tensors that are sharded over a mesh of two by two, in every way; return those that arrived wrong."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    whole = {name: torch.randn(7, 10) for name in ("rows", "columns", "both", "twice", "plain")}
    placements = {
        "rows": [Shard(0), Shard(1)],
        "columns": [Shard(1), Shard(0)],
        "twice": [Shard(0), Shard(0)],
    }
    given = {
        name: distribute_tensor(tensor, mesh, placements[name])
        if name in placements
        else distribute_tensor(tensor, mesh["shards"], [Shard(1)])
        if name == "both"
        else tensor
        for name, tensor in whole.items()
    }

    async def wrong() -> list[str]:
        served = Holder({name: torch.zeros_like(tensor) for name, tensor in whole.items()})
        engine = InlineEngine(served) if rank == 3 else None
        async with WeightSync.connect(given, engine) as sync:
            await sync.push(version="step-1")
        return differing(tensors_of(served), whole) if engine else []

    return asyncio.run(wrong())


class Holder(nn.Module):
    """Holds tensors under names with dots."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            part: nn.Module = self
            for step in path:
                if step not in part._modules:
                    part.add_module(step, nn.Module())
                part = part.get_submodule(step)
            part.register_buffer(last, tensor)


class DeadEngine(InlineEngine):
    """An engine whose process has ended."""

    async def weight_manifest(self) -> WeightManifest:
        raise EngineDied("the engine's process has ended")


def refused(address: tuple[str, int], timeout: float) -> socket.socket:
    """Connect again and again until it is refused."""
    while True:
        _connect(address, timeout=timeout).close()
        time.sleep(0.01)


def push_what_fails(rank: int, how: str) -> list[object]:
    """Push what cannot be pushed, then what can; return the first error, the engine's weights after it, and the end."""

    async def pushes() -> list[object]:
        trained, served = sharded(), Model(2)
        before = tensors_of(served)
        alive = InlineEngine(served)
        engine = DeadEngine(served) if how == "dead engine" else alive
        given: Any = trained
        if how == "NaN" and rank == 1:
            with torch.no_grad():
                local(trained.model.layers[1].get_parameter("up.weight")).fill_(float("nan"))
        if how == "missing":
            given = {name: tensor for name, tensor in trained.state_dict().items() if "up.bias" not in name}
        if how == "a rank cannot read its weights" and rank == 1:
            given = trained.state_dict() | {"model.norm.bias": "text"}
        has_engine = rank == 0 or (how == "a rank has an engine too" and rank == 1)
        found: list[object] = []
        async with WeightSync.connect(given, engine if has_engine else None, group=dist.group.WORLD) as sync:
            version = f"of rank {rank}" if how.startswith("another version") else "bad"
            is_late = how == "another version, and a late rank" and rank == dist.get_world_size() - 1
            try:
                with mock.patch.object(socket, "create_connection", refused) if is_late else nullcontext():
                    await sync.push(version=version)
            except DrivetrainError as error:
                found += [type(error).__name__, str(error)]
            found.append(differing(tensors_of(served), before) if rank == 0 else [])
        async with WeightSync.connect(sharded(), alive if rank == 0 else None) as sync:
            found.append((await sync.push(version="good")).version)
        found.append(differing(tensors_of(served), tensors_of(Model(1))) if rank == 0 else [])
        return found

    return asyncio.run(pushes())


def push_again_after_a_refusal(rank: int) -> list[str]:
    """Push NaN and then sound weights with one sync; return the outcomes."""

    async def pushes() -> list[str]:
        trained, served = sharded(), Model(2)
        found = []
        weight = local(trained.model.layers[0].get_parameter("up.weight"))
        async with WeightSync.connect(trained, InlineEngine(served) if rank == 0 else None, bucket_bytes=8192) as sync:
            for value in (float("nan"), 1.0, float("inf"), 2.0):
                with torch.no_grad():
                    weight.fill_(value)
                try:
                    found.append((await sync.push(version=f"v{value}")).version)
                except DrivetrainError as error:
                    found.append(type(error).__name__)
        return found

    return asyncio.run(pushes())


def form_a_group_without_gpus(rank: int) -> str:
    """Meet the others as ranks on GPUs do; return why no NCCL group forms then."""
    del rank
    try:
        NcclCarrier(ShardRanks(), "group", torch.device("cpu"))
    except DrivetrainError as error:
        return str(error)
    return ""


def push_while_one_dies(rank: int, victim: int, where: str) -> tuple[str, str, str]:
    """Push twice; the victim kills itself during the second. Return the outcome and whose weights the engine holds.

    Shards are gathered where the place says so, and left where they are otherwise.
    """

    async def pushes() -> tuple[str, str, str]:
        trained, served = sharded(), Model(2)
        engine = InlineEngine(served) if rank == 0 else None
        strategy = "disk" if "shards" in where else "shared_memory"
        async with WeightSync.connect(trained, engine, strategy, bucket_bytes=8192) as sync:
            await sync.push(version="first")
            first = tensors_of(served)
            with torch.no_grad():
                for parameter in trained.parameters():
                    local(parameter).mul_(-1.5)
            if rank == victim:
                _die(where)
            outcome, message = "pushed", ""
            try:
                await sync.push(version="second")
            except DrivetrainError as error:
                outcome, message = type(error).__name__, str(error)
            return outcome, message, "first" if not differing(tensors_of(served), first) else "another"

    return asyncio.run(pushes())


def _die(where: str) -> None:
    """Kill this process when it comes to the place."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "before":
        kill()
    kind, name, nth = _PLACES[where]
    original = getattr(kind, name)
    count = iter(range(nth))

    def dies(*arguments: Any, **named: Any) -> Any:
        if next(count, None) is None:
            kill()
        return original(*arguments, **named)

    setattr(kind, name, dies)


_PLACES: Final[dict[str, tuple[type[object], str, int]]] = {
    "first shards asked for": (SocketCarrier, "send", 0),
    "second shards asked for": (SocketCarrier, "send", 1),
    "first shards gathered": (SocketCarrier, "fetch", 0),
    "second shards gathered": (SocketCarrier, "fetch", 1),
    "asked to stage its parts": (PartStager, "stage", 0),
    "parts staged": (SharedMemorySender, "source", 0),
    "all parts staged": (ShardsSource, "model_validate", 0),
    "prepared": (Gatherer, "staged", 0),
    "updated": (EnginePush, "update", 0),
    "committed": (Gatherer, "committed", 0),
}
