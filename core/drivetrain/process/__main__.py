"""``python -m drivetrain.process``: the host process that a trainer starts. Not for people."""

from __future__ import annotations

import argparse
import logging
import sys


def main(given: list[str] | None = None) -> int:
    """Serve one engine or answer one probe; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain.process", description=__doc__)
    parser.add_argument("--fd", type=int, help="file descriptor of the call socket")
    parser.add_argument("--watch-fd", type=int, help="file descriptor of the heartbeat socket")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between heartbeats")
    parser.add_argument(
        "--patience", type=float, default=10.0, help="seconds after which a stopped process counts as lost"
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="read a configuration from stdin, print the engine's capabilities to stdout",
    )
    arguments = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if arguments.probe:
        from drivetrain.process.capability_probe import answer

        return answer()
    if arguments.fd is None or arguments.watch_fd is None:
        parser.error("--fd and --watch-fd are needed; start an engine with drivetrain.create_engine instead")
    from drivetrain.process.host_loop import serve

    return serve(arguments.fd, arguments.watch_fd, arguments.period, arguments.patience)


if __name__ == "__main__":
    sys.exit(main())
