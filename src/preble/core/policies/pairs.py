"""Pairs of replicas with fixed roles: the source computes the prompt, the target decodes its answer.

The policy chooses the source, as if the replicas that compute prompts were the whole cluster: by what they cache and by
what waits there. Nothing decodes on them, so the sum of `preble` is what the prompt adds to the first tokens. The
target is the one on which the answer adds least, in the same seconds of delay:

    v (max(T, F) + t) + 2 min(o N, O) d

T are the seconds until the KV is there: the source's queue, the prompt, and other transfers on the same links. F is the
wait for room: a replica keeps the KV of answers until they end. t is one step of decoding; d, o, N and O are as in
`preble`. What a target has cached need not be sent, but that is known only where it reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from preble.core.cluster.links import PrefixCopy
from preble.core.cluster.state import ClusterState
from preble.core.policies.view import Choice, ClusterView
from preble.core.prefixes.matching import usable_tokens
from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.core.types import Candidate, Request


def pools(request: Request, eligible: ReplicaSet, cluster: ClusterState) -> Iterator[tuple[ReplicaSet, ReplicaSet]]:
    """Yield the sources and the targets among which pairs may be made, for each transfer group that has both."""
    targets, sources = eligible & cluster.replicas.decoding, cluster.replicas.sources(request)
    for members in cluster.links.pairing.values():
        if members & sources and members & targets:
            yield members & sources, members & targets


def delay_s(view: ClusterView, choice: Choice, value: float, *, decodes: bool = True) -> float:
    """Return the delay that the request adds where the policy put it; of a policy that knows no costs, its own time.

    `value`: v. `decodes`: whether the answer decodes there, too.
    """
    replica_id = view.replica_id(choice.replica)
    for candidate in choice.candidates:
        if candidate.replica_id == replica_id and candidate.score is None:
            return candidate.cost_s
    first_s = value * view.ttft_s(choice.replica)
    return first_s + view.expected_output_tokens * view.tpot_s(choice.replica) if decodes else first_s


class Pairs:
    """The pairs that the source of `choice`, a policy's, can make with `targets`. `sources`, `targets`: both pools.
    `value`: v of the policy."""

    def __init__(self, sources: ClusterView, choice: Choice, targets: ClusterView, value: float) -> None:
        self._sources, self._choice, self._targets, self._value = sources, choice, targets, value
        self._own_s = sources.ttft_s(choice.replica)
        self._source_s = delay_s(sources, choice, value, decodes=False)

    def best(self) -> Choice:
        """Return the cheapest pair as a choice of its target; the first one of equals with fewest in flight."""
        targets, found = self._targets, []
        least, best = (inf, 0), 0
        for i, replica in enumerate(targets.replicas):
            split = self._split(replica)
            candidate = self._candidate(replica, split)
            found.append((candidate, split))
            cost = (candidate.cost_s, targets.num_requests[replica])
            if cost < least:
                least, best = cost, i
        candidates = [candidate for candidate, _ in found]
        return Choice(targets.replicas[best], self._choice.reason, candidates, found[best][1])

    def _split(self, target: ReplicaIndex) -> PrefixCopy:
        sources, targets, source = self._sources, self._targets, self._choice.replica
        cluster, num_tokens = targets.cluster, targets.request.num_prompt_tokens
        reports = cluster.replicas.specs[target].reports_events
        matched = usable_tokens(num_tokens, num_tokens, cluster.replicas.block_size[target])
        tokens = matched - (targets.matched_on(target) if reports else 0)
        link_s = targets.cost_model.link_s(tokens)
        if link_s == inf:  # the profile knows no link: what it takes is taken to be nothing
            link_s = 0.0
        starts_s = max(cluster.links.free_at(source, target, targets.now) - targets.now, self._own_s)
        seconds = starts_s + link_s + targets.cost_model.link_latency_s
        return PrefixCopy(source, matched, tokens, link_s, seconds, sources.matched_on(source))

    def _candidate(self, target: ReplicaIndex, split: PrefixCopy) -> Candidate:
        view = self._targets
        step_s, ready_s = view.tpot_s(target), max(split.seconds, self._room_s(target))
        slowness, num_requests = view.slowness(target), view.num_requests[target]
        together = min(view.expected_output_tokens * num_requests, float(view.output_tokens_in_flight[target]))
        decode_s = view.decode_pace * view.cost_model.decode_sequence_s(view.request.num_prompt_tokens)
        return Candidate(
            view.replica_id(target),
            split.source_tokens,
            2.0 * decode_s * together * slowness,
            0.0,
            self._source_s + self._value * (ready_s - self._own_s + step_s),
            own_wait_s=ready_s,
            own_prefill_s=step_s,
            copied_tokens=split.tokens,
            copy_s=split.seconds,
        )

    def _room_s(self, target: ReplicaIndex) -> float:
        """Return the seconds until the target has room for the request's KV."""
        view = self._targets
        in_use = view.cluster.index.caches[target].in_use_tokens
        come = view.request.num_prompt_tokens + view.expected_output_tokens
        lacks = in_use + come - view.cluster.replicas.capacity[target]
        if lacks <= 0 or not view.num_requests[target]:
            return 0.0
        whole_s = view.tpot_s(target) * view.output_tokens_in_flight[target] / view.num_requests[target]
        return whole_s * min(lacks / max(in_use, 1), 1.0)
