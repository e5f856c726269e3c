"""Tools from an OpenAPI document, against a real service on a loopback port."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.registry import ToolDefinitionError, ToolRegistry
from agent_runtime.tools.rest import rest_tools
from agent_runtime.tools.result import Failure, ToolResult
from tests.gateway.serving import serving

DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.3",
    "paths": {
        "/pets/{id}": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": {
                "operationId": "get-pet",
                "summary": "One pet.",
                "parameters": [
                    {"$ref": "#/components/parameters/Fields"},
                    {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                ],
            },
            "delete": {"description": "Removes a pet."},
        },
        "/pets": {
            "post": {
                "operationId": "addPet",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}},
                },
            }
        },
        "/big": {"get": {"operationId": "big"}},
    },
    "components": {
        "parameters": {
            "Fields": {
                "name": "fields",
                "in": "query",
                "description": "Which fields.",
                "schema": {"type": "array", "items": {"type": "string"}},
            }
        },
        "schemas": {
            "Pet": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "nick": {"type": "string", "nullable": True},
                    "friend": {"$ref": "#/components/schemas/Pet"},
                },
            },
            "Unused": {"type": "object"},
        },
    },
}


async def _pet(request: Request) -> Response:
    if request.path_params["id"] == "gone":
        return JSONResponse({"error": "no such pet"}, 404)
    told = {
        "path": request.path_params["id"],
        "raw": request.scope["raw_path"].decode(),
        "fields": request.query_params.getlist("fields"),
        "trace": request.headers.get("x-trace"),
        "method": request.method,
    }
    return JSONResponse(told)


async def _add(request: Request) -> Response:
    return JSONResponse({"added": await request.json(), "type": request.headers["content-type"]}, 201)


async def _big(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes]:
        for _ in range(6):
            yield b"x" * 1024 * 1024

    return StreamingResponse(pieces())


SERVICE = Starlette(
    routes=[
        Route("/v2/pets", _add, methods=["POST"]),
        Route("/v2/pets/{id:path}", _pet, methods=["GET", "DELETE"]),
        Route("/v2/big", _big),
    ]
)


async def called(*wanted: tuple[str, Any], document: dict[str, Any] = DOCUMENT) -> list[ToolResult]:
    async with serving(SERVICE) as url, httpx.AsyncClient(base_url=f"{url}/v2", trust_env=False) as client:
        registry = ToolRegistry(rest_tools(document, client))
        return [await registry.execute(ToolCall("c", name, json.dumps(values))) for name, values in wanted]


def one(name: str) -> dict[str, Any]:
    with_client = rest_tools(DOCUMENT, httpx.AsyncClient(), operations=[name])
    return with_client[0].schema["function"]


def test_an_operation_says_what_the_document_says_with_the_schemas_it_uses() -> None:
    get, add = one("get-pet"), one("addPet")
    assert get["description"] == "One pet." and get["parameters"]["required"] == ["id"]
    assert get["parameters"]["properties"]["fields"]["description"] == "Which fields."
    assert get["parameters"]["additionalProperties"] is False
    assert add["parameters"]["properties"]["body"] == {"$ref": "#/$defs/Pet"}
    pet = add["parameters"]["$defs"]["Pet"]
    assert pet["properties"]["friend"] == {"$ref": "#/$defs/Pet"} and pet["properties"]["nick"]["type"] == [
        "string",
        "null",
    ]
    assert list(add["parameters"]["$defs"]) == ["Pet"]


async def test_parameters_go_where_they_belong() -> None:
    (result,) = await called(("get-pet", {"id": "a b/../c", "fields": ["x", "y"], "X-Trace": "t"}))
    told = json.loads(result.model)
    assert told["path"] == "a b/../c" and "a%20b%2F..%2Fc" in told["raw"], "one segment, wherever it seems to lead"
    assert told["fields"] == ["x", "y"] and told["trace"] == "t"
    assert result.user == "GET /pets/{id}: 200 OK"


async def test_a_body_is_checked_and_sent_as_json() -> None:
    good, wrong, deep = await called(
        ("addPet", {"body": {"name": "Ünï", "friend": {"name": "b", "nick": None}}}),
        ("addPet", {"body": {"nick": "x"}}),
        ("addPet", {"body": {"name": "a", "friend": {"name": 3}}}),
    )
    assert json.loads(good.model)["added"]["name"] == "Ünï" and good.ok
    assert wrong.failure is Failure.INVALID_ARGUMENTS and "name" in wrong.model
    assert deep.failure is Failure.INVALID_ARGUMENTS


async def test_what_the_service_refuses_is_read_by_the_model() -> None:
    gone, removed = await called(("get-pet", {"id": "gone"}), ("delete__pets_id", {"id": "1"}))
    assert (
        gone.failure is Failure.REFUSED and gone.model == 'The service answered 404 Not Found.\n{"error":"no such pet"}'
    )
    assert json.loads(removed.model)["method"] == "DELETE"


@pytest.mark.parametrize("part", ["..", ".", ""])
async def test_a_path_parameter_cannot_lead_to_another_path(part: str) -> None:
    (result,) = await called(("get-pet", {"id": part}))
    assert "cannot be a part of a path" in result.model


async def test_a_header_cannot_hold_another_header() -> None:
    (result,) = await called(("get-pet", {"id": "1", "X-Trace": "a\r\nevil: 1"}))
    assert "cannot be a header" in result.model


async def test_an_answer_without_end_is_given_up() -> None:
    (result,) = await called(("big", {}))
    assert result.failure is Failure.REFUSED and "more than 4194304 bytes" in result.model


async def test_a_service_that_is_not_there_is_a_sentence() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as client:
        registry = ToolRegistry(rest_tools(DOCUMENT, client))
        result = await registry.execute(ToolCall("c", "big", "{}"))
    assert result.model.startswith("The service cannot be reached: ConnectError") and result.failure is Failure.REFUSED


def test_only_reading_operations_run_beside_others() -> None:
    made = {t.name: t.parallel for t in rest_tools(DOCUMENT, httpx.AsyncClient())}
    assert made == {"addPet": False, "big": True, "delete__pets_id": False, "get-pet": True}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"openapi": "2.0"}, "openapi='2.0'; an OpenAPI 3 document"),
        (
            {"paths": {"/x": {"get": {"parameters": [{"name": "c", "in": "cookie", "schema": {}}]}}}},
            "parameter 'c' is in a cookie",
        ),
        (
            {"paths": {"/x": {"get": {"parameters": [{"name": "o", "in": "query", "schema": {"type": "object"}}]}}}},
            "parameter 'o' is an object",
        ),
        (
            {"paths": {"/x": {"post": {"requestBody": {"content": {"text/xml": {}}}}}}},
            r"its body is \['text/xml'\]",
        ),
        ({"paths": {"/x": {"get": {"parameters": [{"$ref": "#/components/nowhere"}]}}}}, "leads nowhere"),
        ({"paths": {"/x": {"get": {"parameters": [{"$ref": "http://x/y"}]}}}}, "leads out of the document"),
        (
            {"paths": {"/x": {"get": {"operationId": "a"}, "put": {"operationId": "a"}}}},
            "two operations are called 'a'",
        ),
    ],
)
def test_what_cannot_be_a_tool_is_refused_when_it_is_made(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolDefinitionError, match=words):
        rest_tools({**DOCUMENT, **change}, httpx.AsyncClient())


def test_an_operation_that_is_not_there_is_named() -> None:
    with pytest.raises(ToolDefinitionError, match=r"no operations \['nope'\]; it has \[\]"):
        rest_tools(DOCUMENT, httpx.AsyncClient(), operations=["nope"])
