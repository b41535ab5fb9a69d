"""The main job: a small policy trained with GRPO against any backend."""
