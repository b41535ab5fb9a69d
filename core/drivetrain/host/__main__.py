"""``python -m drivetrain.host``: what a trainer starts. Not for people."""

from __future__ import annotations

import argparse
import logging
import sys


def main() -> int:
    """Serve one engine, or answer one probe; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain.host", description=__doc__)
    parser.add_argument("--fd", type=int, help="socket that carries the calls")
    parser.add_argument("--watch-fd", type=int, help="socket that carries the heartbeats")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between heartbeats")
    parser.add_argument("--probe", action="store_true", help="configuration on stdin, what the engine can do on stdout")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if arguments.probe:
        from drivetrain.host.probe import answer

        return answer()
    if arguments.fd is None or arguments.watch_fd is None:
        parser.error("--fd and --watch-fd are needed; start an engine with drivetrain.create_engine instead")
    from drivetrain.host.server import serve

    return serve(arguments.fd, arguments.watch_fd, arguments.period)


if __name__ == "__main__":
    sys.exit(main())
