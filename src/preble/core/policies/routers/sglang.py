"""The three rules of SGLang's routers: the first one (v0.4), its heir in the Shepherd model gateway, the slim one."""

from __future__ import annotations

from random import Random

from preble.core.policies.cost_table import lowest
from preble.core.policies.scoring import choose_lowest, in_flight, match_ratio, scored, uncached_tokens
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Reason


class SglangCacheAware:
    """SGLang's router, v0.4: follow the longest match while the whole cluster is balanced.

    With q = requests in flight: if max q - min q > `balance_abs` and max q > `balance_rel` x min q, the least q. Else
    the longest match, if it is more than `cache_threshold` of the prompt; else the replica that caches the fewest
    tokens.

    Defaults: `cache_threshold` 0.5 of the prompt (its command line later said 0.3), `balance_abs` 32 requests,
    `balance_rel` 1.0001 (later 1.5). Source: SGLang v0.4, sgl-router, `cache_aware` policy (RouterArgs).
    Theirs matches characters and measures trees in characters; of several replicas with the same match it takes any.
    """

    name = "sglang_cache_aware"

    def __init__(self, *, cache_threshold: float = 0.5, balance_abs: float = 32, balance_rel: float = 1.0001) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas + depth)."""
        replicas = view.replicas
        load = in_flight(view, replicas)
        if max(load) - min(load) > self._balance_abs and max(load) > self._balance_rel * min(load):
            return choose_lowest(view, replicas, load, rng, Reason.BALANCE)
        uncached = uncached_tokens(view, replicas)
        if match_ratio(view, view.request.num_prompt_tokens - min(uncached)) > self._cache_threshold:
            return choose_lowest(view, replicas, uncached, rng, Reason.EXPLOIT)
        return choose_lowest(view, replicas, [view.held_tokens(replica) for replica in replicas], rng, Reason.EXPLORE)


class SmgCacheAware:
    """Shepherd model gateway: follow the longest match, request by request, unless the replica with it is overloaded.

    With q = requests in flight: if the longest match is more than `cache_threshold` of the prompt, the least q of up to
    `max_holders` replicas with that match; but the least q of all if the chosen q > `spill_rel` x mean q and
    > mean q + `spill_abs`. Else the least q of all.

    Defaults: `cache_threshold` 0.3 of the prompt, `spill_rel` 1.5, `spill_abs` 64 requests, `max_holders` 8.
    Source: Shepherd model gateway, August 2026, `cache_aware` policy.
    Theirs adds a replica that took a spilled request to the holders; here each prompt counts where it was placed.
    """

    name = "smg_cache_aware"

    def __init__(
        self,
        *,
        cache_threshold: float = 0.3,
        spill_rel: float = 1.5,
        spill_abs: float = 64,
        max_holders: int = 8,
    ) -> None:
        self._cache_threshold = cache_threshold
        self._spill_rel = spill_rel
        self._spill_abs = spill_abs
        self._max_holders = max_holders

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas + depth)."""
        replicas, matched = view.replicas, view.matched_tokens(view.replicas)
        load = in_flight(view, replicas)
        best = max(matched)
        if match_ratio(view, best) <= self._cache_threshold:
            return choose_lowest(view, replicas, load, rng, Reason.EXPLORE)
        holders = [replica for replica, tokens in zip(replicas, matched, strict=True) if tokens == best][
            : self._max_holders
        ]
        choice = choose_lowest(view, holders, in_flight(view, holders), rng, Reason.EXPLOIT)
        if self._is_overloaded(view.num_requests[choice.replica], sum(load) / len(load)):
            return choose_lowest(view, replicas, load, rng, Reason.REDIRECT)
        return choice

    def _is_overloaded(self, load: int, mean: float) -> bool:
        return load > self._spill_rel * mean and load > mean + self._spill_abs


class SlimRouter:
    """SGLang's slim router: the fewest uncached tokens, within a band, unless that replica is under pressure.

    With E = prompt tokens not cached there, p = prompt tokens still to be computed there: only replicas with
    E <= min E + `margin` compete; of them those with p - min p > `pressure_abs` and p > `pressure_rel` x min p are
    vetoed; then the least (E, p).

    Defaults: `margin` 1024 tokens, `pressure_abs` 8192 tokens, `pressure_rel` 1.5. Source: SGLang's experimental
    router, experimental/sgl-router, `cache_aware` policy, 2026. Theirs as of September 2026 (src/policies)
    has `pressure_abs` 1024; only replicas that cache 1024 tokens or more compete, at most the best eight or 5 %,
    and where there is none, the better of two random replicas gets the request. It breaks the last tie by the replica's
    id.
    """

    name = "slim_router"

    def __init__(self, *, margin: int = 1024, pressure_abs: int = 8192, pressure_rel: float = 1.5) -> None:
        self._margin = margin
        self._pressure_abs = pressure_abs
        self._pressure_rel = pressure_rel

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas + depth)."""
        replicas, pressure = view.replicas, view.waiting_prefill_tokens
        uncached = dict(zip(replicas, uncached_tokens(view, replicas), strict=True))
        fewest = min(uncached.values())
        band = [replica for replica in replicas if uncached[replica] <= fewest + self._margin]
        free = self._without_vetoed(band, pressure)
        least = min(uncached[replica] for replica in free)
        finalists = [replica for replica in free if uncached[replica] == least]
        replica = lowest(finalists, [pressure[replica] for replica in finalists], rng)
        return Choice(
            replica, self._reason(view, fewest, least), scored(view, band, [uncached[replica] for replica in band])
        )

    def _without_vetoed(self, band: list[ReplicaIndex], pressure: list[int]) -> list[ReplicaIndex]:
        """Return the candidates without the vetoed ones. The one with the least pressure is never vetoed."""
        least = min(pressure[replica] for replica in band)
        limit = max(least + self._pressure_abs, self._pressure_rel * least)
        return [replica for replica in band if pressure[replica] <= limit]

    def _reason(self, view: ClusterView, fewest: int, chosen: int) -> Reason:
        if chosen > fewest:
            return Reason.REDIRECT
        return Reason.EXPLOIT if fewest < view.request.num_prompt_tokens else Reason.EXPLORE
