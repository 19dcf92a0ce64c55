"""The lengths of answers by prefix, carried from one scheduler to the next: found in one tree, recalled in another.

A prefix is known again by a digest of its tokens. Two trees split at different tokens, so a node recalls the longest
prefix that ends within it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from preble.core.prefixes.history import PrefixHistory
from preble.core.prefixes.radix_tree import Node, RadixTree, Root
from preble.core.types import TOKEN_BYTES, LearnedLength

LEAST_ANSWERS: Final = 4.0
"""A prefix with fewer says little more than the shorter one that it begins with."""
MOST_LENGTHS: Final = 4096
MOST_HASHED_BYTES: Final = 2**24
"""Of the tree's tokens, in one search: some ten milliseconds."""
RECALLED_FOR_S: Final = 3600.0
"""What has not come again by then is forgotten, so that new prefixes need no digest any more."""
_DIGEST_BYTES: Final = 16


def learned_lengths(tree: RadixTree) -> list[LearnedLength]:
    """Return the lengths of answers to the tree's prefixes, the shorter prefixes first. O(tokens of those prefixes).

    At most `MOST_LENGTHS`, of prefixes with `LEAST_ANSWERS`, of which `MOST_HASHED_BYTES` are looked at.
    """
    found: list[LearnedLength] = []
    hashed = 0
    row = deque((node, _digest_of(root)) for root in tree.roots() for node in (root.children or {}).values())
    while row and len(found) < MOST_LENGTHS:
        node, above = row.popleft()
        answers, tokens = node.history.lengths if node.history is not None else (0.0, 0.0)
        if answers < LEAST_ANSWERS or hashed + len(node.tokens) > MOST_HASHED_BYTES:
            continue  # no longer prefix has more answers
        hashed += len(node.tokens)
        digest = above.copy()
        digest.update(node.tokens)
        found.append(LearnedLength(digest.hexdigest(), node.end, answers, tokens))
        row.extend((child, digest) for child in (node.children or {}).values())
    return found


class LearnedLengths:
    """Lengths that another scheduler has learned, until their prefixes come again."""

    def __init__(self, lengths: Sequence[LearnedLength]) -> None:
        self._lengths = {(length.end, length.digest): length for length in lengths[:MOST_LENGTHS]}
        self._ends = sorted({end for end, _ in self._lengths})
        self._until: float | None = None

    def recall(self, node: Node, history: PrefixHistory, now: float) -> None:
        """Let the new history of the prefix that ends with `node` begin with what is known of it.

        O(tokens of the prefix), if there is anything to recall of its length; else O(log(lengths)).
        """
        if not self._ends:
            return
        if self._until is None:
            self._until = now + RECALLED_FOR_S
        if now > self._until:
            self._lengths, self._ends = {}, []
            return
        ends = self._ends[bisect_right(self._ends, node.start) : bisect_right(self._ends, node.end)]
        if ends and (length := self._longest(node, ends)) is not None:
            history.recall(length.answers, length.output_tokens)

    def _longest(self, node: Node, ends: list[int]) -> LearnedLength | None:
        path = node.ancestors()
        top = path[-1].parent
        assert isinstance(top, Root)
        digest, found, done = _digest_of(top), None, 0
        for above in reversed(path[1:]):
            digest.update(above.tokens)
        for end in ends:
            upto = (end - node.start) * TOKEN_BYTES
            digest.update(node.tokens[done:upto])
            done = upto
            found = self._lengths.get((end, digest.hexdigest()), found)
        return found


def _digest_of(root: Root) -> blake2b:
    """Return the digest of the empty prefix."""
    return blake2b(root.namespace.encode() + b"\0", digest_size=_DIGEST_BYTES)
