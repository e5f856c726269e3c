"""The OpenAPI document says all that is there, and what it allows, breaks or leaves open never fails the gateway."""

import asyncio
import json
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.openapi.document import document
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import MODEL, WEATHER_TOOL, chat, continued, tool_results
from tests.gateway.conftest import Running
from tests.gateway.messages import ask as messages_body
from tests.gateway.responses_items import asks, items_of
from tests.gateway.serving import serving
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
EXAMPLES = 10
"""Requests of each route."""
ANSWER_S = 20.0
"""An answer that takes longer counts as hanging."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

schema = schemathesis.openapi.from_dict(document())


def body_schema(name: str) -> Draft202012Validator:
    """What a request body may be, as the document has it."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document()["components"]})


def test_every_route_is_in_the_document_and_nothing_else(offline: Running) -> None:
    routes: set[tuple[str, str]] = set()
    for route in offline.app.routes:
        assert isinstance(route, Route)
        if not route.include_in_schema:
            continue
        path = route.path.replace(":path", "")
        routes |= {(path, method.lower()) for method in route.methods or () if method != "HEAD"}
    described = {(path, method) for path, methods in document()["paths"].items() for method in methods}
    assert described == routes


async def test_the_document_is_served_and_is_valid(offline: Running) -> None:
    served = (await offline.client.get("/openapi.json")).json()
    assert served == document()
    names = set(served["components"]["schemas"])
    used = set(part.split('"')[0] for part in json.dumps(served).split("#/components/schemas/")[1:])
    assert used <= names
    for component in served["components"]["schemas"].values():
        Draft202012Validator.check_schema(component)


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER_TOOL], "tool_choice": "auto"}, {"stop": ["a"], "n": 2}])
async def test_what_clients_send_fits_the_document(
    gateway: Running, stub: StubEngine, writer: TurnWriter, fields: dict[str, Any]
) -> None:
    body = chat(**fields)
    body_schema("ChatRequest").validate(body)
    call = ("get_weather", (("city", "string", "Oslo"),))
    stub.plan = lambda _: says(writer.turn("T", "said", calls=(call,)), end_of_msg=END_OF_MSG)
    answer = await gateway.ask(body)
    results = tool_results(answer, "rain") if answer["choices"][0]["message"].get("tool_calls") else []
    following = continued(body, answer, *results)
    body_schema("ChatRequest").validate(following)
    body_schema("ResponsesRequest").validate(asks(items_of(following["messages"])))
    body_schema("MessagesRequest").validate({**messages_body("Hello")})


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ChatRequest", {"model": MODEL}),
        ("ChatRequest", chat(temperature=3)),
        ("ChatRequest", chat(temprature=1)),
        ("ChatRequest", {**chat(), "messages": []}),
        ("ChatRequest", {**chat(), "messages": [{"role": "robot", "content": "x"}]}),
        ("ResponsesRequest", {"model": MODEL, "input": [{"type": "web_search_call"}]}),
        ("MessagesRequest", {"model": MODEL, "messages": []}),
        ("PinRequest", {"seconds": 1}),
    ],
)
def test_what_is_refused_does_not_fit_the_document(name: str, body: dict[str, Any]) -> None:
    assert not body_schema(name).is_valid(body)


@pytest.fixture(scope="module")
def fuzzed(tokenizer: K3Tokenizer, writer: TurnWriter, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """URL of a gateway before a scripted engine, both on a thread of their own."""
    ready: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def plan(body: dict[str, Any]) -> Script:
        return says(writer.turn("T", "Hi"), end_of_msg=END_OF_MSG)

    async def serve() -> None:
        engine = StubEngine(plan, cache_backend="k3")
        fields = {"model": MODEL, "tokenizer_dir": tmp_path_factory.mktemp("none"), "context_len": 100_000}
        async with serving(engine.app()) as engine_url:
            app = create_app(GatewaySettings(**fields), SGLangEngine(engine_url), tokenizer)
            async with serving(app) as url:
                ready.set_result(url)
                await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield ready.result(timeout=30)
    loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=30)
    loop.close()


def with_known_model(case: schemathesis.Case) -> None:
    """Let three of four bodies name the served model, for else every one would end at that."""
    body = case.body
    if isinstance(body, dict) and isinstance(name := body.get("model"), str) and len(name) % 4 != 3:
        body["model"] = MODEL


@pytest.mark.timeout(300)
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
def test_no_request_that_fits_or_breaks_the_document_fails_the_gateway(case: schemathesis.Case, fuzzed: str) -> None:
    with_known_model(case)
    response = case.call(base_url=fuzzed, timeout=ANSWER_S)
    case.validate_response(response, checks=CHECKS)


def test_the_gateway_is_well_after_all_of_that(fuzzed: str) -> None:
    answer = httpx.post(f"{fuzzed}/v1/chat/completions", json=chat(), trust_env=False, timeout=ANSWER_S)
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"
    limits = httpx.get(f"{fuzzed}/v1/k3/limits", trust_env=False).json()
    assert (limits["generating"]["running"], limits["counting"]["running"]) == (0, 0)
