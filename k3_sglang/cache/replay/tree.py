"""A small radix tree that counts units of KV and kept states, for the models of other engines' caches.

A node is an edge of the path ending at ``depth``; a state lives at the end of its node. Keys are the bytes of 64-bit
units, so that comparing an edge is one memory comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

UNIT_BYTES = 8


class Node:
    """An edge and what is kept at its end."""

    __slots__ = ("children", "depth", "kind", "key", "parent", "pins", "stamp", "state", "state_stamp")

    def __init__(self, key: bytes, depth: int, parent: Node | None) -> None:
        self.key = key
        self.depth = depth
        """Units from the root to the end of this edge."""
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.state = False
        self.kind = ""
        """What made the model keep the state."""
        self.stamp: float = 0.0
        """Last use of the edge's KV."""
        self.state_stamp: float = 0.0
        self.pins = 0
        """Running requests whose path contains this node."""

    @property
    def units(self) -> int:
        """KV units of the edge."""
        return len(self.key) // UNIT_BYTES

    @property
    def start(self) -> int:
        """Units before the edge."""
        return self.depth - self.units


class Tree:
    """The radix tree with its totals."""

    def __init__(self) -> None:
        self.root = Node(b"", 0, None)
        self.kv_units = 0
        self.num_states = 0

    def walk(self, path: bytes) -> tuple[list[Node], int]:
        """Nodes wholly on the path, and how many units of the path have KV (a partial edge included)."""
        nodes: list[Node] = []
        node, at = self.root, 0
        while at < len(path):
            child = node.children.get(path[at : at + UNIT_BYTES])
            if child is None:
                break
            if path.startswith(child.key, at):
                nodes.append(child)
                node, at = child, at + len(child.key)
                continue
            at += common_bytes(child.key, path, at)
            break
        return nodes, at // UNIT_BYTES

    def insert(self, path: bytes) -> list[Node]:
        """Make the whole path present; returns its nodes in order."""
        nodes, matched = self.walk(path)
        parent = nodes[-1] if nodes else self.root
        if parent.depth < matched:
            parent = self._split(parent.children[_unit(path, parent.depth)], matched)
            nodes.append(parent)
        if matched * UNIT_BYTES < len(path):
            node = Node(path[matched * UNIT_BYTES :], len(path) // UNIT_BYTES, parent)
            parent.children[_unit(path, matched)] = node
            self.kv_units += node.units
            nodes.append(node)
        return nodes

    def node_at(self, path: bytes, depth: int) -> Node | None:
        """The node ending exactly at ``depth`` on the path, splitting an edge if needed; None without KV there."""
        if depth <= 0:
            return None
        nodes, matched = self.walk(path[: depth * UNIT_BYTES])
        if matched < depth:
            return None
        parent = nodes[-1] if nodes else self.root
        if parent.depth == depth:
            return parent
        return self._split(parent.children[_unit(path, parent.depth)], depth)

    def set_state(self, node: Node, kind: str, stamp: float) -> None:
        """Keep a state at the node's end, or refresh the one there."""
        if not node.state:
            node.state = True
            node.kind = kind
            self.num_states += 1
        node.state_stamp = stamp

    def drop_state(self, node: Node) -> None:
        """Free the node's state; a node that separates nothing any more is merged into its only child."""
        node.state = False
        self.num_states -= 1
        self._merge_if_plain(node)

    def drop_leaf(self, node: Node) -> None:
        """Free a leaf's KV and state."""
        assert not node.children and node.parent is not None, "only leaves are dropped"
        if node.state:
            self.drop_state(node)
        self.kv_units -= node.units
        parent, node.parent = node.parent, None
        del parent.children[node.key[:UNIT_BYTES]]
        self._merge_if_plain(parent)

    def cut_leaf(self, node: Node, units: int) -> None:
        """Free the last ``units`` of a leaf's KV and the state at its end."""
        if node.state:
            self.drop_state(node)
        node.key = node.key[: (node.units - units) * UNIT_BYTES]
        node.depth -= units
        self.kv_units -= units

    def nodes(self) -> Iterator[Node]:
        """Every node, in no particular order."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _merge_if_plain(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node.state or node.pins or len(node.children) != 1:
            return
        (child,) = node.children.values()
        parent.children[node.key[:UNIT_BYTES]] = child
        child.key, child.parent = node.key + child.key, parent
        node.children, node.parent = {}, None

    def _split(self, child: Node, depth: int) -> Node:
        """Cut an edge at ``depth``; the state stays with the deeper part."""
        parent = child.parent
        assert parent is not None and child.start < depth < child.depth, "the cut must lie inside the edge"
        cut = (depth - child.start) * UNIT_BYTES
        upper = Node(child.key[:cut], depth, parent)
        upper.stamp, upper.pins = child.stamp, child.pins
        parent.children[child.key[:UNIT_BYTES]] = upper
        child.key, child.parent = child.key[cut:], upper
        upper.children[child.key[:UNIT_BYTES]] = child
        return upper


def _unit(path: bytes, depth: int) -> bytes:
    return path[depth * UNIT_BYTES : (depth + 1) * UNIT_BYTES]


def common_bytes(key: bytes, path: bytes, at: int) -> int:
    """Bytes of ``key`` equal to ``path[at:]``, a whole number of units."""
    low, high = 0, min(len(key), len(path) - at) // UNIT_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if path.startswith(key[: middle * UNIT_BYTES], at):
            low = middle
        else:
            high = middle - 1
    return low * UNIT_BYTES
