"""How many frames one weight push takes on each hop: from the trainer to the host, and from the host to the engine.

    python benchmarks/frames.py [BACKEND] [--strategy shared_memory] [--pushes 3] [--bucket-bytes N]
        [--fields JSON] [--json]

The first hop is counted at its trainer's end, with the engine in a host process. The second is counted at its host's
end: this process then owns the backend as a host does. A frame is one message of the wire protocol in one direction.
The heartbeat is not counted. The model is a tiny one on the CPU; smaller buckets show whether their number matters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM

from drivetrain import EngineConfig, InferenceEngine, create_engine
from drivetrain.backend.registry import load_backend
from drivetrain.process.wire import Call, FrameReader, Message
from drivetrain.process.write_buffer import WriteBuffer
from drivetrain.testing import tiny_model
from drivetrain.types.config import Isolation
from drivetrain_weight_sync import WeightSync

if TYPE_CHECKING:
    from torch import nn


class Frames:
    """Frames that this process has sent and received."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        """Names of the methods that were called."""
        self.sent = 0
        self.received = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within the context, on every socket of this process."""
        put, feed = WriteBuffer.put, FrameReader.feed

        def counting_put(buffer: WriteBuffer, message: Message) -> None:
            self.sent += 1
            if isinstance(message, Call):
                self.calls.append(message.method)
            put(buffer, message)

        def counting_feed(reader: FrameReader, data: bytes) -> list[memoryview]:
            payloads = feed(reader, data)
            self.received += len(payloads)
            return payloads

        WriteBuffer.put, FrameReader.feed = counting_put, counting_feed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            WriteBuffer.put, FrameReader.feed = put, feed  # type: ignore[method-assign]


def in_a_host(config: EngineConfig) -> InferenceEngine:
    """Return an engine whose host process is at the other end of this process's socket."""
    return create_engine(config.model_copy(update={"isolation": Isolation.PROCESS}))


def as_a_host(config: EngineConfig) -> InferenceEngine:
    """Return an engine whose backend is in this process."""
    backend = load_backend(config.backend)
    capabilities = backend.capabilities(config)
    return InferenceEngine(config, backend(config), capabilities=capabilities, isolation=Isolation.INLINE, versions={})


def connected(policy: nn.Module, engine: InferenceEngine, arguments: argparse.Namespace) -> WeightSync:
    return WeightSync.connect(policy, engine, arguments.strategy, bucket_bytes=arguments.bucket_bytes)


async def frames_of_pushes(engine: InferenceEngine, policy: nn.Module, arguments: argparse.Namespace) -> list[Frames]:
    """Return the frames of each push."""
    found: list[Frames] = []
    async with engine, connected(policy, engine, arguments) as sync:
        for number in range(arguments.pushes):
            found.append(Frames())
            with found[-1].counted():
                await sync.push(version=str(number))
    return found


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = tiny_model("qwen2")
    policy = AutoModelForCausalLM.from_pretrained(model)
    fields = {"backend": arguments.backend, "model": str(model), "device": "cpu"} | arguments.fields
    config = EngineConfig.from_mapping(fields)
    hops = (("trainer to host", in_a_host), ("host to engine", as_a_host))
    return [
        {"hop": hop, "push": number + 1, "sent": one.sent, "received": one.received, "calls": one.calls}
        for hop, make in hops
        for number, one in enumerate(await frames_of_pushes(make(config), policy, arguments))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("backend", nargs="?", default="transformers")
    parser.add_argument("--strategy", default="shared_memory")
    parser.add_argument("--pushes", type=int, default=3)
    parser.add_argument("--bucket-bytes", type=int, default=1 << 30)
    parser.add_argument("--fields", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{arguments.backend}, {arguments.strategy}")
    print(f"{'hop':17}{'push':>5}{'sent':>6}{'received':>10}  calls")
    for row in rows:
        print(f"{row['hop']:17}{row['push']:5}{row['sent']:6}{row['received']:10}  {', '.join(row['calls'])}")


if __name__ == "__main__":
    main()
