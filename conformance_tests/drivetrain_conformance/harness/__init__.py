"""Running and judging a case: the test bench, the runner, the verdict."""
