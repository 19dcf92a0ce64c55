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
  + v crowding r D_i                 who comes while this work is queued or computed waits for it as well, or turns away
  + 2 min(o N_i, O_i) d              decoding together: it slows the others down, and they slow it down
  + M_i                              what must be evicted for it will be computed again

D_i is the wait of those who come, added up over the time that the prefill is in the queue or computed: the integral of
the work that is left then, from W_i + P_i down to W_i, of which nobody waits for more than E_i. For who comes may go to
another replica, where the least W of all others waits, and pay for a prompt there: `_TURNING_AWAY` times the prefill of
a typical one, which has the geometric mean of the lengths. Where prompts are alike D_i is P_i (W_i + P_i/2). But a
document of 100,000 tokens does not hold up the chats that come in the half minute that it takes: they go elsewhere, as
long as there is a replica where they can. Where one replica alone caches the longest prefix, those who use it would
compute it elsewhere. So of those who come to this replica, the part u / r that uses it waits for up to E_i and the
prefill of the prefix.

A prefix that keeps its holders busy is not paid for by the request that first takes it to a further replica, since the
next ones will want it there. Of a piece of the prompt that another replica holds and i does not, P_i counts the part
1 / (1 + x^2), x = crowding u s / (h + 1): u requests a second use the piece, h replicas hold it, and each use takes s
seconds of a replica's time once the piece is cached. u s / (h + 1) is the share of each holder's time that the prefix
would take with the copy; x compares it with 1 / crowding, the part of a replica's time that is free. So what can fill a
replica is copied before it does, and all else stays where it is, which leaves the other caches to other prefixes. x has
no unit and depends on no window: rates and populations that grow together change nothing.

Later users pay no more than they gain. If n uses come once the copy is there, it takes n s / (h + 1) seconds of work
off the other holders. The discount is at most `_RELIEF` times that. The past tells n (`PrefixHistory.later_uses`): if
the uses go on, as many as there were. A burst of a second on a document that takes six to compute will be
over before a copy is there. So it is computed once, and the burst waits for it. On a replica without a request in
flight and with room for the copy, only those who come and do not use it would pay more. If u of r requests a second use
it, the discount has no limit there on the part u / r.

M_i is e times the terms with P_i where i's cache is full, else 0. A full cache evicts as many tokens as it takes in,
and the share e of them will be computed again, with the same delays. e is the share of what the replicas compute that
they had computed before (`Recomputation`). Which tokens go matters little: the next to go would soon have gone anyway.

Where another replica caches more of the prompt than i, i may copy that instead of computing it, if it is there sooner.
Then P_i is the prefill of the rest, and the request waits for the copy, C_i seconds, if that is longer than W_i. Nobody
else waits for it. But it evicts more than what is computed, since it is popular and stays. So it needs room for
`_COPY_EVICTS` times its tokens. Where there is none, M_i is so many times e times the terms with P_i as without the
copy, and without discount. A replica that is chosen to compute the prefix evicts the same either way, so it copies if
that is sooner.

Answers differ in length, and often by what the prompt begins with. o is learned for each prefix (`PrefixHistory`). Two
requests decode together for as long as the shorter one does; the sum over those in flight of the shorter length is at
most o N_i and at most O_i, and near the lower of them where lengths differ much. Lengths are as the replicas report
them, so all decoding is multiplied by the pace at which they turned out to decode (`decode_pace`, mostly 1).

Why each term is there, what it gains and what else was tried: docs/decisions/0008.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import inf
from random import Random
from typing import Final, overload

from preble.core.cluster.links import PrefixCopy
from preble.core.policies.policy import TTFT_WEIGHT
from preble.core.policies.splitting import Splits
from preble.core.policies.transfers import TransferOptions
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Candidate, Reason, Ways

_EXPLORE: Final = Reason.EXPLORE
_EXPLOIT: Final = Reason.EXPLOIT
_REPLICATE: Final = Reason.REPLICATE
"""Compiled code looks a member up by its name each time."""

_RELIEF: Final = 8.0
"""What a second that a copy takes off the other holders is worth, in seconds of prefill: who waits there gains, too."""


_COPY_EVICTS: Final = 8.0
"""How many times as much as another token one that is copied evicts: it is popular, so it stays, and one after the
other finds no place. Where caches hold half of what is asked for, 1 and 2 made E2E 5 % and 3 % longer."""

_TURNING_AWAY: Final = 6.0
"""Prefills by which a queue must be longer than another one before requests avoid it. With fewer, prompts that nothing
distinguishes are sent behind queues, to keep other replicas free for prompts that are hardly shorter."""


