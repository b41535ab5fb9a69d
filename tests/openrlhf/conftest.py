"""A Ray cluster, whose GPUs are on paper, and models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
import torch
from ray import cloudpickle

import openrlhf_trainer
import trainer_process


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")  # a process that runs other files has room for one cluster
def cluster() -> Iterator[None]:
    for module in (openrlhf_trainer, trainer_process):
        cloudpickle.register_pickle_by_value(module)
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
