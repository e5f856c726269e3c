"""The checkpoint tree: what is kept, what each checkpoint costs, what it has saved, and which would die first."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.inspector.figures import count, plural, share, size
from agent_runtime.inspector.html import Child, Html, element
from agent_runtime.inspector.layout import PREFIX, Crumb, Site, chip, notice, page, table, tiles
from agent_runtime.inspector.tree import Path, Tree, TreeNode, read_tree

OPEN_ROWS = 60
"""Rows that are not folded at first."""
_HEAD_ROWS, _TAIL_ROWS = 4, 8
"""Rows of a long path that stay in sight; those between are folded."""
_FIRST_TO_DIE = 15
_NAME_CHARS = 48
_NEAR_DEATH = 5
_WORTH = (
    "gap: tokens to the next shallower checkpoint; reused: the whole path at each hit; saved: the gap at each hit, "
    "what would have been computed without it; worth: tokens it is expected to save"
)

_ORDER = "When a slot is needed, the checkpoint that is expected to save least goes. Locked, pinned ones stay."
_ROLES = {
    "tip": "nothing deeper: where a live session goes on",
    "prompt_end": "exactly one deeper: used when the answer comes back changed",
    "superseded": "two or more deeper on its only path: used when the history is edited",
    "fork": "several paths go on from it",
}
_FLAGS = {
    "locked": "a running request uses it",
    "pinned": "kept for some time because somebody asked for it",
    "declared": "the caller named this position as one that others share",
    "released": "its session is over",
    "left": "its session went on from elsewhere",
}


def no_tree_page(site: Site, reason: str) -> Html:
    """The page when there is no tree to be had."""
    return page(site, [Crumb("Checkpoints")], element("h1", "Checkpoints"), notice(reason))


def tree_page(site: Site, ranks: Sequence[Mapping[str, Any]], rank: int) -> Html:
    """The tree of one rank; ``rank`` is its place in the engine's answer."""
    dump = ranks[rank]
    tree = read_tree(dump, OPEN_ROWS)
    cost = _Cost(dump)
    return page(
        site,
        [Crumb("Checkpoints")],
        element("h1", "Checkpoints"),
        _rank_links(ranks, rank),
        _summary(dump, tree, cost),
        _metrics(dump["metrics"]),
        element("h2", "The tree"),
        _legend(),
        element("div", [_path(path, tree) for path in tree.paths], class_="tree")
        if tree.paths
        else notice("Nothing is kept."),
        element("h2", "Which die first"),
        element("p", _ORDER, class_="quiet"),
        _first_to_die(tree.order[:_FIRST_TO_DIE], cost),
    )  # fmt: skip


class _Cost:
    """What one checkpoint of a rank takes."""

    def __init__(self, dump: Mapping[str, Any]) -> None:
        self.state_bytes: int | None = dump.get("checkpoint_bytes")
        self.token_bytes: float | None = dump.get("kv_token_bytes")

    @property
    def state_tokens(self) -> float | None:
        """The KV tokens that take as much memory as one state."""
        if not self.state_bytes or not self.token_bytes:
            return None
        return self.state_bytes / self.token_bytes


def _rank_links(ranks: Sequence[Mapping[str, Any]], rank: int) -> Html | None:
    if len(ranks) < 2:
        return None
    links = [
        element("a", f"rank {place}", href=f"{PREFIX}/checkpoints?rank={place}",
                aria_current="page" if place == rank else None)
        for place in range(len(ranks))
    ]  # fmt: skip
    return element("nav", links, class_="pager", aria_label="Waiting queues of the engine")


