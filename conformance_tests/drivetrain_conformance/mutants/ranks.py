"""Engines with one rank that deviates from the others.

Ranks are processes that an engine starts, so that they cannot be spoiled through a class of this process. A module
``sitecustomize`` on their path spoils them instead: Python imports it in each new process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from drivetrain_conformance.mutants.registry import SpoilRank, spoiled_rank

_PATH: Final = "PYTHONPATH"
_SPOILED: Final = 1
"""The rank that is spoiled, of two."""
_LAST_OF_UPDATES: Final = ("commit_weights", "apply_weights", "apply_weights_counting")
"""The calls with one of which each engine ends an update."""
_CALLS: Final = "drivetrain.process.worker_calls"
"""The module through which each rank is called."""
_SITE: Final = f"""
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {_CALLS!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            from {__name__} import spoil
            spoil(module.WorkerMethods, {{wrong!r}})
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

Proceed = Callable[[], Any]


@contextmanager
def spoiled_ranks(wrong: SpoilRank) -> Iterator[None]:
    """Spoil one rank of each engine that starts meanwhile."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-mutant-") as folder:
        Path(folder, "sitecustomize.py").write_text(_SITE.format(wrong=wrong.__name__), encoding="utf-8")
        paths = os.pathsep.join(filter(None, [folder, os.environ.get(_PATH)]))
        with mock.patch.dict(os.environ, {_PATH: paths}):
            yield


def spoil(methods: Any, name: str) -> None:
    """Let the mutant of this name answer the calls of one rank. Called in each process of an engine."""
    wrong: SpoilRank = getattr(sys.modules[__name__], name)
    serve = methods.serve

    def serve_wrongly(worker: Any, call: Any, *rest: Any) -> Any:
        is_spoiled = getattr(worker, "group", None) is not None and worker.rank == _SPOILED
        return serve(_Rank(worker, wrong) if is_spoiled else worker, call, *rest)

    methods.serve = staticmethod(serve_wrongly)


class _Rank:
    """Stand-in for a worker, each of whose methods a mutant surrounds."""

    def __init__(self, worker: Any, wrong: SpoilRank) -> None:
        self._worker = worker
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        return lambda *arguments: self._wrong(self._worker, name, lambda: method(*arguments))


@spoiled_rank(caught_by="parallel/layers_split_over_two_ranks", says="nats below")
def has_a_shard_of_zeros(worker: Any, name: str, proceed: Proceed) -> Any:
    """One of the last parameters of the model is zeros on one rank."""
    if name == "gpus":
        list(worker.model.parameters())[-2].data.zero_()
    return proceed()


@spoiled_rank(caught_by="parallel/an_update_reaches_every_rank", says="nats below")
def updates_one_rank_alone(worker: Any, name: str, proceed: Proceed) -> Any:
    """One rank verifies new weights, and goes on with its old ones."""
    parameters = list(worker.model.parameters())
    if name == "prepare_weights":
        worker.of_before = [parameter.detach().clone() for parameter in parameters]
    result = proceed()
    if name in _LAST_OF_UPDATES:
        for parameter, before in zip(parameters, worker.of_before, strict=True):
            parameter.data.copy_(before)
    return result


@spoiled_rank(caught_by="parallel/a_push_reaches_every_rank", says=("nats below", "is not what was pushed"))
def takes_a_push_on_one_rank_alone(worker: Any, name: str, proceed: Proceed) -> Any:
    """One rank verifies a push, and goes on with its old weights."""
    return updates_one_rank_alone(worker, name, proceed)


@spoiled_rank(caught_by="parallel/an_adapter_reaches_every_rank", says="nats below")
def serves_an_adapter_on_one_rank_alone(worker: Any, name: str, proceed: Proceed) -> Any:
    """One rank's part of an adapter that comes as tensors is zeros."""
    result = proceed()
    if name == "stage_adapter":
        for adapter in worker.adapters.values():
            for tensor in adapter.tensors.values():
                tensor.zero_()
    return result


@spoiled_rank(caught_by="parallel/every_rank_gives_its_memory_back", says="the ranks differ after sleep")
def stays_awake_on_one_rank(worker: Any, name: str, proceed: Proceed) -> Any:
    """One rank takes no notice of sleep."""
    if name != "sleep":
        return proceed()
    _ = worker.receiver  # all ranks have to make it together, and sleep is the first to need it
    return None


@spoiled_rank(caught_by="parallel/every_rank_gives_its_memory_back", says="the ranks gave [")
def keeps_its_memory_on_one_rank(worker: Any, name: str, proceed: Proceed) -> Any:
    """One rank sleeps as the others do, and holds as much memory as before."""
    if name == "sleep":
        worker.held_asleep = [parameter.detach().clone() for parameter in worker.model.parameters()]
    return proceed()


@spoiled_rank(caught_by="parallel/every_rank_gives_its_memory_back", says="the ranks gave [")
def keeps_a_fifth_of_its_memory_on_one_rank(worker: Any, name: str, proceed: Proceed) -> Any:
    """One rank sleeps as the others do, and holds a fifth of its weights."""
    if name == "sleep":
        weights = [parameter.detach().flatten() for parameter in worker.model.parameters()]
        worker.held_asleep = [weight[: len(weight) // 5].clone() for weight in weights]
    return proceed()


@spoiled_rank(caught_by="parallel/an_update_reaches_every_rank", says="the ranks differ after")
def commits_another_version_on_one_rank(worker: Any, name: str, proceed: Proceed) -> Any:
    """One rank commits an update as another version."""
    result = proceed()
    if name in _LAST_OF_UPDATES:
        worker.committed = "another"
    return result
