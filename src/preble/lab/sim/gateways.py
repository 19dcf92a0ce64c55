"""Several gateways in front of one simulated cluster, which tell each other what they place (`preble.peers`).

To the simulation they are one scheduler. Each request goes to a gateway at random and stays with it. KV events reach
all of them. Their messages to each other arrive late, or not at all: see `GatewayGroup`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

import msgspec

from preble.core.costs.model import CostModel
from preble.core.placing.promises import Forecast
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.placing.snapshot import SchedulerState
from preble.core.policies.policy import Policy
from preble.core.types import (
    BlocksStored,
    CacheChange,
    PeerId,
    Placement,
    PrefixReplication,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
)
from preble.decisions.settings import make_scheduler
from preble.errors import ConfigError
from preble.lab.sim.config import GatewayGroup, SimConfig
from preble.peers.member import BEAT_S, GroupMember
from preble.peers.packets import Message

_SEEDS_APART = 1_000_003
"""Gateways break ties differently: with one seed, all would take the same of two equal replicas at once."""


def make_cluster_scheduler(config: SimConfig, policy: Policy | None = None) -> ClusterScheduler:
    """Return the scheduler that the configuration describes, or its group of gateways. Raises: ConfigError: no such
    policy.
    """
    if config.group is None:
        return make_scheduler(config.scheduler_settings, config.told_profile, policy)
    if policy is not None:
        raise ConfigError("each of several gateways needs a policy of its own: give its name in place of an object")
    return Gateways(config, config.group)


class Gateways:
    """The gateways of a group. `schedulers`: theirs. `told_bytes`: what they have published so far."""

    def __init__(self, config: SimConfig, group: GatewayGroup) -> None:
        settings = config.scheduler_settings
        self.schedulers = [
            make_scheduler(
                msgspec.structs.replace(settings, seed=settings.seed + _SEEDS_APART * i), config.told_profile
            )
            for i in range(group.gateways)
        ]
        self.told_bytes = 0
        self._group = group
        self._seed = settings.seed
        self._rng = Random(settings.seed)
        self._on_the_way: list[tuple[float, int, int, PeerId, Message]] = []
        self._order = count()
        self._now = 0.0
        self._next_beat = 0.0
        self._members = [] if group.delay_s is None or group.gateways == 1 else self._join()

    def _join(self) -> list[GroupMember]:
        members = []
        for i, scheduler in enumerate(self.schedulers):
            member = GroupMember(PeerId(f"gateway-{i}"), scheduler, partial(self._send, i))
            scheduler.listen(member)
            members.append(member)
        return members

    # -- what they tell each other ------------------------------------------------------------------------------------

    def _send(self, sender: int, message: Message) -> None:
        assert self._group.delay_s is not None
        peer = PeerId(f"gateway-{sender}")
        self.told_bytes += len(msgspec.msgpack.encode(message))
        is_cut = any(cut.from_s <= self._now < cut.until_s for cut in self._group.cuts)
        for i in range(len(self.schedulers)):
            if i == sender:
                continue
            if not is_cut and not (self._group.loss and self._rng.random() < self._group.loss):
                heappush(self._on_the_way, (self._now + self._group.delay_s, next(self._order), i, peer, message))

    def _deliver(self, now: float) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, to, sender, message = heappop(self._on_the_way)
            self._members[to].receive(sender, message, now)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self.schedulers[0].policy

    @property
    def cost_model(self) -> CostModel:
        """The cost model of the first gateway, as corrected so far."""
        return self.schedulers[0].cost_model

    def forecast(self, request: Request, now: float) -> Forecast:
        return self._scheduler_of(request.request_id).forecast(request, now)

    def place(self, request: Request, now: float) -> Placement:
        self._now = now
        return self._scheduler_of(request.request_id).place(request, now)

    def _scheduler_of(self, request_id: RequestId) -> GlobalScheduler:
        """Return the request's gateway. It follows from the id, so that nobody must remember who is never placed."""
        return Random(f"{self._seed}/{request_id}").choice(self.schedulers)

    def on_transferred(self, request_id: RequestId, now: float) -> None:
        self._scheduler_of(request_id).on_transferred(request_id, now)

    def on_transfer_failed(self, request_id: RequestId, now: float) -> None:
        self._scheduler_of(request_id).on_transfer_failed(request_id, now)

    def on_first_token(self, request_id: RequestId, now: float) -> None:
        self._now = now
        self._scheduler_of(request_id).on_first_token(request_id, now)

    def on_finish(
        self, request_id: RequestId, output_tokens: int, now: float, *, cached_tokens: int | None = None
    ) -> None:
        self._now = now
        self._scheduler_of(request_id).on_finish(request_id, output_tokens, now, cached_tokens=cached_tokens)

    # -- replicas: every gateway follows them -------------------------------------------------------------------------

    def on_stored(self, event: BlocksStored, now: float) -> bool:
        located = [scheduler.on_stored(event, now) for scheduler in self.schedulers]
        return all(located)

    def on_evicted(self, event: CacheChange, now: float) -> None:
        for scheduler in self.schedulers:
            scheduler.on_evicted(event, now)

    def add_replica(self, spec: ReplicaSpec, now: float) -> None:
        self._now = now
        for scheduler in self.schedulers:
            scheduler.add_replica(spec, now)

    def remove_replica(self, replica_id: ReplicaId, now: float) -> list[Request]:
        self._now = now
        return [orphan for scheduler in self.schedulers for orphan in scheduler.remove_replica(replica_id, now)]

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        due_s = min((due for scheduler in self.schedulers if (due := scheduler.next_timer()) is not None), default=inf)
        if self._members:
            due_s = min(due_s, self._next_beat, self._on_the_way[0][0] if self._on_the_way else inf)
        return None if due_s == inf else due_s

    def on_timer(self, now: float) -> list[PrefixReplication]:
        self._now = now
        self._deliver(now)
        if self._members and self._next_beat <= now:
            self._next_beat = now + BEAT_S
            for member in self._members:
                member.tick(now)
        due = [scheduler for scheduler in self.schedulers if (at := scheduler.next_timer()) is not None and at <= now]
        return [change for scheduler in due for change in scheduler.on_timer(now)]

    # -- reading ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerState:
        """Return the first gateway's state, with the requests in flight of all."""
        states = [scheduler.snapshot() for scheduler in self.schedulers]
        return replace(states[0], num_in_flight=sum(state.num_in_flight for state in states))

    def check(self) -> None:
        for scheduler in self.schedulers:
            scheduler.check()


ClusterScheduler = GlobalScheduler | Gateways
"""What a simulation asks: one scheduler, or several."""
