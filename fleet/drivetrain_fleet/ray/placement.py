"""Bundles and resources of each engine, checked before any actor is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real

import ray
from ray.util.placement_group import PlacementGroup

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import EngineConfig

_SLACK = 1e-6
"""Ray counts resources in steps of 0.0001."""


@dataclass(frozen=True, slots=True)
class Place:
    """The bundles of one engine."""

    bundles: tuple[tuple[int, float], ...]
    """Index of each bundle, and the GPUs that are taken of it. The engine's actor is in the first one.

    Without a placement group there is one, with the index -1.
    """


def gpus_of(config: EngineConfig, given: float | None) -> float:
    """Return how many GPUs an engine takes.

    Args:
        config: The engine's configuration.
        given: Number that the caller asks for. None: one for each rank, but none if the engine or the cluster has no
            GPUs.
    """
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    if given is None:
        device = config.device or ("cuda" if ray.cluster_resources().get("GPU") else "cpu")
        return 0.0 if device.startswith("cpu") else float(ranks)
    return check_amount("gpus_per_engine", given)


def check_amount(field: str, given: float) -> float:
    """Raise :class:`InvalidConfig` if ``given`` is no amount of a resource."""
    if not isinstance(given, Real) or isinstance(given, bool) or not isfinite(given) or given < 0:
        raise InvalidConfig(f"{field}={shown(given)}: expected a number from 0", field=field)
    if field == "gpus_per_engine" and given > 1 and given != int(given):
        raise InvalidConfig(f"{field}={given}: Ray gives whole GPUs, or a part of one", field=field)
    return float(given)


def places(
    count: int,
    gpus: float,
    cpus: float,
    group: PlacementGroup | None,
    indices: Sequence[int | Sequence[int]] | None,
) -> list[Place]:
    """Return the place of each engine.

    Args:
        count: Number of engines.
        gpus: GPUs of each.
        cpus: CPUs of each engine's actor.
        group: The placement group of the bundles; None: Ray chooses a node for each engine.
        indices: For each engine its bundle or bundles; None: the first free ones.

    Raises:
        InvalidConfig: The placement group has too few bundles, an index is out of range, or a bundle is too small.
    """
    if group is None:
        if indices is not None:
            raise InvalidConfig(
                "bundle_indices without placement_group: give the placement group that they belong to",
                field="bundle_indices",
            )
        return [Place(((-1, gpus),))] * count
    if not isinstance(group, PlacementGroup):
        raise InvalidConfig(
            f"placement_group={shown(group)}: expected what ray.util.placement_group() returns", field="placement_group"
        )
    specs = group.bundle_specs
    chosen = _first_free(count, gpus, specs) if indices is None else _checked(count, indices, len(specs))
    left = [{"CPU": 0.0, "GPU": 0.0, **spec} for spec in specs]
    return [_place(f"engine {number}", bundles, gpus, cpus, left) for number, bundles in enumerate(chosen)]


def _first_free(count: int, gpus: float, specs: Sequence[Mapping[str, float]]) -> list[tuple[int, ...]]:
    """Give each engine the next bundles that together have its GPUs."""
    chosen: list[tuple[int, ...]] = []
    free = iter(range(len(specs)))
    for number in range(count):
        bundles: list[int] = []
        while not bundles or sum(specs[index].get("GPU", 0.0) for index in bundles) < gpus - _SLACK:
            index = next((one for one in free if not gpus or specs[one].get("GPU")), None)
            if index is None:
                raise InvalidConfig(
                    f"the placement group has too few bundles: its {len(specs)} hold {number} of {count} engines of "
                    f"{gpus:g} GPUs each; make it larger, or start fewer engines",
                    field="placement_group",
                )
            bundles.append(index)
        chosen.append(tuple(bundles))
    return chosen


def _checked(count: int, indices: Sequence[int | Sequence[int]], bundles: int) -> list[tuple[int, ...]]:
    field = "bundle_indices"
    if isinstance(indices, str) or not isinstance(indices, Sequence) or len(indices) != count:
        raise InvalidConfig(
            f"{field}={shown(indices)}: expected {count} entries, one for each engine: an index, or several",
            field=field,
        )
    chosen: list[tuple[int, ...]] = []
    for number, entry in enumerate(indices):
        given = (entry,) if isinstance(entry, int) else tuple(entry) if isinstance(entry, Sequence) else ()
        if not given or len(set(given)) < len(given):
            raise InvalidConfig(f"{field}: engine {number} has {shown(entry)}; expected different indices", field=field)
        for index in given:
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < bundles:
                raise InvalidConfig(
                    f"{field}: engine {number} has the index {shown(index)}; the placement group has the bundles 0 to "
                    f"{bundles - 1}",
                    field=field,
                )
        chosen.append(given)
    return chosen


def _place(engine: str, bundles: tuple[int, ...], gpus: float, cpus: float, left: list[dict[str, float]]) -> Place:
    """Take an engine's resources from its bundles."""
    first = bundles[0]
    if not gpus and len(bundles) > 1:
        raise InvalidConfig(
            f"bundle_indices: {engine} takes no GPU, and has {len(bundles)} bundles; give it one",
            field="bundle_indices",
        )
    taken: list[tuple[int, float]] = []
    wanted = gpus
    for index in bundles:
        share = min(wanted, left[index]["GPU"])
        share = share if len(bundles) == 1 else float(int(share + _SLACK))
        taken.append((index, share))
        left[index]["GPU"] -= share
        wanted -= share
    names = ", ".join(map(str, bundles))
    if wanted > _SLACK or (gpus and not all(share for _, share in taken)):
        raise InvalidConfig(
            f"{engine} takes {gpus:g} GPUs of bundle {names}, which has {gpus - wanted:g} for it; give it other "
            "bundles, or change gpus_per_engine",
            field="bundle_indices",
        )
    if left[first]["CPU"] < cpus - _SLACK:
        raise InvalidConfig(
            f"{engine} takes {cpus:g} CPUs of bundle {first}, which has {left[first]['CPU']:g} for it; make "
            "the bundle larger, or change cpus_per_engine",
            field="cpus_per_engine",
        )
    left[first]["CPU"] -= cpus
    return Place(tuple(taken))


def require_one_node(made: Sequence[Place], nodes: Mapping[int, str]) -> None:
    """Raise :class:`InvalidConfig` if the bundles of one engine are on several nodes.

    Args:
        made: The places.
        nodes: The node of each bundle, by index.
    """
    for number, place in enumerate(made):
        its = {index: nodes[index] for index, _ in place.bundles if index >= 0}
        if len(set(its.values())) > 1:
            where = ", ".join(f"bundle {index} on {node[:8]}" for index, node in its.items())
            raise InvalidConfig(
                f"bundle_indices: engine {number} is on one node, and its bundles are on several: {where}; give it "
                "bundles of one node, or make the group with the strategy STRICT_PACK",
                field="bundle_indices",
            )