def _summary(dump: Mapping[str, Any], tree: Tree, cost: _Cost) -> Html:
    slots = dump["stored_slots"] or dump["slots"]
    kept = [node for node in tree.nodes if node.checkpoint is not None]
    kv = sum(node.tokens for node in tree.nodes if node.has_kv)
    saved = sum(int(node.checkpoint["saved_tokens"]) for node in kept if node.checkpoint is not None)
    return tiles(
        ("checkpoints", count(len(kept)), "states that are kept"),
        ("slots", f"{count(slots['total'] - slots['free'])} of {count(slots['total'])} used",
         "the rest are free; running requests hold some of the used ones where checkpoints lie among them"),
        ("one costs", size(cost.state_bytes) if cost.state_bytes else "–", "bytes of one state on this rank"),
        ("as much as", f"{count(cost.state_tokens)} tok of KV" if cost.state_tokens else "–", None),
        ("all of them", size(len(kept) * cost.state_bytes) if cost.state_bytes else "–", None),
        ("nodes", count(len(tree.nodes)), None),
        ("KV", f"{count(kv)} tok", "tokens whose KV is in the tree"),
        ("KV takes", size(kv * cost.token_bytes) if cost.token_bytes else "–", None),
        ("reused", f"{count(sum(map(_reused, kept)))} tok", "from those kept: the whole path at each hit"),
        ("saved", f"{count(saved)} tok", "by those kept: the gap at each hit, what would have been computed without"),
        ("requests seen", count(dump["tick"]), None),
        ("typical pause", f"{dump['reuse_interval']:.1f} requests", "until a session comes back to its tip"),
    )  # fmt: skip


def _metrics(metrics: Mapping[str, Any]) -> Html:
    prompt = metrics["prompt_tokens"]
    evicted: Mapping[str, int] = metrics["evicted"]
    limits: Mapping[str, int] = metrics["hits_ended_by"]
    facts: list[tuple[str, Child]] = [
        ("prompt tokens since the start", count(prompt)),
        ("from the cache", f"{count(metrics['cached_tokens'])} ({share(metrics['cached_tokens'], prompt)})"),
        ("KV, but no state", f"{count(metrics['no_state_tokens'])} ({share(metrics['no_state_tokens'], prompt)})"),
        ("no KV", f"{count(metrics['no_kv_tokens'])} ({share(metrics['no_kv_tokens'], prompt)})"),
        ("made, reused", f"{count(metrics['made'])}, {count(metrics['reused'])}"),
        ("evicted", ", ".join(f"{count(number)} {role}" for role, number in evicted.items()) or "none"),
        ("hits ended by", ", ".join(f"{reason} {count(number)}" for reason, number in limits.items()) or "–"),
    ]
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in facts]
    return element("dl", rows, class_="facts")


def _legend() -> Html:
    roles = [element("li", chip(f"role-{role}", role), text) for role, text in _ROLES.items()]
    bar = element("li", element("i", class_="key kv"), "tokens of the node, on the scale of the longest path")
    return element("ul", roles, bar, class_="legend")


def _path(top: Path, tree: Tree) -> Html:
    """A path with all that hangs on it, made from the bottom up."""
    order: list[Path] = []
    waiting = [top]
    while waiting:
        path = waiting.pop()
        order.append(path)
        waiting += path.branches
    made: dict[int, Html] = {}
    for path in reversed(order):
        made[id(path)] = _one_path(path, [made[id(branch)] for branch in path.branches], tree)
    return made[id(top)]


def _one_path(path: Path, branches: Sequence[Html], tree: Tree) -> Html:
    first, last = path.nodes[0], path.nodes[-1]
    session = next((name for node in reversed(path.nodes) if (name := _session(node))), None)
    sizes = [plural(path.total_nodes, "node"), plural(path.total_checkpoints, "checkpoint"),
             f"{count(path.total_tokens)} tok"]  # fmt: skip
    if branches:
        sizes.append(plural(len(branches), "branch", "branches") + f" at {count(last.end)}")
    summary = element(
        "summary",
        element("span", f"{count(first.start)}–{count(last.end)}", class_="range"),
        element("span", " · ".join(sizes), class_="quiet"),
        element("span", session, class_="session") if session else None,
    )
    rows = [_row(node, tree) for node in path.nodes]
    return element("details", summary, _folded(rows), branches, class_="path", open=path.is_open)


def _folded(rows: Sequence[Html]) -> list[Html]:
    """The rows of a path; the middle of a long one is folded."""
    hidden = len(rows) - _HEAD_ROWS - _TAIL_ROWS
    if hidden < 3:
        return [element("div", rows, class_="rows")]
    middle = rows[_HEAD_ROWS:-_TAIL_ROWS]
    return [
        element("div", rows[:_HEAD_ROWS], class_="rows"),
        element(
            "details",
            element("summary", f"{hidden:,} more nodes"),
            element("div", middle, class_="rows"),
            class_="fold",
        ),
        element("div", rows[-_TAIL_ROWS:], class_="rows"),
    ]


