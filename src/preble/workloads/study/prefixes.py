"""How much of the prompts is shared, by one prefix tree over all of them: a cache that never forgets.

Source: Preble, section on the workload study. A prompt is a path in the tree; a node is a run of tokens in which no
prompt parts from another or ends. The *key portion* of a prompt is the deepest node on its path that has more tokens
than all the nodes before it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from preble.core.prefixes.radix_tree import Node, RadixTree
from preble.core.types import TOKEN_BYTES, PackedTokens
from preble.workloads.study.distribution import Distribution, distribution


class KeyPortions(msgspec.Struct, frozen=True):
    """The key portions of a workload's prompts.

    `fraction`: tokens of the key portion / tokens of the prompt, over the requests. `requests`: how many have the same
    node as their key portion, over these nodes. `nodes`: how many such nodes there are.
    """

    fraction: Distribution
    requests: Distribution
    nodes: int


class Sharing(msgspec.Struct, frozen=True):
    """How much of the prompts an earlier prompt began with; "seen" means that.

    `fraction`: seen tokens / tokens of the prompt, over the requests in their order. `hit_rate`: all seen tokens / all
    prompt tokens: what a cache without bounds saves. `mostly_shared`: share of requests of which more is seen than
    not: those that E2 sends where the prefix is. `prompt_tokens`: of all requests. `distinct_tokens`: in the tree: what
    that cache would hold in the end.
    """

    fraction: Distribution
    hit_rate: float
    mostly_shared: float
    prompt_tokens: int
    distinct_tokens: int
    key_portions: KeyPortions


def study_sharing(prompts: Iterable[PackedTokens]) -> Sharing:
    """Sharing between prompts, in the order in which they are sent.

    Takes one prompt after another and keeps what is distinct of them: four bytes a token, memcmp speed.

    Raises: ValueError: no prompts, or an empty one.
    """
    tree = RadixTree()
    ends: list[Node] = []
    lengths: list[int] = []
    seen: list[int] = []
    for prompt in prompts:
        if not prompt:
            raise ValueError(f"prompt number {len(ends)} (from 0) is empty, so nothing of it can be shared")
        match = tree.match(prompt)
        # A node that is split later keeps its end, so the path of a prompt can be found again when all are in.
        ends.append(tree.extend(match, prompt)[-1])
        lengths.append(len(prompt) // TOKEN_BYTES)
        seen.append(match.num_tokens)
    fractions = [part / whole for part, whole in zip(seen, lengths, strict=True)]
    return Sharing(
        fraction=distribution(fractions),
        hit_rate=sum(seen) / sum(lengths),
        mostly_shared=sum(fraction > 0.5 for fraction in fractions) / len(fractions),
        prompt_tokens=sum(lengths),
        distinct_tokens=tree.num_tokens,
        key_portions=_key_portions(ends),
    )


def key_portion(end: Node) -> Node:
    """The key portion of the prompt whose last token is the last of node `end`. O(depth)."""
    return next(node for node in end.ancestors() if node.num_tokens > node.start)


def _key_portions(ends: Iterable[Node]) -> KeyPortions:
    pairs = [(key_portion(end), end) for end in ends]
    sharers = Counter(node for node, _ in pairs)
    fractions = [node.num_tokens / end.end for node, end in pairs]
    return KeyPortions(distribution(fractions), distribution(list(sharers.values())), len(sharers))
