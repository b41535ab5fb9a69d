"""Records of requests: the route, the time and tokens taken, and the outcome. No prompts, texts or keys."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drivetrain.types.outputs import Completion

LOGGER: Final = logging.getLogger("drivetrain.serving.requests")
_LONGEST: Final = 256
"""Most characters of a path or a name that a client chose."""


class RequestRecord:
    """One request.

    Args:
        scope: The request, as ASGI gives it.
    """

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"][:_LONGEST]
        self.headers = Headers(scope=scope)
        self.began = time.time()
        self.seconds = 0.0
        self.status: int | None = None
        """None if the server ended before it answered."""
        self.complete = False
        """True if the answer was sent to its end."""
        self.error: str | None = None
        """Class of the error that ended the request."""
        self.model: str | None = None
        """The model or adapter that generated; None if the request reached no engine."""
        self.request_id = ""
        self.prompts = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.first_token_seconds: float | None = None
        """Seconds to the first token, or to the last one if the answer is not streamed."""
        self.finish_reasons: Counter[str] = Counter()
        self.weight_versions: dict[str, None] = {}
        self._clock = time.perf_counter()

    def generates(self, model: str, request_ids: Sequence[str]) -> None:
        """Record the model, the number of prompts, and the first prompt's request id."""
        self.model = model[:_LONGEST]
        self.request_id = request_ids[0][:_LONGEST]
        self.prompts = len(request_ids)
        self.error = None  # of an earlier call for the same request

    def sampled(self, tokens: int) -> None:
        """Record sampled tokens."""
        self.generated_tokens += tokens
        if self.first_token_seconds is None and tokens:
            self.first_token_seconds = time.perf_counter() - self._clock

    def completed(self, completion: Completion) -> None:
        """Record the end of a completion, whose tokens :meth:`sampled` has recorded."""
        if completion.sample_index == 0:
            self.prompt_tokens += len(completion.prompt_token_ids)
            self.cached_tokens += completion.cached_tokens
        self.finish_reasons[completion.finish_reason.value] += 1
        self.weight_versions |= {span.version: None for span in completion.weight_versions}

    def failed(self, error: Exception) -> None:
        """Record the error that ended the request."""
        self.error = type(error).__name__

    def ended(self) -> None:
        """Record the duration of the request."""
        self.seconds = time.perf_counter() - self._clock

    def described(self) -> Mapping[str, object]:
        """Return the record's facts."""
        facts: dict[str, object] = {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "complete": self.complete,
            "seconds": round(self.seconds, 6),
            "error": self.error,
        }
        if self.model is None:
            return facts
        first = self.first_token_seconds
        return facts | {
            "request_id": self.request_id,
            "model": self.model,
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "first_token_seconds": None if first is None else round(first, 6),
            "finish_reasons": dict(self.finish_reasons),
            "weight_versions": list(self.weight_versions),
        }


RECORD: Final[ContextVar[RequestRecord | None]] = ContextVar("drivetrain_request_record", default=None)
"""The record of the request that is being answered; None if records are off."""


class RequestRecords:
    """Middleware that records each request.

    Args:
        app: The application.
        observers: Called with the record when the request has ended.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[RequestRecord], None]]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope)

        async def noting(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                record.complete = True

        token = RECORD.set(record)
        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            record.status = 500
            record.failed(error)
            raise
        finally:
            RECORD.reset(token)
            record.ended()
            for observer in self._observers:
                observer(record)


def log_to_stderr() -> None:
    """Write the lines of :func:`log_record` to stderr as they are, unlike the other messages."""
    LOGGER.addHandler(logging.StreamHandler())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


def log_record(record: RequestRecord) -> None:
    """Log a request as one line of JSON."""
    LOGGER.info(json.dumps({"time": datetime.now(UTC).isoformat(), **record.described()}))
