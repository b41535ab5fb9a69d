"""Experts and sampling masks of a turn: asked for by a request or the server, and packed for the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_serving.config import SessionConfig
from drivetrain_serving.gateway.answer_types import PackedExperts, PackedMask
from drivetrain_serving.vllm.json_objects import Json

FIELDS: Final = ("return_routed_experts", "return_prompt_routed_experts", "return_sampling_mask")
"""Fields of a session's requests, with the same names and meanings as in SamplingParams."""


def split_extras(body: Mapping[str, object], config: SessionConfig) -> tuple[dict[str, bool], Json]:
    """Return the sampling parameters of what a turn records beside its ids, and the other fields of its request.

    A field that the request does not give has the server's default.

    Raises:
        InvalidRequest: A field is neither a boolean nor null.
    """
    defaults = {"return_routed_experts": config.routed_experts, "return_sampling_mask": config.sampling_mask}
    asked: dict[str, bool] = {}
    for name in FIELDS:
        given = body.get(name)
        if given is not None and not isinstance(given, bool):
            raise InvalidRequest(f"{name}={shown(given)}: expected true, false or null", field=name)
        if defaults.get(name, False) if given is None else given:
            asked[name] = True
    return asked, {name: value for name, value in body.items() if name not in FIELDS}


def packed_experts(experts: RoutedExperts | None) -> PackedExperts | None:
    """Return experts as the trajectory has them; None if none were recorded."""
    if experts is None:
        return None
    return {
        "shape": [len(experts), experts.layers, experts.experts_per_token],
        "dtype": "uint8" if experts.bytes_per_expert == 1 else "uint16",
        "data": experts.packed,
    }


def packed_mask(mask: SamplingMask | None) -> PackedMask | None:
    """Return a mask as the trajectory has it; None if none was recorded."""
    return None if mask is None else {"vocab_size": mask.vocab_size, "positions": len(mask), "data": mask.packed}
