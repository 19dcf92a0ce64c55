"""The prefixes that most requests of the window share, as a tree: for the live page, never for decisions."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import count

from preble.core.prefixes.radix_tree import Node, RadixTree

_LEAST_USES = 2
"""A prefix that only one request uses is not shared."""
_LEAST_TOKENS = 16
"""A shorter run fills no block of any engine, so it is left out, and its children move up to its parent."""


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A node that several requests of the window use. `parent`: its parent's place in the list, None at the top."""

    node: Node
    namespace: str
    parent: int | None


def hottest(tree: RadixTree, at_most: int) -> list[SharedNode]:
    """Return the nodes that most requests of the window use, each after its parent.

    A parent has at least as many uses, so a search from the roots finds them all. O(prompts below the roots).
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
