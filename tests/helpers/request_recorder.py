"""An HTTP server that records requests and gives prepared answers: the far end of a trainer's engine layer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    path: str
    query: dict[str, list[str]]
    body: Any


@dataclass
class Recorder:
    """Requests that came, and the answers that the next ones get.

    ``answer`` makes the body of an answer from a request. ``statuses`` has, by path, the statuses of the next answers;
    after them it is 200. Status 0 closes the connection without an answer.
    """

    answer: Callable[[Request], Any]
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    statuses: dict[str, list[int]] = field(default_factory=dict)

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests to ``path``."""
        return [request.body for request in self.requests if request.path == path]

    def paths(self) -> list[str]:
        """Paths in the order of the requests."""
        return [request.path for request in self.requests]


@contextmanager
def recording(answer: Callable[[Request], Any]) -> Iterator[Recorder]:
    """Serve on a free port of this machine until the block ends."""
    recorder = Recorder(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # its output is no part of a test's
            del format, args

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            self._reply(json.loads(self.rfile.read(size)) if size else None)

        def _reply(self, body: Any) -> None:
            parts = urlsplit(self.path)
            request = Request(parts.path, parse_qs(parts.query), body)
            recorder.requests.append(request)
            waiting = recorder.statuses.get(request.path)
            status = waiting.pop(0) if waiting else 200
            if status == 0:
                self.close_connection = True
                return
            error = {"error": {"message": f"status {status}"}}
            data = json.dumps(recorder.answer(request) if status == 200 else error).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            with suppress(BrokenPipeError, ConnectionResetError):  # a client that gave up
                self.end_headers()
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    recorder.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
