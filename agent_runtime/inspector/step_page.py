"""One step: its exact prompt and output with the structure in sight, sizes, and what came back with the next one."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.guard.verdict import EXPLAINED
from agent_runtime.inspector.content import Output, Sent, StepContent
from agent_runtime.inspector.facts import StepFacts, marks
from agent_runtime.inspector.figures import count, duration, moment, plural, share
from agent_runtime.inspector.html import Html, element, joined
from agent_runtime.inspector.layout import PREFIX, Crumb, Site, chip, notice, page, tiles
from agent_runtime.inspector.log import SessionFacts
from agent_runtime.inspector.sessions_page import session_href, session_title, step_href
from agent_runtime.inspector.structure import Block, blocks, pieces
from agent_runtime.inspector.timeline import figures, glyph
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel

BLOCKS_PER_PAGE = 60
_OPEN_CHARS = 1_200
"""Longer messages are folded."""
MAX_SHOWN_CHARS = 20_000
"""Of one message; a link leads to the whole of it."""
_SHORT_PREVIEW = 90
_LIMITS = {
    "whole": "there was no more to give",
    "no_kv": "the text that follows had not been seen here after this beginning",
    "no_state": "the KV goes further, but no state was kept deeper on this path",
    "evicted": "what reached further was dropped to make room",
    "boundary": "computed before but not kept",
    "no_slot": "there was a hit, but no free slot to restore its state into",
    "asked": "the request wants something computed for tokens of its prompt",
}
"""The words of the cache for what ended a hit."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A step that goes on from this one, and the turn as its client sent it, None where content is not shown."""

    step: StepFacts
    sent: Sent | None


@dataclass(frozen=True, slots=True)
class StepView:
    """All that the page of a step shows. ``content`` is None where content may not be shown."""

    step: StepFacts
    session: SessionFacts
    content: StepContent | None
    returned: Sequence[Returned]
    tokenizer: K3Tokenizer | None


def step_page(site: Site, view: StepView, begin: int | None, whole: int | None) -> Html:
    """The page. ``begin`` is the first message shown, by default so that the last is; ``whole`` shows one uncut."""
    step = view.step
    title = f"Step {step.id}"
    trail = [
        Crumb("Sessions", PREFIX),
        Crumb(session_title(view.session), session_href(step.session)),
        Crumb(title),
    ]
    body: list[Html] = [element("h1", title), _neighbours(view), _sizes(step), _remarks(view)]
    if view.content is None:
        body.append(notice("Prompts and answers are not shown here: inspector_content is false."))
    else:
        body.append(
            notice("This page shows content: what users, tools and the model said. Mind who can see your screen.")
        )
        body += [_jump(), *_prompt(view, view.content, begin, whole)]
        body.append(element("h2", "What was generated", id="generated"))
        body += _outputs(view, view.content)
    body += [element("h2", "What came back", id="returned"), _came_back(view)]
    return page(site, trail, *body)


def _jump() -> Html:
    places = (("The prompt", "prompt"), ("What was generated", "generated"), ("What came back", "returned"))
    return element("p", [element("a", text, href=f"#{place}") for text, place in places], class_="jump")


def _neighbours(view: StepView) -> Html:
    steps = view.session.steps
    at = next((place for place, step in enumerate(steps) if step.id == view.step.id), 0)

    def link(text: str, place: int, rel: str) -> Html:
        if 0 <= place < len(steps):
            return element("a", text, href=step_href(steps[place].id), rel=rel)
        return element("span", text, class_="off")

    where = element("span", f"{at + 1:,} of {len(steps):,} in its session")
    return element("nav", link("‹ step before", at - 1, "prev"), where, link("step after ›", at + 1, "next"),
                   class_="pager", aria_label="Steps of the session")  # fmt: skip


def _sizes(step: StepFacts) -> Html:
    return tiles(
        ("prompt", count(step.prompt_tokens), "tokens"),
        (
            "cached",
            count(step.cached_tokens) if step.is_computed else "–",
            "prompt tokens that were not computed again",
        ),
        ("share", share(step.cached_tokens, step.prompt_tokens) if step.is_computed else "–", None),
        ("computed", count(step.new_tokens) if step.is_computed else "–", "prompt tokens"),
        ("thinking", count(step.think_tokens), "tokens"),
        ("text", count(step.text_tokens), "tokens, with the structure around it"),
        ("calls", count(step.call_tokens), "tokens"),
        ("first token", duration(step.first_token_ms), None),
        ("total", duration(step.total_ms), None),
        ("at", moment(step.created_ms), None),
        ("protocol", step.form, "the form of the request"),
    )


