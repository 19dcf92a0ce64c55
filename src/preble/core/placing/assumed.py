"""Requests that other gateways of the cluster have placed.

Their load and their prompts count like those of our own requests, so that two gateways do not send the same prefix to
two replicas, nor everything to the one that looks idle. KV events come only after the prefill, too late for that
(docs/concepts/scale.md). We measure no times on them, since we hear of them late.

Messages may come twice, in the wrong order, or not at all. An end that comes before its placement is remembered, so the
placement does not count. If the end of a request is lost, the caller must end it, or `forget` its gateway.
"""

from __future__ import annotations

from preble.core.placing.in_flight import InFlightTable
from preble.core.types import PeerEnded, PeerId, PeerPlaced, RequestId

REMEMBERED_ENDS = 4096
"""Of each peer: how many ids of its ended requests we remember."""


class AssumedRequests:
    """The ids under which other gateways' requests are in flight here, by gateway."""

    def __init__(self, in_flight: InFlightTable) -> None:
        self._in_flight = in_flight
        self._live: dict[PeerId, set[RequestId]] = {}
        self._ended: dict[PeerId, dict[RequestId, None]] = {}

    def is_new(self, event: PeerPlaced) -> bool:
        """Whether we have heard of neither its placement nor its end."""
        own = own_id(event.peer, event.request_id)
        return own not in self._in_flight and event.request_id not in self._ended.get(event.peer, ())

    def start(self, event: PeerPlaced) -> None:
        """The request is in flight here from now on."""
        self._live.setdefault(event.peer, set()).add(event.request_id)

    def end(self, event: PeerEnded) -> RequestId | None:
        """The request is over. Return the id under which it is in flight here, None if it is not."""
        ended = self._ended.setdefault(event.peer, {})
        ended[event.request_id] = None
        if len(ended) > REMEMBERED_ENDS:
            del ended[next(iter(ended))]
        self._live.get(event.peer, set()).discard(event.request_id)
        own = own_id(event.peer, event.request_id)
        return own if own in self._in_flight else None

    def forget(self, peer: PeerId) -> list[RequestId]:
        """Forget all of a gateway. Return the ids of its requests that are in flight here. O(its requests)."""
        self._ended.pop(peer, None)
        owns = [own_id(peer, request_id) for request_id in self._live.pop(peer, ())]
        return [own for own in owns if own in self._in_flight]


def own_id(peer: PeerId, request_id: RequestId) -> RequestId:
    """The id under which another gateway's request is in flight here."""
    return RequestId(f"{peer}\x1f{request_id}")
