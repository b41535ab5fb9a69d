"""The conformance suite, every case of it, for the echo backend."""

from drivetrain_conformance.pytest_class import ConformanceTests
from drivetrain_echo.conformance import EchoSuite


class TestEcho(EchoSuite, ConformanceTests):
    """One test for each case; which they are is the suite's business."""
