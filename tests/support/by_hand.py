"""Replicas for examples worked by hand: a prompt token takes 1 ms, and what a test needs is put there past the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any

from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.policy import Policy
from preble.core.policies.registry import make_policy
from preble.core.types import (
    CacheCleared,
    Placement,
    Reason,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    pack_tokens,
)

MODEL = CostModel(CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.0, 0.001, 0.0, 10_000))
A, B, C, D = (ReplicaId(name) for name in "abcd")


def run_of(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1 << 30) for _ in range(count)]


DOC = run_of(1, 100)
OWN = run_of(2, 100)


def scheduler_of(
    policy: Policy | str,
    *names: str,
    model: CostModel = MODEL,
    seed: int = 0,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **spec: Any,
) -> GlobalScheduler:
    """A scheduler with replicas of these names. `settings`: of the scheduler. `spec`: more about each replica; blocks
    have one token if not given."""
    made = GlobalScheduler(make_policy(policy) if isinstance(policy, str) else policy, model, seed=seed, **settings)
    for name in names:
        made.add_replica(ReplicaSpec(ReplicaId(name), **{"block_size": 1, **spec}), 0.0)
    return made


class Cluster:
    """A scheduler with a few replicas. What a test needs on one of them is put there, past the rule."""

    def __init__(self, policy: Policy | str, *names: ReplicaId, seed: int = 0, **spec: object) -> None:
        self.scheduler = scheduler_of(policy, *names, seed=seed, **spec)
        self.names = frozenset(names)
        self._count = 0

    def ask(self, prompt: Sequence[int], avoid: frozenset[ReplicaId] = frozenset()) -> Placement:
        self._count += 1
        return self.scheduler.place(Request(RequestId(f"q{self._count}"), pack_tokens(prompt), avoid=avoid), 0.0)

    def put(self, where: ReplicaId, prompt: Sequence[int]) -> RequestId:
        """A request that waits there for its first token."""
        return self.ask(prompt, self.names - {where}).request_id

    def decode(self, where: ReplicaId, prompt: Sequence[int]) -> RequestId:
        """A request that has its first token: it makes nobody wait."""
        request_id = self.put(where, prompt)
        self.scheduler.on_first_token(request_id, 0.0)
        return request_id

    def hold(self, where: ReplicaId, prompt: Sequence[int]) -> None:
        """A prompt that is cached there, whose request is over."""
        self.finish(self.decode(where, prompt))

    def busy(self, where: ReplicaId, count: int) -> list[RequestId]:
        """`count` decoding requests that are a token long, all different."""
        self._count += 1000
        return [self.decode(where, [self._count + i]) for i in range(count)]

    def forget(self, where: ReplicaId, request_id: RequestId) -> None:
        """The request is over, and nothing is cached there any more."""
        self.finish(request_id)
        self.scheduler.on_evicted(CacheCleared(where), 0.0)

    def finish(self, request_id: RequestId) -> None:
        self.scheduler.on_finish(request_id, 1, 0.0)


def scores(placement: Placement) -> dict[ReplicaId, float | None]:
    return {candidate.replica_id: candidate.score for candidate in placement.candidates}


def chosen(placement: Placement) -> tuple[ReplicaId, Reason]:
    return placement.replica_id, placement.reason


def over_seeds(arrange: Callable[[int], Placement], count: int = 40) -> Counter[ReplicaId]:
    return Counter(arrange(seed).replica_id for seed in range(count))
