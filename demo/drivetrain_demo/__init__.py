"""The demo: a small policy trained with GRPO against any backend."""
