"""Reads the inspector's pages: fetched and checked for what holds on every page, their text, the ways to them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from tests.gateway.conftest import Running

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
