"""The OpenAPI document: every route with what it takes, what it answers, and how it fails."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from agent_runtime.gateway.cache_routes import Abandon, Pin, Release
from agent_runtime.gateway.completions import CompletionOptions
from agent_runtime.gateway.openapi import messages_api, prompts, responses_api
from agent_runtime.gateway.openapi.words import ANYTHING, FLAG, TEXT, Schema, a_list, an_object, one_of, or_null, ref
from agent_runtime.gateway.openapi.words import words as words_of
from agent_runtime.gateway.options import ChatOptions
from agent_runtime.gateway.responses.fields import PASSED_ON, ResponseFields

INTERFACE_VERSION = "1"

_OVERLOADED = "529"
_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS = a_list(_ID)
_ERROR = an_object(
    {
        "error": an_object(
            {"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)},
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
_ALWAYS = ("401", "408", "429", "431", "500")
_WITH_BODY = ("400", "404", "409", "413")
_OF_ENGINE = ("502", "503", "504")
_SESSION_HEADERS: list[Schema] = [
    {"name": name, "in": "header", "required": False, "schema": {"type": "string", "maxLength": 512}}
    for name in ("x-k3-session", "x-session-id")
]


def document() -> dict[str, Any]:
    """The document, as JSON."""
    components: dict[str, Schema] = {
        "Error": _ERROR,
        **prompts.SCHEMAS,
        **messages_api.SCHEMAS,
        **responses_api.SCHEMAS,
    }
    components |= _requests(components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "K3 gateway",
            "version": INTERFACE_VERSION,
            "description": "Chat completions, Anthropic's Messages API and OpenAI's Responses API for Kimi K3.",
        },
        "paths": {**_conversations(), **_responses(), **_texts(), **_cache(), **_state()},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _requests(components: dict[str, Schema]) -> dict[str, Schema]:
    """Bodies of requests, from the models that read them; what these refer to goes to the components."""
    chat = _properties(ChatOptions, components)
    names = {name: chat[name] for name in ("prompt_cache_key", "metadata", "user")}
    completion = _properties(CompletionOptions, components)
    responses = _properties(ResponseFields, components)
    passed_on = {name: {**prompts.PROPERTIES, **chat}[name] for name in PASSED_ON}
    pin = _properties(Pin, components)
    text = one_of(TEXT, a_list(TEXT))
    return {
        "ChatRequest": an_object({**prompts.PROPERTIES, **chat}, "model", "messages"),
        "MessagesRequest": messages_api.MESSAGES_REQUEST,
        "CountRequest": messages_api.COUNT_REQUEST,
        "ResponsesRequest": an_object({**passed_on, **responses, **responses_api.PROPERTIES}, "model", "input"),
        "CompletionRequest": an_object({**completion, "prompt": one_of(TEXT, _IDS)}, "model", "prompt"),
        "TokenizeRequest": one_of(
            an_object({"model": TEXT, "prompt": text, "add_special_tokens": {"const": False}}, "prompt"),
            an_object({"model": TEXT, **prompts.PROPERTIES, **names}, "messages"),
        ),
        "DetokenizeRequest": an_object(
            {"model": TEXT, "tokens": one_of(_IDS, a_list(_IDS)), "skip_special_tokens": {"const": False}}, "tokens"
        ),
        "ReleaseRequest": an_object(_properties(Release, components), "session"),
        "AbandonRequest": an_object(_properties(Abandon, components), "session"),
        "PinRequest": one_of(
            an_object(pin, "seconds", "ids"),
            an_object({"seconds": pin["seconds"], **prompts.PROPERTIES}, "seconds", "messages"),
        ),
    }


def _properties(model: type[BaseModel], components: dict[str, Schema]) -> Schema:
    """Properties of a model by the names they have in JSON."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    components |= schema.get("$defs", {})
    return schema["properties"]


def _conversations() -> Schema:
    fails = (*_ALWAYS, *_WITH_BODY, *_OF_ENGINE)
    anthropic: dict[str, Any] = {"error": "AnthropicError", "parameters": [messages_api.VERSION_HEADER]}
    of_messages = (*_ALWAYS, *_WITH_BODY, "502", "504", _OVERLOADED)
    return {
        "/v1/chat/completions": {
            "post": _operation(
                "A chat completion, whole or streamed",
                fails,
                body="ChatRequest",
                answer=an_object({"id": TEXT, "choices": a_list(ANYTHING), "usage": ANYTHING}, "id", more=True),
                streams=True,
                parameters=_SESSION_HEADERS,
            )
        },
        "/v1/messages": {
            "post": _operation(
                "A message, whole or streamed",
                of_messages,
                body="MessagesRequest",
                answer=an_object({"id": TEXT, "type": {"const": "message"}}, "id", "type", more=True),
                streams=True,
                **anthropic,
            )
        },
        "/v1/messages/count_tokens": {
            "post": _operation(
                "Tokens of the prompt that a message would have",
                of_messages,
                body="CountRequest",
                answer=an_object({"input_tokens": _ID}, "input_tokens"),
                **anthropic,
            )
        },
    }


