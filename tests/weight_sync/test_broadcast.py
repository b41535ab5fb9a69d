"""Groups that do not form, and groups that break."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from drivetrain.errors import DeadlineExceeded, EngineBusy, InvalidRequest, WeightTransferFailed
from drivetrain.types.weights import CommunicatorSpec, TensorSpec, WeightManifest, WeightUpdateRequest
from drivetrain_weight_sync import make_plan
from drivetrain_weight_sync.transports.broadcast import BroadcastReader, BroadcastSender, require_own_gpu
from drivetrain_weight_sync.transports.process_groups import Group, Groups, meeting_place

CPU = torch.device("cpu")
Pair = tuple[BroadcastSender, BroadcastReader, Group]
_A_TRAINER_THAT_STOPS = """
import sys, time, torch
from drivetrain_weight_sync.transports.broadcast import BroadcastSender
sender = BroadcastSender(torch.device("cpu"), "gloo", "127.0.0.1")
spec, store = sender.offer(1, 20)
print(spec.model_dump_json(), flush=True)
sender.join(spec, store)
print("formed", flush=True)
time.sleep(60)
"""


def spec(port: int, timeout: float, world_size: int = 2) -> CommunicatorSpec:
    return CommunicatorSpec(
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=world_size,
        group_name="g",
        backend="gloo",
        timeout=timeout,
    )


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def test_a_group_of_which_nobody_is_there_ends_by_its_deadline(free_port: int) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="waiting for rank 0 of the group"):
        Groups().join(spec(free_port, 0.5), 1, CPU)
    assert time.monotonic() - begun < 60


def test_a_trainer_whose_engine_does_not_come_stops_waiting() -> None:
    sender = BroadcastSender(torch.device("cpu"), "gloo", "127.0.0.1")
    offered, store = sender.offer(1, 0.5)
    with pytest.raises(DeadlineExceeded, match=r"timed out after 0\.5 s waiting for ranks 1 of 2 to join the group"):
        sender.join(offered, store)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_a_loopback_address_listens_nowhere_else(address: str) -> None:
    store = meeting_place(address, 2, 5)
    found = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == store.port]
    assert set(found) == {"127.0.0.1"}


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"master_address='192\.0\.2\.1'"):
        meeting_place("192.0.2.1", 2, 5)


def test_a_store_of_a_host_name_is_reached() -> None:
    store = meeting_place(socket.gethostname(), 2, 5)
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_a_trainer_that_leaves_stops_waiting_for_an_engine_that_does_not_come() -> None:
    sender = BroadcastSender(torch.device("cpu"), "gloo", "127.0.0.1")
    offered, store = sender.offer(1, 60)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(sender.join, offered, store)
        time.sleep(0.2)
        assert not joining.done()
        sender.leave()
        with pytest.raises(WeightTransferFailed, match="left the group"):
            joining.result(timeout=60)


def test_a_rank_outside_of_the_group_is_refused(free_port: int) -> None:
    with pytest.raises(InvalidRequest, match="rank 2 is not in a group of 2"):
        Groups().join(spec(free_port, 5), 2, CPU)


def test_a_group_is_joined_behind_a_worker_that_goes_on() -> None:
    sender, groups = BroadcastSender(torch.device("cpu"), "gloo", "127.0.0.1"), Groups()
    offered, store = sender.offer(1, 20)
    with pytest.raises(EngineBusy):
        groups.join_behind(offered, 1, CPU)
    sender.join(offered, store)
    ends = time.monotonic() + 20
    while True:
        try:
            groups.join_behind(offered, 1, CPU)
            break
        except EngineBusy:
            assert time.monotonic() < ends
            time.sleep(0.01)
    groups.join_behind(offered, 1, CPU)  # a rank that has joined may be asked again while others have not
    assert groups.get(offered.group_name).spec == offered
    with pytest.raises(InvalidRequest, match="already"):
        groups.join_behind(offered.model_copy(update={"master_port": 1}), 1, CPU)
    with pytest.raises(InvalidRequest, match="already"):
        groups.join(offered, 1, CPU)
    groups.leave(offered.group_name)
    with pytest.raises(InvalidRequest, match="no group"):
        groups.leave(offered.group_name)
    sender.close()


def test_a_trainer_that_is_killed_is_noticed_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", _A_TRAINER_THAT_STOPS], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        offered = CommunicatorSpec.model_validate_json(trainer.stdout.readline())
        group = Group(offered, 1, CPU)
        assert trainer.stdout.readline() == "formed\n"
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(group.broadcast, torch.empty(1 << 20, dtype=torch.uint8))
            time.sleep(0.2)
            assert not receiving.done()
            trainer.kill()
            with pytest.raises(WeightTransferFailed, match="a rank is gone"):
                receiving.result(timeout=60)


def test_a_rank_that_leaves_gives_its_broadcast_up() -> None:
    with subprocess.Popen([sys.executable, "-c", _A_TRAINER_THAT_STOPS], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        group = Group(CommunicatorSpec.model_validate_json(trainer.stdout.readline()), 1, CPU)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(group.broadcast, torch.empty(1 << 20, dtype=torch.uint8))
            time.sleep(0.2)
            group.leave()
            with pytest.raises(WeightTransferFailed, match="left the group"):
                receiving.result(timeout=60)
        with pytest.raises(WeightTransferFailed, match="left the group"):
            group.broadcast(torch.empty(1, dtype=torch.uint8))
        trainer.kill()


PLAN = make_plan([TensorSpec(f"layers.{index}.a", "float32", (100 + index,)) for index in range(3)], bucket_bytes=1)
TENSORS = {spec.name: torch.arange(spec.shape[0], dtype=torch.float32) for spec in PLAN.tensors}


@pytest.fixture
def pair() -> Iterator[Pair]:
    sender, groups = BroadcastSender(CPU, "gloo", "127.0.0.1"), Groups()
    offered, store = sender.offer(1, 20)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(groups.join, offered, 1, CPU)
        sender.join(offered, store)
        joining.result(timeout=20)
    reader = BroadcastReader(groups)
    sender.begin(PLAN)
    for name, tensor in TENSORS.items():
        sender.put(name, tensor, held=True)
    request = WeightUpdateRequest(version="v", source=sender.source(), plan=PLAN, digests=dict.fromkeys(TENSORS, 0))
    reader.open(request, WeightManifest(PLAN.tensors))
    yield sender, reader, groups.get(offered.group_name)
    reader.close()
    groups.close()
    sender.close()


def test_buckets_come_one_after_another_to_the_same_memory(
    pair: Pair,
) -> None:
    sender, reader, _ = pair
    places: list[list[int]] = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            sending = pool.submit(sender.send, [0, 1, 2])
            came: dict[str, torch.Tensor] = {}
            places.append([])
            for (index,) in reader.bring([0, 1, 2]):
                for name, tensor in reader.tensors(index):
                    came[name] = tensor.clone()
                    places[-1].append(tensor.data_ptr())
            sending.result(timeout=20)
            assert came.keys() == TENSORS.keys()
            assert all(torch.equal(came[name], tensor) for name, tensor in TENSORS.items())
    assert places[0][0] != places[0][1], "one is received while another is loaded"
    assert places[0] == places[1]


def test_memory_that_may_still_be_written_is_not_used_again(
    pair: Pair,
) -> None:
    sender, reader, group = pair
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, [0])
        brought = reader.bring([0, 1])
        assert next(brought) == [0]
        sending.result(timeout=20)
        before = reader.buffers
        group.leave()  # as if the trainer were given up
        with pytest.raises(WeightTransferFailed, match="left the group"):
            next(brought)
    reader.release()
    assert reader.buffers is not before
    assert any(before in kept for kept in group.kept if isinstance(kept, tuple)), "it is held until the group has ended"


def test_nccl_is_refused_where_trainer_and_engine_share_a_gpu() -> None:
    require_own_gpu("GPU-0", ["GPU-1", "GPU-2"])
    require_own_gpu("GPU-0", [])
    with pytest.raises(InvalidRequest, match="one rank of each GPU, and GPU-1 holds the trainer's weights") as caught:
        require_own_gpu("GPU-1", ["GPU-0", "GPU-1"])
    assert caught.value.field == "group_backend"
