"""The inspector's pages over HTTP: what they say, what they refuse, and that no text of theirs becomes markup."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.inspector import routes
from agent_runtime.inspector.facts import StepFacts
from agent_runtime.inspector.log import StepLog
from agent_runtime.inspector.reading import turn_facts
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.agent.scripted_endpoint import Reply, usage
from tests.gateway.bodies import chat, continued, user
from tests.gateway.conftest import NO_ENGINE, Running
from tests.gateway.serving import serving
from tests.gateway.stub_engine import Script, StubEngine, cut
from tests.gateway.vocabulary import TurnWriter
from tests.inspector.conftest import HOSTILE, converse
from tests.inspector.trees import dump
from tests.upstream.conftest import scripted

ELEMENTS = frozenset((
    "html", "head", "meta", "title", "link", "script", "body", "a", "header", "strong", "nav", "span", "ol", "ul", "li",
    "b", "i", "main", "footer", "h1", "h2", "h3", "p", "dl", "dt", "dd", "div", "table", "caption", "thead", "tbody",
    "tr", "th", "td", "time", "section", "svg", "rect", "path", "line", "text", "details", "summary", "pre",
))  # fmt: skip


class Elements(HTMLParser):
    """Names of all elements, all attributes of events, the text, and whether everything was closed in order."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.handlers: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.text = ""
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name in ("style", "srcdoc")]
        if tag == "script":
            self.scripts.append(dict(attrs))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        self.words += data.split()


