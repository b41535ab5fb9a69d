"""Spans of requests, by OpenTelemetry."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from typing import Final

from opentelemetry import propagate, trace

from drivetrain_serving.http_layer.request_records import RequestRecord

_SESSION: Final = re.compile(r"^/sessions/[^/]+")
_NS: Final = 1_000_000_000


def span_maker() -> Callable[[RequestRecord], None]:
    """Return a function that makes a span of a request that has ended.

    The span's parent is the one that the request's ``traceparent`` names. It goes to the tracer provider of the
    process.
    """
    tracer = trace.get_tracer("drivetrain.serving", importlib.metadata.version("drivetrain"))

    def make(record: RequestRecord) -> None:
        began = round(record.began * _NS)
        span = tracer.start_span(
            _name(record),
            context=propagate.extract(record.headers),
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=began,
        )
        if record.error is not None and (record.status is None or record.status >= 500 or record.status == 200):
            span.set_status(trace.StatusCode.ERROR, record.error)
        span.end(began + round(record.seconds * _NS))

    return make


def _name(record: RequestRecord) -> str:
    """Name a span by its route, so that few names come of many sessions and wrong paths."""
    if record.status == 404:
        return record.method
    return f"{record.method} {_SESSION.sub('/sessions/{session}', record.path)}"


def _attributes(record: RequestRecord) -> dict[str, str | int | float | list[str]]:
    """Return the record's facts by the names of OpenTelemetry's conventions, and by our own where these have none."""
    facts: dict[str, str | int | float | list[str]] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "drivetrain.complete": record.complete,
    }
    if record.status is not None:
        facts["http.response.status_code"] = record.status
    if record.error is not None:
        facts["error.type"] = record.error
    if record.model is not None:
        facts |= {
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.generated_tokens,
            "gen_ai.response.finish_reasons": list(record.finish_reasons.elements()),
            "drivetrain.request_id": record.request_id,
            "drivetrain.cached_tokens": record.cached_tokens,
            "drivetrain.weight_versions": list(record.weight_versions),
        }
    if record.first_token_seconds is not None:
        facts["drivetrain.first_token_seconds"] = record.first_token_seconds
    return facts
