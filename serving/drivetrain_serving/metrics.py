"""Metrics of the served engine for Prometheus: of the server as a whole, and of each engine of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from drivetrain.backend.base import EngineStats
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import EngineState
from drivetrain.errors import DrivetrainError
from drivetrain_fleet import InferenceEngineClient


@dataclass(frozen=True, slots=True)
class _Asked:
    """An engine, and its statistics; None instead of statistics if the engine could not answer."""

    engine: InferenceEngine
    stats: EngineStats | None


async def metrics_of(engine: InferenceEngine, answers: Mapping[str, Mapping[int, int]]) -> bytes:
    """Return the metrics of a server, in Prometheus' text format.

    ``drivetrain_…`` is of the server as a whole, and ``drivetrain_engine_…`` of one engine, with the label ``engine``.

    Args:
        engine: The engine or fleet that is served.
        answers: Route → status → number of answers.
    """
    engines = engine.engines if isinstance(engine, InferenceEngineClient) else {"engine-0": engine}
    whole, *each = await asyncio.gather(_asked(engine), *(_asked(one) for one in engines.values()))
    registry = CollectorRegistry()
    registry.register(_Answers(answers))
    registry.register(_Families("drivetrain", {(): whole}, ()))
    by_label: dict[tuple[str, ...], _Asked] = {(name,): one for name, one in zip(engines, each, strict=True)}
    registry.register(_Families("drivetrain_engine", by_label, ("engine",)))
    return generate_latest(registry)


async def _asked(engine: InferenceEngine) -> _Asked:
    try:
        return _Asked(engine, await engine.stats())
    except DrivetrainError:  # an engine that cannot answer still has a state, which gives the reason
        return _Asked(engine, None)


class _Answers(Collector):
    """The number of answers by route and status."""

    def __init__(self, answers: Mapping[str, Mapping[int, int]]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        requests = CounterMetricFamily(
            "drivetrain_http_requests", "Requests whose answer began.", labels=["route", "status"]
        )
        for route, by_status in self._answers.items():
            for status, number in by_status.items():
                requests.add_metric([route, str(status)], number)
        yield requests


class _Families(Collector):
    """The metrics of several engines.

    Args:
        prefix: Begins each metric's name.
        engines: Label values → engine.
        labels: Names of the labels.
    """

    def __init__(self, prefix: str, engines: Mapping[tuple[str, ...], _Asked], labels: tuple[str, ...]) -> None:
        self._prefix = prefix
        self._engines = engines
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._states()
        yield from self._loads()
        yield from self._samples()
        yield from self._times()

    def _gauge(self, name: str, says: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_{name}", says, labels=[*self._labels, *more])

    def _counter(self, name: str, says: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"{self._prefix}_{name}", says, labels=[*self._labels, *more])

    def _states(self) -> Iterator[Metric]:
        state = self._gauge("state", "1 for the engine's state.", "state")
        version = InfoMetricFamily(f"{self._prefix}_weight", "The weights that are served.", labels=self._labels)
        adapters = self._gauge("lora_adapters", "LoRA adapters that are loaded.")
        for labels, asked in self._engines.items():
            for one in EngineState:
                state.add_metric([*labels, one.value], one is asked.engine.state)
            version.add_metric(labels, {"version": asked.engine.get_weight_version()})
            adapters.add_metric(labels, len(asked.engine.parts.loaded_adapters.names))
        yield from (state, version, adapters)

    def _loads(self) -> Iterator[Metric]:
        running = self._gauge("requests_running", "Requests in the batch.")
        waiting = self._gauge("requests_waiting", "Requests that are not yet in the batch.")
        cache = self._gauge("kv_cache_bytes", "Memory held for KV cache.")
        weights = self._gauge("weight_bytes", "Memory held for weights.")
        for labels, asked in self._engines.items():
            stats = asked.stats
            running.add_metric(labels, nan if stats is None else stats.running)
            waiting.add_metric(labels, nan if stats is None else stats.waiting)
            cache.add_metric(labels, nan if stats is None else stats.kv_cache_bytes)
            weights.add_metric(labels, nan if stats is None else stats.weight_bytes)
        yield from (running, waiting, cache, weights)

    def _samples(self) -> Iterator[Metric]:
        ended = self._counter("completions", "Completions that ended, by reason.", "finish_reason")
        prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        hits = self._counter("prefix_cache_hit_tokens", "Tokens of prompts that the prefix cache had.")
        generated = self._counter("generation_tokens", "Tokens that were sampled.")
        for labels, asked in self._engines.items():
            counts = asked.engine.parts.in_flight.counts
            for reason, number in counts.ended.items():
                ended.add_metric([*labels, reason], number)
            prompt.add_metric(labels, counts.prompt_tokens)
            hits.add_metric(labels, counts.cached_tokens)
            generated.add_metric(labels, counts.generated_tokens)
        yield from (ended, prompt, hits, generated)

    def _times(self) -> Iterator[Metric]:
        pauses = self._counter("pauses", "Pauses that began.")
        paused = self._counter("pause_seconds", "Seconds in pauses.")
        sleeps = self._counter("sleeps", "Sleeps that began.")
        asleep = self._counter("sleep_seconds", "Seconds asleep.")
        updates = self._counter("weight_updates", "Weight updates that ended.", "outcome")
        updating = self._counter("weight_update_seconds", "Seconds in weight updates.")
        for labels, asked in self._engines.items():
            controller = asked.engine.parts.controller
            times = controller.times
            pauses.add_metric(labels, times.paused.times)
            paused.add_metric(labels, times.paused.seconds)
            sleeps.add_metric(labels, times.asleep.times)
            asleep.add_metric(labels, times.asleep.seconds)
            updates.add_metric([*labels, "committed"], controller.status.updates)
            updates.add_metric([*labels, "failed"], times.failed_updates)
            updating.add_metric(labels, times.updating.seconds)
        yield from (pauses, paused, sleeps, asleep, updates, updating)
