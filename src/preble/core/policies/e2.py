"""E2: exploit a cached prefix or explore a replica (Algorithm 1), by load cost L + M + P (Algorithm 2).

Source: Preble, "E2 Global Scheduler". Where the paper is silent: docs/decisions/0001 and 0004.
"""

from __future__ import annotations

from random import Random
from typing import Final

from preble.core.policies.policy import Choice
from preble.core.policies.view import ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Reason

_STANDS_OUT: Final = 1.5
"""How much more decoding per prefill a replica must have than the others together: Th_bal, the paper's measure."""


class E2:
    """The paper's policy. Stateless.

    `rebalance`: redirect requests off heavy replicas, and serve replicated prefixes where they were replicated.
    `mix_decode`: send what must be explored to a replica that mostly decodes. `max_decode_ratio`: ImbalR, the share of
    decoding in a replica's load above which it counts as such; calculated from the cost profile if None.
    """

    def __init__(
        self,
        name: str = "e2",
        *,
        rebalance: bool = True,
        mix_decode: bool = True,
        max_decode_ratio: float | None = None,
    ) -> None:
        self.name = name
        self._rebalance = rebalance
        self._mix_decode = mix_decode
        self._max_decode_ratio = max_decode_ratio

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """Exploit if less of the prompt is missing than cached somewhere, else explore every replica.

        O(depth + holders of the key portion + victims) to exploit, O(replicas) to explore.
        """
        cached_tokens = view.cached_tokens
        if view.request.num_prompt_tokens - cached_tokens < cached_tokens:
            return self._exploit(view, rng)
        return self._explore(view, rng)

    def _exploit(self, view: ClusterView, rng: Random) -> Choice:
        holders = view.key_holders
        prefix_tokens, replicas = view.key_prefix_tokens if self._rebalance else 0, holders
        if self._rebalance and (replicated := view.replicated_on()) is not None:
            prefix_tokens, replicas = replicated
        costs = view.costs(replicas)
        replica = costs.cheapest(rng)
        if self._rebalance and view.sheds(replica):
            redirected = self._redirect(view, replica, rng)
            if redirected is not None:
                return redirected
        return Choice(replica, Reason.EXPLOIT if replica in holders else Reason.REPLICATE, costs, prefix_tokens)

    def _redirect(self, view: ClusterView, heavy: ReplicaIndex, rng: Random) -> Choice | None:
        """The lightest replica in place of a heavy one, if that saves more waiting than it costs to compute; else None.

        It costs the prefix, which the lightest must compute; it saves the difference of what waits on the two, less
        that. Without this test, half-empty replicas would trade prefixes for nothing (docs/decisions/0004).
        """
        lightest_s = view.lightest_load_s()
        lightest = rng.choice([replica for replica in view.replicas if view.load_s[replica] == lightest_s])
        costs = view.costs([heavy, lightest])
        there, here = costs[1], costs[0]
        price_s = there.eviction_s + there.prefill_s - here.eviction_s - here.prefill_s
        saved_s = view.waiting_prefill_s[heavy] - view.waiting_prefill_s[lightest] - price_s
        return Choice(lightest, Reason.REDIRECT, costs, view.key_prefix_tokens) if saved_s > price_s else None

    def _explore(self, view: ClusterView, rng: Random) -> Choice:
        if self._mix_decode:
            decoding = self._mostly_decoding(view)
            if decoding is not None:
                return Choice(decoding, Reason.BALANCE, view.costs([decoding]))
        costs = view.costs(view.replicas)
        return Choice(costs.cheapest(rng), Reason.EXPLORE, costs)

    def _mostly_decoding(self, view: ClusterView) -> ReplicaIndex | None:
        """The replica with the highest share of decoding, if that is over ImbalR and the others' shares are lower.

        Where all replicas have relatively balanced shares, the paper compares costs. "Relatively" is by Th_bal here:
        decoding per prefill on the replica, compared with decoding per prefill on the others together.
        """
        replica = max(view.replicas, key=view.decode_ratio)
        ratio, limit = view.decode_ratio(replica), self._max_decode_ratio
        if ratio <= (view.cost_model.balanced_decode_ratio() if limit is None else limit) or view.sheds(replica):
            return None
        decode_s, load_s = view.decode_load_s, view.load_s
        others_decode_s = sum([decode_s[one] for one in view.replicas]) - decode_s[replica]
        others_prefill_s = sum([load_s[one] for one in view.replicas]) - load_s[replica] - others_decode_s
        stands_out = decode_s[replica] * others_prefill_s > _STANDS_OUT * others_decode_s * (
            load_s[replica] - decode_s[replica]
        )
        return replica if stands_out else None
