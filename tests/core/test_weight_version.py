"""Ask a server for its weight version over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from drivetrain import DeadlineExceeded, EngineError, InferenceEngine, InvalidRequest


@contextmanager
def server(answers: dict[str, object], *, answers_at_all: bool = True) -> Iterator[str]:
    may_answer = threading.Event()
    if answers_at_all:
        may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            may_answer.wait()
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            may_answer.set()
            http.shutdown()


@pytest.mark.parametrize("path", ["/weight_version", "/get_weight_version"])
async def test_the_version_is_read_where_servers_say_it(path: str) -> None:
    with server({path: {"weight_version": "step-7"}}) as endpoint:
        assert await InferenceEngine.get_remote_weight_version(endpoint) == "step-7"


async def test_a_server_that_does_not_say_is_a_typed_error() -> None:
    with server({}) as endpoint:
        with pytest.raises(EngineError, match="HTTP 404"):
            await InferenceEngine.get_remote_weight_version(endpoint)
    with pytest.raises(EngineError, match="cannot be reached"):
        await InferenceEngine.get_remote_weight_version("http://127.0.0.1:9")
    with pytest.raises(InvalidRequest, match="endpoint='ftp"):
        await InferenceEngine.get_remote_weight_version("ftp://x")


async def test_a_slow_server_is_not_waited_for() -> None:
    with server({"/weight_version": {"weight_version": "x"}}, answers_at_all=False) as endpoint:
        async with asyncio.timeout(60):
            with pytest.raises((DeadlineExceeded, EngineError)):
                await InferenceEngine.get_remote_weight_version(endpoint, timeout=0.3)