class Preble:
    """Least added delay. Stateless; O(replicas + depth) per request.

    `ttft_weight`: how many seconds of decoding a user would give for a second less before the first token. `crowding`:
    how much longer the queue of a loaded replica lasts than the work that is in it now, since more arrives meanwhile:
    1 / (1 - utilisation), here for a replica that is busy for three quarters of the time.
    """

    def __init__(self, name: str = "preble", *, ttft_weight: float = TTFT_WEIGHT, crowding: float = 4.0) -> None:
        self.name = name
        self.ttft_value = 1.0 + ttft_weight
        self._crowding = crowding

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """Return the replica where the request adds the least delay."""
        if view.has_copies:
            return self._choose_with_copies(view, rng)
        delays = _Delays(view, self.ttft_value, self._crowding)
        i = delays.least(view, rng)
        return Choice(view.replicas[i], _reason(view, delays.matched[i], delays.most_matched), delays)

    def _choose_with_copies(self, view: ClusterView, rng: Random) -> Choice:
        transfers = TransferOptions(view)
        delays = _DelaysWithCopies(view, transfers, self.ttft_value, self._crowding)
        i = delays.least(view, rng)
        copy = delays.copies[i]
        if transfers.splitting:
            splits = Splits(view, transfers, delays.computed(), self.ttft_value)
            split = splits.best(i, delays[i].cost_s)
            delays.split_s = splits.comparable_s
            if split is not None:
                copy, i, candidate = split
                delays.split = i, candidate
        matched = delays.matched[i] if copy is None else 0
        return Choice(view.replicas[i], _reason(view, matched, delays.most_matched), delays, copy)


