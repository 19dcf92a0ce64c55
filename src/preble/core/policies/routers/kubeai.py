"""The rule of KubeAI's load balancer."""

from __future__ import annotations

import struct
from bisect import bisect
from collections.abc import Iterator, Sequence
from hashlib import blake2b, shake_128
from itertools import chain
from random import Random

from preble.core.policies.scoring import unweighed
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import TOKEN_BYTES, ReplicaId

_HASH_BYTES = 8


class Chwbl:
    """KubeAI's PrefixHash: consistent hashing with bounded loads.

    Replicas stand on a ring, each at `virtual_nodes` places; a prompt stands where the hash of its first
    `prefix_tokens` tokens puts it. The first replica clockwise with q <= `load_factor` x (total q + 1) / replicas,
    with q = requests in flight.

    Defaults: `prefix_tokens` 25 (theirs: 100 characters), `load_factor` 1.25, `virtual_nodes` 256 a replica. Source:
    KubeAI 2026, strategy PrefixHash. It knows no cache. The hash is ours, and model adapters do not count in it. It is
    the only rule here that depends on the token ids themselves: a decision log with renamed tokens cannot replay it.
    """

    name = "chwbl"

    def __init__(self, *, prefix_tokens: int = 25, load_factor: float = 1.25, virtual_nodes: int = 256) -> None:
        self._prefix_bytes = prefix_tokens * TOKEN_BYTES
        self._load_factor = load_factor
        self._virtual_nodes = virtual_nodes
        self._replica_ids: Sequence[ReplicaId | None] = ()
        self._places: list[int] = []
        self._ring: list[ReplicaIndex] = []

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(log places + places passed); O(places) when a replica has joined or left."""
        del rng
        if view.replica_ids is not self._replica_ids:
            self._build_ring(view.replica_ids)
        eligible, load = set(view.replicas), view.num_requests
        limit = self._load_factor * (sum(load[replica] for replica in view.replicas) + 1) / len(view.replicas)
        replica = next(replica for replica in self._clockwise(view) if replica in eligible and load[replica] <= limit)
        return unweighed(view, replica)

    def _clockwise(self, view: ClusterView) -> Iterator[ReplicaIndex]:
        """Return the replicas on the ring, once round from the prompt on. The least loaded one is always within the
        limit.
        """
        key = blake2b(view.request.prompt[: self._prefix_bytes], digest_size=_HASH_BYTES).digest()
        start = bisect(self._places, int.from_bytes(key, "little"))
        return (self._ring[i] for i in chain(range(start, len(self._ring)), range(start)))

    def _build_ring(self, replica_ids: Sequence[ReplicaId | None]) -> None:
        self._replica_ids = replica_ids
        ring = sorted(
            (place, ReplicaIndex(replica))
            for replica, replica_id in enumerate(replica_ids)
            if replica_id is not None
            for place in self._places_of(replica_id)
        )
        self._places = [place for place, _ in ring]
        self._ring = [replica for _, replica in ring]

    def _places_of(self, replica_id: ReplicaId) -> tuple[int, ...]:
        """Places follow from the id alone, so the others keep theirs when a replica joins or leaves."""
        digest = shake_128(replica_id.encode()).digest(self._virtual_nodes * _HASH_BYTES)
        return struct.unpack(f"<{self._virtual_nodes}Q", digest)
