"""The OpenAPI document: it names each route of the application, and the fields that requests have on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from drivetrain import InferenceEngine
from drivetrain_serving import Server, ServerConfig, create_app
from drivetrain_serving.http_layer.route_docs import documented
from drivetrain_serving.openapi.document import document_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "0123456789abcdef"


async def document_at(engine: InferenceEngine, dialect: Literal["vllm", "sglang"]) -> tuple[Starlette, Any]:
    app = create_app(engine, ServerConfig(dialect=dialect))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.get("/openapi.json")
    assert response.status_code == 200
    return app, response.json()


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (one for name, one in value.items() if name == "$ref")
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from references(one)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_it_has_the_routes_of_the_application(
    engine: InferenceEngine, dialect: Literal["vllm", "sglang"]
) -> None:
    app, found = await document_at(engine, dialect)
    served = {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert served == {(path, method) for path, operations in found["paths"].items() for method in operations}
    operations = [one for operations in found["paths"].values() for one in operations.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all(one["description"] for one in operations)
    known = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert set(references(found)) == known, "each schema is there, and none that no route uses"
    await app.state.sessions.close()


async def test_fields_have_their_names_on_the_wire(engine: InferenceEngine, client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        fields = schemas[name]["properties"]
        assert {"structured_outputs", "allowed_token_ids", "max_tokens", "return_token_ids"} <= fields.keys()
        assert not {"structured_output", "logit_processors"} & fields.keys()
    params = schemas["GenerateRequest"]["properties"]["sampling_params"]["properties"]
    assert {"max_tokens", "min_tokens", "structured_outputs"} <= params.keys()
    assert not {"max_new_tokens", "logit_processors"} & params.keys()
    assert schemas["LoadAdapterFields"]["required"] == ["lora_name", "lora_path"]
    assert "required" not in schemas["AbortFields"], "an empty body ends all requests"
    of_sglang, *_ = schemas["GenerateBody"]["properties"]["sampling_params"]["anyOf"]
    assert {"max_new_tokens", "sampling_seed"} <= of_sglang["properties"].keys()
    asked = {"prompt": "hello", "allowed_token_ids": [104], "max_tokens": 2, "top_k": -1, "logprobs": True}
    answer = await client.post("/v1/completions", json={**asked, "return_token_ids": True})
    assert answer.json()["choices"][0]["token_ids"] == [104, 104]


async def test_a_key_opens_what_the_document_says(engine: InferenceEngine) -> None:
    config = ServerConfig(port=0, api_key=KEY, control_key=KEY + KEY)
    async with Server(engine, config) as server, httpx.AsyncClient(base_url=server.url) as client:
        found = (await client.get("/openapi.json")).json()
        for path, operations in found["paths"].items():
            if operation := operations.get("get"):
                response = await client.get(path.replace("{session}", "nobody"))
                assert (response.status_code == 401) is (operation["tags"] != ["none"]), path
                assert str(response.status_code) in operation["responses"], path
                with_key = {"authorization": f"Bearer {KEY}"}
                response = await client.get(path.replace("{session}", "nobody"), headers=with_key)
                assert (response.status_code == 401) is (operation["tags"] == ["control"]), path


async def test_statuses_of_wrong_requests_are_documented(engine: InferenceEngine, client: httpx.AsyncClient) -> None:
    found = (await client.get("/openapi.json")).json()
    reads = [
        (path, operation["responses"])
        for path, operations in found["paths"].items()
        if "requestBody" in (operation := operations.get("post", {}))
    ]
    assert len(reads) > 30
    for path, responses in reads:
        where = path.replace("{session}", "nobody")
        for content in (b"[1", b"[]", b"x" * (1 << 21)):
            response = await client.post(where, content=content, headers={"content-type": "application/json"})
            assert str(response.status_code) in responses, (path, response.status_code)
            assert response.status_code in (400, 413), path


class _Fields(BaseModel):
    """Fields of one kind."""

    size: int = 0


def _other_fields() -> type[BaseModel]:
    class _Fields(BaseModel):
        """Fields of another kind."""

        name: str = ""

    return _Fields


@documented(body=_Fields)
async def _one(request: Request) -> Response:
    """Answer."""
    return Response()


@documented(body=_other_fields())
async def _other(request: Request) -> Response:
    """Answer."""
    return Response()


async def _nothing(request: Request) -> Response:
    return Response()


async def test_a_route_cannot_be_left_out() -> None:
    one, other = (Route(path, answer, methods=["POST"]) for path, answer in (("/one", _one), ("/other", _other)))

    def document(*routes: Route) -> None:
        document_of(routes, lambda path: "none")

    document(one)
    with pytest.raises(LookupError, match=r"GET /nothing: .*documented"):
        document(Route("/nothing", _nothing))
    with pytest.raises(LookupError, match="_Fields is the name of two types"):
        document(one, other)