class _Delays(Sequence[Candidate]):
    """The delay that one request adds on each replica, by position in `view.replicas`. It reads as candidates, whose L
    is the delay that does not depend on what is missed, P the delay that does, and M as above.

    They are computed when asked for, from what is kept of the replicas as the request found them: a list is copied in
    the time of a few additions.
    """

    __slots__ = (
        "_again",
        "_charged_s",
        "_crowd",
        "_crowding",
        "_elsewhere_s",
        "_expected_tokens",
        "_has_room",
        "_ids",
        "_loaded",
        "_loading_s",
        "_num_requests",
        "_output_tokens",
        "_replicas",
        "_requests_per_s",
        "_slowness",
        "_sole",
        "_staying",
        "_staying_s",
        "_together_s",
        "_ttft_value",
        "_waiting_s",
        "_whole_prefill_s",
        "matched",
        "most_matched",
    )

    def __init__(self, view: ClusterView, ttft_value: float, crowding: float) -> None:
        replicas = view.replicas
        self._replicas, self._ids = replicas, view.replica_ids
        self._ttft_value, self._crowding = ttft_value, crowding
        self.matched = view.matched_tokens(replicas)
        self.most_matched, sole = 0, -1
        for i, tokens in enumerate(self.matched):  # not `max`: compiled, this takes a tenth of its time
            if tokens > self.most_matched:
                self.most_matched, sole = tokens, i
            elif tokens == self.most_matched:
                sole = -1
        self._waiting_s = view.waiting_prefill_s.copy()
        self._num_requests = view.num_requests.copy()
        self._output_tokens = view.output_tokens_in_flight.copy()
        self._slowness = [view.slowness(replica) for replica in replicas] if view.has_slow_replicas else None
        self._loading_s = [view.loading_s(replica) for replica in replicas] if view.has_tiers else None
        self._loaded = self._loads(view) if view.has_tiers else None
        self._again = view.recomputed_share
        self._requests_per_s = view.requests_per_s
        self._crowd = ttft_value * crowding * self._requests_per_s / len(replicas)
        self._expected_tokens = view.expected_output_tokens
        self._charged_s: list[float] = []
        self._has_room: list[bool] = []
        typical_tokens, cost_model = int(view.typical_prompt_tokens), view.cost_model
        self._together_s = 2.0 * view.decode_pace * cost_model.decode_sequence_s(view.request.num_prompt_tokens)
        typical_s = cost_model.prefill_s(typical_tokens)
        most_cached_s = cost_model.prefill_s(view.request.num_prompt_tokens - self.most_matched, self.most_matched)
        self._whole_prefill_s = {self.most_matched: most_cached_s}
        self._elsewhere_s = _least_of_others(
            [_TURNING_AWAY * typical_s + self._waiting_s[replica] for replica in replicas]
        )
        self._sole, self._staying, self._staying_s = -1, 0.0, 0.0
        if sole >= 0 and self._requests_per_s:
            self._note_sole_holder(view, sole, most_cached_s)

    def _note_sole_holder(self, view: ClusterView, i: int, prefill_s: float) -> None:
        """Note which part of those who come to the only holder of the prefix use it, if any of them would turn away."""
        if self._waiting_s[self._replicas[i]] + self._own_prefill_s(i, prefill_s) > self._elsewhere_s[i]:
            uses_per_s = view.pieces(self.most_matched, beyond=self.most_matched - 1)[-1].uses_per_s
            self._sole = i
            self._staying = min(uses_per_s * len(self._replicas) / self._requests_per_s, 1.0)
            self._staying_s = self._elsewhere_s[i] + view.cost_model.prefill_s(self.most_matched)

    def _loads(self, view: ClusterView) -> list[tuple[int, float]]:
        """Return how many tokens each replica has to load, and the seconds for which it would compute these."""
        found = []
        for replica, matched in zip(self._replicas, self.matched, strict=True):
            tokens = view.loaded_tokens(replica)
            computing_s = view.prefill_s(matched - tokens) - view.prefill_s(matched) if tokens else 0.0
            found.append((tokens, computing_s))
        return found

    def least(self, view: ClusterView, rng: Random) -> int:
        """Return the position of the replica with the least delay, ties at random."""
        tokens_to_come = view.request.num_prompt_tokens + self._expected_tokens
        most_cached_s = self._whole_prefill_s[self.most_matched]
        charges = {self.most_matched: (most_cached_s, most_cached_s)}
        least_s, best, tokens, beside_s, alone_s = inf, [0], -1, 0.0, 0.0
        for i, replica in enumerate(self._replicas):
            if self.matched[i] != tokens:  # neighbours mostly match alike
                tokens = self.matched[i]
                if tokens not in charges:
                    charges[tokens] = self._shared_prefill_s(view, tokens)
                beside_s, alone_s = charges[tokens]
            come = tokens_to_come - tokens + (0 if self._loaded is None else self._loaded[i][0])
            is_alone = alone_s < beside_s and self._num_requests[replica] == 0 and view.has_room(replica, come)
            self._charged_s.append(alone_s if is_alone else beside_s)
            delay_s = self._prefill_delay_s(i, replica, self._own_prefill_s(i, self._charged_s[i]))
            cost_s = self._load_delay_s(i, replica)
            if self._again:
                self._has_room.append(view.has_room(replica, come))
                if not self._has_room[i]:
                    cost_s += self._again * delay_s
            cost_s += delay_s
            if cost_s < least_s:
                least_s, best = cost_s, [i]
            elif cost_s == least_s:
                best.append(i)
        return best[0] if len(best) == 1 else rng.choice(best)

    def __len__(self) -> int:
        return len(self._replicas)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._candidate(index)

    def _candidate(self, index: int) -> Candidate:
        replica, tokens = self._replicas[index], self.matched[index]
        replica_id = self._ids[replica]
        assert replica_id is not None
        delay_s = self._prefill_delay_s(index, replica, self._own_prefill_s(index, self._charged_s[index]))
        found = Candidate(
            replica_id,
            tokens,
            self._load_delay_s(index, replica),
            self._evicting_s(index, delay_s),
            delay_s,
            own_wait_s=self._waiting_s[replica],
            own_prefill_s=self._own_prefill_s(index, self._whole_prefill_s[tokens]),
        )
        if self._loaded is not None:
            found.loaded_tokens, computing_s = self._loaded[index]
            found.ways = Ways(found.cost_s)
            if found.loaded_tokens:
                own_s = self._slowed_s(index, self._charged_s[index] + computing_s)
                delay_s = self._prefill_delay_s(index, replica, own_s)
                found.ways = Ways(found.load_s + self._evicting_s(index, delay_s) + delay_s, found.cost_s)
        return found

    def _evicting_s(self, i: int, delay_s: float) -> float:
        """Return M of a prefill that adds this delay."""
        return self._again * delay_s if self._has_room and not self._has_room[i] else 0.0

    def _load_delay_s(self, i: int, replica: ReplicaIndex) -> float:
        slowness = 1.0 if self._slowness is None else self._slowness[i]
        together = min(self._expected_tokens * self._num_requests[replica], float(self._output_tokens[replica]))
        return self._ttft_value * self._waiting_s[replica] + self._together_s * together * slowness

    def _prefill_delay_s(self, i: int, replica: ReplicaIndex, own: float) -> float:
        """Return the delay that a prefill of `own` seconds adds."""
        waiting, elsewhere = self._waiting_s[replica], self._elsewhere_s[i]
        held_up = _wait_s(waiting + own, elsewhere) - _wait_s(waiting, elsewhere)
        if i == self._sole:
            staying_s = _wait_s(waiting + own, self._staying_s) - _wait_s(waiting, self._staying_s)
            held_up += self._staying * (staying_s - held_up)
        return own * (self._ttft_value + self._num_requests[replica]) + self._crowd * held_up

    def _own_prefill_s(self, i: int, prefill_s: float) -> float:
        """Return the seconds in which i loads and computes the prompt, if the average one takes `prefill_s`."""
        slowness = 1.0 if self._slowness is None else self._slowness[i]
        return (prefill_s if self._loading_s is None else prefill_s + self._loading_s[i]) * slowness

    def _slowed_s(self, i: int, seconds: float) -> float:
        """Return the seconds in which i does what the average replica does in `seconds`."""
        return seconds if self._slowness is None else seconds * self._slowness[i]

    def _shared_prefill_s(self, view: ClusterView, matched: int) -> tuple[float, float]:
        """Return seconds of prefill where `matched` tokens are cached, less what later users of a copy pay.

        Twice: where others wait for it as well, and on a replica where only those do who come and do not use it.
        """
        num_tokens, known, model = view.request.num_prompt_tokens, view.known_tokens, view.cost_model
        hit_s = model.prefill_s(num_tokens - known, known)
        hit_s += view.decode_pace * model.decode_s(self._expected_tokens, num_tokens)
        whole_s = self._whole_prefill_s[matched] = model.prefill_s(num_tokens - matched, matched)
        paid_s = paid_alone_s = 0.0
        rate = self._requests_per_s
        for piece in view.pieces(self.most_matched, beyond=matched):
            busy = piece.uses_per_s * hit_s / (piece.holders + 1)
            square = math.pow(self._crowding * busy, 2.0)
            missed = min(piece.end, self.most_matched) - max(piece.start, matched)
            piece_s = whole_s * missed / (num_tokens - matched)
            relief_s = piece.later_uses(piece_s) * hit_s / (piece.holders + 1)
            wanted_s = piece_s * square / (1.0 + square)
            repaid_s = min(wanted_s, _RELIEF * relief_s)
            users = min(piece.uses_per_s / rate, 1.0) if rate else 0.0
            paid_s += repaid_s
            paid_alone_s += repaid_s + users * (wanted_s - repaid_s)
        return whole_s - paid_s, whole_s - paid_alone_s


