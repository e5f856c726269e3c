"""The inspector's pages over HTTP: what they say, and that no text of theirs becomes markup."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent_runtime.inspector import routes
from agent_runtime.inspector.facts import StepFacts
from agent_runtime.inspector.log import StepLog
from agent_runtime.inspector.reading import turn_facts
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import chat
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import StubEngine, cut
from tests.gateway.vocabulary import TurnWriter
from tests.inspector.conftest import HOSTILE, converse
from tests.inspector.pages import Elements, page, session_path, step_paths, text_of
from tests.inspector.trees import dump


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
