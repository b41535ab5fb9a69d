# pyright: reportMissingImports=false
"""Translate a completion to verl's ``TokenOutput``."""

from __future__ import annotations

from verl.workers.rollout.replica import TokenOutput

from drivetrain.types.outputs import Completion, FinishReason


def token_output(completion: Completion, version: str) -> TokenOutput:
    """Return a completion as verl's trainers take it.

    ``extra_fields`` has ``global_steps``, ``min_global_steps`` and ``max_global_steps``, the trainer's steps whose
    weights sampled the tokens, and ``weight_versions``, the spans as text: ``3:0-16 4:16-20``.

    Args:
        completion: The completion.
        version: The engine's current version, for a completion without tokens.
    """
    spans = completion.weight_versions
    steps = [step_of(span.version) for span in spans] or [step_of(version)]
    known = [step for step in steps if step is not None]
    return TokenOutput(
        token_ids=completion.token_ids,
        log_probs=completion.logprobs,
        stop_reason="aborted" if completion.finish_reason is FinishReason.ABORT else "completed",
        extra_fields={
            "global_steps": steps[-1],
            "min_global_steps": min(known, default=None),
            "max_global_steps": max(known, default=None),
            "weight_versions": " ".join(f"{span.version}:{span.start}-{span.end}" for span in spans),
            "num_cached_tokens": completion.cached_tokens,
        },
    )


def aborted(version: str) -> TokenOutput:
    """Return the output of a request that was turned away before it reached the engine."""
    step = step_of(version)
    return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": step})


def step_of(version: str) -> int | None:
    """Return the trainer's step that a weight version names; None for the weights that the engine started with."""
    return int(version) if version.isascii() and version.isdecimal() else None
