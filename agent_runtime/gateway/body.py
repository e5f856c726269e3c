"""Reads a request body into a JSON object: bounded, strict, every fault a 400, 408 or 413 with its reason."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NoReturn, cast

from starlette.requests import ClientDisconnect, Request

from agent_runtime.gateway import http
from agent_runtime.gateway.errors import ApiError

MAX_DEPTH = 128
"""Objects and lists in each other. What handles a body is recursive in places, some frames a level."""
_LENGTH_DIGITS = 20
"""No length needs more; what is sent is counted anyway."""


async def read_json_object(
    request: Request, max_body_bytes: int, *, finite: bool = False
) -> tuple[dict[str, Any], bytes]:
    """The body's object, and the body as it was received. Raises ApiError; ClientDisconnect when the client left.

    With ``finite`` numbers beyond a double, which could be read and not be written again, are refused.
    """
    raw = await _read(request, max_body_bytes)
    read_float = _finite if finite else None
    try:
        # Decoded here and strictly: json.loads would let UTF-16 and surrogates encoded like characters pass.
        value: Any = json.loads(raw.decode("utf-8-sig"), parse_float=read_float, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
        raise _invalid(str(error)) from error
    if _deeper_than(value, MAX_DEPTH):
        raise _invalid(f"it is nested too deeply; {MAX_DEPTH} levels are allowed")
    if not isinstance(value, dict):
        raise _invalid(f"it must be an object, not {type(value).__name__}")
    # Only an escape can put half a surrogate pair into a string, and such a string has no UTF-8 form.
    if b"\\ud" in raw or b"\\uD" in raw:
        _refuse_lone_surrogates(value)
    return cast("dict[str, Any]", value), raw


async def _read(request: Request, max_body_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) <= _LENGTH_DIGITS and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes, f"{declared} bytes were announced")
    raw = bytearray()
    pieces = request.stream()
    while (piece := await _next(pieces)) is not None:
        raw += piece
        if len(raw) > max_body_bytes:
            raise _too_large(max_body_bytes, "more were sent")
    return bytes(raw)


async def _next(pieces: AsyncGenerator[bytes, None]) -> bytes | None:
    """What comes next; None at the end."""
    try:
        async with asyncio.timeout(http.CLIENT_IDLE_S):
            return await anext(pieces, None)
    except TimeoutError as error:
        raise http.client_too_slow("no more of its body had come") from error


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether objects and lists lie in each other deeper than that."""
    level: list[Any] = [value]
    for _ in range(levels + 1):
        level = [inner for outer in level for inner in _within(outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number; write it smaller, or as a string")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _invalid("a string holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error


def _invalid(reason: str) -> ApiError:
    return ApiError(400, f"The request body is not usable JSON: {reason}.", code="invalid_json")


def _too_large(max_body_bytes: int, what: str) -> ApiError:
    return ApiError(
        413,
        f"The request body may have {max_body_bytes} bytes, {what}.",
        code="request_too_large",
        headers={"connection": "close"},
    )


__all__ = ["ClientDisconnect", "read_json_object"]