def _responses() -> Schema:
    response = an_object({"id": TEXT, "object": {"const": "response"}}, "id", "object", more=True)
    named = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    include = {"name": "include", "in": "query", "required": False, "schema": a_list(_properties_of_include())}
    page = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in (
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            ("order", words_of("asc", "desc")),
            ("after", TEXT),
        )
    ]
    fails = (*_ALWAYS, "400", "404")
    deleted = an_object({"id": TEXT, "object": TEXT, "deleted": FLAG}, "id", "deleted", more=True)
    items = an_object({"object": {"const": "list"}, "data": a_list(ANYTHING)}, "data", more=True)
    return {
        "/v1/responses": {
            "post": _operation(
                "A response, whole, streamed, or in the background",
                (*_ALWAYS, *_WITH_BODY, *_OF_ENGINE),
                body="ResponsesRequest",
                answer=response,
                streams=True,
                parameters=_SESSION_HEADERS,
            )
        },
        "/v1/responses/{name}": {
            "get": _operation("A stored response", fails, answer=response, parameters=[*named, include]),
            "delete": _operation("Forget it", fails, answer=deleted, parameters=named),
        },
        "/v1/responses/{name}/cancel": {
            "post": _operation("End one in the background", fails, answer=response, parameters=named)
        },
        "/v1/responses/{name}/input_items": {
            "get": _operation("What it was given", fails, answer=items, parameters=[*named, include, *page])
        },
    }


def _properties_of_include() -> Schema:
    schema = ResponseFields.model_json_schema()["properties"]["include"]
    return schema["anyOf"][0]["items"]


def _texts() -> Schema:
    fails = (*_ALWAYS, *_WITH_BODY, "501")
    counts = an_object({"tokens": {"type": "array"}, "count": one_of(_ID, _IDS)}, "tokens", "count", more=True)
    return {
        "/v1/completions": {
            "post": _operation(
                "What the model writes behind a text",
                (*fails, *_OF_ENGINE),
                body="CompletionRequest",
                answer=an_object({"id": TEXT, "choices": a_list(ANYTHING)}, "id", "choices", more=True),
            )
        },
        "/v1/tokenize": {"post": _operation("Ids of a text or prompt", fails, body="TokenizeRequest", answer=counts)},
        "/v1/detokenize": {
            "post": _operation(
                "The text of ids",
                fails,
                body="DetokenizeRequest",
                answer=an_object({"text": one_of(TEXT, a_list(TEXT))}, "text"),
            )
        },
    }


def _cache() -> Schema:
    fails = (*_ALWAYS, *_WITH_BODY, *_OF_ENGINE)
    ranks = an_object({"object": TEXT, "ranks": a_list(ANYTHING)}, "object", "ranks", more=True)
    tree = {"name": "tree", "in": "query", "required": False, "schema": words_of("0", "1")}
    session = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/k3/cache": {
            "get": _operation("The engine's cache", (*fails, "403"), answer=ranks, parameters=[tree]),
        },
        "/v1/k3/cache/release": {
            "post": _operation("A session is over", fails, body="ReleaseRequest", answer=ranks),
        },
        "/v1/k3/cache/abandon": {
            "post": _operation("A session will not go on behind a position", fails, body="AbandonRequest", answer=ranks)
        },
        "/v1/k3/cache/pin": {
            "post": _operation("Keep a beginning", fails, body="PinRequest", answer=ranks, parameters=_SESSION_HEADERS),
        },
        "/v1/k3/sessions/{id}": {
            "delete": _operation("A session is over", fails, answer=ranks, parameters=[session]),
        },
    }


def _state() -> Schema:
    models = an_object({"data": a_list(ANYTHING)}, "data", more=True)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    status = an_object({"status": TEXT}, "status")
    deep = {"name": "deep", "in": "query", "required": False, "schema": words_of("0", "1", "true", "false")}
    healthy = {"503": _answer("The engine does not answer", status)}
    return {
        "/v1/models": {"get": _operation("The served names", _ALWAYS, answer=models)},
        "/v1/models/{name}": {
            "get": _operation("One of them", (*_ALWAYS, "404"), answer=ANYTHING, parameters=[name]),
        },
        "/v1/k3/replay": {"get": _operation("Counts of what was found about histories", _ALWAYS, answer=ANYTHING)},
        "/v1/k3/limits": {"get": _operation("What runs and waits, and what may", _ALWAYS, answer=ANYTHING)},
        "/metrics": {"get": _metrics()},
        "/openapi.json": {"get": _operation("This document", _ALWAYS, answer=ANYTHING)},
        "/health": {
            "get": _operation("Whether the engine answers", _ALWAYS, answer=status, more=healthy, parameters=[deep]),
        },
        "/ready": {"get": _operation("Whether requests can be answered", _ALWAYS, answer=status, more=healthy)},
    }


def _metrics() -> Schema:
    described = _operation("Counts and times, in Prometheus' text format", _ALWAYS, answer=TEXT)
    described["responses"]["200"]["content"] = {"text/plain": {"schema": TEXT}}
    return described


def _operation(
    summary: str,
    fails: Iterable[str],
    *,
    answer: Schema,
    body: str | None = None,
    streams: bool = False,
    error: str = "Error",
    parameters: list[Schema] | None = None,
    more: Schema | None = None,
) -> Schema:
    """One method of a path; ``fails`` are the statuses of its errors."""
    success = _answer("Success", answer)
    if streams:
        success["content"]["text/event-stream"] = {}
    operation: Schema = {
        "summary": summary,
        "responses": {"200": success, **{status: _answer("Refused or failed", ref(error)) for status in fails}},
    }
    operation["responses"] |= more or {}
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(body)}}}
    return operation


def _answer(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
