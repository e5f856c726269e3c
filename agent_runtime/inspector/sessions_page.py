"""The list of sessions, and one session: its timelines and the same figures as a table."""

from collections import Counter
from collections.abc import Sequence

from agent_runtime.inspector.facts import StepFacts, marks
from agent_runtime.inspector.figures import count, duration, moment, plural, share
from agent_runtime.inspector.html import Html, element
from agent_runtime.inspector.layout import PREFIX, Crumb, Site, chip, notice, page, pager, table, tiles
from agent_runtime.inspector.log import SessionFacts, StepLog
from agent_runtime.inspector.timeline import ALL, Bar, charts, glyph, legend, spark

SESSIONS_PER_PAGE = 50
STEPS_PER_PAGE = 100
_SHOWN_NAME_CHARS = 80

_VERDICTS = ("exact", "repaired", "missing", "foreign", "new")


def sessions_page(site: Site, log: StepLog, number: int) -> Html:
    """All sessions, the one used last first."""
    total = log.count_sessions()
    pages = max(1, -(-total // SESSIONS_PER_PAGE))
    number = min(number, pages)
    shown = log.sessions((number - 1) * SESSIONS_PER_PAGE, SESSIONS_PER_PAGE)
    heads = (
        ("session", "the client's name for it, or the number of its first request"),
        ("last use", None),
        ("steps", "model calls"),
        ("last prompt", "tokens of the latest prompt"),
        ("prompts", "the latest prompts, computed over cached"),
        ("all prompts", "tokens of all prompts that were answered"),
        ("cached", "share of them that was not computed again"),
        ("replay", "how the histories came back"),
    )
    body = (
        table(heads, [_session_row(session) for session in shown], "Sessions, the one used last first", kind="cards")
        if shown
        else notice("No request has come yet. This page shows the first one by itself.")
    )
    return page(
        site,
        [Crumb("Sessions")],
        element("h1", "Sessions"),
        element("p", f"{plural(total, 'session')}, {plural(len(log), 'step')}.", class_="quiet"),
        body,
        pager(number, pages, PREFIX, f"{total:,} sessions"),
        live=True,
    )


def session_title(session: SessionFacts) -> str:
    """What a session is called."""
    name = session.name or f"#{session.id}"
    return name if len(name) <= _SHOWN_NAME_CHARS else f"{name[:_SHOWN_NAME_CHARS]}…"


def session_href(number: int) -> str:
    """Where a session is shown."""
    return f"{PREFIX}/sessions/{number}"


def step_href(number: int) -> str:
    """Where a step is shown."""
    return f"{PREFIX}/steps/{number}"


def _session_row(session: SessionFacts) -> Html:
    last = session.steps[-1]
    running = sum(step.running for step in session.steps)
    name = element("a", session_title(session), href=session_href(session.id), title=session.name or None)
    cells = (
        element("th", name, chip("running", f"{running} running") if running else None, scope="row"),
        _cell("last use", moment(session.used_ms)),
        _cell("steps", count(len(session.steps)), "number"),
        _cell("last prompt", count(last.prompt_tokens), "number"),
        _cell("prompts", spark(session.steps)),
        _cell("all prompts", count(session.prompt_tokens), "number"),
        _cell("cached", share(session.cached_tokens, session.prompt_tokens), "number"),
        _cell("replay", _verdicts(session.steps)),
    )
    return element("tr", cells)


def _cell(label: str, content: Html | str, kind: str | None = None) -> Html:
    return element("td", content, class_=kind, data_label=label)


def _verdicts(steps: Sequence[StepFacts]) -> Html:
    found = Counter(step.verdict for step in steps)
    return element(
        "span",
        [chip(verdict, f"{verdict} {found[verdict]:,}") for verdict in _VERDICTS if found[verdict]],
        class_="chips",
    )


def session_page(site: Site, session: SessionFacts, number: int | None) -> Html:
    """One session; without a ``number`` its latest steps."""
    total = len(session.steps)
    pages = -(-total // STEPS_PER_PAGE)
    at = None if number is None else min(number, pages)
    begin = max(0, total - STEPS_PER_PAGE) if at is None else (at - 1) * STEPS_PER_PAGE
    bars = _bars(session.steps, begin, begin + STEPS_PER_PAGE)
    title = session_title(session)
    latest = f"the latest {STEPS_PER_PAGE} of {total:,} steps"
    paging = pager(at, pages, session_href(session.id), f"{total:,} steps", latest)
    return page(
        site,
        [Crumb("Sessions", PREFIX), Crumb(title)],
        element("h1", title),
        _summary(session),
        paging,
        charts(bars, f"{PREFIX}/steps/"),
        legend(ALL),
        element("p", "Point at a bar, or move to it with the keyboard, for its figures.", id="figures", role="status"),
        element("h2", "Steps"),
        _steps_table(bars),
        paging,
        live=at is None or at == pages,
    )


def _bars(steps: Sequence[StepFacts], begin: int, end: int) -> list[Bar]:
    shown = steps[begin:end]
    before = [steps[begin - 1] if begin else None, *shown]
    return [Bar(step, marks(step, last)) for step, last in zip(shown, before, strict=False)]


def _summary(session: SessionFacts) -> Html:
    steps = session.steps
    outputs = sum(step.output_tokens for step in steps)
    return tiles(
        ("steps", count(len(steps)), "model calls that are known here"),
        ("last prompt", count(steps[-1].prompt_tokens), "tokens"),
        ("prompt tokens", count(session.prompt_tokens), "of all steps that were answered"),
        ("cached", share(session.cached_tokens, session.prompt_tokens), "prompt tokens that were not computed again"),
        ("computed", count(session.prompt_tokens - session.cached_tokens), "prompt tokens"),
        ("generated", count(outputs), "tokens"),
        ("last use", moment(session.used_ms), None),
        ("replay", _verdicts(steps), "verdicts on the histories of its steps"),
    )


def _steps_table(bars: Sequence[Bar]) -> Html:
    heads = (
        ("step", None), ("time", None), ("prompt", "tokens"), ("cached", "tokens"), ("share", None),
        ("computed", "prompt tokens"), ("thinking", "tokens"), ("text", "tokens, with the structure around it"),
        ("calls", "tokens"), ("first token", None), ("total", None), ("replay", None), ("finish", None),
        ("remarks", None),
    )  # fmt: skip
    return table(heads, [_step_row(bar) for bar in bars], "Steps in the order in which they came", kind="steps")


def _step_row(bar: Bar) -> Html:
    step = bar.step
    number = element("th", element("a", str(step.id), href=step_href(step.id)), scope="row", class_="number")
    prompt = (count(step.cached_tokens), share(step.cached_tokens, step.prompt_tokens), count(step.new_tokens))
    output = (count(step.think_tokens), count(step.text_tokens), count(step.call_tokens))
    texts = (
        count(step.prompt_tokens),
        *(prompt if step.is_computed else ("–",) * len(prompt)),
        *(output if step.turns else ("–",) * len(output)),
    )
    cells = [element("td", text, class_="number") for text in texts]
    finish = ", ".join(dict.fromkeys(turn.finish for turn in step.turns)) or "–"
    return element(
        "tr",
        number,
        element("td", moment(step.created_ms)),
        cells,
        element("td", duration(step.first_token_ms), class_="number"),
        element("td", duration(step.total_ms), class_="number"),
        element("td", chip(step.verdict, step.verdict)),
        element("td", finish),
        element("td", [element("span", glyph(mark), mark.text, class_="remark") for mark in bar.marks]),
    )
