"""The rotation: replicas join and leave it, and what they report reaches the scheduler.

Synchronous, in the event loop's thread, as the placements are: nothing happens between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    CacheChange,
    CacheCleared,
    EventsLost,
    KvEvent,
    ReplicaId,
    Role,
)
from preble.core.types.life import Lost
from preble.engines.adapter import Engine, EngineInfo, ModelNames
from preble.engines.http import HttpClient
from preble.serving.placements import Placements
from preble.serving.replicas.live import LiveReplica


class Rotation:
    """Changes the table of live replicas, and the scheduler with it.

    `replicas`, `scheduler`: only to be read. `copies`: between live replicas.
    """

    def __init__(self, placements: Placements) -> None:
        self.replicas = placements.replicas
        self.scheduler = placements.scheduler
        self.copies = placements.copies
        self._placements = placements
        self._ejection = placements.ejection
        self._telemetry = placements.telemetry
        self._timer = placements.timer
        self._loop = asyncio.get_running_loop()

    def add(self, engine: Engine, info: EngineInfo, suspect: asyncio.Event | None = None) -> LiveReplica:
        """Add a replica to the rotation. `suspect`: as `LiveReplica`'s, shared by the ranks of one server."""
        replica_id = engine.replica_id
        info = self.replicas.with_base_model(info)
        copies = info.spec.role is Role.MIXED
        if copies and self.scheduler.cost_model.link_s(1) == inf:  # no copy pays, so nobody need look for one
            info = replace(info, spec=replace(info.spec, transfer_group=""))
        before = self.scheduler.snapshot()
        self.scheduler.add_replica(info.spec, self._loop.time())
        self._telemetry.index_may_be_short(before, self.scheduler.snapshot())
        self._ejection.add(replica_id, info.models)
        self.replicas.add(replica := LiveReplica(engine, info, suspect=suspect or asyncio.Event()))
        self._timer.arm()
        self._telemetry.replica_up(
            replica_id, engine=info.engine, version=info.version, models=info.models, events=info.spec.reports_events
        )
        return replica

    def hold_back(self, replica_id: ReplicaId, *, held_back: bool) -> None:
        """Give a live replica no new requests, or some again. What runs there goes on, and its cache stays known."""
        if held_back == (replica_id in self.replicas.held_back):
            return
        self.replicas.hold_back(self.replicas.held_back ^ {replica_id})

    def set_models(self, replica: LiveReplica, names: ModelNames) -> None:
        """A live replica has loaded or unloaded adapters or further models."""
        self.replicas.set_models(replica, names)
        self._ejection.set_group(replica.engine.replica_id, names.models)
        self._telemetry.models_changed(replica.engine.replica_id, names.models)

    def remove(self, replica_id: ReplicaId, reason: str | None, *, silent_since: float | None = None) -> None:
        """Take a replica out of the rotation. The scheduler forgets its requests, which may still end well there.

        `silent_since`: since when its machine is silent; None where it still answers or refuses. See `Lost`.
        Raises: what one of those who hear of it raises, after all have heard.
        """
        orphans = self.scheduler.remove_replica(replica_id, self._loop.time())
        try:
            self._placements.lose(replica_id, orphans, Lost(reason, silent_since))
        finally:
            self.replicas.remove(replica_id)
            self._ejection.remove(replica_id)
            self._timer.arm()
            self._telemetry.replica_down(replica_id, reason, len(orphans))
            if reason is not None:
                self._placements.quarantine.left(replica_id, self._loop.time())

    def runs_at(self, http: HttpClient) -> bool:
        """Return whether any request runs at this server, also one that began before the replica left the rotation."""
        return bool(self._placements.running()[http])

    def set_trust(self, replica: LiveReplica, trusted: bool) -> None:
        """Have matches on a replica count or not. Nothing happens if it has left the rotation."""
        replica_id = replica.engine.replica_id
        if self.replicas.get(replica_id) is replica and replica.trusted != trusted:
            self.scheduler.set_trust(replica_id, trusted, self._loop.time())
            replica.trusted = trusted

    def apply(self, changes: Sequence[KvEvent]) -> None:
        """Give the scheduler changes of live replicas' caches."""
        now, scheduler = self._loop.time(), self.scheduler
        for change in changes:
            self._telemetry.kv_event(change.replica_id, type(change).__name__)
            if isinstance(change, BlocksStored):
                self._stored(change, now)
            else:
                scheduler.on_evicted(change, now)
                if not isinstance(change, BlocksEvicted):
                    self._note_events(change)
        self._timer.arm()

    def _stored(self, event: BlocksStored, now: float) -> None:
        replica = self.replicas[event.replica_id]
        if event.block_size != replica.info.spec.block_size:
            self._learn_block_size(replica, event.block_size)
        if not self.scheduler.on_stored(event, now):
            self._count_unlocated(event)
        elif replica.probe_prompt is not None:
            replica.probe_prompt.note(event)

    def _learn_block_size(self, replica: LiveReplica, block_size: int) -> None:
        """Learn the block size from events that differ from what the replica says (context parallelism)."""
        if replica.engine.learn_block_size(block_size):
            self._telemetry.block_size_learned(replica.engine.replica_id, block_size)
            replica.suspect.set()  # so that it joins again with that size

    def _note_events(self, event: CacheChange) -> None:
        """Note whether the replica's events arrive. When they start again, its cache is cleared first."""
        if not isinstance(event, CacheCleared | EventsLost):
            return
        replica, lost = self.replicas.get(event.replica_id), isinstance(event, EventsLost)
        if replica is not None and replica.has_lost_events != lost:
            replica.has_lost_events = lost
            self._telemetry.events_lost(event.replica_id, lost=lost)
            if lost:
                # It may have restarted between two checks and publish elsewhere now.
                replica.suspect.set()

    def _count_unlocated(self, event: BlocksStored) -> None:
        """Count an event with an unknown parent. If it came over the stream, have that start over, with backoff."""
        replica_id = event.replica_id
        self._telemetry.unlocated(replica_id)
        if event.past_is_cut:
            return
        replica = self.replicas[replica_id]
        if replica.resync_backoff.is_due(self._loop.time()):
            self._telemetry.resynced(replica_id)
            replica.engine.resync_kv_events()
