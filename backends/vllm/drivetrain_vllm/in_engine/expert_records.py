# pyright: reportMissingImports=false
"""Records the experts of each token with vLLM's first model runner, which serves on a CPU.

Newer releases record them with their second runner only. Its connector, which keeps the experts of cached blocks by
their hashes, needs of a runner what the first one knows too: the batch of each step, and the scheduler's message to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from drivetrain_vllm.translate import records_experts_by_block

_CONNECTOR: Final = "_drivetrain_experts"
"""Attribute of a model runner."""


def register() -> None:
    """Hook the first model runner."""
    if not records_experts_by_block():
        return
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    VllmConfig._verify_aux_output_compatibility = _allowing(VllmConfig._verify_aux_output_compatibility)
    GPUModelRunner.initialize_kv_cache = _connecting(GPUModelRunner.initialize_kv_cache)
    GPUModelRunner._update_states = _beginning(GPUModelRunner._update_states)
    GPUModelRunner.sample_tokens = _recording(GPUModelRunner.sample_tokens)


class _OfSecondRunner:
    """A configuration of vLLM as if it had its second model runner."""

    use_v2_model_runner: Final = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _allowing(original: Callable[..., None]) -> Callable[..., None]:
    """Let vLLM check all else that its record of experts needs, on a CPU."""

    @wraps(original)
    def verify(config: Any) -> None:
        from vllm.platforms import current_platform

        original(_OfSecondRunner(config) if current_platform.is_cpu() else config)

    return verify


def _connector_of(runner: Any) -> Any:
    return runner.__dict__.get(_CONNECTOR)


def _connecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def initialize_kv_cache(runner: Any, kv_cache_config: Any, is_profiling: bool = False, **named: Any) -> Any:
        result = original(runner, kv_cache_config, is_profiling, **named)
        if runner.vllm_config.aux_output_config.enabled and not is_profiling:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            made = get_aux_output_connector(runner.get_model(), runner.vllm_config, kv_cache_config)
            setattr(runner, _CONNECTOR, made)
        return result

    return initialize_kv_cache


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_states(runner: Any, scheduler_output: Any) -> Any:
        connector = _connector_of(runner)
        if connector is not None:
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return original(runner, scheduler_output)

    return update_states


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give a step's output the experts of its tokens."""

    @wraps(original)
    def sample_tokens(runner: Any, grammar_output: Any) -> Any:
        connector = _connector_of(runner)
        if connector is None or runner.execute_model_state is None:
            return original(runner, grammar_output)
        batch = runner.input_batch
        count = batch.num_reqs
        step = SimpleNamespace(
            req_ids=list(batch.req_ids),
            query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
        )
        is_drawn = ~runner.discard_request_mask.np[:count]
        pending = connector.prepare_output(step)
        output = original(runner, grammar_output)
        if pending is None:  # a rank whose output is not read
            return output
        pending.enqueue_cpu_copy(is_drawn.astype(np.int32), np.zeros(count, dtype=np.int32))

        def add(arrived: Any) -> Any:
            arrived.aux_output_connector_output = pending.process_output()
            return arrived

        if not hasattr(output, "get_output"):
            return add(output)
        get_output: Callable[[], Any] = output.get_output
        output.get_output = lambda: add(get_output())
        return output

    return sample_tokens
