"""Fields of engines that start within a minute on a GPU: small CUDA graphs, no compiler, a cache of fixed size."""

from __future__ import annotations

from typing import Any, Final

ENVIRONMENT: Final = {
    # SGLang takes what others hold of a GPU for its own, and for an imbalance between two.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}
"""Environment variables of engines, unless they are set."""


def sglang_fields(graphs: list[int], *, share: float, cache_tokens: int, **engine_kwargs: Any) -> dict[str, Any]:
    """Fields for SGLang.

    Args:
        graphs: Batch sizes to capture graphs of.
        share: Fraction of the GPU's memory. The pool is small, but SGLang counts memory that other processes take while
            it starts.
        cache_tokens: Size of the KV cache.
        engine_kwargs: More of SGLang's own.
    """
    return {
        "attention_backend": "triton",
        "gpu_memory_utilization": share,
        "engine_kwargs": {
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": graphs,
            "max_total_tokens": cache_tokens,
            **engine_kwargs,
        },
    }


def vllm_fields(graphs: list[int], *, share: float, cache_bytes: int, **engine_kwargs: Any) -> dict[str, Any]:
    """Fields for vLLM.

    Args:
        graphs: Batch sizes to capture graphs of.
        share: Fraction of the GPU's memory that must be free when vLLM starts.
        cache_bytes: Size of the KV cache.
        engine_kwargs: More of vLLM's own.
    """
    return {
        "gpu_memory_utilization": share,
        "engine_kwargs": {
            "optimization_level": 0,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": graphs,
            },
            "kernel_config": {"enable_flashinfer_autotune": False},
            "kv_cache_memory_bytes": cache_bytes,
            **engine_kwargs,
        },
    }