async def page(gateway: Running, path: str, status: int = 200) -> str:
    """A page's markup, checked for what holds on every page."""
    response = await gateway.client.get(path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert response.headers["cache-control"] == "no-store"
    found = Elements(response.text)
    assert found.open == []
    assert found.names <= ELEMENTS | ({"title"} if "svg" in found.names else set())
    assert found.handlers == []
    assert found.scripts == [{"src": "/inspector/static/inspector.js", "defer": None}]
    return response.text


def text_of(markup: str) -> str:
    """What a reader sees, word by word."""
    return " ".join(Elements(markup).words)


async def session_path(gateway: Running) -> str:
    """Where the session used last is shown."""
    return re.findall(r'href="(/inspector/sessions/\d+)"', await page(gateway, "/inspector"))[0]


async def step_paths(gateway: Running) -> list[str]:
    """Where the steps of that session are shown, in their order."""
    markup = await page(gateway, await session_path(gateway))
    return list(dict.fromkeys(re.findall(r'href="(/inspector/steps/\d+)"', markup)))


async def test_before_the_first_request_the_pages_say_so(gateway: Running) -> None:
    assert "No request has come yet" in await page(gateway, "/inspector")
    assert "is not known to run the checkpoint cache" in await page(gateway, "/inspector/checkpoints")


async def test_the_list_has_each_session_with_its_figures(inspected: Running) -> None:
    await converse(inspected, 1)
    text = text_of(await page(inspected, "/inspector"))
    assert "2 sessions, 5 steps." in text
    assert text.index("#") < text.index("prompt_cache_key:the session")  # the one used last first
    assert "exact 1 repaired 1 new 2" in text
    assert re.search(r"79\.\d %|80\.0 %", text)


async def test_a_session_shows_bars_to_scale_and_the_same_figures_below(inspected: Running) -> None:
    markup = await page(inspected, await session_path(inspected))
    bars = re.findall(r'<a class="bar" href="/inspector/steps/(\d+)".*?</a>', markup)
    assert len(bars) == 8  # four steps in two charts
    steps = [step for step in (Elements(markup).text.split("Steps in the order")[1]).split("tool_calls")]
    assert len(steps) == 5
    # The first chart: heights of cached and computed prompt are in the proportion of their tokens.
    first = markup.split('<a class="bar"')[1]
    heights = [float(height) for height in re.findall(r'class="(?:cached|new)"[^>]*height="([\d.]+)"', first)]
    assert heights[0] / sum(heights) == pytest.approx(0.8, abs=0.01)
    assert "the history begins anew" in markup
    assert "put right from the record" in markup


async def test_a_step_shows_its_exact_prompt_what_was_generated_and_what_came_back(
    inspected: Running, caching_stub: StubEngine, tokenizer: K3Tokenizer
) -> None:
    second, third = (await step_paths(inspected))[1:3]
    markup = await page(inspected, second)
    blocks = re.findall(r"<pre>(.*?)</pre>", markup, re.S)
    shown = "".join(Elements(block).text for block in blocks[:-1])
    assert shown == tokenizer.decode(caching_stub.requests[1]["input_ids"])
    assert '<span class="text in-think">I think.</span>' in blocks[-1]
    assert '<span class="text in-argument">Oslo</span>' in blocks[-1]
    text = text_of(markup)
    assert "This page shows content" in text
    assert re.search(r"Step \d+ sent it back as messages\[3\]: repaired its thinking is not there", text)
    assert "What clients send is kept with a ledger only" in text
    assert "No request has gone on from this step yet" in await page(inspected, third)


@pytest.mark.parametrize("place", ["session name", "user text", "tool result"])
async def test_hostile_text_stays_text(
    caching_stub: StubEngine, gateway: Running, settings: dict[str, Any], place: str
) -> None:
    name = HOSTILE if place == "session name" else "plain"
    body = await converse(gateway, 1, name=name, text=HOSTILE if place == "tool result" else "sun")
    if place == "user text":
        body = chat(HOSTILE, prompt_cache_key=name)
    await gateway.ask(body)
    caching_stub.dump = dump(30)
    for node in caching_stub.dump["nodes"]:
        if node["checkpoint"]:
            node["checkpoint"]["session"] = HOSTILE
    paths = ["/inspector", await session_path(gateway), "/inspector/checkpoints", *await step_paths(gateway)]
    markups = [await page(gateway, path) for path in paths]
    assert all("<script>document" not in markup for markup in markups)
    assert all("\x00" not in markup and "\u202e" not in markup for markup in markups)
    assert any("&lt;script&gt;document.title=" in markup for markup in markups)
    if place != "session name":
        # What spells a control token is text, and is shown as text; real ones are marked.
        assert '<span class="control">&lt;|open|&gt;' in markups[-1]
        assert re.search(r'class="text in-message">[^/]*&lt;/pre&gt;.*&lt;\|open\|&gt;message', markups[-1])


async def test_text_that_the_model_writes_stays_text(
    caching_stub: StubEngine, gateway: Running, writer: TurnWriter
) -> None:
    call = ('x" onclick="alert(1)', (("<b>", "string", HOSTILE),))
    ids = writer.turn(HOSTILE, HOSTILE, (call,))
    caching_stub.plan = lambda _: cut(ids[:-8], piece=50)
    await gateway.ask(chat())
    for path in [await session_path(gateway), *await step_paths(gateway)]:
        await page(gateway, path)


@pytest.mark.parametrize(
    "path",
    ["sessions/1234567", "sessions/x", f"sessions/{'9' * 40}", "steps/0", "steps/-1", "static/../app.py", "what"],
)
async def test_what_is_not_there_is_a_page_that_says_so(gateway: Running, path: str) -> None:
    markup = await page(gateway, f"/inspector/{path}", 404)
    assert "Not found" in markup


async def test_a_slash_at_the_end_is_the_list(gateway: Running) -> None:
    assert "No request has come yet" in await page(gateway, "/inspector/")


async def test_a_query_that_is_not_understood_is_refused(inspected: Running) -> None:
    assert "known here: page" in text_of(await page(inspected, "/inspector?pages=2", 400))
    assert "whole number from 1" in await page(inspected, "/inspector?page=0", 400)
    assert "whole number from 0" in await page(inspected, (await step_paths(inspected))[0] + "?from=-1", 400)
    assert "ranks 0 to 0" in await page(inspected, "/inspector/checkpoints?rank=1", 400)


async def test_a_page_that_has_not_changed_is_not_sent_again(inspected: Running) -> None:
    first = await inspected.client.get("/inspector")
    tag = first.headers["etag"]
    again = await inspected.client.get("/inspector", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    await converse(inspected, 1)
    assert (await inspected.client.get("/inspector", headers={"if-none-match": tag})).status_code == 200


def filled(steps: int) -> StepLog:
    """A log with one session of many steps."""
    log = StepLog(steps)
    for number in range(1, steps + 1):
        step = StepFacts(
            id=number, session=1, name="long", is_conversation=True, parent=None if number == 1 else number,
            created_ms=1_000 * number, form="chat", encoded_tokens=100 * number, replay={"verdict": "exact"},
            came_back=None,
        )  # fmt: skip
        step.turns.append(
            turn_facts(number, 0, 1_000 * number + 500, prompt_tokens=100 * number, cached_tokens=90 * number,
                       output_tokens=50, think_tokens=20, call_tokens=10, finish="stop")
        )  # fmt: skip
        log.add(step)
    return log


async def test_a_session_of_ten_thousand_steps_is_shown_page_by_page(gateway: Running) -> None:
    log = gateway.app.state.record.log
    for step in filled(10_000).session(1).steps:  # type: ignore[union-attr]
        log.add(step)
    last = await page(gateway, "/inspector/sessions/1")
    assert "the latest 100 of 10,000 steps" in last
    assert re.findall(r'class="bar" href="/inspector/steps/(\d+)"', last)[:100] == [str(n) for n in range(9901, 10001)]
    first = await page(gateway, "/inspector/sessions/1?page=1")
    assert first.count('class="bar"') == 200
    assert "/inspector/sessions/1?page=2" in first
    assert len(first) < 300_000
    assert "page 100 of 100, 10,000 steps" in await page(gateway, "/inspector/sessions/1?page=1000")


async def test_a_tree_of_five_hundred_nodes_is_folded(caching_stub: StubEngine, gateway: Running) -> None:
    await gateway.ask(chat())
    markup = await page(gateway, "/inspector/checkpoints")
    text = text_of(markup)
    assert markup.count('class="node"') == 500
    assert "449 MB" in text
    assert "16,253 tok of KV" in text
    kept = [node["checkpoint"] for node in caching_stub.dump["nodes"] if node["checkpoint"]]
    assert f"{sum(one['saved_tokens'] for one in kept):,} tok" in text
    free = [one for one in kept if not (one["locked"] or one["pinned"])]
    assert f"dies #{len(free)}" in text
    assert text.count("stays") >= len(kept) - len(free)
    assert re.search(r"[\d,]+ more nodes", text)
    # The table begins with the one that is worth least.
    assert text.split("would go")[1].split("#1 ")[1].startswith(min(free, key=lambda one: one["score"])["role"])


async def test_several_viewers_ask_the_engine_for_one_dump(
    caching_stub: StubEngine, gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "TREE_MAX_AGE_S", 3600.0)
    await gateway.ask(chat())
    for _ in range(3):
        await page(gateway, "/inspector/checkpoints")
    assert caching_stub.commands == [("dump", None)]


async def test_a_refusal_of_the_engine_is_shown(caching_stub: StubEngine, gateway: Running) -> None:
    await gateway.ask(chat())
    caching_stub.refusal = "no <tree> today"
    assert "no &lt;tree&gt; today" in await page(gateway, "/inspector/checkpoints")


async def test_content_can_be_withheld(
    caching_stub: StubEngine, settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str
) -> None:
    app = create_app(GatewaySettings(**settings, inspector_content=False), SGLangEngine(engine_url), tokenizer)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        running = Running(app, url, client)
        await converse(running, 2, text="a secret")
        for path in await step_paths(running):
            markup = await page(running, path)
            assert "secret" not in markup
            assert "I think" not in markup
            assert "inspector_content is false" in markup


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({}, True), ({"host": "localhost"}, True), ({"host": "::1"}, True), ({"host": "0.0.0.0"}, False),
        ({"host": "example.org"}, False), ({"host": "0.0.0.0", "inspector": "on"}, True), ({"inspector": "off"}, False),
    ],
)  # fmt: skip
async def test_by_itself_it_is_served_on_loopback_only(
    settings: dict[str, Any], tokenizer: K3Tokenizer, given: dict[str, Any], served: bool
) -> None:
    is_open = given.get("host") in ("0.0.0.0", "example.org")
    app = create_app(GatewaySettings(**settings, **given, allow_no_keys=is_open), SGLangEngine(NO_ENGINE), tokenizer)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://localhost:8000", transport=transport) as client:
        assert (await client.get("/inspector")).status_code == (200 if served else 404)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:8000", 200), ("LOCALHOST:80", 200),
        ("evil.example", 403), ("127.0.0.1.evil.example:8000", 403), ("", 403),
    ],
)  # fmt: skip
async def test_a_name_that_was_made_to_lead_here_is_refused(
    settings: dict[str, Any], tokenizer: K3Tokenizer, host: str, status: int
) -> None:
    app = create_app(GatewaySettings(**settings), SGLangEngine(NO_ENGINE), tokenizer)
    async with httpx.AsyncClient(base_url="http://localhost", transport=httpx.ASGITransport(app)) as client:
        assert (await client.get("/inspector", headers={"host": host})).status_code == status


