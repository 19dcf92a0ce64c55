"""Requests that other gateways of the cluster have placed.

Their load and their prompts count like those of our own requests, so that two gateways do not send the same prefix to
two replicas, nor everything to the one that looks idle. KV events come only after the prefill, too late for that
(docs/concepts/scale.md). We measure no times on them, since we hear of them late.

Messages may come twice, in the wrong order, or not at all. An end that comes before its placement is remembered, so the
placement does not count. If the end of a request is lost, the caller must end it, or `forget` its gateway.
"""

from __future__ import annotations

from math import inf
from typing import Final

from preble.core.cluster.links import PrefixCopy
from preble.core.cluster.replicas import longest_prompt
from preble.core.cluster.state import ClusterState
from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.in_flight import InFlightTable
from preble.core.prefixes.radix_tree import expected_output_tokens
from preble.core.replica_index import ReplicaIndex
from preble.core.types import TOKEN_BYTES, PackedTokens, PeerId, Request, RequestId, Role
from preble.core.types.events import PeerEvent, PeerHeld, PeerPlaced
from preble.core.types.life import Ended, FirstToken, TransferFailed, Transferred

REMEMBERED_ENDS: Final = 4096
"""Of each peer: how many ids of its ended requests we remember."""


class AssumedRequests:
    """Other gateways' requests in flight here, by gateway."""

    def __init__(self, cluster: ClusterState, tracker: CacheTracker, in_flight: InFlightTable) -> None:
        self._cluster = cluster
        self._replicas = cluster.replicas
        self._tracker = tracker
        self._in_flight = in_flight
        self._live: dict[PeerId, set[RequestId]] = {}
        self._ended: dict[PeerId, dict[RequestId, None]] = {}

    def assume(self, event: PeerEvent, now: float) -> bool:
        """Take what another gateway reports; return whether it changed anything. See `GlobalScheduler.assume`."""
        if isinstance(event, PeerHeld):
            return self._take_held(event, now)
        peer, request_id, fact = event.peer, event.request_id, event.fact
        if isinstance(fact, PeerPlaced):
            return self._take_placed(peer, request_id, fact, now)
        own = own_id(peer, request_id)
        if isinstance(fact, Ended):
            self._note_end(peer, request_id)
        if own not in self._in_flight.entries:
            return False
        entry = self._in_flight.entries[own]
        if isinstance(fact, Transferred):
            self._in_flight.transferred(entry, now)
        elif isinstance(fact, TransferFailed):
            self._in_flight.transfer_failed(entry, now, fact.kept_s)
        elif isinstance(fact, FirstToken):
            self._in_flight.first_token(entry, now, seen=False)
        else:
            self._in_flight.finish(entry, fact.output_tokens or 0, fact.cached_tokens, now)
        return True

    def forget(self, peer: PeerId, now: float) -> int:
        """Forget all of a gateway. Return how many of its requests were in flight here. O(its requests)."""
        self._ended.pop(peer, None)
        owns = [own_id(peer, request_id) for request_id in self._live.pop(peer, ())]
        here = [own for own in owns if own in self._in_flight.entries]
        for own in here:
            self._in_flight.finish(self._in_flight.entries[own], 0, None, now)
        return len(here)

    def _take_placed(self, peer: PeerId, request_id: RequestId, fact: PeerPlaced, now: float) -> bool:
        num_tokens, prompt = fact.num_prompt_tokens, fact.prompt or PackedTokens(b"")
        own = own_id(peer, request_id)
        is_known = own in self._in_flight.entries or request_id in self._ended.get(peer, ())
        if is_known or fact.replica_id not in self._replicas:
            return False
        replica = self._replicas.replica(fact.replica_id)
        spec = self._replicas.specs[replica]
        if not 0 < num_tokens <= longest_prompt(spec) or len(prompt) not in (0, num_tokens * TOKEN_BYTES):
            return False
        self._tracker.expire(now)
        request = Request(own, prompt, namespace=fact.namespace, model=spec.model)
        match = self._cluster.index.tree.match(prompt, fact.namespace, spec.model)
        matched = fact.matched_tokens
        if matched is None:
            matched = self._tracker.trusted_tokens(replica, request, match)
        matched = min(max(matched, 0), num_tokens)
        split = self._split(fact, replica, matched, now)
        if fact.source is not None or (spec.role is Role.DECODE and not spec.answers_alone):
            matched = num_tokens  # another replica computes the prompt
        prefill_s = self._cluster.cost_model.prefill_s(num_tokens - matched, matched)
        expected = expected_output_tokens(match.path, self._cluster.window.mean_answer_tokens)
        self._in_flight.start(
            request,
            replica,
            matched,
            prefill_s,
            match,
            now,
            output_tokens=expected,
            assumed_tokens=num_tokens,
            copy=split,
        )
        self._live.setdefault(peer, set()).add(request_id)
        return True

    def _split(self, fact: PeerPlaced, replica: ReplicaIndex, cached: int, now: float) -> PrefixCopy | None:
        """Return the part of the replica that computes the prompt; None where none does, or it is unknown here.

        `cached`: tokens of the prompt there.
        """
        if fact.source is None or fact.source not in self._replicas:
            return None
        source, links, model = self._replicas.replica(fact.source), self._cluster.links, self._cluster.cost_model
        if not links.join(source, replica):
            return None
        sent = fact.num_prompt_tokens
        link_s = model.link_s(sent)
        link_s = 0.0 if link_s == inf else link_s
        starts_s = links.free_at(source, replica, now) - now
        return PrefixCopy(source, sent, sent, link_s, starts_s + link_s + model.link_latency_s, min(cached, sent))

    def _take_held(self, event: PeerHeld, now: float) -> bool:
        if event.replica_id not in self._replicas or len(event.prompt) % TOKEN_BYTES:
            return False
        replica = self._replicas.replica(event.replica_id)
        model = self._replicas.specs[replica].model
        request = Request(RequestId(""), event.prompt, namespace=event.namespace, model=model)
        if request.num_prompt_tokens > longest_prompt(self._replicas.specs[replica]):
            return False
        self._tracker.expire(now)
        match = self._cluster.index.tree.match(event.prompt, event.namespace, model)
        return self._tracker.computed_elsewhere(replica, request, match, now)

    def _note_end(self, peer: PeerId, request_id: RequestId) -> None:
        """Remember that the request is over."""
        ended = self._ended.setdefault(peer, {})
        ended[request_id] = None
        if len(ended) > REMEMBERED_ENDS:
            del ended[next(iter(ended))]
        self._live.get(peer, set()).discard(request_id)


def own_id(peer: PeerId, request_id: RequestId) -> RequestId:
    """Return the id under which another gateway's request is in flight here."""
    return RequestId(f"{peer}\x1f{request_id}")