class _DelaysWithCopies(_Delays):
    """Delays where a replica may copy a prefix from another one. `copies`: those that are made if the replica is
    chosen, by position in `view.replicas`; None where there is none. `split`: the position of the target of a chosen
    split, and what it costs. `split_s`: what splits cost, in seconds of the other costs, by their target's position.
    """

    __slots__ = ("_copied_s", "_evicts", "_in_place_of_computing", "copies", "split", "split_s")

    def __init__(self, view: ClusterView, transfers: TransferOptions, ttft_value: float, crowding: float) -> None:
        super().__init__(view, ttft_value, crowding)
        self.copies = transfers.copies()
        self._evicts = [False] * len(self._replicas)
        self._in_place_of_computing = -1
        self.split: tuple[int, Candidate] | None = None
        self._copied_s: list[float | None] = [None] * len(self._replicas)
        self.split_s: list[float | None] = [None] * len(self._replicas)

    def least(self, view: ClusterView, rng: Random) -> int:
        """Do as `_Delays.least`, with copies."""
        computed = super().least(view, rng)
        tokens_to_come = view.request.num_prompt_tokens + self._expected_tokens
        least_s, best = super()._candidate(computed).cost_s, [computed]
        its_copy: PrefixCopy | None = None
        for i, replica in enumerate(self._replicas):
            copy = self.copies[i]
            if copy is None:
                continue
            self._whole_prefill_s[copy.matched_tokens] = view.prefill_s(copy.matched_tokens)
            come = tokens_to_come - copy.matched_tokens + copy.tokens
            self._evicts[i] = not view.has_room(replica, _COPY_EVICTS * come)
            cost_s = self._load_delay_s(i, replica) + self._copy_delay_s(i, replica, copy)
            cost_s += self._copy_eviction_s(i, replica)
            self._copied_s[i] = cost_s
            if not self._is_sooner(i, copy):
                self.copies[i] = None
                continue
            if i == computed:
                its_copy = copy
            if cost_s >= super()._candidate(i).cost_s:
                self.copies[i] = None
            elif cost_s < least_s:
                least_s, best = cost_s, [i]
            elif cost_s == least_s:
                best.append(i)
        i = best[0] if len(best) == 1 else rng.choice(best)
        if i == computed and self.copies[i] is None and its_copy is not None:
            self.copies[i], self._in_place_of_computing = its_copy, i
            self._copied_s[i] = super()._candidate(i).cost_s
        return i

    def computed(self) -> list[Candidate]:
        """Return the candidates as if nothing could be copied."""
        return [super(_DelaysWithCopies, self)._candidate(i) for i in range(len(self._replicas))]

    def _candidate(self, index: int) -> Candidate:
        found, computed = self._by_the_chosen_way(index), super()._candidate(index)
        ways = Ways(computed.cost_s) if computed.ways is None else computed.ways
        found.ways = Ways(ways.computed_s, ways.loaded_s, self._copied_s[index], self.split_s[index])
        return found

    def _by_the_chosen_way(self, index: int) -> Candidate:
        if self.split is not None and self.split[0] == index:
            return self.split[1]
        copy, replica = self.copies[index], self._replicas[index]
        if copy is None:
            return super()._candidate(index)
        if index == self._in_place_of_computing:
            found = super()._candidate(index)  # it costs no more than this
            found.matched_tokens, found.copied_tokens, found.copy_s = copy.matched_tokens, copy.tokens, copy.seconds
            found.own_wait_s, found.own_prefill_s = (
                max(self._waiting_s[replica], copy.seconds),
                self._rest_s(index, copy),
            )
            return found
        replica_id = self._ids[replica]
        assert replica_id is not None
        return Candidate(
            replica_id,
            copy.matched_tokens,
            self._load_delay_s(index, replica),
            self._copy_eviction_s(index, replica),
            self._copy_delay_s(index, replica, copy),
            own_wait_s=max(self._waiting_s[replica], copy.seconds),
            own_prefill_s=self._rest_s(index, copy),
            copied_tokens=copy.tokens,
            copy_s=copy.seconds,
        )

    def _is_sooner(self, i: int, copy: PrefixCopy) -> bool:
        """Return whether the first token comes sooner after a copy, on a replica with nothing else to do."""
        return copy.seconds + self._rest_s(i, copy) < self._computed_s(i)

    def _copy_delay_s(self, i: int, replica: ReplicaIndex, copy: PrefixCopy) -> float:
        """Return the delay of the prefill that is left after a copy, and of the wait for the copy."""
        late_s = max(copy.seconds - self._waiting_s[replica], 0.0)
        return self._ttft_value * late_s + self._prefill_delay_s(i, replica, self._rest_s(i, copy))

    def _copy_eviction_s(self, i: int, replica: ReplicaIndex) -> float:
        """Return M of a copy: of all that is computed or copied."""
        if not self._evicts[i]:
            return 0.0
        return _COPY_EVICTS * self._again * self._prefill_delay_s(i, replica, self._computed_s(i))

    def _rest_s(self, i: int, copy: PrefixCopy) -> float:
        """Return the seconds in which i computes what is left of the prompt after a copy."""
        return self._slowed_s(i, self._whole_prefill_s[copy.matched_tokens])

    def _computed_s(self, i: int) -> float:
        """Return the seconds in which i loads and computes the prompt without a copy."""
        return self._own_prefill_s(i, self._whole_prefill_s[self.matched[i]])


def _least_of_others(values: list[float]) -> list[float]:
    """Return for each value the least of the others; infinity where there is no other."""
    least = second = inf
    for value in values:
        if value < least:
            least, second = value, least
        elif value < second:
            second = value
    return [second if value == least else least for value in values]


def _wait_s(work_s: float, most_s: float) -> float:
    """Return the waits, added up, while this work is done: who comes waits for what is left, at most for `most_s`."""
    waited_s = min(work_s, most_s)
    return waited_s * (work_s - waited_s / 2)


def _reason(view: ClusterView, matched: int, best: int) -> Reason:
    """Explore where most of the prompt is cached nowhere; else exploit a replica with the most, or replicate."""
    if view.request.num_prompt_tokens - best >= best:
        return _EXPLORE
    return _EXPLOIT if matched == best else _REPLICATE