async def test_nothing_can_be_changed(inspected: Running) -> None:
    for path in ("/inspector", "/inspector/checkpoints", await session_path(inspected)):
        assert (await inspected.client.post(path)).status_code == 405
        assert (await inspected.client.delete(path)).status_code == 405


async def test_a_restarted_gateway_shows_what_its_ledger_has(
    caching_stub: StubEngine, settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, tmp_path: Path
) -> None:
    settings = {**settings, "ledger": str(tmp_path / "ledger.db")}

    async def once(ask: bool) -> list[str]:
        app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer)
        async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            running = Running(app, url, client)
            if ask:
                body = await converse(running, 2, name="kept")
                stripped = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in body["messages"]]
                await running.ask({**body, "messages": stripped})
                told = {"session": "prompt_cache_key:kept", "from": 77}
                assert (await client.post("/v1/k3/cache/abandon", json=told)).status_code == 200
                await running.ask({**body, "messages": [*stripped, {"role": "user", "content": "and now"}]})
            paths = [await session_path(running), *await step_paths(running)]
            return [_without_total(await page(running, path)) for path in paths]

    before, after = await once(ask=True), await once(ask=False)
    # Also what the client sent is there, and the prompt, which is no longer in memory, comes from the file.
    assert after == before
    assert "The message as it was sent" in after[2]
    assert "compressed: the client has left what lay behind token 77" in after[0]
    assert re.search(r"first token [\d.]+ m?s", after[0])
    assert "I think." in after[2]


