"""How much of a prompt each replica caches. Reading only.

A match says which nodes a prompt begins with, and the replicas' entries say who caches them. Only tokens count that are
cached from the prompt's start without a gap. What requests in flight are about to compute counts as cached, while the
cache has room for it; otherwise they will evict what was used longest ago, and that no longer counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from preble.core.prefixes.radix_tree import Match, Node, Root, live_node
from preble.core.prefixes.replica_cache import ReplicaCache
from preble.core.replica_index import replicas_in
from preble.core.types import TOKEN_BYTES, BlocksStored

_MIN_LOCATED: Final = 16
"""Tokens by which an event is located in a prompt; fewer could be anywhere."""


class PrefixMatch:
    """How much of a prompt any replica of a set caches, without a gap.

    `cached_tokens`: the longest such prefix of any of them. `key_node`: the key portion, which is the node with the
    most tokens on that prefix. `key_holders`: mask of those that hold most of it.
    """

    __slots__ = ("cached_tokens", "key_holders", "key_node")

    def __init__(self, cached_tokens: int, key_node: Node | None, key_holders: int) -> None:
        self.cached_tokens = cached_tokens
        self.key_node = key_node
        self.key_holders = key_holders


# -- of several replicas: `caches` are by replica index ---------------------------------------------------------------


def prefix_match(match: Match, caches: Sequence[ReplicaCache], among: int) -> PrefixMatch:
    """Return what the replicas of the mask `among` hold of the prompt. O(depth + holders of a part of a node)."""
    best, key_tokens, key_holders = 0, 1, 0
    key_node: Node | None = None
    alive = among
    for node in match.path:
        whole, parts = _holders_of(node, match.num_tokens, caches, alive)
        longest = _agreeing(node, match.num_tokens) if whole else max(parts.values()) if parts else 0
        if longest >= key_tokens:
            key_tokens, key_node, key_holders = longest, node, whole
            if parts:
                for replica, tokens in parts.items():
                    if 2 * tokens > longest:
                        key_holders |= 1 << replica
        if longest:
            best = node.start + longest
        if not whole:
            break
        alive = whole
    return PrefixMatch(best, key_node, key_holders)


def matched_tokens(match: Match, caches: Sequence[ReplicaCache], among: int, crowded: int) -> list[tuple[int, int]]:
    """Return pairs (mask, leading tokens held without a gap) for groups of the replicas in `among` that hold any.

    A later group supersedes earlier ones for the replicas in it. `crowded`: the mask of those that are. O(depth +
    holders of a part of a node + crowded holders of the first).
    """
    groups: list[tuple[int, int]] = []
    alive = among
    reached = 0
    for node in match.path:
        whole = alive & node.full_holders
        if whole != alive:
            parts: dict[int, int] = {}
            if whole != alive & node.holders:
                whole, parts = _holders_of(node, match.num_tokens, caches, alive)
            if reached and whole != alive:
                groups.append((alive, reached))
            groups += [(1 << replica, node.start + tokens) for replica, tokens in parts.items()]
            alive = whole
        reached = min(node.end, match.num_tokens)
        if not alive:
            break
    if reached and alive:
        groups.append((alive, reached))
    if crowded and match.path:
        held_by = replicas_in(match.path[0].holders & among & crowded)
        groups += [(1 << replica, matched_on(match, caches[replica])) for replica in held_by]
    return groups


# -- of one replica ---------------------------------------------------------------------------------------------------


def matched_on(match: Match, cache: ReplicaCache) -> int:
    """Return leading tokens that the replica holds, or is about to hold, without a gap, once it has computed what waits
    there.

    O(depth); on a crowded replica also what `ReplicaCache.tokens_left` takes.
    """
    is_crowded, start = cache.is_crowded, 0
    for node in match.path:
        if is_crowded:
            tokens = cache.tokens_left(node)
            if tokens < node.num_tokens:
                return min(start + tokens, match.num_tokens)
        elif not node.full_holders & cache.bit:
            entry = cache.entries.get(node)
            return start if entry is None else min(start + entry.held, match.num_tokens)
        start = node.end
    return match.num_tokens


def in_use_on(match: Match, cache: ReplicaCache) -> int:
    """Return leading tokens that requests in flight on the replica use. O(depth)."""
    start = 0
    for node in match.path:
        entry = cache.entries.get(node)
        if entry is None or not entry.ref_count:
            return start
        start = node.end
    return match.num_tokens


def confirmed_on(match: Match, cache: ReplicaCache) -> tuple[int, float]:
    """Return leading tokens that the replica holds for certain, and when the least recently used of them was last used.

    What is only about to be held does not count. The time is infinity if there are none. O(depth).
    """
    used_s, start = inf, 0
    for node in match.path:
        entry = cache.entries.get(node)
        if entry is None or not entry.held:
            return start, used_s
        used_s = min(used_s, entry.last_used_s)
        if entry.held < node.num_tokens:
            return min(start + entry.held, match.num_tokens), used_s
        start = node.end
    return match.num_tokens, used_s


def find_parent(leaf: Node, end: int, event: BlocksStored, namespace: str) -> tuple[Node, int] | None:
    """Return the place in a prompt that the event's blocks continue, as the node and the token at which their parent
    ends.

    The prompt is the one of `end` tokens whose last node was `leaf`. None if it is not of this namespace, does
    not have the first of the blocks, or has too few of their tokens to decide. O(tokens).
    """
    leaf = live_node(leaf, end)
    if not len(event.tokens) >= _MIN_LOCATED * TOKEN_BYTES or leaf.end < end:
        return None
    path = leaf.ancestors()
    root = path[-1].parent if path else leaf
    if not isinstance(root, Root) or root.namespace != namespace:
        return None
    prompt = b"".join([node.tokens for node in reversed(path)])
    size = max(event.block_size, _MIN_LOCATED) * TOKEN_BYTES
    step = event.block_size * TOKEN_BYTES
    found = prompt.find(event.tokens[:size], step)
    while found > 0 and found % step:
        found = prompt.find(event.tokens[:size], found + 1)
    if found <= 0:
        return None
    parent_end = found // TOKEN_BYTES
    return next(node for node in path if node.start < parent_end), parent_end


def usable_tokens(held_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
    """Return how many of the leading tokens that a replica holds spare it work: whole blocks, and never the prompt's
    last.

    The last token is always computed, since its output is needed.

    >>> usable_tokens(held_tokens=64, num_prompt_tokens=64, block_size=16)
    48
    """
    return min(held_tokens, max(num_prompt_tokens - 1, 0)) // block_size * block_size


# -- inside -----------------------------------------------------------------------------------------------------------


def _holders_of(node: Node, num_tokens: int, caches: Sequence[ReplicaCache], among: int) -> tuple[int, dict[int, int]]:
    """Return, of `among`, those that hold all of the node up to `num_tokens`, as a mask; the tokens of others."""
    whole = among & node.full_holders
    partial = among & node.holders & ~node.full_holders
    if not partial:
        return whole, {}
    parts: dict[int, int] = {}
    size = _agreeing(node, num_tokens)
    for replica in replicas_in(partial):
        tokens = caches[replica].tokens_held(node)
        if tokens >= size:
            whole |= 1 << replica
        elif tokens:
            parts[replica] = tokens
    return whole, parts


def _agreeing(node: Node, num_tokens: int) -> int:
    """Return tokens of the node that a prompt uses which agrees with its path for `num_tokens`."""
    return node.num_tokens if node.end <= num_tokens else num_tokens - node.start
