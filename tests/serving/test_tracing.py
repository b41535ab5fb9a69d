"""OpenTelemetry's spans of requests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig
from engines import HANGING, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TOKENS: dict[str, object] = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """The spans of this process, whose provider can be set once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    exporter.clear()
    yield exporter
    exporter.clear()


@pytest_asyncio.fixture(loop_scope="session")
async def traced(engine: InferenceEngine, spans: InMemorySpanExporter) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(port=0, served_model_name=("policy",), trace_requests=True)
    async with Server(engine, config) as server, httpx.AsyncClient(base_url=server.url, timeout=HANGING) as client:
        yield client


async def only(spans: InMemorySpanExporter) -> ReadableSpan:
    await until(lambda: len(spans.get_finished_spans()) > 0)
    (span,) = spans.get_finished_spans()
    spans.clear()
    return span


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_below_its_callers(
    traced: httpx.AsyncClient, spans: InMemorySpanExporter, stream: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": [5, 6], "n": 2, "stream": stream, **TOKENS}
    assert (await traced.post("/v1/completions", json=body, headers=headers)).status_code == 200
    span = await only(spans)
    assert (span.name, span.kind) == ("POST /v1/completions", trace.SpanKind.SERVER)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    expected = {
        "http.response.status_code": 200,
        "gen_ai.request.model": "policy",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "drivetrain.weight_versions": ("initial",),
        "drivetrain.complete": True,
    }
    assert span.attributes is not None
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert span.start_time is not None
    assert span.end_time is not None
    first = span.attributes["drivetrain.first_token_seconds"]
    assert isinstance(first, float)
    assert 0 < first * 1e9 <= span.end_time - span.start_time


async def test_refusals_and_sessions_have_few_names(traced: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    asked: list[tuple[str, dict[str, object], str, int, str | None]] = [
        ("/nowhere/at/all", {}, "POST", 404, None),
        ("/v1/completions", {"prompt": [5], "max_tokens": -1}, "POST /v1/completions", 400, "InvalidRequest"),
        ("/v1/embeddings", {"input": "a"}, "POST /v1/embeddings", 501, "UnsupportedCapability"),
        ("/sessions/one/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **TOKENS},
         "POST /sessions/{session}/v1/chat/completions", 200, None),
    ]  # fmt: skip
    for path, body, name, status, error in asked:
        await traced.post(path, json=body)
        span = await only(spans)
        assert span.attributes is not None
        assert (span.name, span.attributes["http.response.status_code"]) == (name, status)
        assert span.attributes.get("error.type") == error
        assert span.parent is None
        assert (span.status.status_code is trace.StatusCode.ERROR) is (status >= 500)


async def test_no_span_is_made_unless_it_is_asked_for(client: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    assert (await client.post("/v1/completions", json={"prompt": [5], **TOKENS})).status_code == 200
    assert spans.get_finished_spans() == ()


async def test_the_extra_is_named_where_opentelemetry_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    assert not ServerConfig().trace_requests
    with pytest.raises(ValidationError, match=r"install drivetrain\[otel\]"):
        ServerConfig(trace_requests=True)
