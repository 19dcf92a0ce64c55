"""The prefixes that most requests of the window share, as a tree: for pages, never for decisions."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import count

from preble.core.prefixes.radix_tree import Node, RadixTree

_LEAST_USES = 2
"""A prefix of one request is nobody else's."""
_LEAST_TOKENS = 16
"""A shorter run is no block of any engine, and stands for chance: what comes below is shown without it."""


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A node that several requests of the window use. `parent`: the place of the node above it in the list, or None."""

    node: Node
    namespace: str
    parent: int | None


def hottest(tree: RadixTree, at_most: int) -> list[SharedNode]:
    """The nodes that most requests of the window use, each after the one above it.

    The node above has at least as many uses, so a search from the roots finds them all. O(prompts below the roots).
    """
    found: list[SharedNode] = []
    heap: list[tuple[int, int, SharedNode]] = []
    order = count()

    def offer(above: Node, namespace: str, parent: int | None) -> None:
        for child in nlargest(at_most, (above.children or {}).values(), key=lambda node: node.recent_uses):
            if child.recent_uses >= _LEAST_USES:
                heappush(heap, (-child.recent_uses, next(order), SharedNode(child, namespace, parent)))

    for root in tree.roots():
        offer(root, root.namespace, None)
    while heap and len(found) < at_most:
        _, _, shared = heappop(heap)
        parent = shared.parent
        if shared.node.num_tokens >= _LEAST_TOKENS:
            parent = len(found)
            found.append(shared)
        offer(shared.node, shared.namespace, parent)
    return found
