"""The routes ``/`` and ``/status``: the state of the server for people."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from drivetrain.errors import DrivetrainError
from drivetrain_fleet import InferenceEngineClient
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.route_docs import documented
from drivetrain_serving.other_processes import Counted
from drivetrain_serving.served_engine import ServedEngine

_INLINE: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class EngineFacts(TypedDict):
    """One engine of a fleet."""

    name: str
    state: str
    details: str
    weight_version: str | None
    samples: int
    tokens: int
    generated_tokens: int


class Status(TypedDict):
    """Answer of ``/status``."""

    model: str
    backend: str
    state: str
    details: str
    weight_version: str
    running: int | None
    waiting: int | None
    generated_tokens: int
    tokens_per_second: float
    uptime_seconds: float
    engines: list[EngineFacts]


class StatusRoutes:
    """The page, and the facts that its script asks for.

    The page itself holds no facts, so that a browser can open it without a key; it asks its reader for the key if
    ``/status`` wants one.
    """

    def __init__(self, served: ServedEngine) -> None:
        self._served = served
        page = files("drivetrain_serving.status").joinpath("page.html").read_text(encoding="utf-8")
        self._page = page.encode()
        self._headers = {
            "content-security-policy": policy_of(page),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    @documented(statuses=(), media=("text/html",))
    async def page(self, request: Request) -> Response:
        """Answer GET ``/``."""
        del request
        return Response(self._page, media_type="text/html", headers=self._headers)

    @documented(statuses=(), answer=Status)
    async def status(self, request: Request) -> Response:
        """Answer GET ``/status``."""
        del request
        engine, traffic = self._served.engine, self._served.traffic
        try:
            stats = await engine.stats()
        except DrivetrainError:  # e.g. a failed engine: the state on the page says why there are no counts
            running = waiting = None
        else:
            running, waiting = stats.running, stats.waiting
        counted = sum(await self._served.others.counts(), Counted({}, traffic.generated, traffic.per_second()))
        fleet = engine if isinstance(engine, InferenceEngineClient) else None
        counts = {} if fleet is None else {name: one.parts.in_flight.counts for name, one in fleet.engines.items()}
        facts: Status = {
            "model": self._served.name,
            "backend": engine.config.backend,
            "state": engine.state.value,
            "details": engine.status.describe(),
            "weight_version": engine.get_weight_version(),
            "running": running,
            "waiting": waiting,
            "generated_tokens": counted.generated,
            "tokens_per_second": counted.tokens_per_second,
            "uptime_seconds": traffic.uptime(),
            "engines": [
                {
                    "name": member.name,
                    "state": member.health.value,
                    "details": member.why,
                    "weight_version": member.version,
                    "samples": member.samples,
                    "tokens": member.tokens,
                    "generated_tokens": counts[member.name].generated_tokens,
                }
                for member in (() if fleet is None else fleet.members)
            ],
        }
        answer = json_answer(facts)
        answer.headers["cache-control"] = "no-store"
        return answer


def policy_of(page: str) -> str:
    """Return a Content-Security-Policy that allows the page's own style and script, and requests to its server."""
    digests = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in _INLINE.findall(page)
    }
    return (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; script-src 'sha256-{digests['script']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
