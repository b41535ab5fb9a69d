"""A bare NCCL communicator, formed as vLLM's weight transfer forms it.

The protocol is that of vLLM's ``StatelessProcessGroup`` and ``PyNcclCommunicator``: rank 0 puts the communicator's id
into a TCPStore, every rank joins, and all of them reduce one float before anything else.
"""

from __future__ import annotations

import ctypes
import pickletools
from datetime import timedelta
from typing import Any, Final

import torch

from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain_weight_sync.trainer_groups.process_messages import JoinNccl

_dist: Any = torch.distributed
"""``Any``: its stores are not declared."""
_ID_BYTES: Final = 128
_ID_KEY: Final = "broadcast_from/0/0"
_FLOAT32: Final = 7
_UINT8: Final = 1
_SUM: Final = 0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class NcclGroup:
    """A communicator in which rank 0 broadcasts.

    Raises:
        InvalidRequest: There is no GPU, or the id is malformed.
        WeightSyncError: NCCL refused.
    """

    def __init__(self, join: JoinNccl) -> None:
        if not torch.cuda.is_available():
            raise InvalidRequest("NCCL needs a GPU, and the server sees none", field="init_info")
        self.device = torch.device("cuda", join.gpu)
        torch.cuda.set_device(self.device)
        self._nccl: Any = ctypes.CDLL("libnccl.so.2")  # the library that torch has loaded
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        identity = _UniqueId.from_buffer_copy(join.unique_id or id_from_store(join))
        self._communicator = ctypes.c_void_p()
        self._call("CommInitRank", ctypes.byref(self._communicator), join.world_size, identity, join.rank)
        warm = torch.zeros(1, device=self.device)
        pointer = ctypes.c_void_p(warm.data_ptr())
        self._call("AllReduce", pointer, pointer, ctypes.c_size_t(1), _FLOAT32, _SUM, *self._on_stream())
        torch.cuda.synchronize(self.device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Receive a tensor from rank 0, as bytes."""
        pointer, nbytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        self._call("Broadcast", pointer, pointer, nbytes, _UINT8, 0, *self._on_stream())

    def _on_stream(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._communicator, ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._nccl, f"nccl{name}")(*arguments)
        if result != 0:
            reason = self._nccl.ncclGetErrorString(result).decode()
            raise WeightSyncError(f"nccl{name} failed: {reason}")


def id_from_store(join: JoinNccl) -> bytes:
    """Return the communicator's id from the trainer's store, which waits until every rank has connected."""
    timeout = timedelta(seconds=join.timeout)
    store = _dist.TCPStore(join.master_address, join.master_port, join.world_size, False, timeout)
    return id_from_pickle(store.get(_ID_KEY))


def id_from_pickle(data: bytes) -> bytes:
    """Return the bytes of a pickled ``ncclUniqueId``, without unpickling data from a socket.

    Raises:
        InvalidRequest: The data is something else.
    """
    try:
        values = [value for _, value, _ in pickletools.genops(data)]
    except Exception as error:
        raise InvalidRequest(f"the trainer's store holds no NCCL id: {error}") from error
    found = [value for value in values if isinstance(value, bytes)]
    if "ncclUniqueId" not in values or [len(value) for value in found] != [_ID_BYTES]:
        raise InvalidRequest(f"the trainer's store holds no NCCL id of {_ID_BYTES} bytes")
    return found[0]
