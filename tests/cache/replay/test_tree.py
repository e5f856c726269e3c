"""The models' radix tree against sets of prefixes."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.replay.tree import Node, Tree

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def packed(units: list[int]) -> bytes:
    """A path as the tree's key."""
    return array("q", units).tobytes()


@settings(max_examples=200, deadline=None)
@given(paths=PATHS, probe=st.lists(st.integers(0, 2), max_size=8), data=st.data())
def test_walks_and_totals_agree_with_the_set_of_all_prefixes(
    paths: list[list[int]], probe: list[int], data: st.DataObject
) -> None:
    tree, prefixes, states = Tree(), set[tuple[int, ...]](), set[tuple[int, ...]]()
    for path in paths:
        tree.insert(packed(path))
        prefixes |= {tuple(path[:n]) for n in range(1, len(path) + 1)}
        depth = data.draw(st.integers(1, len(path)))
        node = tree.node_at(packed(path), depth)
        assert node is not None and node.depth == depth
        tree.set_state(node, "", 0.0)
        states.add(tuple(path[:depth]))
    assert tree.kv_units == len(prefixes) == sum(node.units for node in tree.nodes())
    assert tree.num_states == len(states) == sum(node.state for node in tree.nodes())
    nodes, matched = tree.walk(packed(probe))
    assert matched == max((n for n in range(len(probe) + 1) if n == 0 or tuple(probe[:n]) in prefixes), default=0)
    on_path = {node.depth for node in nodes if node.state}
    assert on_path == {n for n in range(1, len(probe) + 1) if tuple(probe[:n]) in states}


@settings(max_examples=100, deadline=None)
@given(paths=PATHS, order=st.randoms(use_true_random=False))
def test_removing_everything_leaves_nothing(paths: list[list[int]], order: object) -> None:
    import random

    assert isinstance(order, random.Random)
    tree = Tree()
    for path in paths:
        tree.set_state(tree.insert(packed(path))[-1], "", 0.0)
    while True:
        nodes: list[Node] = sorted(tree.nodes(), key=lambda node: (node.depth, node.key))
        if not nodes:
            break
        node = order.choice(nodes)
        if node.state:
            tree.drop_state(node)
        elif not node.children:
            if node.units > 1 and order.random() < 0.5:
                tree.cut_leaf(node, 1)
            else:
                tree.drop_leaf(node)
        assert tree.kv_units == sum(one.units for one in tree.nodes())
    assert (tree.kv_units, tree.num_states) == (0, 0)
