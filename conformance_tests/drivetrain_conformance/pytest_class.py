"""The suite as a pytest class: a subclass names its backend, and pytest runs every case."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.checks.extras import from_extra

with from_extra("conformance", "the conformance suite"):
    import hypothesis  # noqa: F401  # cases import these two when they are collected
    import pytest
    import scipy  # noqa: F401

    from drivetrain_conformance.cases import all_cases
    from drivetrain_conformance.harness.case import Case
    from drivetrain_conformance.harness.runner import Runner
    from drivetrain_conformance.harness.suite import Suite
    from drivetrain_conformance.harness.verdict import Verdict

_OURS = ("test_case", "test_every_claim_was_seen_to_work", "pytest_generate_tests", "conformance_runner")


class ConformanceTests(Suite):
    """Run every case of the suite as one test.

    A subclass named ``Test…`` sets :attr:`backend`::

        class TestMyEngine(ConformanceTests):
            backend = "my-engine"

    A subclass may override :meth:`open_engine` and :meth:`oracle`. It cannot change, replace or leave out a test: leave
    a capability unclaimed if the backend lacks it, and list broken cases in :attr:`known_failures`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        changed = [name for name in vars(cls) if name in _OURS or name.startswith("test")]
        if changed:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(changed)}; the suite's tests are the same for every backend. "
                "Put tests of your own into a class of their own"
            )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test of each case."""
        if "case" in metafunc.fixturenames:
            cases = all_cases()
            metafunc.parametrize("case", cases, ids=[case.id for case in cases])

    @pytest.fixture(scope="class")
    def conformance_runner(self) -> Iterator[Runner]:
        """Keep one runner, with at most one engine open, for the whole class."""
        suite: type[Suite] = type(self)
        with Runner(suite()) as runner:
            yield runner

    def test_case(self, case: Case, conformance_runner: Runner) -> None:
        """A claimed capability works; an unclaimed one is refused."""
        result = conformance_runner.execute(case)
        if result.verdict is Verdict.NOT_RUN:
            pytest.skip(f"not run: {result.judgement.message}")
        if result.verdict.is_failure:
            raise AssertionError(f"{case.summary}\n{result.judgement.message}") from result.error

    def test_every_claim_was_seen_to_work(self, conformance_runner: Runner) -> None:
        """Every case ran, and each claimed capability has a case that passed."""
        left_out = {case.id for case in all_cases()} - conformance_runner.capability_results.cases
        assert not left_out, f"these cases did not run: {', '.join(sorted(left_out))}"
        failed = [
            item for item in conformance_runner.capability_results.conclude(complete=True) if item.verdict.is_failure
        ]
        assert not failed, "\n".join(f"{item.capability.value}: {item.message}" for item in failed)
