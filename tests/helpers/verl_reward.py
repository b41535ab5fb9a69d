"""A reward by which verl's optimizer changes the weights at odd steps alone. verl loads this file by its path."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

_spec = importlib.util.spec_from_file_location("verl_grpo", Path(__file__).parents[2] / "examples/verl_grpo.py")
assert _spec is not None
assert _spec.loader is not None
verl_grpo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(verl_grpo)


def score_at_odd_steps(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object], folder: str
) -> dict[str, object]:
    """Return the example's score at odd steps, and 0 for each response of an even one: no response has an advantage."""
    result = verl_grpo.compute_score(data_source, solution_str, ground_truth, extra_info, folder)
    step = int(str(extra_info["index"])) // verl_grpo.ROWS + 1
    return {**result, "score": result["score"] if step % 2 else 0.0}
