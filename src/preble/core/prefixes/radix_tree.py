"""A forest of radix trees over packed token ids.

A node holds a run of tokens; its path from the root is a prompt prefix. Runs are packed, compared at memcmp speed.
When a node splits, the *lower* part keeps its identity, and when a node merges with its only child, the *child* keeps
its own: code that keeps "the node at whose end my prompt ends" needs no update.

Source: Preble, "Global scheduler data structures"; the namespaces (model adapter, cache salt) are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from preble.core.prefixes.history import PrefixHistory
from preble.core.types import TOKEN_BYTES

NODE_BYTES: Final = 280
"""What a node takes besides its tokens, measured on CPython 3.11 (benchmarks/micro/place.py --memory)."""


class Node:
    """A run of tokens.

    `num_tokens`: in this run; 0 once it is out of the tree. `end`: tokens from the start of the prompt to its end.
    `holders`, `full_holders`: bit i is set if replica i has an entry here, or caches the whole run.
    `recent_uses`: requests of the window that use it, on any replica. `history`: of the prefix that ends with it, None
    until a second request uses it. All four are kept by `PrefixIndex`; a new node has none of them.
    """

    __slots__ = (
        "children",
        "end",
        "full_holders",
        "history",
        "holders",
        "num_tokens",
        "parent",
        "recent_uses",
        "tokens",
    )

    def __init__(self, tokens: bytes, end: int, parent: Node | None) -> None:
        self.tokens = tokens
        self.num_tokens = len(tokens) // TOKEN_BYTES
        self.end = end
        self.parent = parent
        self.children: dict[bytes, Node] | None = None
        self.holders = 0
        self.full_holders = 0
        self.recent_uses = 0
        self.history: PrefixHistory | None = None

    @property
    def start(self) -> int:
        """Tokens before this run."""
        return self.end - self.num_tokens

    def ancestors(self) -> list[Node]:
        """Yield this node, then its parent, up to the one below the root."""
        path = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def __repr__(self) -> str:
        return f"<Node {self.start}..{self.end}, {len(self.children or ())} children>"


class Root(Node):
    """The empty node above every prompt of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", 0, None)
        self.namespace = namespace


class Match:
    """How far a run of tokens agrees with a tree.

    `base`, `base_tokens`: where the comparison began, and how many tokens of the prompt lie before it.
    `path`: every node of which at least one further token agrees, from the top. `num_tokens`: tokens of the prompt that
    agree, `base_tokens` included; less than the last node's end if that one agrees only in part. `last`: the node of
    the path at its end, or `base`.
    """

    __slots__ = ("base", "base_tokens", "last", "num_tokens", "path")

    def __init__(self, base: Node, base_tokens: int, path: tuple[Node, ...], num_tokens: int) -> None:
        self.base = base
        self.base_tokens = base_tokens
        self.path = path
        self.last = path[-1] if path else base
        self.num_tokens = num_tokens

    def node_at(self, tokens: int) -> Node | None:
        """Return the node that ends with the first `tokens` tokens or has the last of them; None beyond the path."""
        for node in self.path:
            if node.end >= tokens:
                return node
        return None

    @property
    def namespace(self) -> str:
        """Of a match that began at the root."""
        assert isinstance(self.base, Root), "the match did not begin at the root"
        return self.base.namespace

    @property
    def whole(self) -> list[Node]:
        """The nodes of the path that agree to their ends."""
        return [node for node in self.path if node.end <= self.num_tokens]


