"""The prefix index: which prompts begin alike, what each replica caches of them, and what it would evict next.

Theory of operation
-------------------
One radix tree holds the tokens; a node is a run of them (`radix_tree`). Each replica has a cache entry for each node of
which it caches something, or which its requests use (`replica_cache`). An entry says three things:

- `held`: how many leading tokens of the node the replica caches. Stored events raise it, or, for a replica without
  events, its first output tokens. Evictions, a cleared cache, the capacity, age and low `cached_tokens` lower it.
- `ref_count`: the replica's requests in flight that use the node. While there are any, the whole node counts as cached:
  it is in use there, or is about to be computed.
- `recent_uses`: requests of the load window that use the node. They say what an eviction would cost.

Entries of cached nodes are in the order in which the replica evicts: least recently used first, a node before the
nodes above it. A node without any entry is removed, and a node whose only child has like entries is joined with it, so
the tree never holds more than somebody caches or uses.

An event names blocks by hashes. A name stands for a place, "token number `end` of the prompt that passes this node", so
that it stays right while nodes split and merge (`live_node`). A stored event is matched with the tree once: `locate`
finds the place below its parent, the caller sees what it would add, and `stored` enters it.

Source: Preble, "Global scheduler data structures".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nextafter
from typing import Final

from preble.core.prefixes.block_names import pack_name, pack_names
from preble.core.prefixes.cache_entry import COPIED_BYTES, ENTRY_BYTES, NAME_BYTES, RUN_BYTES, IndexSize
from preble.core.prefixes.history import PrefixHistory
from preble.core.prefixes.learned_lengths import LearnedLengths
from preble.core.prefixes.radix_tree import NODE_BYTES, Match, Node, RadixTree, live_node
from preble.core.prefixes.replica_cache import UNKNOWN_CAPACITY, ReplicaCache
from preble.core.replica_index import replicas_in
from preble.core.types import TOKEN_BYTES, BlockHash, BlocksStored, LearnedLength, PackedTokens

_DROPPED_AT_ONCE: Final = 16
"""Cache entries that are forgotten together where memory is short."""


class PrefixIndex:
    """The trees, and the cache of every replica. What a prompt finds in them: `preble.core.prefixes.matching`.

    `caches`: by replica index, for reading only; a replica that is gone has an empty one. `trim_tokens`: how many
    tokens at the end of a leaf may be cached nowhere before they are cut off; by default about what a node takes
    besides its tokens. `lengths`: of answers, that another scheduler has learned.
    """

    def __init__(self, trim_tokens: int = NODE_BYTES // TOKEN_BYTES, *, lengths: Sequence[LearnedLength] = ()) -> None:
        self.tree = RadixTree(on_split=self._split_entries)
        self.caches: list[ReplicaCache] = []
        self._trim_tokens = trim_tokens
        self._size = IndexSize()
        self._recalled = LearnedLengths(lengths)

    def add_replica(self, replica: int, capacity: int | None = None) -> None:
        """Add a replica that can cache `capacity` tokens, None if nobody knows how many."""
        if replica == len(self.caches):
            self.caches.append(ReplicaCache(replica, self._size))
        self.caches[replica].capacity = UNKNOWN_CAPACITY if capacity is None else capacity

    def remove_replica(self, replica: int) -> None:
        """Forget the replica. No request in flight or in the window may refer to it any more. O(its cache entries)."""
        closed, self.caches[replica] = self.caches[replica], ReplicaCache(replica, self._size)
        self._prune_all(closed.close())

    @property
    def crowded(self) -> int:
        """The replicas on which more was placed than fits, as a mask."""
        return self._size.crowded

    @property
    def num_bytes(self) -> int:
        """Memory of the trees and entries, in bytes, by count."""
        tree, size = self.tree, self._size
        names_bytes = size.runs * RUN_BYTES + size.names * NAME_BYTES + size.copied * COPIED_BYTES
        nodes_bytes = tree.num_tokens * TOKEN_BYTES + tree.num_nodes * NODE_BYTES
        return nodes_bytes + size.entries * ENTRY_BYTES + names_bytes

    def match(self, prompt: PackedTokens, namespace: str = "") -> Match:
        """Return how far the prompt agrees with any known prefix, whether or not a replica still caches it."""
        return self.tree.match(prompt, namespace)

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, replica: int, match: Match, prompt: PackedTokens, now: float, *, known_only: bool = False) -> Node:
        """Note that a request is placed: its prompt is in use on the replica and counts in the window. Return its last
        node.

        `match`: of the prompt with the trees as they are now. `known_only`: only the nodes are to count that the prompt
        uses whole. The node stays valid until `release` and `forget_use` have both been called with it. O(tokens +
        depth).
        """
        path = match.whole if known_only else self.tree.extend(match, prompt)
        for node in path:
            if node.holders:  # it was there before this request
                if node.history is None:
                    node.history = PrefixHistory(now)
                    self._recalled.recall(node, node.history, now)
                node.history.note_use(now)
        self.caches[replica].add_use(path, now)
        return path[-1] if path else match.base

    def place_too(self, replica: int, leaf: Node, now: float) -> None:
        """Do as `place`, for a request that is placed already and uses its prompt on a second replica. O(depth)."""
        self.caches[replica].add_use(leaf.ancestors()[::-1], now)

    def note_answer(self, leaf: Node, output_tokens: int, noted_tokens: float = 0.0, noted_at: float = 0.0) -> None:
        """A request whose prompt ends in `leaf` was answered. `noted_tokens`: of them, at `noted_at`. O(depth)."""
        node = leaf
        while node.parent is not None:
            history = node.history
            if history is not None:
                history.note_answer(output_tokens - (noted_tokens if history.began_s <= noted_at else 0.0))
            node = node.parent

    def note_running(self, leaf: Node, more_tokens: float) -> None:
        """Note that a running answer to the prompt that ends in `leaf` has grown by so many tokens. O(depth)."""
        node = leaf
        while node.parent is not None:
            if node.history is not None:
                node.history.note_running(more_tokens)
            node = node.parent

    def hold(self, replica: int, leaf: Node, num_tokens: int, now: float) -> Node:
        """Note that what the replica caches of the first `num_tokens` of a prompt is in use there, but by no request.

        `leaf`: where the prompt ends. Only whole nodes. Return the last of them, for `release`. O(depth).
        """
        cache, path = self.caches[replica], []
        last = leaf
        for node in reversed(leaf.ancestors()):
            if node.end > num_tokens or not node.full_holders & cache.bit:
                break
            path.append(node)
        while last.parent is not None and last not in path:
            last = last.parent
        cache.add_hold(path, now)
        return last

    def release(self, replica: int, leaf: Node) -> None:
        """A request whose prompt ends in `leaf`, or a `hold`, no longer uses it on the replica. O(depth)."""
        if dropped := self.caches[replica].walk_up(leaf, ref_count=1, recent_uses=0):
            self._prune_all(dropped)

    def forget_use(self, replica: int, leaf: Node) -> None:
        """A request whose prompt ends in `leaf` has left the window. O(depth)."""
        path = leaf.ancestors()
        self._prune_all(self.caches[replica].walk_up(leaf, ref_count=0, recent_uses=1))
        self._trim(leaf)
        for node in path:
            self._merge_only_child(node)

    def set_computed(self, replica: int, leaf: Node, num_tokens: int, now: float) -> None:
        """The replica caches the first `num_tokens` of the prompt that ends in `leaf`. O(depth)."""
        cache, node = self.caches[replica], leaf
        while node.parent is not None:
            held = node.num_tokens if node.end <= num_tokens else max(node.num_tokens - node.end + num_tokens, 0)
            entry = cache.entries.get(node)
            if held > (0 if entry is None else entry.held):
                cache.set_held(node, held, now)
            node = node.parent

    # -- reports and forgetting ---------------------------------------------------------------------------------------

    def locate(self, replica: int, event: BlocksStored, namespace: str) -> Match | None:
        """Return the match of the event's tokens with the tree below its parent; None if the replica has no such
        parent.
        """
        if event.parent is None:
            return self.tree.match(event.tokens, namespace)
        found = self.caches[replica].block(event.parent)
        return None if found is None else self.tree.match_below(found[0], found[1], event.tokens)

    def name_parent(self, replica: int, node: Node, end: int, event: BlocksStored, now: float) -> None:
        """The event's parent ends at token `end`, in `node`. So the replica caches the prompt up to there. O(depth)."""
        assert event.parent is not None
        self.set_computed(replica, node, end, now)
        self.caches[replica].name_blocks(pack_name(event.parent), node, end, event.block_size)

    def stored(self, replica: int, match: Match, event: BlocksStored, now: float) -> None:
        """The replica caches the event's blocks. `match`: what `locate` gives for it now. O(tokens + depth)."""
        cache, base, depth = self.caches[replica], match.base, match.base_tokens
        end = depth + len(event.tokens) // TOKEN_BYTES
        if depth == base.end and _is_alone_at_end(cache, base):
            self.tree.grow(base, event.tokens)
            path = [base]
        else:
            path = list(match.path) if match.num_tokens == end else self.tree.extend(match, event.tokens)
        for node in path:
            held = cache.tokens_held(node)
            if max(depth - node.start, 0) <= held:
                cache.set_held(node, max(held, min(node.end, end) - node.start), now)
        _name_blocks(cache, path, depth, event)
        self._prune(path[-1])

    def evicted(
        self, replica: int, block_hashes: Sequence[BlockHash], now: float, also_from: int | None = None
    ) -> None:
        """The replica has one copy less of these blocks. Of which it was the last, neither it nor `also_from` caches.

        Unknown ones are ignored.
        """
        cache = self.caches[replica]
        for was_in, start, block_size, _ in cache.forget_names(block_hashes):
            self._forget_from(cache, was_in, start, block_size, now)
            if also_from is not None:
                self._forget_from(self.caches[also_from], was_in, start, block_size, now)

    def moved(self, replica: int, to: int, block_hashes: Sequence[BlockHash], now: float) -> None:
        """These blocks are no longer in the one cache, but in the cache `to`, with all that leads to them."""
        cache = self.caches[replica]
        for node, start, block_size, names in cache.forget_names(block_hashes):
            end = start + len(names) // NAME_BYTES * block_size
            self.set_computed(to, node, end, now)
            self.caches[to].name_blocks(names, node, end, block_size)
            self._forget_from(cache, node, start, block_size, now)

    def copied(self, replica: int, to: int, block_hashes: Sequence[BlockHash], now: float) -> None:
        """The cache `to` has copies of these blocks, and of all that leads to them.

        Only the last block of a run shows it: it comes with the others. O(blocks + depth).
        """
        for node, end in self.caches[replica].named_ends(block_hashes):
            self.set_computed(to, node, end, now)
            self.caches[to].touch(node, now)

    def forget_end(self, replica: int, leaf: Node, num_tokens: int, now: float) -> None:
        """Forget what the replica caches of the prompt that ends in `leaf` beyond token `num_tokens`. O(depth)."""
        cache, dropped = self.caches[replica], []
        for node in leaf.ancestors():
            if node.end <= num_tokens:
                break
            dropped += _lower_held(cache, node, max(num_tokens - node.start, 0), now)
        self._prune_all(dropped)

    def drop_oldest(self, now: float, used_before_s: float) -> bool:
        """Forget the least recently used entries of idle prefixes, to save memory; False if there are none.

        Forgets several entries of the replica that has the oldest one, so that one search serves several. Takes only
        what was last used before `used_before_s`: no request of the window uses it, so its nodes go as well.
        """
        idle = ((entry, replica) for replica, of_one in enumerate(self.caches) if (entry := of_one.oldest_idle()))
        entry, replica = min(idle, key=lambda item: item[0].last_used_s, default=(None, -1))
        if entry is None:
            return False
        old = _used_until(self.caches[replica], nextafter(used_before_s, -inf), _DROPPED_AT_ONCE)
        self._forget(replica, old, now)
        return bool(old)

    def clear(self, replica: int, now: float) -> None:
        """The replica's whole cache is gone. Prompts in flight there still count: they are computed again."""
        self.caches[replica].forget_blocks()
        self._forget(replica, [entry.node for entry in self.caches[replica].oldest_first() if entry.node], now)

    def forget_unused_since(self, replica: int, limit_s: float, now: float, at_most: int | None = None) -> bool:
        """Forget idle entries that were last used at or before `limit_s`; False if there are more than `at_most`.

        O(entries forgotten).
        """
        old = _used_until(self.caches[replica], limit_s, at_most)
        self._forget(replica, old, now)
        return at_most is None or len(old) < at_most

    def forget_beside(self, replica: int, leaf: Node, num_tokens: int, now: float, *, keep_named: bool = False) -> None:
        """Forget what the replica caches beyond token `num_tokens` of a prompt, but beside it: in other prompts.

        `leaf`: where the prompt ends. `keep_named`: not the blocks that the replica has named, nor what leads to
        them. O(nodes that share the first `num_tokens`).
        """
        cache, gone, kept = self.caches[replica], [], leaf
        stack = list((leaf.children or {}).values())
        for node in leaf.ancestors():
            if node.end < num_tokens:
                break
            stack += [child for child in (node.children or {}).values() if child is not kept]
            kept = node
        while stack:
            node = stack.pop()
            if node.holders & cache.bit:
                stack += (node.children or {}).values()
                gone.append(node)
        forgotten: list[Node] = []
        leading: set[Node] = set()
        for node in reversed(gone):  # children come before their parents
            entry = cache.entries.get(node)
            if keep_named and (node in leading or (entry is not None and entry.names)):
                if node.parent is not None:
                    leading.add(node.parent)
            elif not cache.is_in_use(node):
                forgotten.append(node)
        self._forget(replica, forgotten, now)

    def evict_down_to(self, replica: int, capacity_tokens: int, now: float) -> None:
        """Forget the least recently used idle tokens, parts of nodes too, until no more than the capacity is used."""
        cache = self.caches[replica]
        if cache.used_tokens <= capacity_tokens:
            return
        dropped = []
        lowered: Node | None = None
        for entry in cache.oldest_first():
            excess = cache.used_tokens - capacity_tokens
            if excess <= 0:
                break
            if entry.held and not entry.ref_count and entry.node is not None:
                lowered = entry.node
                dropped += _lower_held(cache, lowered, max(0, entry.held - excess), now)
        self._prune_all(dropped)
        if lowered is not None:
            self._trim(lowered)

    def check(self) -> None:
        """Assert every invariant of trees and entries. O(everything); for tests."""
        self.tree.check()
        for cache in self.caches:
            cache.check()
        known = (1 << len(self.caches)) - 1
        for node in self.tree.nodes():
            assert not node.holders & ~known and not node.full_holders & ~node.holders
            assert node.holders or node.children, "a node that nobody caches or uses is removed"
            entries = [self.caches[replica].entries.get(node) for replica in replicas_in(node.holders)]
            assert node.recent_uses == sum(entry.recent_uses for entry in entries if entry is not None)
            assert None not in entries

    # -- inside -------------------------------------------------------------------------------------------------------

    def _split_entries(self, upper: Node, lower: Node) -> None:
        for replica in replicas_in(lower.holders):
            self.caches[replica].split(upper, lower)
        if not lower.holders and not lower.children:
            self.tree.remove(lower)

    def _forget_from(self, cache: ReplicaCache, was_in: Node, start: int, block_size: int, now: float) -> None:
        """The block that begins at token `start` is gone; it ended in `was_in` when it was named."""
        end = start + block_size
        node = live_node(was_in, end)
        if node.start < end <= node.end:
            self._prune_all(self._evict_from(cache, node, start, block_size, now))
            self._trim(node)

    def _evict_from(self, cache: ReplicaCache, node: Node, start: int, block_size: int, now: float) -> list[Node]:
        """Forget a block that ends in `node` and begins at token `start` of the prompt, with all that follows
        it.

        If the block begins in a node above, the tokens there belong to blocks of other branches too. They are kept
        where that node has blocks of its own (this overstates less than a block, and matches count whole blocks only),
        and dropped with the last branch where it has none. Returns the nodes that lost their entry.
        """
        dropped = _lower_held(cache, node, max(0, start - node.start), now)
        above = node.parent
        while above is not None and above.parent is not None and above.end > start:
            if above.start < above.end // block_size * block_size or _holds_below(cache, above):
                break
            dropped += _lower_held(cache, above, 0, now)
            above = above.parent
        return dropped

    def _forget(self, replica: int, nodes: list[Node], now: float) -> None:
        cache = self.caches[replica]
        self._prune_all([gone for node in nodes for gone in _lower_held(cache, node, 0, now)])

    def _prune_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Remove the node and those above it that nobody caches or uses; join the first that stays with its child."""
        while node.tokens and not node.holders and not node.children and node.parent is not None:
            parent = node.parent
            self.tree.remove(node)
            node = parent
        self._merge_only_child(node)

    def _trim(self, node: Node) -> None:
        """Cut off the end of a leaf that no replica caches and no request uses, if it is long enough."""
        if not node.tokens or node.children or not node.holders:
            return
        entries = [self.caches[replica].entries.get(node) for replica in replicas_in(node.holders)]
        if any(entry is not None and (entry.ref_count or entry.recent_uses) for entry in entries):
            return
        held = max(entry.held for entry in entries if entry is not None)
        if node.num_tokens - held > self._trim_tokens:
            self.tree.split(node, held)

    def _merge_only_child(self, node: Node) -> None:
        if not node.tokens or node.children is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        replicas = replicas_in(node.holders)
        if node.holders != child.holders or not all(
            self.caches[replica].can_merge(node, child) for replica in replicas
        ):
            return
        self.tree.merge(node)
        for replica in replicas:
            self.caches[replica].merge(node, child)


def _used_until(cache: ReplicaCache, limit_s: float, at_most: int | None) -> list[Node]:
    """Return the idle nodes that were last used at `limit_s` or before, the oldest first, `at_most` of them."""
    old: list[Node] = []
    for entry in cache.oldest_first():
        if entry.last_used_s > limit_s or len(old) == at_most:
            break
        if not entry.ref_count and entry.node is not None:
            old.append(entry.node)
    return old


def _lower_held(cache: ReplicaCache, node: Node, limit: int, now: float) -> list[Node]:
    """Let no more than `limit` tokens of the node be held; returns [node] if that removed its entry, else []."""
    lower = cache.tokens_held(node) > limit
    return [node] if lower and cache.set_held(node, limit, now) else []


def _is_alone_at_end(cache: ReplicaCache, node: Node) -> bool:
    """Return whether the node is a leaf of which this replica alone has an entry, caches all, and no request uses it.

    Then the next tokens belong to the same node: a leaf of their own would be merged with it at once
    (`ReplicaCache.can_merge`). So an answer that is reported block by block becomes one node.
    """
    if node.children is not None or node.holders != cache.bit or node.full_holders != cache.bit:
        return False
    entry = cache.entries.get(node)
    return entry is not None and not entry.ref_count and not entry.recent_uses


def _holds_below(cache: ReplicaCache, node: Node) -> bool:
    children = (node.children or {}).values()
    return any(child.holders & cache.bit and cache.tokens_held(child) for child in children)


def _name_blocks(cache: ReplicaCache, path: list[Node], depth: int, event: BlocksStored) -> None:
    """Note in which node of `path`, which continues a prefix of `depth` tokens, each block of the event ends."""
    names, named, size = pack_names(event.block_hashes), 0, event.block_size
    for node in path:
        count = min((node.end - depth) // size, len(names) // NAME_BYTES)
        if count > named:
            end = depth + count * size
            cache.name_blocks(names[named * NAME_BYTES : count * NAME_BYTES], node, end, size, are_copies=True)
            named = count
