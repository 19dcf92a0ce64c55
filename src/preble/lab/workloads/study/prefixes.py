"""How much of the prompts is shared: one prefix tree over all of them, like a cache that never evicts.

Source: the workload study of the paper. A prompt is a path in the tree; a node is a run of tokens inside which no
prompt ends or branches off. The *key portion* of a prompt is the deepest node on its path that has more tokens
than all the nodes before it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from preble.core.prefixes.radix_tree import Node, RadixTree
from preble.core.types import TOKEN_BYTES, PackedTokens
from preble.lab.workloads.study.distribution import Distribution, distribution


class KeyPortions(msgspec.Struct, frozen=True):
    """The key portions of a workload's prompts.

    `fraction`: tokens of the key portion / tokens of the prompt, over the requests. `requests`: the requests of each
    node that is a key portion, over these nodes. `nodes`: the number of these nodes.
    """

    fraction: Distribution
    requests: Distribution
    nodes: int


class PrefixSharing(msgspec.Struct, frozen=True):
    """How much of each prompt is the beginning of an earlier prompt; such tokens are "seen".

    `fraction`: seen tokens / tokens of the prompt, over the requests in order. `hit_rate`: all seen tokens / all prompt
    tokens, which an unlimited cache would save. `mostly_shared`: the share of requests with more seen than unseen
    tokens, which E2 sends to their prefix. `prompt_tokens`: of all requests. `distinct_tokens`: the tree, which
    that cache would hold in the end.
    """

    fraction: Distribution
    hit_rate: float
    mostly_shared: float
    prompt_tokens: int
    distinct_tokens: int
    key_portions: KeyPortions


def study_sharing(prompts: Iterable[PackedTokens]) -> PrefixSharing:
    """Return the sharing between prompts, in sending order.

    It reads one prompt at a time and keeps the distinct tokens, four bytes each, at memcmp speed.

    Raises: ValueError: no prompts, or an empty one.
    """
    tree = RadixTree()
    ends: list[Node] = []
    lengths: list[int] = []
    seen: list[int] = []
    for prompt in prompts:
        if not prompt:
            raise ValueError(f"prompt number {len(ends)} (from 0) is empty; leave it out")
        match = tree.match(prompt)
        # A node that is split later keeps its end, so the path of each prompt can still be found at the end.
        ends.append(tree.extend(match, prompt)[-1])
        lengths.append(len(prompt) // TOKEN_BYTES)
        seen.append(match.num_tokens)
    fractions = [part / whole for part, whole in zip(seen, lengths, strict=True)]
    return PrefixSharing(
        fraction=distribution(fractions),
        hit_rate=sum(seen) / sum(lengths),
        mostly_shared=sum(fraction > 0.5 for fraction in fractions) / len(fractions),
        prompt_tokens=sum(lengths),
        distinct_tokens=tree.num_tokens,
        key_portions=_key_portions(ends),
    )


def key_portion(end: Node) -> Node:
    """Return the key portion of the prompt that ends with node `end`. O(depth)."""
    return next(node for node in end.ancestors() if node.num_tokens > node.start)


def _key_portions(ends: Iterable[Node]) -> KeyPortions:
    pairs = [(key_portion(end), end) for end in ends]
    sharers = Counter(node for node, _ in pairs)
    fractions = [node.num_tokens / end.end for node, end in pairs]
    return KeyPortions(distribution(fractions), distribution(list(sharers.values())), len(sharers))
