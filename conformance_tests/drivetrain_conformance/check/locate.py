"""Find the first layer that an engine computes differently than the reference.

A residual layer whose weights are all zero adds nothing. With zeros in layers k and above, engine and reference compute
a model of k layers; pushed to both sides, the smallest k whose logprobs differ names the layer. It takes log2(layers)
pushes, and nothing of the engine but weight updates.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from torch import nn

from drivetrain.types.capability import Capability
from drivetrain_conformance.check.compared_answers import Answers, Measure
from drivetrain_conformance.check.comparison import Comparison
from drivetrain_conformance.check.weights import push

Tell = Callable[[str], None]


async def first_wrong_layer(answers: Answers, measure: Measure, whole: Comparison, tell: Tell) -> str:
    """Name the first layer that differs, and the part of it.

    Args:
        answers: The engine and the reference, which hold the same weights and disagree.
        measure: The measure by which they disagree.
        whole: Its result with all layers.
        tell: Called with each step.
    """
    layers = answers.reference.layers
    if not layers:
        return f"the layers of {type(answers.reference.module).__name__} cannot be told apart"

    async def alive(count: int, without: Sequence[nn.Module] = ()) -> Comparison:
        tell(f"comparing the first {count} of {len(layers)} layers")
        return await _with_zeros(answers, measure, [*layers[count:], *without], f"check-{count}-layers")

    nothing = await alive(0)
    if not np.isfinite(nothing.off).all():
        return "logprobs of zeroed layers are not finite, so layers cannot be compared one by one"
    if not nothing.agrees:
        return await _around_the_layers(answers, nothing)
    right, wrong, gap = 0, len(layers), whole
    agreed = nothing
    while wrong - right > 1:
        middle = (right + wrong) // 2
        found = await alive(middle)
        if _differs(found, nothing, whole):
            wrong, gap = middle, found
        else:
            right, agreed = middle, found

    async def differs_without(others: Sequence[nn.Module]) -> bool:
        return _differs(await alive(right + 1, others), nothing, whole)

    part = await _first_wrong_part(layers[right], differs_without)
    return (
        f"layer {right} of 0 to {len(layers) - 1}{f', {part}' if part else ''}: with it {gap.gap}, "
        f"with the layers before it alone {agreed.gap}"
    )


async def _with_zeros(answers: Answers, measure: Measure, zeroed: Sequence[nn.Module], version: str) -> Comparison:
    with answers.reference.zeroed(zeroed):
        await push(answers.engine, answers.reference, version)
        return await measure()


def _differs(found: Comparison, nothing: Comparison, whole: Comparison) -> bool:
    """Return True if this comparison is nearer to the whole model's, which is wrong, than to the one without layers.

    Errors of right layers are as large as transformers' own at any depth, so a fixed limit would tell less.
    """
    if found.plain is None:
        return not found.agrees
    return found.times_plain > math.sqrt(nothing.times_plain * whole.times_plain)


async def _first_wrong_part(layer: nn.Module, differs_without: Callable[[Sequence[nn.Module]], Awaitable[bool]]) -> str:
    """Return the name of the layer's first part that differs when its other parts are zero; "" if none does."""
    parts = {
        name: part for name, part in layer.named_children() if any(tensor.ndim > 1 for tensor in part.parameters())
    }
    for name, part in parts.items() if len(parts) > 1 else ():
        if await differs_without([other for other in parts.values() if other is not part]):
            return name
    return ""


async def _around_the_layers(answers: Answers, found: Comparison) -> str:
    """Tell an error of the head from an earlier one by hidden states, if the engine returns them."""
    seen = f"without any layer {found.gap}"
    if not answers.engine.supports(Capability.HIDDEN_STATES):
        return f"the embedding, the final norm or the head: {seen}"
    with answers.reference.zeroed(answers.reference.layers):
        off = await hidden_states_off(answers)
    place = "the head" if off <= answers.tolerance else "the embedding or the final norm"
    return f"{place}: {seen}, hidden states {off:.2g} of their largest value off"


async def hidden_states_off(answers: Answers) -> float:
    """Return the largest difference of hidden states, as a share of the reference's largest value."""
    worst = 0.0
    for completion, states in await answers.hidden_states():
        ids = [*completion.prompt_token_ids, *completion.token_ids]
        start = len(completion.prompt_token_ids) - 1
        expected = (await asyncio.to_thread(answers.reference.hidden_states, ids))[start : start + len(states)]
        worst = max(worst, float(np.abs(np.array(states) - expected).max() / max(1.0, np.abs(expected).max())))
    return worst
