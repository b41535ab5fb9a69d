"""Check that an engine holds its weights, and computes, in the dtype that was asked for."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import numpy as np

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.harness.testbench import Bench, NoOracle
from drivetrain_conformance.references.oracle import token_logprobs
from drivetrain_conformance.references.tolerances import ROUGHEST

_PROMPTS: Final = 4
_TOKENS: Final = 60
"""Tokens of each answer; most of what a token looks at was decoded, too."""


_FLOATS: Final = frozenset({"float16", "bfloat16", "float32"})
"""Others are those of quantised weights."""


async def check_dtype(bench: Bench, engine: InferenceEngine) -> None:
    """Raise unless an engine reports the configuration's dtype, holds its matrices in it, and is as precise."""
    asked, dtype = engine.config.dtype, engine.model_info.dtype
    assert asked in ("auto", dtype), f"dtype={asked} was asked for: {dtype}"
    with suppress(UnsupportedCapability):
        held = {spec.dtype for spec in (await engine.weight_manifest()).tensors if len(spec.shape) > 1} & _FLOATS
        # A model may keep some in float32, such as its routers.
        assert not held or (dtype in held and held <= {dtype, "float32"}), f"it reports {dtype}, and holds {held}"
    await check_precision(bench, engine)


async def check_precision(bench: Bench, engine: InferenceEngine) -> None:
    """Raise if logprobs of a 16-bit engine are less precise than its dtype: a tolerance for the worst one hides that.

    The root mean square of the errors is compared with that of the oracle after rounding its weights in several ways.
    """
    if engine.model_info.dtype == "float32" or not engine.supports(Capability.LOGPROBS_RAW):
        return
    asked = SamplingParams(
        max_new_tokens=_TOKENS,
        ignore_eos=engine.supports(Capability.IGNORE_EOS),
        logprobs=0,
        logprobs_mode=LogprobsMode.RAW,
    )
    with suppress(NoOracle):
        errors: list[float] = []
        rounding: list[float] = []
        for completion in (await engine.generate(bench.prompts(_PROMPTS, engine=engine), asked)).completions:
            exact = bench.output_logprobs(completion)
            errors += np.subtract(completion.logprobs or [], exact).tolist()
            for rows in bench.rounded_output_logits(completion, engine):
                rounding += np.subtract(token_logprobs(rows, completion.token_ids), exact).tolist()
        ratio = _root_mean_square(errors) / (_root_mean_square(rounding) or 1.0)
        assert ratio <= ROUGHEST, (
            f"errors of {len(errors)} logprobs are {ratio:.2f} times those of weights rounded to "
            f"{engine.model_info.dtype}: {_root_mean_square(errors):.4f} nats; at most {ROUGHEST:g} times is that dtype"
        )


def _root_mean_square(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values else 0.0