def _without_total(markup: str) -> str:
    """A turn is on record a moment before its step is over."""
    markup = re.sub(r"(total )[\d.]+ m?s", r"\1", markup)
    markup = re.sub(
        r'(<td class="number">[^<]*</td>)<td class="number">[^<]*</td>(<td><span class="chip)', r"\1\2", markup
    )
    return re.sub(r"(<dt>total</dt><dd>)[^<]*", r"\1", markup)


async def test_a_compression_that_the_client_tells_of_is_marked_at_the_next_step(inspected: Running) -> None:
    told = {"session": "prompt_cache_key:the session", "from": 1234}
    assert (await inspected.client.post("/v1/k3/cache/abandon", json=told)).status_code == 200
    await converse(inspected, 2, name="the session")
    markup = await page(inspected, await session_path(inspected))
    rows = markup.split("Steps in the order")[2].split("<tr>")[-2:]
    assert "compressed: the client has left what lay behind token 1,234" in rows[0]
    assert "compressed" not in rows[1]


async def test_what_the_ledger_forgets_is_gone_here_too(inspected: Running) -> None:
    log: StepLog = inspected.app.state.record.log
    (session,) = log.sessions(0, 10)
    log.forget_sessions([session.id])
    await page(inspected, f"/inspector/sessions/{session.id}", 404)
    assert len(log) == 0


