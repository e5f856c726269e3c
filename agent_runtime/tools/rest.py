"""Tools that call a REST service, from its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final, cast
from urllib.parse import quote

import httpx

from agent_runtime.tools.openapi import BODY, Operation, read_operations
from agent_runtime.tools.registry import DEFAULT_TIMEOUT_S, Tool
from agent_runtime.tools.result import Failure, ToolError, ToolResult
from agent_runtime.tools.schema_signature import SchemaSignature

_SAFE_METHODS: Final = ("get", "head", "options")
_MAX_BODY_BYTES: Final = 4 * 1024 * 1024


def rest_tools(
    document: Mapping[str, Any],
    client: httpx.AsyncClient,
    *,
    operations: Collection[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Tool]:
    """One tool for each operation.

    Operations that only read may run beside others; all others run alone. Redirects are not followed unless the client
    does. Credentials belong into the client's headers: what is a parameter, the model sees and writes.

    Args:
        document: a parsed OpenAPI 3 document.
        client: knows the service's base URL, headers and limits; stays the caller's to close.
        operations: names of the tools to make; None makes all.

    Raises:
        ToolDefinitionError: see `read_operations`.
    """
    return [_tool(operation, client, timeout_s) for operation in read_operations(document, operations)]


def _tool(operation: Operation, client: httpx.AsyncClient, timeout_s: float) -> Tool:
    async def call(**arguments: Any) -> ToolResult:
        request = _request(operation, client, arguments)
        try:
            response = await client.send(request, stream=True)
            try:
                body = await _read(response)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise ToolError(f"The service cannot be reached: {type(error).__name__}.", debug=repr(error)) from error
        return _result(operation, response, body)

    signature = SchemaSignature(operation.name, operation.description, operation.parameters)
    return Tool(call, signature, timeout_s, parallel=operation.method in _SAFE_METHODS)


def _request(operation: Operation, client: httpx.AsyncClient, arguments: Mapping[str, Any]) -> httpx.Request:
    path = operation.path
    query: list[tuple[str, str | int | float | bool | None]] = []
    headers: dict[str, str] = {}
    content: bytes | None = None
    for key, value in arguments.items():
        place, name = operation.places[key]
        if place == BODY:
            content = json.dumps(value, ensure_ascii=False).encode()
            headers["content-type"] = "application/json"
        elif place == "path":
            path = path.replace(f"{{{name}}}", _segment(key, _text(value)))
        elif place == "query":
            values = cast("list[Any]", value) if isinstance(value, list) else [value]
            query += [(name, _text(one)) for one in values]
        else:
            headers[name] = _header(key, _text(value))
    return client.build_request(
        operation.method.upper(), path.lstrip("/"), params=query or None, headers=headers, content=content
    )


def _segment(key: str, text: str) -> str:
    """One segment of a path: nothing in it can lead to another one."""
    if text in ("", ".", ".."):
        raise ToolError(f"{key}: {text!r} cannot be a part of a path")
    return quote(text, safe="")


def _header(key: str, text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise ToolError(f"{key}: {text!r} cannot be a header; use printable ASCII")
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise ToolError(f"The answer has more than {_MAX_BODY_BYTES} bytes; ask for less.")
    return bytes(body)


def _result(operation: Operation, response: httpx.Response, body: bytes) -> ToolResult:
    text = body.decode(response.encoding or "utf-8", "replace").strip()
    status = f"{response.status_code} {response.reason_phrase}".strip()
    user = f"{operation.method.upper()} {operation.path}: {status}"
    if response.is_success:
        return ToolResult(text or f"({status}, no content)", user)
    told = f"The service answered {status}.\n{text}".strip()
    return ToolResult(told, user, f"{response.request.method} {response.request.url}", Failure.REFUSED)