def _remarks(view: StepView) -> Html:
    step, steps = view.step, view.session.steps
    at = next((place for place, other in enumerate(steps) if other.id == step.id), 0)
    found = marks(step, steps[at - 1] if at else None)
    items = [element("li", "replay of its history: ", chip(step.verdict, step.verdict), " ", _counts(step))]
    items += [element("li", glyph(mark), mark.text) for mark in found]
    limit = next((turn.limit for turn in step.turns if turn.limit), None)
    if limit is not None:
        items.append(element("li", f"why the cache gave no more: {limit}, {_LIMITS.get(limit, 'see docs/cache.md')}"))
    prefix = step.replay.get("prefix")
    if prefix is not None and prefix.get("holds"):
        items.append(element("li", "the prompt begins with the one before it and what was generated from that"))
    elif prefix is not None and prefix.get("detail"):
        items.append(element("li", f"{prefix['detail']} (message {prefix.get('index')})"))
    for turn in step.replay.get("turns", ()):
        reason = turn.get("reason")
        items.append(element("li", f"messages[{turn['index']}]: {turn['verdict']}, {EXPLAINED.get(reason, reason)}"))
    items += [
        element("li", f"choice {turn.choice}: the model's turn is irregular: {warning}")
        for turn in step.turns
        for warning in turn.warnings
    ]
    return element("ul", items, class_="remarks")


def _counts(step: StepFacts) -> str:
    found = [f"{step.replay.get(name, 0)} {name}" for name in ("exact", "repaired", "missing", "foreign")]
    return f"({', '.join(found)} of its earlier turns)"


def _prompt(view: StepView, content: StepContent, begin: int | None, whole: int | None) -> list[Html]:
    ids, tokenizer = content.prompt_ids, view.tokenizer
    heading = element("h2", "The prompt", id="prompt")
    if ids is None or tokenizer is None:
        return [heading, notice(content.missing or "Without tokenizer_dir its ids cannot be read.")]
    found = blocks(ids, tokenizer)
    last = max(0, len(found) - BLOCKS_PER_PAGE)
    first = last if begin is None else min(begin, max(0, len(found) - 1))
    shown = found[first : first + BLOCKS_PER_PAGE]
    # Images stand in the ids as one pad each, and the cache counts them as the tokens they became.
    boundary = view.step.cached_tokens if view.step.turns and not view.step.images else None
    drawn = [
        _block(ids, block, tokenizer, _Place(first + index, boundary, step_href(view.step.id), whole))
        for index, block in enumerate(shown)
    ]
    text = (
        f"{plural(len(found), 'block')}, {count(len(ids))} ids; control tokens and tags stand as the model sees them."
    )
    if boundary is not None:
        text += " A grey edge: from the cache. An orange one: computed for this step."
    paging = _block_pager(view.step.id, first, len(found))
    return [heading, element("p", text, class_="quiet"), *paging, element("div", drawn, class_="blocks"), *paging]


