"""The inspector in a real browser: it keeps itself current, works without scripts, and lets nothing foreign run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.gateway.bodies import chat
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import StubEngine
from tests.inspector.browser import PROGRAMS, BrowserError, Page, browser, program
from tests.inspector.conftest import HOSTILE, converse
from tests.inspector.test_pages import session_path, step_paths

pytestmark = [
    pytest.mark.skipif(program() is None, reason=f"no browser is installed: none of {', '.join(PROGRAMS)} is found"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    """One browser for all tests of this file."""
    with browser() as page:
        yield page


@pytest.fixture
def tab(chromium: Page) -> Page:
    """Its tab, wide, light, with scripts."""
    chromium.size(1280, 900)
    chromium.complaints.clear()
    return chromium


async def paths(gateway: Running) -> list[str]:
    """One of each kind of page."""
    return ["/inspector", await session_path(gateway), (await step_paths(gateway))[1], "/inspector/checkpoints"]


async def test_every_page_loads_all_it_needs_and_nothing_is_refused(inspected: Running, tab: Page) -> None:
    for path in await paths(inspected):
        await asyncio.to_thread(tab.open, inspected.url + path)
        sheets = await asyncio.to_thread(tab.evaluate, "document.styleSheets[0].cssRules.length")
        assert sheets > 50
    assert tab.complaints == []


async def test_the_list_and_a_session_show_new_steps_by_themselves(inspected: Running, tab: Page) -> None:
    await asyncio.to_thread(tab.open, f"{inspected.url}/inspector")
    assert await asyncio.to_thread(tab.until, "document.getElementById('live').textContent === 'live'")
    assert await asyncio.to_thread(tab.evaluate, "document.querySelectorAll('tbody tr').length") == 1
    await converse(inspected, 1, name="another")
    await asyncio.to_thread(
        tab.until, "document.querySelector('tbody th a').textContent === 'prompt_cache_key:another'"
    )
    await asyncio.to_thread(tab.open, inspected.url + await session_path(inspected))
    assert await asyncio.to_thread(tab.evaluate, "document.querySelectorAll('tbody tr').length") == 1
    await asyncio.to_thread(tab.evaluate, "document.querySelector('a.bar').focus()")
    await converse(inspected, 1, name="another")
    await asyncio.to_thread(tab.until, "document.querySelectorAll('tbody tr').length === 2")
    # Who was at a bar is still there, and its figures too.
    assert await asyncio.to_thread(tab.evaluate, "document.activeElement.matches('a.bar')")
    assert "step 9:" in await asyncio.to_thread(tab.evaluate, "document.getElementById('figures').textContent")
    assert tab.complaints == []


async def test_a_gateway_that_is_gone_is_said_to_be(inspected: Running, tab: Page) -> None:
    await asyncio.to_thread(tab.open, f"{inspected.url}/inspector")
    await asyncio.to_thread(tab.send, "Network.emulateNetworkConditions", offline=True, latency=0,
                            downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
    try:
        await asyncio.to_thread(tab.until, "document.getElementById('live').textContent === 'no answer'")
    finally:
        await asyncio.to_thread(tab.send, "Network.emulateNetworkConditions", offline=False, latency=0,
                                downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
    await asyncio.to_thread(tab.until, "document.getElementById('live').textContent === 'live'")


async def test_pointing_and_arrow_keys_show_the_figures_of_a_bar(inspected: Running, tab: Page) -> None:
    await asyncio.to_thread(tab.open, inspected.url + await session_path(inspected))

    def look() -> list[str]:
        shown: list[str] = []
        line = "document.getElementById('figures').textContent"
        box = tab.evaluate("(b => [b.left + b.width / 2, b.bottom - 4])"
                           "(document.querySelectorAll('a.bar')[1].getBoundingClientRect())")  # fmt: skip
        tab.point(*box)
        shown.append(tab.evaluate(line))
        tab.evaluate("document.querySelector('a.bar').focus()")
        shown.append(tab.evaluate(line))
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
            tab.press(key)
            shown.append(tab.evaluate(line))
        return shown

    shown = await asyncio.to_thread(look)
    assert [text.split(":")[0] for text in shown] == ["step 3", "step 1", "step 3", "step 5", "step 3"]
    assert "cached" in shown[0]
    assert "replay exact" in shown[0]


async def test_without_scripts_the_pages_say_the_same(inspected: Running, tab: Page) -> None:
    for path in await paths(inspected):
        await asyncio.to_thread(tab.open, inspected.url + path)
        with_scripts = await asyncio.to_thread(tab.evaluate, "document.querySelector('main').innerText")
        tab.size(1280, 900, scripts=False)
        await asyncio.to_thread(tab.open, inspected.url + path)
        assert await asyncio.to_thread(tab.evaluate, "document.querySelector('.live').hidden")
        assert await asyncio.to_thread(tab.evaluate, "document.querySelector('main').innerText") == with_scripts
        tab.size(1280, 900)


@pytest.mark.parametrize("dark", [False, True])
async def test_narrow_windows_and_both_colour_schemes_are_readable(inspected: Running, tab: Page, dark: bool) -> None:
    """Nothing is wider than the window (wide tables scroll by themselves), and text stands out from its ground."""
    contrast = (
        "(() => { const light = c => { const [r, g, b] = c.match(/\\d+/g).map(v => v / 255)"
        ".map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);"
        "return 0.2126 * r + 0.7152 * g + 0.0722 * b; };"
        "const ground = light(getComputedStyle(document.documentElement).backgroundColor);"
        "return Math.min(...[...document.querySelectorAll('main *')].filter(e => e.children.length === 0"
        " && e.textContent.trim() && e.checkVisibility() && !e.closest('svg') && !e.closest('.off')).map(e => {"
        "const text = light(getComputedStyle(e).color);"
        "return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05); })); })()"
    )
    for path in await paths(inspected):
        tab.size(400, 800, dark=dark)
        await asyncio.to_thread(tab.open, inspected.url + path)
        assert await asyncio.to_thread(tab.evaluate, "document.documentElement.scrollWidth") <= 400, path
        assert await asyncio.to_thread(tab.evaluate, contrast) >= 4.5, path
        tab.size(1280, 900, dark=dark)
        await asyncio.to_thread(tab.open, inspected.url + path)
        assert await asyncio.to_thread(tab.evaluate, "document.documentElement.scrollWidth") <= 1280, path


async def test_hostile_text_runs_nowhere(caching_stub: StubEngine, gateway: Running, tab: Page) -> None:
    body = await converse(gateway, 1, name=HOSTILE, text=HOSTILE)
    await gateway.ask({**body, "messages": [*body["messages"], {"role": "user", "content": HOSTILE}]})
    for path in [*await paths(gateway), (await step_paths(gateway))[0]]:
        await asyncio.to_thread(tab.open, gateway.url + path)
        await asyncio.to_thread(tab.evaluate, "new Promise(done => setTimeout(done, 50))")
        assert "owned" not in (await asyncio.to_thread(tab.evaluate, "document.title")).split(" · ")
        assert await asyncio.to_thread(tab.evaluate, "document.querySelectorAll('script').length") == 1
    assert tab.complaints == []


async def test_even_markup_that_got_through_could_not_run_or_send_anything(gateway: Running, tab: Page) -> None:
    await gateway.ask(chat())
    await asyncio.to_thread(tab.open, f"{gateway.url}/inspector")
    inline = "(s => { s.textContent = 'window.ran = true'; document.body.append(s) })(document.createElement('script'))"
    await asyncio.to_thread(tab.evaluate, inline)
    assert await asyncio.to_thread(tab.evaluate, "window.ran === undefined")
    for way in ("fetch('http://127.0.0.1:9/')", "import('data:text/javascript,1')"):
        with pytest.raises(BrowserError):
            await asyncio.to_thread(tab.evaluate, way)
    assert any("Content Security Policy" in text for text in tab.complaints)
    framed = await gateway.client.get("/inspector")
    assert "frame-ancestors 'none'" in framed.headers["content-security-policy"]
