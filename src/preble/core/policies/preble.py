"""`preble`: place a request where it adds the least delay, to itself and to everybody else.

Of each replica i is asked: by how many seconds do the latencies of all requests together grow if the request goes
there? A request's latency is reckoned as its end-to-end time plus `ttft_weight` times its time to first token, so a
second before the first token counts v = 1 + `ttft_weight`, and a second of decoding counts one. With

- W_i the prefill that waits on i, P_i the prefill of what the request misses there, N_i the requests in flight on i,
- o the output tokens to expect, d the seconds by which one more sequence makes each decode iteration longer,
- r the requests a second that a replica gets on average,

the delay is the sum of

    v (W_i + P_i)                    its own first token waits for what is queued, then for its own prefill
  + N_i P_i                          who is there already stands still while its prompt is computed
  + v crowding r P_i (W_i + P_i/2)   who comes while this work is queued or computed waits for it as well
  + 2 o N_i d                        decoding together: it slows the others down, and they slow it down
  + M_i                              what must be evicted for it will be computed again (E2's M)

A prefix that many requests use is not paid for by the one that first takes it to a further replica. Of a piece of the
prompt that another replica holds and i does not, P_i counts the part 1 / (1 + x^2), x = u / ((h + 1) copy_after): u
requests of the window use the piece, h replicas hold it. So what is hot is replicated before its holders are saturated,
and what is used now and then stays where it is, which leaves the other caches to other prefixes.

Why each term is there, what it gains and what else was tried: docs/decisions/0008.
"""

from __future__ import annotations

from random import Random

from preble.core.policies.cost_table import CostTable
from preble.core.policies.policy import Choice
from preble.core.policies.view import ClusterView
from preble.core.types import Reason


class Preble:
    """Least added delay. Stateless; O(replicas + depth + victims) a request.

    `ttft_weight`: how many seconds of decoding a user would give for a second less before the first token. `crowding`:
    how much longer the queue of a loaded replica lasts than the work that is in it now, since more arrives meanwhile
    (1 / (1 - utilisation), here for a replica that is busy for three quarters of the time). `copy_after`: how many
    requests of the window each copy of a prefix has to serve for a further one to count half.
    """

    def __init__(
        self, name: str = "preble", *, ttft_weight: float = 3.0, crowding: float = 4.0, copy_after: float = 20.0
    ) -> None:
        self.name = name
        self._ttft_value = 1.0 + ttft_weight
        self._crowding = crowding
        self._copy_after = copy_after

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """The replica where the request adds the least delay."""
        replicas = view.replicas
        matched = view.matched_tokens(replicas)
        best = max(matched)
        costs = self._costs(view, matched, best)
        replica = costs.cheapest(rng)
        return Choice(replica, _reason(view, view.matched_on(replica), best), costs)

    def _costs(self, view: ClusterView, matched: list[int], best: int) -> CostTable:
        """L: the delay that does not depend on what is missed. P: the delay that does. `best`: the longest match."""
        replicas = view.replicas
        waiting_s, num_requests, mean_output_tokens = (
            view.waiting_prefill_s,
            view.num_requests,
            view.mean_output_tokens,
        )
        value = self._ttft_value
        crowd = value * self._crowding * view.requests_per_s / len(replicas)
        together_s = 2.0 * view.cost_model.decode_sequence_s(view.request.num_prompt_tokens)
        loads: list[float] = []
        prefills: list[float] = []
        prefill_s: dict[int, float] = {}
        tokens, prefill = -1, 0.0
        for i, replica in enumerate(replicas):
            if matched[i] != tokens:  # neighbours mostly match alike
                tokens = matched[i]
                if tokens not in prefill_s:
                    prefill_s[tokens] = self._prefill_s(view, tokens, best)
                prefill = prefill_s[tokens]
            waiting = waiting_s[replica]
            loads.append(value * waiting + together_s * mean_output_tokens[replica] * num_requests[replica])
            prefills.append(prefill * (value + num_requests[replica] + crowd * (waiting + prefill / 2)))
        return view.table(replicas, matched, load_s=loads, prefill_s=prefills)

    def _prefill_s(self, view: ClusterView, matched: int, best: int) -> float:
        """Seconds of prefill where `matched` tokens are cached, less what later users of a copy will pay of it."""
        whole_s = view.prefill_s(matched)
        if matched == best:
            return whole_s
        paid_by_others = 0.0
        for node in view.known_prefix:
            if node.start >= best:
                break
            tokens = min(node.end, best) - max(node.start, matched)
            if tokens > 0:
                uses = node.recent_uses / ((node.full_holders.bit_count() + 1) * self._copy_after)
                paid_by_others += tokens * uses * uses / (1.0 + uses * uses)
        return whole_s * (1.0 - paid_by_others / (view.request.num_prompt_tokens - matched))


def _reason(view: ClusterView, matched: int, best: int) -> Reason:
    """Explore where most of the prompt is cached nowhere; else exploit a replica with the most, or replicate."""
    if view.request.num_prompt_tokens - best >= best:
        return Reason.EXPLORE
    return Reason.EXPLOIT if matched == best else Reason.REPLICATE
