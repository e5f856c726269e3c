"""The engine's checkpoint tree as read from its dump: paths without branches, what each checkpoint costs and saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TreeNode:
    """A node: tokens ``start`` to ``end`` of a path. ``checkpoint`` is the dump's object, None without a state.

    ``dies`` is its place in the order in which checkpoints go, from 1; None while it is locked or pinned.
    """

    id: int
    start: int
    end: int
    has_kv: bool
    checkpoint: Mapping[str, Any] | None
    children: list["TreeNode"] = field(default_factory=list["TreeNode"])
    dies: int | None = None

    @property
    def tokens(self) -> int:
        """Its own length."""
        return self.end - self.start


@dataclass(slots=True)
class Path:
    """Nodes that follow each other without a branch, and the paths that go on from the last one."""

    nodes: list[TreeNode]
    branches: list["Path"] = field(default_factory=list["Path"])
    total_nodes: int = 0
    total_tokens: int = 0
    total_checkpoints: int = 0
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree of one rank. ``order`` are the checkpoints as they would die, the first one first."""

    paths: Sequence[Path]
    nodes: Sequence[TreeNode]
    order: Sequence[TreeNode]
    longest: int
    """Tokens of the longest path."""


def read_tree(dump: Mapping[str, Any], open_rows: int) -> Tree:
    """The tree of a rank's dump; paths are open from the top until they have ``open_rows`` rows together."""
    nodes: dict[int, TreeNode] = {}
    roots: list[TreeNode] = []
    for entry in dump["nodes"]:  # a parent comes before its children
        node = TreeNode(entry["id"], entry["start"], entry["end"], entry["kv"], entry["checkpoint"])
        nodes[node.id] = node
        (roots if entry["parent"] is None else nodes[entry["parent"]].children).append(node)
    order = _order(list(nodes.values()))
    paths = _paths(roots)
    _open(paths, open_rows)
    return Tree(paths, list(nodes.values()), order, max((node.end for node in nodes.values()), default=0))


def _order(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """By score, as the policy chooses; among equals the longest unused, then the oldest."""
    scored = [
        ((checkpoint["score"], -checkpoint["age"], node.id), node)
        for node in nodes
        if (checkpoint := node.checkpoint) is not None and not (checkpoint["locked"] or checkpoint["pinned"])
    ]
    order = [node for _, node in sorted(scored, key=lambda pair: pair[0])]
    for place, node in enumerate(order, 1):
        node.dies = place
    return order


def _paths(roots: Sequence[TreeNode]) -> list[Path]:
    """Joined from the top, counted from the bottom: without recursion, since a path may branch at every token."""
    tops = [Path([root]) for root in roots]
    found: list[Path] = []
    waiting = list(tops)
    while waiting:
        path = waiting.pop()
        found.append(path)
        while len(path.nodes[-1].children) == 1:
            path.nodes.append(path.nodes[-1].children[0])
        path.branches = [Path([child]) for child in path.nodes[-1].children]
        waiting += path.branches
    for path in reversed(found):
        path.total_nodes = len(path.nodes) + sum(branch.total_nodes for branch in path.branches)
        own_tokens = sum(node.tokens for node in path.nodes)
        path.total_tokens = own_tokens + sum(branch.total_tokens for branch in path.branches)
        own = sum(node.checkpoint is not None for node in path.nodes)
        path.total_checkpoints = own + sum(branch.total_checkpoints for branch in path.branches)
    return tops


def _open(tops: Sequence[Path], rows: int) -> None:
    """Open paths level by level while there is room."""
    level = list(tops)
    while level:
        for path in level:
            path.is_open = len(path.nodes) <= rows or path is tops[0]
            rows -= len(path.nodes) if path.is_open else 1
        level = [branch for path in level if path.is_open for branch in path.branches]
