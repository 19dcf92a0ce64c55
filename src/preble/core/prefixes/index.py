"""The global prefix trees: who is believed to hold what, who asks for it, and what would be evicted.

The belief has two sources. While a request is in flight its replica counts as holding the whole prompt ("pinned": in
use there, or about to be computed). Afterwards only what the replica reported as stored stays; for one that reports
nothing, what it must have computed. Evictions, restarts, capacity and time take it away again.

Source: Preble, "Global scheduler data structures". Nodes nobody holds and nobody in the window uses are removed.
"""

from __future__ import annotations

from math import inf, nextafter

from preble.core.prefixes.radix_tree import NODE_BYTES, Match, Node, RadixTree, live_node
from preble.core.prefixes.replica_cache import IndexSize, ReplicaCache
from preble.core.replica_index import replicas_in
from preble.core.types import TOKEN_BYTES, BlocksEvicted, BlocksStored, PackedTokens

_DROPPED_AT_ONCE = 16
"""Records that are forgotten together where memory is short."""


class PrefixIndex:
    """Prefix trees with the holdings of every replica. What a prompt finds there: `preble.core.prefixes.matching`.

    `holdings`: by slot, for reading only; of a replica that is gone, empty ones. `trim_tokens`: how many tokens at the
    end of a leaf may be held by nobody before they are taken off; by default about what a node takes besides its
    tokens.
    """

    def __init__(self, trim_tokens: int = NODE_BYTES // TOKEN_BYTES) -> None:
        self.tree = RadixTree(on_split=self._split_records)
        self.holdings: list[ReplicaCache] = []
        self._trim_tokens = trim_tokens
        self._size = IndexSize()

    def add_replica(self, replica: int) -> None:
        if replica == len(self.holdings):
            self.holdings.append(ReplicaCache(replica, self._size))

    def remove_replica(self, replica: int) -> None:
        """Forget the replica. No request in flight or in the window may refer to it any more. O(its records)."""
        closed, self.holdings[replica] = self.holdings[replica], ReplicaCache(replica, self._size)
        self._prune_all(closed.close())

    @property
    def num_bytes(self) -> int:
        """Memory of the trees and records, in bytes, by count."""
        return self.tree.num_bytes + self._size.num_bytes

    def match(self, prompt: PackedTokens, namespace: str = "") -> Match:
        """How far the prompt agrees with anything known. Whether anybody holds that is another question."""
        return self.tree.match(prompt, namespace)

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, replica: int, match: Match, prompt: PackedTokens, namespace: str, now: float) -> Node:
        """A request is placed: its prompt is pinned on the replica and counted in the window. Returns its last node.

        `match`: of the prompt with the trees as they are now. The node stays valid until both `unpin` and `unshare`
        were called with it. O(tokens + depth).
        """
        return self.place_on(replica, self.tree.extend(match, prompt), namespace, now)

    def place_on(self, replica: int, path: list[Node], namespace: str, now: float) -> Node:
        """As `place`, for a prompt of which only the nodes of `path` are to count, from the top without a gap."""
        self.holdings[replica].pin_and_share(path, now)
        return path[-1] if path else self.tree.root(namespace)

    def unpin(self, replica: int, leaf: Node) -> None:
        self._prune_all(self.holdings[replica].unpin(leaf))

    def unshare(self, replica: int, leaf: Node) -> None:
        path = list(leaf.ancestors())
        self._prune_all(self.holdings[replica].unshare(leaf))
        self._trim(leaf)
        for node in path:
            self._merge_only_child(node)

    def believe_held(self, replica: int, leaf: Node, block_size: int, now: float) -> None:
        """A replica that reports nothing has computed the prompt that ends in `leaf`: it holds its whole blocks."""
        holdings = self.holdings[replica]
        num_tokens = leaf.end // block_size * block_size
        for node in leaf.ancestors():
            held = node.num_tokens if node.end <= num_tokens else max(num_tokens - node.start, 0)
            if held > holdings.tokens_held(node):
                holdings.set_held(node, held, now)

    # -- reports and forgetting ---------------------------------------------------------------------------------------

    def end_of_parent(self, replica: int, event: BlocksStored) -> tuple[Node, int] | None:
        """The node in which what is before the blocks ends, and how many tokens that is; None if it is unknown."""
        if event.parent is None:
            return self.tree.root(event.namespace), 0
        return self.holdings[replica].block(event.parent)

    def stored(self, replica: int, event: BlocksStored, now: float) -> bool:
        """The replica caches these blocks. False if their parent is unknown, so that they cannot be located."""
        found = self.end_of_parent(replica, event)
        if found is None:
            return False
        holdings = self.holdings[replica]
        base, depth = found
        end = depth + len(event.tokens) // TOKEN_BYTES
        if depth == base.end and _is_alone_at_end(holdings, base):
            self.tree.grow(base, event.tokens)
            path = [base]
        else:
            match = self.tree.match_below(base, depth, event.tokens)
            path = list(match.path) if match.num_tokens == end else self.tree.extend(match, event.tokens)
        _name_blocks(holdings, path, depth, event)
        for node in path:
            held = holdings.tokens_held(node)
            if max(depth - node.start, 0) <= held:
                holdings.set_held(node, max(held, min(node.end, end) - node.start), now)
        self._prune(path[-1])
        return True

    def evicted(self, replica: int, event: BlocksEvicted, block_size: int, now: float) -> None:
        """The replica caches these blocks no longer; those that are unknown are passed over."""
        holdings = self.holdings[replica]
        left: dict[Node, int] = {}
        for node, end in holdings.forget_names(event.block_hashes):
            if not node.tokens or end <= node.end - node.num_tokens:
                node = live_node(node, end)
                if not node.start < end <= node.end:
                    continue
            left[node] = min(end - block_size, left.get(node, end))
        for node, num_tokens in left.items():
            if node.tokens:
                self._prune_all(self._evict_from(holdings, node, num_tokens, block_size, now))
                self._trim(node)

    def drop_oldest(self, now: float, used_before_s: float) -> bool:
        """Forget the least recently used tokens that a replica holds idle, to save memory; False if there are none.

        Takes the replica whose oldest tokens are the oldest, and some of its records, so that the search for it is
        shared by several. Only what was last used before `used_before_s`: then no request of the window uses it, and
        its nodes go.
        """
        idle = ((record, replica) for replica, of_one in enumerate(self.holdings) if (record := of_one.oldest_idle()))
        record, replica = min(idle, key=lambda item: item[0].last_used_s, default=(None, -1))
        if record is None:
            return False
        old = _used_until(self.holdings[replica], nextafter(used_before_s, -inf), _DROPPED_AT_ONCE)
        self._forget(replica, old, now)
        return bool(old)

    def clear(self, replica: int, now: float) -> None:
        """The replica's whole cache is gone; what is in flight there will be computed again."""
        self.holdings[replica].forget_blocks()
        self._forget(replica, [record.node for record in self.holdings[replica].oldest_first() if record.node], now)

    def forget_unused_since(self, replica: int, limit_s: float, now: float, at_most: int | None = None) -> bool:
        """Drop what was last used at or before `limit_s` and is not in use; False if `at_most` records left some.

        O(records dropped).
        """
        old = _used_until(self.holdings[replica], limit_s, at_most)
        self._forget(replica, old, now)
        return at_most is None or len(old) < at_most

    def evict_down_to(self, replica: int, capacity_tokens: int, now: float) -> None:
        """Drop least recently used tokens, parts of nodes too, until no more than the capacity is used."""
        holdings = self.holdings[replica]
        if holdings.used_tokens <= capacity_tokens:
            return
        dropped = []
        lowered: Node | None = None
        for record in holdings.oldest_first():
            excess = holdings.used_tokens - capacity_tokens
            if excess <= 0:
                break
            if record.held and not record.pins and record.node is not None:
                lowered = record.node
                dropped += _lower_held(holdings, lowered, max(0, record.held - excess), now)
        self._prune_all(dropped)
        if lowered is not None:
            self._trim(lowered)

    def check(self) -> None:
        """Every invariant of trees and records. O(everything); for tests."""
        self.tree.check()
        for holdings in self.holdings:
            holdings.check()
        known = (1 << len(self.holdings)) - 1
        for node in self.tree.nodes():
            assert not node.holders & ~known and not node.full_holders & ~node.holders
            assert node.holders or node.children, "a node that nobody holds or uses is removed"
            records = [self.holdings[replica].get(node) for replica in replicas_in(node.holders)]
            assert node.num_shares == sum(record.shares for record in records if record is not None)
            assert None not in records

    # -- inside -------------------------------------------------------------------------------------------------------

    def _split_records(self, upper: Node, lower: Node) -> None:
        for replica in replicas_in(lower.holders):
            self.holdings[replica].split(upper, lower)
        if not lower.holders and not lower.children:
            self.tree.remove(lower)

    def _evict_from(self, holdings: ReplicaCache, node: Node, start: int, block_size: int, now: float) -> list[Node]:
        """A block that ends in `node` and begins `start` tokens from the prompt's start is gone, and what is behind it.

        If the block began further up, the tokens there belong to blocks of other branches too. They are kept where the
        node above has blocks of its own (less than a block is overstated, and matches count whole blocks only), and
        dropped with the last branch where it has none. Returns the nodes that lost their record.
        """
        dropped = _lower_held(holdings, node, max(0, start - node.start), now)
        above = node.parent
        while above is not None and above.parent is not None and above.end > start:
            if above.start < above.end // block_size * block_size or _holds_below(holdings, above):
                break
            dropped += _lower_held(holdings, above, 0, now)
            above = above.parent
        return dropped

    def _forget(self, replica: int, nodes: list[Node], now: float) -> None:
        holdings = self.holdings[replica]
        self._prune_all([gone for node in nodes for gone in _lower_held(holdings, node, 0, now)])

    def _prune_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Remove the node, and what is above, as far as nobody holds or uses it; join the rest with an only child."""
        while node.tokens and not node.holders and not node.children and node.parent is not None:
            parent = node.parent
            self.tree.remove(node)
            node = parent
        self._merge_only_child(node)

    def _trim(self, node: Node) -> None:
        """Take the end off a leaf that nobody holds that far and no request uses, if it is worth the work."""
        if not node.tokens or node.children or not node.holders:
            return
        records = [self.holdings[replica].get(node) for replica in replicas_in(node.holders)]
        if any(record is not None and (record.pins or record.shares) for record in records):
            return
        held = max(record.held for record in records if record is not None)
        if node.num_tokens - held > self._trim_tokens:
            self.tree.split(node, held)

    def _merge_only_child(self, node: Node) -> None:
        if not node.tokens or node.children is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        replicas = replicas_in(node.holders)
        if node.holders != child.holders or not all(
            self.holdings[replica].can_merge(node, child) for replica in replicas
        ):
            return
        self.tree.merge(node)
        for replica in replicas:
            self.holdings[replica].merge(node, child)


def _used_until(holdings: ReplicaCache, limit_s: float, at_most: int | None) -> list[Node]:
    """The nodes that were last used at `limit_s` or before and are not in use, the oldest first, up to so many."""
    old: list[Node] = []
    for record in holdings.oldest_first():
        if record.last_used_s > limit_s or len(old) == at_most:
            break
        if not record.pins and record.node is not None:
            old.append(record.node)
    return old


def _lower_held(holdings: ReplicaCache, node: Node, limit: int, now: float) -> list[Node]:
    """Let no more than `limit` tokens of the node be held; returns the node if its record is gone by that, else []."""
    lower = holdings.tokens_held(node) > limit
    return [node] if lower and holdings.set_held(node, limit, now) else []


def _is_alone_at_end(holdings: ReplicaCache, node: Node) -> bool:
    """Whether the node is a leaf that this replica alone has a record of, holds whole, and no request uses.

    Then what follows belongs to the same node: a leaf of its own would be merged with it
    (`ReplicaCache.can_merge`). So an answer, which is reported block by block, is one node and not one a block.
    """
    if node.children is not None or node.holders != holdings.bit or node.full_holders != holdings.bit:
        return False
    record = holdings.get(node)
    return record is not None and not record.pins and not record.shares


def _holds_below(holdings: ReplicaCache, node: Node) -> bool:
    children = (node.children or {}).values()
    return any(child.holders & holdings.bit and holdings.tokens_held(child) for child in children)


def _name_blocks(holdings: ReplicaCache, path: list[Node], depth: int, event: BlocksStored) -> None:
    """Remember in which node of `path`, which continues a prefix of `depth` tokens, each block of the event ends."""
    named, size = 0, event.block_size
    for node in path:
        count = min((node.end - depth) // size, len(event.block_hashes))
        if count > named:
            ends = range(depth + (named + 1) * size, depth + count * size + 1, size)
            holdings.name_blocks(event.block_hashes[named:count], node, ends)
            named = count