def _row(node: TreeNode, tree: Tree) -> Html:
    scale = 100 / max(1, tree.longest)
    bar = element(
        "svg",
        element("rect", class_="rail", x=0, y=3, width=100, height=2),
        element("rect", class_="kv" if node.has_kv else "gone", x=node.start * scale, y=0,
                width=max(node.tokens * scale, 0.6), height=8),
        class_="span", viewBox="0 0 100 8", preserveAspectRatio="none", width=160, height=8, aria_hidden="true",
    )  # fmt: skip
    where = element("span", f"{count(node.start)}–{count(node.end)}", class_="range")
    kv = f"{count(node.tokens)} tok" if node.has_kv else f"{count(node.tokens)} tok · no KV"
    return element(
        "div", bar, where, element("span", kv, class_="number quiet"), _state(node), class_="node", id=f"node-{node.id}"
    )


def _state(node: TreeNode) -> Html:
    checkpoint = node.checkpoint
    if checkpoint is None:
        return element("span", "no checkpoint", class_="quiet")
    role = str(checkpoint["role"])
    said = [
        f"gap {count(checkpoint['gap'])}",
        plural(checkpoint["hits"], "hit"),
        f"reused {count(_reused(node))}",
        f"saved {count(checkpoint['saved_tokens'])}",
        f"worth {_worth(checkpoint)}",
    ]
    order = "stays" if node.dies is None else f"dies #{count(node.dies)}"
    is_near = node.dies is not None and node.dies <= _NEAR_DEATH
    flags = [chip("flag", flag, text) for flag, text in _FLAGS.items() if checkpoint[flag]]
    return element(
        "span",
        chip(f"role-{role}", role, _ROLES.get(role)),
        element("span", " · ".join(said), class_="worth", title=_WORTH),
        chip("missing", order) if is_near else element("span", order, class_="worth"),
        flags,
        class_="state",
    )


def _reused(node: TreeNode) -> int:
    """Tokens that requests took from it: each the whole path up to it."""
    return node.end * int(node.checkpoint["hits"]) if node.checkpoint is not None else 0


def _worth(checkpoint: Mapping[str, Any]) -> str:
    """Tokens that it is expected to save in the near future."""
    tokens = 2.0 ** min(float(checkpoint["score"]), 60.0)
    return f"{tokens:,.1f} tok" if tokens >= 0.05 else "under 0.1 tok"


def _session(node: TreeNode) -> str | None:
    name = node.checkpoint["session"] if node.checkpoint is not None else None
    return None if not name else str(name) if len(name) <= _NAME_CHARS else f"{name[:_NAME_CHARS]}…"


def _first_to_die(order: Sequence[TreeNode], cost: _Cost) -> Html:
    heads = (
        ("order", None),
        ("role", None),
        ("ends at", "tokens from the start"),
        ("gap", "tokens to the next shallower one"),
        ("worth", "tokens it is expected to save"),
        ("hits", "requests that went on from it"),
        ("reused", "tokens: the whole path at each hit"),
        ("saved", "tokens: the gap at each hit"),
        ("costs", "memory of its state"),
        ("age", "requests since its path was used"),
        ("session", None),
    )
    return table(heads, [_victim(node, cost) for node in order], "Checkpoints in the order in which they would go")


def _victim(node: TreeNode, cost: _Cost) -> Html:
    checkpoint = node.checkpoint or {}
    role = str(checkpoint["role"])
    figures = (
        count(node.end),
        count(checkpoint["gap"]),
        _worth(checkpoint),
        count(checkpoint["hits"]),
        count(_reused(node)),
        count(checkpoint["saved_tokens"]),
        size(cost.state_bytes) if cost.state_bytes else "–",
        count(checkpoint["age"]),
    )
    return element(
        "tr",
        element("th", element("a", f"#{node.dies}", href=f"#node-{node.id}"), scope="row", class_="number"),
        element("td", chip(f"role-{role}", role, _ROLES.get(role))),
        [element("td", figure, class_="number") for figure in figures],
        element("td", _session(node) or "–"),
    )
