"""The servers that a suite keeps: idle ones are stopped to make room."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from drivetrain import create_engine
from drivetrain.testing import tiny_model
from drivetrain_conformance.harness import server_suite
from drivetrain_conformance.harness.server_suite import Launch, Servers

ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def launch(number: int) -> Launch:
    return Launch([sys.executable, "-c", ANSWERS], {"number": number}, "/")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr(server_suite, "_AT_ONCE", 2)
    made = Servers()
    yield made
    made.close()


@pytest.mark.slow
def test_of_many_the_one_that_was_used_longest_ago_gives_way(running: Servers) -> None:
    first, second = running.get(launch(1)), running.get(launch(2))
    assert running.get(launch(1)) is first
    third = running.get(launch(3))
    assert [server.is_alive for server in (first, second, third)] == [True, False, True]
    assert running.get(launch(2)) is not second


@pytest.mark.slow
async def test_one_to_which_an_engine_is_connected_stays(running: Servers) -> None:
    engine = create_engine("transformers", model=str(tiny_model("qwen2")), isolation="inline")
    first = running.get(launch(1))
    first.connected(engine)
    async with engine:
        second, third = running.get(launch(2)), running.get(launch(3))
        assert [server.is_alive for server in (first, second, third)] == [True, False, True]
    running.get(launch(4))
    assert not first.is_alive, "its engine is closed"
