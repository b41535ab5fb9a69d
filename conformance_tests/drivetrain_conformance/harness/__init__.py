"""Run and judge cases: the test bench, the runner, the verdict."""
