"""The frame of every page: head, navigation, notices; and the headers that keep a page to itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.inspector.figures import count, plural
from agent_runtime.inspector.html import Child, Html, element, joined

PREFIX = "/inspector"
LIVE_EVERY_S = 2

HEADERS = {
    # Nothing from elsewhere, nothing inline: text that got through as markup could still not run or fetch anything.
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Site:
    """What all pages say about the gateway. ``content`` is whether prompts and answers may be shown."""

    model: str
    content: bool
    max_steps: int
    has_ledger: bool


@dataclass(frozen=True, slots=True)
class Crumb:
    """One place on the way to a page; without ``href`` it is the page itself."""

    text: str
    href: str | None = None


def page(site: Site, crumbs: Sequence[Crumb], *body: Child, live: bool = False) -> Html:
    """A whole page; a ``live`` one is asked for again every few seconds when scripts may run."""
    title = " · ".join([*(crumb.text for crumb in reversed(crumbs)), "K3 inspector"])
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href=f"{PREFIX}/static/icon.svg"),
        element("link", rel="stylesheet", href=f"{PREFIX}/static/inspector.css"),
        element("script", src=f"{PREFIX}/static/inspector.js", defer=True),
    )
    frame = element(
        "body",
        element("a", "Skip to the content", class_="skip", href="#content"),
        _header(site, crumbs),
        element("main", *body, id="content", data_every=LIVE_EVERY_S if live else None),
        element("footer", _footer(site)),
    )
    return joined(Html("<!doctype html>"), element("html", head, frame, lang="en"))


def _header(site: Site, crumbs: Sequence[Crumb]) -> Html:
    links = (("Sessions", PREFIX), ("Checkpoints", f"{PREFIX}/checkpoints"))
    here = crumbs[0].text if crumbs else ""
    navigation = [
        element("a", text, href=href, aria_current="page" if text == here and len(crumbs) == 1 else None)
        for text, href in links
    ]
    trail = [
        element("li", element("a", crumb.text, href=crumb.href) if crumb.href else element("b", crumb.text))
        for crumb in crumbs
    ]
    return element(
        "header",
        element("strong", "K3 inspector", class_="brand"),
        element("nav", navigation, aria_label="Pages"),
        element("span", element("span", class_="dot"), element("span", "", id="live"), class_="live", hidden=True),
        element("span", site.model, class_="model", title="served model"),
        element("nav", element("ol", trail), class_="trail", aria_label="Where this is") if len(crumbs) > 1 else None,
    )


def _footer(site: Site) -> Html:
    kept = f"The latest {plural(site.max_steps, 'request')} are known here"
    source = ", also those before the last start: there is a ledger" if site.has_ledger else "; there is no ledger"
    shown = "." if site.content else ". Prompts and answers are not shown (inspector_content: false)."
    return joined(kept, source, shown)


def notice(*text: Child, kind: str = "note") -> Html:
    """A paragraph that stands out."""
    return element("p", *text, class_=f"notice {kind}")


def tiles(*facts: tuple[str, Child, str | None]) -> Html:
    """Figures with their names: (name, figure, explanation)."""
    return element(
        "dl",
        [element("div", element("dt", name), element("dd", value), title=title) for name, value, title in facts],
        class_="tiles",
    )


def table(heads: Sequence[tuple[str, str | None]], rows: Sequence[Html], caption: str, *, kind: str = "") -> Html:
    """A table in a box that scrolls by itself; heads are (text, explanation)."""
    head = element("tr", [element("th", text, scope="col", title=title) for text, title in heads])
    whole = element(
        "table",
        element("caption", caption, class_="quiet"),
        element("thead", head),
        element("tbody", rows),
        class_=kind or None,
    )
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def pager(number: int | None, pages: int, path: str, total: str, latest: str = "") -> Html | None:
    """Links to the other pages of a list; None when there is one only. Pages count from 1.

    ``total`` is how many things there are in all. With ``latest`` the address without a page shows the end of the list
    (``number`` None), called so; else it shows the first page.
    """
    if pages < 2:
        return None
    at = pages if number is None else number

    def link(text: str, to: int, rel: str | None = None) -> Html:
        if to == number or not 1 <= to <= pages:
            return element("span", text, class_="off")
        return element("a", text, href=f"{path}?page={to}", rel=rel)

    here = latest if number is None else f"page {count(at)} of {count(pages)}, {total}"
    end = link("last »", pages)
    if latest:
        end = element("span", "latest »", class_="off") if number is None else element("a", "latest »", href=path)
    return element(
        "nav",
        link("« first", 1),
        link("‹ before", at - 1, "prev"),
        element("span", here),
        link("after ›", at + 1, "next"),
        end,
        class_="pager",
        aria_label="Pages of the list",
    )


def chip(kind: str, text: str, title: str | None = None) -> Html:
    """A small coloured word."""
    return element("span", text, class_=f"chip {kind}", title=title)


def not_found(site: Site, what: str, remedy: str) -> Html:
    """The page of a 404."""
    return page(site, [Crumb("Not found")], element("h1", "Not found"), notice(what, " ", remedy, kind="wrong"))
