"""`preble`: place a request where it adds the least delay, to itself and to everybody else.

Of each replica i is asked: by how many seconds do the latencies of all requests together grow if the request goes
there? A request's latency counts as its end-to-end time plus `ttft_weight` times its time to first token, so a
second before the first token counts v = 1 + `ttft_weight`, and a second of decoding counts one. With

- W_i the prefill that waits on i, P_i the prefill of what the request misses there, N_i the requests in flight on i,
- o the output tokens to expect of it, O_i those of all requests in flight on i together,
- d the seconds by which one more sequence makes each decode iteration longer,
- r the requests a second that a replica gets on average,

the delay is the sum of

    v (W_i + P_i)                    its own first token waits for what is queued, then for its own prefill
  + N_i P_i                          who is there already stands still while its prompt is computed
  + v crowding r P_i (W_i + P_i/2)   who comes while this work is queued or computed waits for it as well
  + 2 min(o N_i, O_i) d              decoding together: it slows the others down, and they slow it down
  + M_i                              what must be evicted for it will be computed again

A prefix that keeps its holders busy is not paid for by the request that first takes it to a further replica, since the
next ones will want it there. Of a piece of the prompt that another replica holds and i does not, P_i counts the part
1 / (1 + x^2), x = crowding u s / (h + 1): u requests a second use the piece, h replicas hold it, and each use takes s
seconds of a replica's time once the piece is cached. u s / (h + 1) is the share of each holder's time that the prefix
would take with the copy; x compares it with 1 / crowding, the part of a replica's time that is free. So what can fill a
replica is copied before it does, and all else stays where it is, which leaves the other caches to other prefixes. x has
no unit and depends on no window: rates and populations that grow together change nothing.

M_i is e times the terms with P_i where i's cache is full, else 0. A full cache evicts as many tokens as it takes in,
and the share e of them will be computed again, with the same delays. e is the share of what the replicas compute that
they had computed before (`Recomputation`). Which tokens go matters little: the next to go would soon have gone anyway.

Answers differ in length, and often by what the prompt begins with. o is learned for each prefix (`PrefixHistory`). Two
requests decode together for as long as the shorter one does; the sum over those in flight of the shorter length is at
most o N_i and at most O_i, and near the lower of them where lengths differ much. Lengths are as the replicas report
them, so all decoding is multiplied by the pace at which they turned out to decode (`decode_pace`, mostly 1).

Why each term is there, what it gains and what else was tried: docs/decisions/0008.
"""

from __future__ import annotations

from random import Random
from typing import Final

from preble.core.policies.cost_table import CostTable
from preble.core.policies.policy import Choice
from preble.core.policies.view import ClusterView
from preble.core.types import Reason

_EXPLORE: Final = Reason.EXPLORE
_EXPLOIT: Final = Reason.EXPLOIT
_REPLICATE: Final = Reason.REPLICATE
"""Compiled code looks a member up by its name each time."""


class Preble:
    """Least added delay. Stateless; O(replicas + depth) per request.

    `ttft_weight`: how many seconds of decoding a user would give for a second less before the first token. `crowding`:
    how much longer the queue of a loaded replica lasts than the work that is in it now, since more arrives meanwhile:
    1 / (1 - utilisation), here for a replica that is busy for three quarters of the time.
    """

    def __init__(self, name: str = "preble", *, ttft_weight: float = 3.0, crowding: float = 4.0) -> None:
        self.name = name
        self._ttft_value = 1.0 + ttft_weight
        self._crowding = crowding

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """The replica where the request adds the least delay."""
        replicas = view.replicas
        matched = view.matched_tokens(replicas)
        best = 0
        for tokens in matched:  # not `max`: compiled, this takes a tenth of its time
            if tokens > best:
                best = tokens
        costs = self._costs(view, matched, best)
        replica = costs.cheapest(rng)
        return Choice(replica, _reason(view, view.matched_on(replica), best), costs)

    def _costs(self, view: ClusterView, matched: list[int], best: int) -> CostTable:
        """L: the delay that does not depend on what is missed; P: the delay that does; M. `best`: the longest match."""
        replicas = view.replicas
        waiting_s, num_requests, output_tokens = (
            view.waiting_prefill_s,
            view.num_requests,
            view.output_tokens_in_flight,
        )
        expected_tokens = view.expected_output_tokens
        value = self._ttft_value
        crowd = value * self._crowding * view.requests_per_s / len(replicas)
        together_s = 2.0 * view.decode_pace * view.cost_model.decode_sequence_s(view.request.num_prompt_tokens)
        loads: list[float] = []
        prefills: list[float] = []
        evictions: list[float] = []
        again, tokens_to_come = view.recomputed_share, view.request.num_prompt_tokens + expected_tokens
        best_s = view.prefill_s(best)
        prefill_s: dict[int, float] = {}
        pieces: list[tuple[int, int, float]] | None = None
        tokens, prefill, has_tiers = -1, 0.0, view.has_tiers
        for i, replica in enumerate(replicas):
            if matched[i] != tokens:  # neighbours mostly match alike
                tokens = matched[i]
                if tokens == best:
                    prefill = best_s
                else:
                    if pieces is None:
                        pieces = self._paid_by_others(view, best, expected_tokens)
                    if tokens not in prefill_s:
                        prefill_s[tokens] = _prefill_s(view, tokens, pieces)
                    prefill = prefill_s[tokens]
            slowness = view.slowness(replica)
            loading_s, loaded = (view.loading_s(replica), view.loaded_tokens(replica)) if has_tiers else (0.0, 0)
            own = (prefill + loading_s) * slowness
            waiting = waiting_s[replica]
            together = min(expected_tokens * num_requests[replica], float(output_tokens[replica]))
            loads.append(value * waiting + together_s * together * slowness)
            delay = own * (value + num_requests[replica] + crowd * (waiting + own / 2))
            prefills.append(delay)
            evictions.append(0.0 if view.has_room(replica, tokens_to_come - tokens + loaded) else again * delay)
        return view.table(replicas, matched, load_s=loads, prefill_s=prefills, eviction_s=evictions)

    def _paid_by_others(self, view: ClusterView, best: int, output_tokens: float) -> list[tuple[int, int, float]]:
        """The pieces up to the longest match, each as start, end, and x^2: what later users of a copy pay of it."""
        hit_s = view.prefill_s(view.known_tokens)
        hit_s += view.decode_pace * view.cost_model.decode_s(output_tokens, view.request.num_prompt_tokens)
        pieces = []
        for piece in view.pieces(best):
            busy = piece.uses_per_s * hit_s / (piece.holders + 1)
            pieces.append((piece.start, min(piece.end, best), (self._crowding * busy) ** 2))
        return pieces


def _prefill_s(view: ClusterView, matched: int, pieces: list[tuple[int, int, float]]) -> float:
    """Seconds of prefill where `matched` tokens are cached, less what later users of a copy will pay of it."""
    paid_by_others = 0.0
    for start, end, square in pieces:
        if end > matched:
            paid_by_others += (end - max(start, matched)) * square / (1.0 + square)
    return view.prefill_s(matched) * (1.0 - paid_by_others / (view.request.num_prompt_tokens - matched))


def _reason(view: ClusterView, matched: int, best: int) -> Reason:
    """Explore where most of the prompt is cached nowhere; else exploit a replica with the most, or replicate."""
    if view.request.num_prompt_tokens - best >= best:
        return _EXPLORE
    return _EXPLOIT if matched == best else _REPLICATE
