"""Waiting for a whole GPU, which CUDA refuses in each thread while another one captures a graph on it."""

from __future__ import annotations

import threading
from typing import Final

import torch

WAITING: Final = threading.Lock()
"""Held to wait for a whole GPU, and to capture a CUDA graph: during the one, CUDA refuses the other in every thread."""


def wait_for(device: torch.device) -> None:
    """Wait until no thread captures a graph and the GPU has nothing more to do."""
    with WAITING:
        torch.cuda.synchronize(device)