async def test_before_another_server_a_turn_is_shown_as_its_text() -> None:
    turn = Reply([{"reasoning_content": "I think."}, {"content": HOSTILE}], "stop", usage(100, 10, 50))
    async with scripted(turn, turn, profile="generic") as (_, client):
        url = str(client.base_url)
        answer = await client.post("/v1/chat/completions", json=chat())
        again = continued(chat(), answer.json(), user("go on"))
        assert (await client.post("/v1/chat/completions", json=again)).status_code == 200
        running = Running(Starlette(), url, client)
        assert "50.0 %" in text_of(await page(running, "/inspector"))
        text = text_of(await page(running, (await step_paths(running))[0]))
    assert "gave no token ids" in text
    assert "I think." in text
    assert "</pre><script>" in text
    assert "sent it back as messages[1]: exact" in text


async def test_a_turn_that_came_back_in_another_protocol_is_shown_as_it_was_sent(
    caching_stub: StubEngine, settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, tmp_path: Path
) -> None:
    settings = {**settings, "ledger": str(tmp_path / "ledger.db")}
    app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        running = Running(app, url, client)
        body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 500, "messages": [user("Hello")]}
        body["metadata"] = {"user_id": "someone"}
        answer = (await client.post("/v1/messages", json=body)).json()
        spoken = [block for block in answer["content"] if block["type"] == "text"]
        body["messages"] += [{"role": "assistant", "content": spoken}, user("go on")]
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        text = text_of(await page(running, (await step_paths(running))[0]))
    assert "messages" in text.split("protocol")[1].split()[0]
    assert re.search(r"sent it back as messages\[1\]: repaired", text)
    assert "I say." in text.split("The message as it was sent")[1]


async def test_the_oldest_steps_go_first(inspected: Running) -> None:
    log = StepLog(3)
    for step in inspected.app.state.record.log.sessions(0, 1)[0].steps:
        log.add(replace(step))
    (session,) = log.sessions(0, 10)
    assert len(session.steps) == len(log) == 3


async def test_a_request_is_shown_while_it_waits_while_it_runs_and_when_it_has_failed(
    caching_stub: StubEngine, gateway: Running, writer: TurnWriter
) -> None:
    begin, end = asyncio.Event(), asyncio.Event()
    ids = writer.turn("I think.", "I say.")
    stop = {"type": "stop", "matched": 258}
    caching_stub.plan = lambda _: Script([begin.wait, ids[:4], end.wait, ids[4:]], stop, cached_tokens=40)
    asked = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat()))
    await caching_stub.until(lambda stub: bool(stub.running))
    waiting = await page(gateway, await session_path(gateway))
    assert "running" in waiting
    assert 'class="pending"' in waiting
    begin.set()
    log: StepLog = gateway.app.state.record.log
    while not (step := log.sessions(0, 1)[0].steps[0]).is_computed:
        await asyncio.sleep(0.01)
    assert (step.cached_tokens, step.pending_tokens, step.running) == (40, 0, True)
    end.set()
    await asked
    assert not step.running
    assert step.total_ms is not None
    caching_stub.plan = lambda _: Script([], None, status=500, error={"error": "broken"})
    await gateway.ask(chat(), status=503)
    assert "it failed, or the client left" in await page(gateway, await session_path(gateway))
