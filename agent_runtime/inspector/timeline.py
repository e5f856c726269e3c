"""Token timelines: one bar per step, to scale, as SVG that needs neither scripts nor inline styles."""

from collections.abc import Sequence
from typing import NamedTuple

from agent_runtime.inspector.facts import Mark, StepFacts
from agent_runtime.inspector.figures import count, duration, share
from agent_runtime.inspector.html import Html, element

HEIGHT = 150
_MARKS_HEIGHT = 16
_WIDTH = 1080
_HALF_WIDTH = 480
_MOST_IN_HALF = 40
"""Columns that two charts beside each other have room for."""
_WIDEST, _NARROWEST = 44, 4

_GLYPHS = {"window": "◆", "repaired": "●", "lost": "▲", "moved": "▼", "cut": "✂", "open": "○"}


class Bar(NamedTuple):
    """A step and what to mark on it."""

    step: StepFacts
    marks: Sequence[Mark]


class Layer(NamedTuple):
    """A kind of tokens: its class in the style sheet, its name, and how many a step has."""

    kind: str
    name: str
    tokens: str


CACHED = Layer("cached", "cached prompt", "cached_tokens")
NEW = Layer("new", "computed prompt", "new_tokens")
THINK = Layer("think", "thinking", "think_tokens")
TEXT = Layer("text", "text", "text_tokens")
CALL = Layer("call", "tool calls", "call_tokens")
PENDING = Layer("pending", "prompt without an answer yet", "pending_tokens")
ALL: Sequence[Layer] = (CACHED, NEW, PENDING, THINK, TEXT, CALL)
COMPUTED: Sequence[Layer] = (NEW, THINK, TEXT, CALL)


def glyph(mark: Mark) -> Html:
    """A mark as a sign, its words beside it for those who point or listen."""
    return element("span", _GLYPHS[mark.kind], class_=f"mark {mark.kind}", title=mark.text, role="img",
                   aria_label=mark.text)  # fmt: skip


def figures(step: StepFacts, marks: Sequence[Mark] = ()) -> str:
    """A step in one line."""
    if not step.turns:
        return f"step {step.id}: prompt {count(step.prompt_tokens)}; " + "; ".join(mark.text for mark in marks)
    parts = [
        f"step {step.id}: prompt {count(step.prompt_tokens)}",
        f"cached {count(step.cached_tokens)} ({share(step.cached_tokens, step.prompt_tokens)})",
        f"computed {count(step.new_tokens)}",
        f"thinking {count(step.think_tokens)}",
        f"text {count(step.text_tokens)}",
        f"calls {count(step.call_tokens)}",
        f"replay {step.verdict}",
    ]
    if step.first_token_ms is not None:
        parts.append(f"first token {duration(step.first_token_ms)}")
    if step.total_ms is not None:
        parts.append(f"total {duration(step.total_ms)}")
    return " · ".join([*parts, *(mark.text for mark in marks)])


def charts(bars: Sequence[Bar], link: str) -> Html:
    """All tokens of each step, and those computed; beside each other where there is room."""
    fits = len(bars) <= _MOST_IN_HALF
    width = _HALF_WIDTH if fits else _WIDTH
    drawn = [
        element("section", element("h2", title), _chart(bars, layers, link, f"Tokens of each step: {title}", width))
        for title, layers in (("Prompt and output", ALL), ("Computed only", COMPUTED))
    ]
    return element("div", drawn, class_="charts pair" if fits else "charts")


def _chart(bars: Sequence[Bar], layers: Sequence[Layer], link: str, label: str, most_width: int) -> Html:
    """One column per step. ``link`` is the address of a step but for its number."""
    highest = max((sum(getattr(bar.step, layer.tokens) for layer in layers) for bar in bars), default=0)
    scale = _round_up(highest)
    column = max(_NARROWEST, min(_WIDEST, most_width // max(1, len(bars))))
    width = max(column * len(bars), 64)
    drawn = [_column(bar, layers, index * column, column, scale, link) for index, bar in enumerate(bars)]
    total = HEIGHT + _MARKS_HEIGHT + 2
    svg = element(
        "svg",
        [_grid(scale, part, width) for part in (0.5, 1.0)],
        drawn,
        element("line", class_="axis", x1=0, x2=width, y1=total - 1, y2=total - 1),
        class_="chart",
        width=width,
        height=total,
        viewBox=f"0 0 {width} {total}",
        role="group",
        aria_label=label,
    )
    scale_text = element(
        "div", [element("span", count(scale * part)) for part in (1.0, 0.5, 0.0)], class_="scale", aria_hidden="true"
    )
    return element("div", scale_text, element("div", svg, class_="scroll", tabindex=0), class_="plot")


def legend(layers: Sequence[Layer]) -> Html:
    """What the colours and the signs say."""
    colours = [element("li", element("i", class_=f"key {layer.kind}"), layer.name) for layer in layers]
    words = {
        "window": "history begins anew",
        "repaired": "repaired",
        "lost": "thinking lost or foreign",
        "moved": "prompt moved",
        "cut": "cut by its budget",
        "open": "no answer yet",
    }
    signs = [element("li", element("span", _GLYPHS[kind], class_=f"mark {kind}"), text) for kind, text in words.items()]
    return element("ul", colours, signs, class_="legend")


def spark(steps: Sequence[StepFacts]) -> Html:
    """The prompts of the latest steps, small: computed over cached."""
    latest = steps[-40:]
    highest = max((step.prompt_tokens for step in latest), default=0) or 1
    cached: list[str] = []
    new: list[str] = []
    for index, step in enumerate(latest):
        x, top = 3 * index + 1, 20 * (1 - step.prompt_tokens / highest)
        between = 20 * (1 - step.cached_tokens / highest)
        cached.append(f"M{x} 20V{between:.2f}")
        new.append(f"M{x} {between:.2f}V{top if step.is_computed else between:.2f}")
    drawn = [element("path", class_=kind, d="".join(lines)) for kind, lines in (("cached", cached), ("new", new))]
    return element("svg", drawn, class_="spark", width=120, height=20, viewBox="0 0 120 20", aria_hidden="true")


def _column(bar: Bar, layers: Sequence[Layer], x: int, column: int, scale: int, link: str) -> Html:
    gap = 1 if column < 12 else 3
    drawn: list[Html] = []
    top = float(HEIGHT + _MARKS_HEIGHT + 1)
    for layer in layers:
        height = HEIGHT * getattr(bar.step, layer.tokens) / scale
        top -= height
        if height > 0:
            drawn.append(element("rect", class_=layer.kind, x=x, width=column - gap, y=top, height=height))
    if bar.marks:
        # One sign has room; the others are in the words.
        mark = bar.marks[0]
        drawn.append(element("text", _GLYPHS[mark.kind], class_=f"mark {mark.kind}", x=x + (column - gap) / 2, y=12))
    text = figures(bar.step, bar.marks)
    hit = element("rect", class_="hit", x=x, width=column, y=0, height=HEIGHT + _MARKS_HEIGHT + 1)
    return element("a", hit, drawn, element("title", text), class_="bar", href=f"{link}{bar.step.id}", aria_label=text)


def _grid(scale: int, part: float, width: int) -> Html:
    y = HEIGHT + _MARKS_HEIGHT + 1 - HEIGHT * part
    return element("line", class_="grid", x1=0, x2=width, y1=y, y2=y)


def _round_up(value: int) -> int:
    """The next small whole number times a power of ten."""
    power = 1
    while True:
        for step in (1, 2, 3, 4, 6, 8):
            if step * power >= value:
                return step * power
        power *= 10
