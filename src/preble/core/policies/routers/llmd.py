"""The two rules of llm-d's router: the older blend of scores, and the filter that replaced it."""

from __future__ import annotations

from bisect import bisect_left
from random import Random

from preble.core.policies.cost_table import lowest
from preble.core.policies.scoring import choose_lowest, match_ratio, scored, uncached_tokens
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Reason, ReplicaId


class StickyUntilSaturated:
    """llm-d's prefix-cache-affinity filter and token-load scorer: stay with the cache until the wait is too long.

    With w = prompt tokens still to be computed there: keep the replicas that cache at least `affinity` of the
    prompt, unless (least w of them - least w of all) / `prefill_tokens_per_s` > `max_penalty_s`; else, and where no
    replica caches that much, keep all. Then the least w + prompt tokens not cached there.

    Defaults: `affinity` 0.80 of the prompt, `max_penalty_s` 18 s, `prefill_tokens_per_s` 15,928 (measured by llm-d for
    Qwen3-32B on two H100: calibrate it to your own). Source: llm-d-router 0.10.0, prefixcacheaffinity/plugin.go and
    tokenload/token_load.go under pkg/epp/framework/plugins/scheduling. Theirs can ignore the filter at random, to
    explore (`explorationProbability`, 0 by default since 0.9.0); of a request that is not streamed it counts the prompt
    until the answer's end.
    """

    name = "sticky_until_saturated"

    def __init__(
        self, *, affinity: float = 0.80, max_penalty_s: float = 18.0, prefill_tokens_per_s: float = 15_928.0
    ) -> None:
        self._affinity = affinity
        self._max_penalty_s = max_penalty_s
        self._prefill_tokens_per_s = prefill_tokens_per_s

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas + depth)."""
        pairs = zip(view.replicas, view.matched_tokens(view.replicas), strict=True)
        sticky = [replica for replica, tokens in pairs if match_ratio(view, tokens) >= self._affinity]
        keeps = sticky and self._penalty_s(view, sticky) <= self._max_penalty_s
        replicas = sticky if keeps else view.replicas
        uncached = uncached_tokens(view, replicas)
        tokens = [view.waiting_prefill_tokens[replica] + own for replica, own in zip(replicas, uncached, strict=True)]
        replica = lowest(replicas, tokens, rng)
        missed = Reason.REDIRECT if sticky else Reason.EXPLORE
        return Choice(replica, Reason.EXPLOIT if replica in sticky else missed, scored(view, replicas, tokens))

    def _penalty_s(self, view: ClusterView, sticky: list[ReplicaIndex]) -> float:
        """Return how much longer the best of the sticky replicas makes the request wait than the best of all."""
        waiting = view.waiting_prefill_tokens
        ahead = min(waiting[replica] for replica in sticky) - min(waiting[replica] for replica in view.replicas)
        return ahead / self._prefill_tokens_per_s


class LlmdBlend:
    """llm-d's older scheduler: the highest weighted sum of four scores between 0 and 1.

    `prefix_weight` x matched / prompt tokens + `queue_weight` x (max w - w) / (max w - min w) + `kv_weight` x
    (1 - KV usage) + `lru_weight` x rank, with w = requests in flight without a first token; the queue scores 1 where
    all are equal. The rank spreads cold requests, those of which no replica has anything: 1 for the replica that got
    one longest ago or never, 0 for the one that got the last; all have 0.5 where the request is not cold.

    Defaults: `prefix_weight` 3, `queue_weight` 2, `kv_weight` 2, `lru_weight` 2. Source: llm-d-router 0.10.0,
    test/perf/config/router-configs/optimized-baseline.yaml; its scorers prefix, queuedepth, kvcacheutilization and
    nohitlru are under pkg/epp/framework/plugins/scheduling/scorer. In July 2026 llm-d's guides moved to the filter.
    Theirs polls w (the engine's own queue) and the KV usage from the engines, so they are late; here both are current.
    KV usage counts prompts in flight only, and is 0 where the size of the cache is unknown. Replicas that never got a
    cold request are equal here; theirs ranks them in the order of its list. A candidate's score is the negative sum.
    """

    name = "llmd_blend"

    def __init__(
        self,
        *,
        prefix_weight: float = 3.0,
        queue_weight: float = 2.0,
        kv_weight: float = 2.0,
        lru_weight: float = 2.0,
    ) -> None:
        self._prefix_weight = prefix_weight
        self._queue_weight = queue_weight
        self._kv_weight = kv_weight
        self._lru_weight = lru_weight
        self._cold_placements = 0
        self._last_cold: dict[ReplicaId, int] = {}
        """Replica -> the number of the last cold request that it got."""

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas x log replicas + depth)."""
        replicas = view.replicas
        queues = [view.num_requests[replica] - view.num_decoding[replica] for replica in replicas]
        longest, spread = max(queues), max(queues) - min(queues)
        matches = view.matched_tokens(replicas)
        is_cold = not any(matches)
        ranks = self._ranks(view) if is_cold else [0.5] * len(replicas)
        sums = [
            self._prefix_weight * match_ratio(view, matched)
            + self._queue_weight * ((longest - queue) / spread if spread else 1.0)
            + self._kv_weight * (1.0 - view.kv_usage(replica))
            + self._lru_weight * rank
            for replica, matched, queue, rank in zip(replicas, matches, queues, ranks, strict=True)
        ]
        choice = choose_lowest(view, replicas, [-total for total in sums], rng)
        if is_cold:
            self._cold_placements += 1
            self._last_cold[view.replica_id(choice.replica)] = self._cold_placements
        return choice

    def _ranks(self, view: ClusterView) -> list[float]:
        """Score replicas by when they last got a cold request: 1 is longest ago, 0 last. A single one scores 1."""
        last = [self._last_cold.get(view.replica_id(replica), 0) for replica in view.replicas]
        ordered = sorted(last)
        return [1.0 - bisect_left(ordered, number) / max(len(last) - 1, 1) for number in last]
