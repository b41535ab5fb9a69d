# pyright: reportArgumentType=false
"""Runs vLLM's second model runner, which needs Triton, without a GPU: in Triton's own interpreter. It is slow.

    VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=tests/support/triton-interpreter .venvs/vllm/bin/drivetrain conformance vllm

Python imports this module first, in every process. vLLM's own kernels for top-k, top-p and grammars do not run there.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class _Driver:
    """The part of a Triton driver that vLLM queries."""

    @staticmethod
    def is_active() -> bool:
        return True


class _Cpu:
    driver = _Driver


triton.backends.backends["cpu"] = _Cpu
