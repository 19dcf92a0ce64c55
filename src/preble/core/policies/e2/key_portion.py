"""The key portion of a prompt, and who holds it: what E2 decides by.

Source: Preble, "E2 Global Scheduler".
"""

from __future__ import annotations

from preble.core.policies.view import ClusterView
from preble.core.prefixes.matching import prefix_match
from preble.core.replica_index import replicas_in


class KeyPortion:
    """The largest node on the prefix of a prompt that trusted replicas cache or can load.

    `holders`: they cache, or can load, most of it. `prefix_tokens`: where it ends, in tokens from the prompt's start; 0
    if no replica caches anything of the prompt. `cached_tokens`: the most prompt tokens that any of the holders would
    serve from its cache: whole blocks. O(depth + holders of a part of a node).
    """

    def __init__(self, view: ClusterView) -> None:
        among, tiers = view.trusted, view.cluster.tiers
        if view.has_tiers:
            among |= tiers.reachable(among)
        found = prefix_match(view.match, view.cluster.index.caches, among)
        holders = found.key_holders
        if view.has_tiers:
            holders = tiers.with_owners(holders) & view.trusted
        self.holders = replicas_in(holders)
        self.prefix_tokens = 0 if found.key_node is None else found.key_node.end
        self.cached_tokens = 0
        for replica in self.holders:
            self.cached_tokens = max(self.cached_tokens, view.matched_on(replica))
