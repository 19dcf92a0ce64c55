"""What one request could do with KV that replicas send each other: copies of a prefix, and splits over two replicas."""

from __future__ import annotations

from math import inf

from preble.core.cluster.links import PrefixCopy
from preble.core.policies.view import ClusterView
from preble.core.prefixes.matching import confirmed_on, matched_on, usable_tokens
from preble.core.replica_index import ReplicaIndex, ReplicaSet, replicas_in


class TransferOptions:
    """The transfers between replicas that a policy may choose for one request, and what splits are weighed by.

    `splitting`: which of `view.replicas` may split a request among them, by position: the members of each group.
    O(replicas x groups); O(1) where none may.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._links = view.cluster.links
        self.splitting: list[list[int]] = []
        if view.request.splits and (may := self._links.splitting & view.trusted):
            groups = [members & may for members in self._links.groups.values()]
            places = [[i for i, replica in enumerate(view.replicas) if members >> replica & 1] for members in groups]
            self.splitting = [members for members in places if len(members) > 1]
        self._num_tokens = view.request.num_prompt_tokens
        self._block_size = view.cluster.replicas.block_size

    def copies(self) -> list[PrefixCopy | None]:
        """Return for each of `view.replicas` the copy after which it would serve most from its cache; None where
        another replica of its group has no more than it.

        Only what the source has computed already counts, and only in its engine's memory. O(replicas x depth).
        """
        replicas = self._view.replicas
        found: list[PrefixCopy | None] = [None] * len(replicas)
        for members in self._links.groups.values():
            source, held = self._best_source(members)
            if held:
                for i, replica in enumerate(replicas):
                    if members >> replica & 1 and replica != source:
                        found[i] = self._copy(source, held, replica)
        return found

    def _best_source(self, members: ReplicaSet) -> tuple[ReplicaIndex, int]:
        """Return the replica of a group with most of the prompt, and how many tokens; 0 where no replica has any.

        Among equals the one that has least to send.
        """
        best, best_tokens, best_until = ReplicaIndex(-1), 0, inf
        match, cluster = self._view.match, self._view.cluster
        holders = match.path[0].holders if match.path else 0
        for replica in replicas_in(holders & members & cluster.replicas.trusted):
            cache = cluster.index.caches[replica]
            held = confirmed_on(match, cache)[0]
            if cache.is_crowded:
                held = min(held, matched_on(match, cache))
            tokens = usable_tokens(held, self._num_tokens, self._block_size[replica])
            until = self._links.sending_until(replica)
            if tokens > best_tokens or (tokens == best_tokens > 0 and until < best_until):
                best, best_tokens, best_until = replica, tokens, until
        return best, best_tokens

    def _copy(self, source: ReplicaIndex, held: int, replica: ReplicaIndex) -> PrefixCopy | None:
        tokens = held - self._view.matched_on(replica)
        if tokens <= 0 or not self._view.trusted >> replica & 1:
            return None
        model, now = self._view.cost_model, self._view.now
        link_s = model.link_s(tokens)
        start = self._links.free_at(source, replica, now)
        return PrefixCopy(source, held, tokens, link_s, start - now + link_s + model.link_latency_s)

    def split(self, source: int, target: int, own_s: float) -> PrefixCopy | None:
        """Return the split where the replica at `source` computes the prompt, in `own_s` with its wait, and sends what
        the one at `target` lacks of it; None where that is nothing.
        """
        at, to = self._view.replicas[source], self._view.replicas[target]
        matched = usable_tokens(self._num_tokens, self._num_tokens, self._block_size[to])
        tokens = matched - self._view.matched_on(to)
        if tokens <= 0:
            return None
        model, now = self._view.cost_model, self._view.now
        link_s = model.link_s(tokens)
        starts_s = max(self._links.free_at(at, to, now) - now, own_s)
        return PrefixCopy(
            at, matched, tokens, link_s, starts_s + link_s + model.link_latency_s, self._view.matched_on(at)
        )

    def standstill(self, replica: ReplicaIndex) -> float:
        """Return for which share of the time answers on the replica stood still of late, while it computed prompts.

        Known where replicas split alone.
        """
        return self._view.cluster.standstill.share(replica, self._view.now) * self._view.slowness(replica)

    def even_standstill(self) -> float:
        """Return for which share they would have, had prompts and answers been spread evenly."""
        cluster = self._view.cluster
        return cluster.standstill.even_share(len(cluster.replicas.live_replicas), self._view.now)
