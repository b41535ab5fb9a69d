"""The complete conformance suite for the echo backend."""

from drivetrain_conformance.pytest_class import ConformanceTests
from drivetrain_echo.conformance import EchoSuite


class TestEcho(EchoSuite, ConformanceTests):
    """One test per case of the suite."""
