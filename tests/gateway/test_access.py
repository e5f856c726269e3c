"""Every route asks for a key, in the words of each protocol; only a look at the health does without."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, AuthenticationError
from starlette.routing import Route

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.__main__ import main
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.keys import ApiKeys
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import MODEL, chat
from tests.gateway.conftest import Running
from tests.gateway.process import running, write
from tests.gateway.stub_engine import StubEngine

ANN, BOB = "ann-key-0123456789", "bob-key-0123456789"
VERSION = {"anthropic-version": "2023-06-01"}
MESSAGE = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def keys() -> ApiKeys:
    """Two owners."""
    return ApiKeys({ANN: "ann", BOB: "bob"})


def bearer(key: str) -> dict[str, str]:
    """Headers with a key."""
    return {"authorization": f"Bearer {key}"}


async def test_every_route_but_health_and_ready_refuses_a_request_without_key(offline: Running) -> None:
    routes = [route for route in offline.app.routes if isinstance(route, Route)]
    seen = 0
    for route in routes:
        path = route.path.replace("{name:path}", "x").replace("{name}", "x").replace("{id:path}", "x")
        for method in sorted(route.methods or ()):
            response = await offline.client.request(method, path)
            is_open = path in ("/health", "/ready")
            assert (response.status_code == 401) is not is_open, (method, path, response.status_code)
            seen += 1
    assert seen > 20
    assert (await offline.client.get("/nowhere")).status_code == 401


@pytest.mark.parametrize("path", ["/health?deep=1", "/health?deep=0", "/ready?x", "/health/", "//health", "/health/x"])
async def test_no_spelling_of_the_open_paths_opens_more(offline: Running, path: str) -> None:
    assert (await offline.client.get(f"http://gateway{path}")).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        bearer(f"{ANN} {ANN}"),
        {"authorization": ANN},
        {"authorization": f"Basic {ANN}"},
        {"x-api-key": ""},
        {"x-api-key": f"Bearer {ANN}"},
        {"api-key": ANN},
        {"cookie": f"key={ANN}"},
    ],
)
async def test_what_is_no_valid_key_is_a_401_that_says_how_and_does_not_repeat_it(
    offline: Running, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    response = await offline.client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "Authorization: Bearer KEY" in error["message"] and "x-api-key" in error["message"]
    assert ANN not in response.text + caplog.text and "wrong" not in response.text + caplog.text


@pytest.mark.parametrize(("path", "headers"), [("/v1/messages", {}), ("/v1/models", VERSION)])
async def test_anthropics_clients_are_refused_in_their_envelope(
    offline: Running, path: str, headers: dict[str, str]
) -> None:
    response = await offline.client.request("POST" if "messages" in path else "GET", path, headers=headers)
    body = response.json()
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
    assert body["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    "headers",
    [
        bearer(ANN),
        {"authorization": f"bearer {BOB}"},
        {"x-api-key": ANN},
        {"authorization": "Bearer no", "x-api-key": ANN},
    ],
)
async def test_a_valid_key_is_let_in_wherever_it_stands(gateway: Running, headers: dict[str, str]) -> None:
    response = await gateway.client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert response.status_code == 200, response.text


async def test_the_clients_of_both_protocols_log_in_as_they_are(gateway: Running) -> None:
    http = httpx.AsyncClient(trust_env=False)
    anthropic = AsyncAnthropic(base_url=gateway.url, api_key=BOB, max_retries=0)
    openai = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=ANN, max_retries=0, http_client=http)
    async with http, anthropic:
        message = await anthropic.messages.create(**MESSAGE)
        assert message.stop_reason == "end_turn"
        assert [model.id async for model in openai.models.list()] == [MODEL]
        with pytest.raises(AuthenticationError):
            await openai.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("where", ["file", "variable"])
async def test_the_process_takes_its_keys_from_a_file_or_a_variable_and_shows_them_nowhere(
    tmp_path: Path, settings_file: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    changes: dict[str, Any] = {"engine_url": engine_url, "host": "0.0.0.0"}
    if where == "file":
        (tmp_path / "keys").write_text(f"ann:{ANN}\n")
        changes["api_keys_file"] = str(tmp_path / "keys")
    else:
        monkeypatch.setenv("GATEWAY_KEYS", f"ann:{ANN}")
        changes["api_keys_env"] = "GATEWAY_KEYS"
    async with running(write(settings_file.parent, changes)) as (process, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/v1/models", headers=bearer(BOB))).status_code == 401
            answer = await client.post("/v1/chat/completions", json=chat(), headers=bearer(ANN))
            assert answer.status_code == 200 and ANN not in answer.text
        assert ANN not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.terminate()
        assert process.stderr is not None
        assert ANN.encode() not in await process.stderr.read()


def test_check_says_whether_settings_and_keys_can_be_used(
    settings_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--settings", str(settings_file), "--check"]) == 0
    (settings_file.parent / "keys").write_text("ann:short")
    path = write(settings_file.parent, {"api_keys_file": str(settings_file.parent / "keys")})
    assert main(["--settings", str(path), "--check"]) == 2
    assert "line 1: the key has 5 characters" in capfd.readouterr().err


async def test_a_websocket_is_closed(offline: Running) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await offline.app({"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b""}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_without_keys_a_key_that_a_client_sends_is_not_looked_at(
    settings: dict[str, Any], stub: StubEngine, engine_url: str, tokenizer: K3Tokenizer
) -> None:
    engine = SGLangEngine(engine_url)
    app = create_app(GatewaySettings(**settings), engine, tokenizer)
    async with httpx.AsyncClient(base_url="http://gateway", transport=httpx.ASGITransport(app)) as client:
        response = await client.post("/v1/chat/completions", content=json.dumps(chat()), headers=bearer("anything"))
        assert response.status_code == 200
    await engine.aclose()
    assert len(stub.requests) == 1
