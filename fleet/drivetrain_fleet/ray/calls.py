"""Actors are made and called here: Ray adds methods at run time, so its types have none of them."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle


def make(actor_class: type, options: Mapping[str, object], *arguments: object) -> ActorHandle[object]:
    """Make an actor of a class, with Ray's options and the arguments of its constructor."""
    remote: Any = ray.remote(actor_class)
    made: ActorHandle[object] = remote.options(**options).remote(*arguments)
    return made


def call(actor: ActorHandle[object], method: str, *arguments: object) -> Awaitable[object]:
    """Call a method of an actor."""
    called: Awaitable[object] = getattr(actor, method).remote(*arguments)
    return called
