# pyright: reportArgumentType=false
"""Lets vLLM's second model runner, which wants Triton, run without a GPU: in Triton's own interpreter. It is slow.

    VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=tests/support/triton-interpreter .venvs/vllm/bin/drivetrain conformance vllm

Python imports this before anything else, in every process. What vLLM has of
its own for top-k, top-p and grammars does not run there.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class _Driver:
    """What vLLM asks a backend for."""

    @staticmethod
    def is_active() -> bool:
        return True


class _Cpu:
    driver = _Driver


triton.backends.backends["cpu"] = _Cpu