def _block_pager(step: int, first: int, total: int) -> list[Html]:
    if total <= BLOCKS_PER_PAGE:
        return []

    def link(text: str, to: int, possible: bool) -> Html:
        return (
            element("a", text, href=f"{step_href(step)}?from={to}") if possible else element("span", text, class_="off")
        )

    end = min(total, first + BLOCKS_PER_PAGE)
    return [
        element(
            "nav",
            link("« first", 0, first > 0),
            link("‹ before", max(0, first - BLOCKS_PER_PAGE), first > 0),
            element("span", f"blocks {first + 1:,} to {end:,} of {total:,}"),
            link("after ›", end, end < total),
            link("last »", max(0, total - BLOCKS_PER_PAGE), end < total),
            class_="pager",
            aria_label="Blocks of the prompt",
        )
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block stands: its number, the tokens that came from the cache, its step, the block to show uncut."""

    number: int
    boundary: int | None
    href: str
    whole: int | None


def _block(ids: Sequence[int], block: Block, tokenizer: K3Tokenizer, place: _Place) -> Html:
    uncut = place.whole == place.number
    text, chars, cut = _text(ids, block, tokenizer, None if uncut else MAX_SHOWN_CHARS)
    role = block.role or "open"
    edge = ""
    if place.boundary is not None:
        edge = "cached" if block.end <= place.boundary else "new" if block.start >= place.boundary else "both"
    name = block.tag.partition(" ")[2] or block.tag or "no message"
    summary = element(
        "summary",
        chip(f"role-{role}", block.role or "–"),
        element("span", name, class_="tag"),
        element("span", _preview(ids, block, tokenizer), class_="preview"),
        element("span", f"{count(block.tokens)} tok", class_="number"),
        element("span", f"at {count(block.start)}", class_="number quiet"),
    )
    more = None
    if cut:
        href = f"{place.href}?from={place.number}&whole={place.number}#block-{place.number}"
        more = element("p", f"The first {MAX_SHOWN_CHARS:,} characters. ", element("a", "Show all of it", href=href))
    return element(
        "details",
        summary,
        element("pre", text),
        more,
        id=f"block-{place.number}",
        class_=f"block {edge}".strip(),
        open=uncut or chars <= _OPEN_CHARS,
    )


def _preview(ids: Sequence[int], block: Block, tokenizer: K3Tokenizer) -> str:
    """The first text of a message on one line, for a folded one."""
    head = ids[block.start : min(block.end, block.start + 200)]
    first = Block(block.tag, 0, len(head), block.start_tags)
    texts = [piece.text for piece in pieces(head, first, tokenizer) if piece.kind == "text" and piece.text.strip()]
    return " ".join((texts[0] if texts else "").split())[:_SHORT_PREVIEW]


def _text(ids: Sequence[int], block: Block, tokenizer: K3Tokenizer, most: int | None) -> tuple[Html, int, bool]:
    """A block's markup, its length in characters (up to ``most``), and whether it was cut there."""
    drawn: list[Html] = []
    chars = 0
    for piece in pieces(ids, block, tokenizer):
        left = None if most is None else most - chars
        if left is not None and left <= 0:
            return joined(drawn), chars, True
        text = piece.text if left is None else piece.text[:left]
        chars += len(text)
        kind = piece.kind if piece.kind != "text" else f"text in-{_known(piece.channel)}"
        drawn.append(element("span", text, class_=kind))
        if len(text) < len(piece.text):
            return joined(drawn), chars, True
    return joined(drawn), chars, False


def _known(channel: str) -> str:
    """A channel's name for the style sheet; the model may have written any."""
    return channel if channel in ("message", "think", "response", "argument", "json") else "other"


def _outputs(view: StepView, content: StepContent) -> list[Html]:
    if not content.outputs:
        return [notice("Nothing is on record.")]
    many = len(view.step.turns) > 1
    drawn: list[Html] = []
    for output in content.outputs:
        if many:
            drawn.append(element("h3", f"Choice {output.choice}"))
        drawn.append(_output(output, view.tokenizer))
    return drawn


def _output(output: Output, tokenizer: K3Tokenizer | None) -> Html:
    if tokenizer is None or not output.ids:
        return _message(output)
    start: Channel = output.start
    found = blocks(output.ids, tokenizer, start)
    drawn = [_block(output.ids, block, tokenizer, _Place(index, None, "", index)) for index, block in enumerate(found)]
    return element("div", drawn, class_="blocks output")


def _message(output: Output) -> Html:
    """A turn whose ids are not known, from its text."""
    message = output.message
    parts: list[Html] = []
    if message.reasoning:
        parts += [element("span", "thinking\n", class_="tag"), element("span", message.reasoning, class_="in-think")]
    if isinstance(message.content, str) and message.content:
        parts += [element("span", "\ntext\n", class_="tag"), element("span", message.content, class_="in-response")]
    for call in message.tool_calls:
        parts.append(element("span", f"\ncall {call.name}\n", class_="tag"))
        parts.append(element("span", call.arguments, class_="in-argument"))
    return element("div", element("pre", parts), class_="blocks output")


def _came_back(view: StepView) -> Html:
    if not view.returned:
        return notice("No request has gone on from this step yet, or none that is known here.")
    return joined([_return(returned) for returned in view.returned])


def _return(returned: Returned) -> Html:
    step, back = returned.step, returned.step.came_back
    link = element("a", f"Step {step.id}", href=step_href(step.id))
    if back is None:
        return element("p", link, " goes on from here; how the turn came back is not on record.")
    said = EXPLAINED.get(back.reason) if back.reason else "as it was generated"  # type: ignore[call-overload]
    line = element("p", link, f" sent it back as messages[{back.at}]: ", chip(back.verdict, back.verdict), f" {said}. ",
                   element("span", figures(step), class_="quiet"))  # fmt: skip
    if returned.sent is None or back.verdict == "exact":
        return line
    if returned.sent.message is None:
        return joined(line, notice(returned.sent.missing))
    shown = returned.sent.message[:MAX_SHOWN_CHARS]
    return joined(line, element("details", element("summary", "The message as it was sent"), element("pre", shown)))