class RadixTree:
    """Prompt prefixes of every namespace. A namespace without prompts takes no memory: clients make them up.

    `num_nodes`: the roots of namespaces other than the common one are counted too. `on_split(upper, lower)` is called
    after each split, so that whoever keeps entries of nodes can split them too.

    >>> from preble.core.types import pack_tokens
    >>> tree = RadixTree()
    >>> leaf = tree.insert(pack_tokens([1, 2, 3]))[-1]
    >>> tree.match(pack_tokens([1, 2, 9])).num_tokens
    2
    >>> [node.num_tokens for node in tree.insert(pack_tokens([1, 2, 9]))], leaf.num_tokens
    ([2, 1], 1)
    """

    def __init__(self, on_split: Callable[[Node, Node], None] | None = None) -> None:
        self._roots = {"": Root("")}
        self._on_split = on_split
        self.num_nodes = 0
        self.num_tokens = 0

    def root(self, namespace: str = "") -> Node:
        """Return the empty node above every prompt of a namespace; where there is no prompt yet, it is in the tree from
        the first that is added below it.
        """
        return self._roots.get(namespace) or Root(namespace)

    def roots(self) -> Iterable[Root]:
        """Return the empty node of each namespace that has a prompt."""
        return self._roots.values()

    def match(self, tokens: bytes, namespace: str = "", model: str = "") -> Match:
        """Return the longest common prefix with any prompt in the tree. O(tokens), at memcmp speed.

        `model`: in which the namespace is, unless it says so itself.
        """
        return self.match_below(self.root(scoped_namespace(model, namespace) if model else namespace), 0, tokens)

    def match_below(self, base: Node, base_tokens: int, tokens: bytes) -> Match:
        """Do as `match`, for tokens that continue the prefix of `base_tokens` tokens that ends in `base`."""
        path: list[Node] = []
        node = base
        position = 0
        if base_tokens < base.end:
            rest = base.tokens[(base_tokens - base.start) * TOKEN_BYTES :]
            position = common_prefix_bytes(rest, tokens, 0)
            if position:
                path.append(base)
            if position < len(rest):
                return Match(base, base_tokens, tuple(path), base_tokens + position // TOKEN_BYTES)
        while node.children is not None:
            child = node.children.get(tokens[position : position + TOKEN_BYTES])
            if child is None:
                break
            path.append(child)
            if not tokens.startswith(child.tokens, position):
                position += common_prefix_bytes(child.tokens, tokens, position)
                break
            position += len(child.tokens)
            node = child
        return Match(base, base_tokens, tuple(path), base_tokens + position // TOKEN_BYTES)

    def insert(self, tokens: bytes, namespace: str = "") -> list[Node]:
        """Make `tokens` a path that ends at a node's end; returns its nodes from the top, [] for no token.

        Splits at most one node and adds at most one leaf. O(tokens).
        """
        return self.insert_below(self.root(namespace), 0, tokens)

    def insert_below(self, base: Node, base_tokens: int, tokens: bytes) -> list[Node]:
        """Do as `insert`, for tokens that continue the prefix of `base_tokens` tokens that ends in `base`.

        Returns the nodes that hold at least one of `tokens`, from the top; the last one ends where they end.
        """
        return self.extend(self.match_below(base, base_tokens, tokens), tokens)

    def extend(self, match: Match, tokens: bytes) -> list[Node]:
        """Do as `insert_below`, given the match of just these tokens with the tree as it is now."""
        path, last = list(match.path), match.last
        if match.num_tokens < last.end:
            last = self.split(last, match.num_tokens - last.start)
            if path:
                path[-1] = last
        rest = tokens[(match.num_tokens - match.base_tokens) * TOKEN_BYTES :]
        if rest:
            path.append(self._add_leaf(last, rest))
        return path

    def grow(self, leaf: Node, tokens: bytes) -> None:
        """Put `tokens` at the end of a leaf's run. O(tokens of the leaf)."""
        assert not leaf.children and leaf.parent is not None, "only a leaf can grow"
        num_tokens = len(tokens) // TOKEN_BYTES
        leaf.tokens += tokens
        leaf.num_tokens += num_tokens
        leaf.end += num_tokens
        self.num_tokens += num_tokens

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` after its first `at` tokens, 0 < at < its tokens; returns the new upper part. O(tokens of node).

        The lower part is `node` itself. The upper part starts with the holders, uses and history of `node`.
        """
        parent = _parent(node)
        upper = Node(node.tokens[: at * TOKEN_BYTES], node.start + at, parent)
        _children(parent)[node.tokens[:TOKEN_BYTES]] = upper
        node.tokens = node.tokens[at * TOKEN_BYTES :]
        node.num_tokens -= at
        node.parent = upper
        upper.children = {node.tokens[:TOKEN_BYTES]: node}
        upper.holders, upper.full_holders, upper.recent_uses = node.holders, node.full_holders, node.recent_uses
        upper.history = node.history.copy() if node.history is not None else None
        self.num_nodes += 1
        if self._on_split is not None:
            self._on_split(upper, node)
        return upper

    def merge(self, node: Node) -> Node:
        """Join `node` with its only child; returns the child, which now starts where `node` did.

        It keeps the history of `node`, which had seen all of the child's requests and earlier ones.
        """
        (child,) = _children(node).values()
        parent = _parent(node)
        _children(parent)[node.tokens[:TOKEN_BYTES]] = child
        child.tokens = node.tokens + child.tokens
        child.num_tokens += node.num_tokens
        child.parent = parent
        child.history = node.history or child.history
        self.num_nodes -= 1
        _bury(node, child)
        return child

    def remove(self, node: Node) -> None:
        """Take a node without children out of its tree."""
        assert not node.children, "only a leaf can be removed"
        parent = _parent(node)
        siblings = _children(parent)
        del siblings[node.tokens[:TOKEN_BYTES]]
        if not siblings:
            parent.children = None
            if isinstance(parent, Root) and parent.namespace:
                del self._roots[parent.namespace]
                self.num_nodes -= 1
        self.num_nodes -= 1
        self.num_tokens -= node.num_tokens
        _bury(node, parent)

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents before children."""
        stack = [child for root in self._roots.values() for child in (root.children or {}).values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend((node.children or {}).values())

    def check(self) -> None:
        """Assert every invariant of the structure. O(nodes); for tests."""
        count, tokens = len(self._roots) - 1, 0
        assert all(root.children or not namespace for namespace, root in self._roots.items()), "a root of nothing"
        for node in self.nodes():
            count += 1
            tokens += node.num_tokens
            assert node.num_tokens > 0 and len(node.tokens) == node.num_tokens * TOKEN_BYTES
            parent = _parent(node)
            assert node.start == parent.end
            assert _children(parent)[node.tokens[:TOKEN_BYTES]] is node
            assert node.children != {}, "no children is None"
        assert (count, tokens) == (self.num_nodes, self.num_tokens)

    def _add_leaf(self, parent: Node, tokens: bytes) -> Node:
        leaf = Node(tokens, parent.end + len(tokens) // TOKEN_BYTES, parent)
        if parent.children is None:
            parent.children = {}
            if isinstance(parent, Root) and parent.namespace:
                assert parent.namespace not in self._roots, "the tree has changed since the match"
                self._roots[parent.namespace] = parent
                self.num_nodes += 1
        parent.children[tokens[:TOKEN_BYTES]] = leaf
        self.num_nodes += 1
        self.num_tokens += leaf.num_tokens
        return leaf


def common_prefix_bytes(run: bytes, tokens: bytes, position: int) -> int:
    """Return bytes of `run`, in whole tokens, that `tokens` has from `position` on. O(run), by bisection at memcmp
    speed.

    >>> common_prefix_bytes(b"aaaabbbbcccc", b"....aaaabbbbcccd", 4)
    8
    """
    left = len(tokens) - position
    if left < len(run) and run.startswith(tokens[position:]):
        return left  # a report of blocks that end within a prompt
    low, high = 0, min(len(run), left) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if tokens[position + start : position + end] == run[start:end]:
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES


def scoped_namespace(model: str, namespace: str) -> str:
    """Return the namespace inside a base model: two models share no KV, whatever the client or the engine gives."""
    return f"{model}\x1e{namespace}" if model else namespace


def expected_output_tokens(path: tuple[Node, ...], prior: float) -> float:
    """Return output tokens to expect of a request that begins with these nodes, from the top. O(depth).

    The mean of the longest prefix that has been answered, and the less it has been, the more that of shorter ones.
    `prior`: of any request.
    """
    for node in path:
        if node.history is not None:
            prior = node.history.expected_tokens(prior)
    return prior


def live_node(node: Node, num_tokens: int) -> Node:
    """Return the node that holds token number `num_tokens` of the prefix that was `node`'s when someone remembered it.

    Follows splits (the upper part is an ancestor), merges and removals (a buried node points to its successor).
    """
    while not node.tokens or num_tokens <= node.start:
        if node.parent is None:
            break
        node = node.parent
    return node


def _bury(node: Node, successor: Node) -> None:
    node.tokens = b""
    node.num_tokens = 0
    node.children = None
    node.parent = successor


def _parent(node: Node) -> Node:
    assert node.parent is not None, "a root has no parent"
    return node.parent


def _children(node: Node) -> dict[bytes, Node]:
    assert node.children is not None
    return node.children
