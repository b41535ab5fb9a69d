"""Host processes that serve a drawn mutant, so that cases which kill or freeze a host judge it as well.

A host finds backends through their entry points, and a drawn mutant has none: it is drawn again in the host.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from drivetrain.backend.registry import load_backend
from drivetrain.process.__main__ import main as serve
from drivetrain.process.host_launcher import hosts_launched_by
from drivetrain.types.capability import Capability
from drivetrain_conformance.mutants.drawn.draw import Drawing
from drivetrain_conformance.mutants.drawn.watched import Probe, probed_backend, wrong_backend
from drivetrain_conformance.mutants.run import registered


@contextmanager
def hosts_of(drawing: Drawing, *, mutant: str = "", seen: str = "") -> Iterator[None]:
    """Serve a mutant in host processes, or the correct backend, which appends the names of mutants seen to a file."""

    def launch(arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
        claimed = [capability.name for capability in drawing.claimed]
        said = json.dumps({"drawing": {**asdict(drawing), "claimed": claimed}, "mutant": mutant, "seen": seen})
        return subprocess.Popen(
            [sys.executable, "-m", __name__, said, *(argument.format(*fds) for argument in arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=environment,
            pass_fds=fds,
            start_new_session=True,
        )

    with hosts_launched_by(launch):
        yield


def main() -> int:
    """Run a host process with the backend that :func:`hosts_of` describes in the arguments."""
    said, *arguments = sys.argv[1:]
    told = json.loads(said)
    fields = told["drawing"]
    drawing = Drawing(**{**fields, "claimed": frozenset(Capability[name] for name in fields["claimed"])})
    correct, pool = load_backend(drawing.backend), drawing.mutants()
    if told["mutant"]:
        (mutant,) = (one for one in pool if one.name == told["mutant"])
        spoiled = wrong_backend(correct, mutant)
    else:
        spoiled = probed_backend(correct, Probe(pool, told["seen"]))
    with registered(spoiled):
        return serve(arguments)


if __name__ == "__main__":
    sys.exit(main())
