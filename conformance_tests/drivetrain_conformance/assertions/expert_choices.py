"""Compare the experts that tokens were routed to with those that the model's router ranks first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.outputs import Completion
from drivetrain_conformance.harness.testbench import Bench


def check_choices(
    bench: Bench, ranked: NDArray[np.float64], chosen: NDArray[np.int64], engine: InferenceEngine | None = None
) -> None:
    """Check that each token's experts are those of the highest logprobs.

    Args:
        bench: The case's bench.
        ranked: The router's logprobs, shape (tokens, MoE layers, experts).
        chosen: Shape (tokens, MoE layers, experts per token).
        engine: The engine that chose; default: the bench's.
    """
    assert ranked.shape[:2] == chosen.shape[:2], f"experts of shape {chosen.shape}, of a router of {ranked.shape}"
    tolerance = bench.tolerance(engine)
    for at, (layers, own_layers) in enumerate(zip(ranked, chosen, strict=True)):
        for layer, (row, own) in enumerate(zip(layers, own_layers, strict=True)):
            line = np.sort(row)[-len(own)]
            assert row[own].min() >= line - tolerance, (
                f"token {at} was routed in layer {layer} to {own.tolist()}; the router's order is "
                f"{np.argsort(-row).tolist()}"
            )


def experts_of(completion: Completion) -> NDArray[np.int64]:
    """Return the experts of a completion's tokens, shape (tokens, MoE layers, experts per token)."""
    assert completion.routed_experts is not None
    return completion.routed_experts.to_numpy().astype(np.int64)


def router_logprobs(bench: Bench, token_ids: Sequence[int], folder: Path | None = None) -> NDArray[np.float64]:
    """Return the logprobs of a model's router, by default the bench's; shape (tokens, MoE layers, experts)."""
    import torch
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder or bench.model, dtype=torch.float32)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([list(token_ids)]), output_router_logits=True, use_cache=False)
    layers = torch.stack([layer.reshape(len(token_ids), -1) for layer in output.router_logits], dim=1)
    return np.asarray(layers.double().log_softmax(-1).numpy())
